//! The way to an API server: credentials and trust by a kubeconfig, or by the service account of the pod.
//!
//! With a kubeconfig, connections are dialled by `portico-dial`, as an agent's to its gateway: through a
//! corporate proxy where one is named. A pod reaches its own API server directly, whatever the environment
//! says about proxies: those are for the way out of the cluster.

mod renewal;

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{HeaderValue, Request, Response, Uri};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::{Body as HttpBody, Bytes, Incoming};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::{Connect, Connected, Connection};
use hyper_util::rt::{TokioExecutor, TokioIo};
use kube::client::{Body, ConfigExt};
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};
use portico_dial::{
    ConnectAnyError, Dialer, ProxyError, ProxyFiles, ProxySetting, Socket, Target, TargetError,
    install_provider, server_verifier,
};
use rustls::RootCertStore;
use rustls::client::Resumption;
use rustls::pki_types::ServerName;
use secrecy::ExposeSecret;
use thiserror::Error;
use tower::{BoxError, Service, ServiceBuilder, ServiceExt, service_fn};

use renewal::Renewing;

/// Time limit for a connection, TLS included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Why there is no way to the API server.
#[derive(Debug, Error)]
pub enum ClientError {
    /// The kubeconfig file is missing or wrong.
    #[error("cannot use the kubeconfig {}: {source}", path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<kube::config::KubeconfigError>,
    },
    /// The text of a kubeconfig is wrong.
    #[error("cannot use the kubeconfig: {0}")]
    Text(#[source] Box<kube::config::KubeconfigError>),
    /// Not in a pod, or in one without a service account.
    #[error("this is no pod with a service account ({0}); name a kubeconfig file by --kubeconfig")]
    NotInCluster(#[from] kube::config::InClusterError),
    /// Certificates or keys cannot be used.
    #[error("cannot set up the connection to the API server: {0}")]
    Connection(#[source] Box<kube::Error>),
    /// The proxy that the kubeconfig's `proxy-url` or the environment names cannot be used.
    #[error("the proxy on the way to the API server: {0}")]
    Proxy(#[from] ProxyError),
}

/// Returns a client by `kubeconfig`, or, without one, by the service account of the pod this runs in. No
/// request is made.
///
/// Where a kubeconfig names certificate and key as files, they are read again when they change.
///
/// With a kubeconfig the proxy is its `proxy-url`, or else what the environment names. `NO_PROXY` is honoured
/// for both.
pub async fn client(kubeconfig: Option<&Path>) -> Result<Client, ClientError> {
    client_of(kubeconfig.as_slice()).await
}

/// [`client`] by several files, which are merged as kubectl does: what an earlier one says stays.
pub async fn client_of<P: AsRef<Path>>(kubeconfigs: &[P]) -> Result<Client, ClientError> {
    install_provider();
    let refused = |error| ClientError::Connection(Box::new(error));
    if kubeconfigs.is_empty() {
        let mut config = Config::incluster()?;
        config.connect_timeout = Some(CONNECT_TIMEOUT);
        // Callers try again themselves, with their own pauses. kube would go on for half an hour.
        config.default_retry = false;
        return Client::try_from(config).map_err(refused);
    }
    let mut file = Kubeconfig::default();
    for path in kubeconfigs.iter().map(AsRef::as_ref) {
        let wrong = |source| ClientError::Kubeconfig { path: path.to_owned(), source: Box::new(source) };
        file = merged(file, Kubeconfig::read_from(path).map_err(wrong)?).map_err(wrong)?;
    }
    // kube would take HTTPS_PROXY for one of the file.
    let proxy = proxy_url(&file).map_or(Ok(ProxySetting::Env), str::parse)?;
    let paths: Vec<_> = kubeconfigs.iter().map(|path| path.as_ref().to_string_lossy()).collect();
    let wrong = |source| ClientError::Kubeconfig { path: paths.join(", ").into(), source: Box::new(source) };
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.map_err(wrong)?;
    let dialer = Dialer::new(proxy, ProxyFiles::default())?;
    let service = service(&config, Arc::new(dialer), CONNECT_TIMEOUT).map_err(refused)?;
    Ok(Client::new(service, config.default_namespace))
}

/// `client`, for an API server whose answers are not trusted to end: one of more than `longest` bytes fails.
/// So does a watch that has sent as many.
#[must_use]
pub fn limited(client: Client, longest: usize) -> Client {
    let namespace = client.default_namespace().to_owned();
    let service = service_fn(move |request: Request<Body>| {
        let client = client.clone();
        async move {
            let response = client.send(request).await?;
            Ok::<_, kube::Error>(response.map(|body| limit(body, longest)))
        }
    });
    Client::new(service, namespace)
}

/// An answer of which no more is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the answer of the API server is longer than {0} bytes, and is not read to its end")]
pub(crate) struct TooLong(usize);

/// The body of an answer, which fails by [`TooLong`] after `longest` bytes.
fn limit<B>(body: B, longest: usize) -> impl HttpBody<Data = Bytes, Error = BoxError> + use<B>
where
    B: HttpBody<Data = Bytes, Error: Into<BoxError>>,
{
    Limited::new(body, longest)
        .map_err(move |error| if error.is::<LengthLimitError>() { TooLong(longest).into() } else { error })
}

/// Both as one; what the first says stays.
fn merged(mut first: Kubeconfig, next: Kubeconfig) -> Result<Kubeconfig, KubeconfigError> {
    // `kubectl config unset current-context` leaves an empty one, which is none.
    first.current_context = first.current_context.filter(|name| !name.is_empty());
    first.merge(next)
}

/// The `proxy-url` of the cluster that the current context names.
fn proxy_url(file: &Kubeconfig) -> Option<&str> {
    let current = file.current_context.as_deref()?;
    let context = file.contexts.iter().find(|named| named.name == current)?.context.as_ref()?;
    let cluster = file.clusters.iter().find(|named| named.name == context.cluster)?.cluster.as_ref()?;
    cluster.proxy_url.as_deref().filter(|url| !url.is_empty())
}

/// Returns a client by the text of a kubeconfig, for an API server that is not trusted. It connects by
/// `dialer` within `connect_timeout`; an answer of more than `longest` bytes fails. No request is made.
///
/// The kubeconfig must hold everything itself: what it says about programs and files is followed.
pub(crate) async fn bounded(
    kubeconfig: &str,
    dialer: Dialer,
    connect_timeout: Duration,
    longest: usize,
) -> Result<Client, ClientError> {
    install_provider();
    let wrong = |source| ClientError::Text(Box::new(source));
    let refused = |error| ClientError::Connection(Box::new(error));
    let file = Kubeconfig::from_yaml(kubeconfig).map_err(wrong)?;
    let mut config =
        Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.map_err(wrong)?;
    // Certificates have no name with a dot at its end; DNS needs it for names that are complete.
    let host = config.cluster_url.host().unwrap_or_default();
    config.tls_server_name = host.strip_suffix('.').map(str::to_owned);
    if config.accept_invalid_certs {
        // Otherwise the roots of the system are read for nothing, and a machine that has none fails.
        config.root_cert.get_or_insert_default();
    }
    let service = service(&config, Arc::new(dialer), connect_timeout).map_err(refused)?;
    // As in `limited`, without a client within a client: there may be hundreds.
    let service = service.map_response(move |response| response.map(|body| limit(body, longest)));
    Ok(Client::new(service, config.default_namespace))
}

/// Does what `Client::try_from` does, with connections made by `dialer` and without its tracing and retries.
fn service(
    config: &Config,
    dialer: Arc<Dialer>,
    connect_timeout: Duration,
) -> kube::Result<
    impl Service<Request<Body>, Response = Response<Incoming>, Error = BoxError, Future: Send + 'static>
    + Send
    + 'static
    + use<>,
> {
    // Without the URL: it may hold a password.
    target(&config.cluster_url).map_err(|why| kube::Error::Service(Box::new(BadServer(why))))?;
    // The layer for it panics at what no header can hold.
    if let Some(token) = &config.auth_info.token {
        let header = HeaderValue::from_str(token.expose_secret());
        header.map_err(|_| kube::Error::Service(Box::new(BadToken)))?;
    }
    let again = config.clone();
    let connections = move || connections(&again, &dialer, connect_timeout);
    let http = Renewing::new(&config.auth_info, connections)?;
    Ok(ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(http))
}

/// The pool that makes and keeps connections to the API server.
fn connections(
    config: &Config,
    dialer: &Arc<Dialer>,
    connect_timeout: Duration,
) -> kube::Result<legacy::Client<impl Connect + Clone + Send + Sync + 'static + use<>, Body>> {
    let dialer = Arc::clone(dialer);
    let tls = tls(config, service_fn(move |uri| connect(Arc::clone(&dialer), uri)))?;
    let mut connector = TimeoutConnector::new(tls);
    connector.set_connect_timeout(Some(connect_timeout));
    connector.set_write_timeout(config.write_timeout);
    Ok(legacy::Client::builder(TokioExecutor::new()).build(connector))
}

/// As kube makes it, without a cache of sessions. A cache is 15 KiB from the start, for each of thousands of
/// user clusters. Their connections are held for minutes.
fn tls<T>(config: &Config, tcp: T) -> kube::Result<HttpsConnector<T>> {
    let mut settings = config.rustls_client_config()?;
    settings.resumption = Resumption::disabled();
    // The file of a pod's own API server is read again by kube's verifier.
    if let (Some(cas), None, false) = (&config.root_cert, &config.root_cert_file, config.accept_invalid_certs)
    {
        let mut roots = RootCertStore::empty();
        for ca in cas {
            roots.add(ca.clone().into()).map_err(|error| kube::Error::Service(Box::new(error)))?;
        }
        let verifier = server_verifier(roots).map_err(|error| kube::Error::Service(Box::new(error)))?;
        settings.dangerous().set_certificate_verifier(verifier);
    }
    let builder = HttpsConnectorBuilder::new().with_tls_config(settings).https_or_http();
    let builder = match &config.tls_server_name {
        Some(name) => {
            let name = ServerName::try_from(name.clone());
            let name = name.map_err(|_| kube::Error::Service(Box::new(BadServerName)))?;
            builder.with_server_name_resolver(FixedServerNameResolver::new(name))
        }
        None => builder,
    };
    Ok(builder.enable_http1().wrap_connector(tcp))
}

/// A name that no certificate can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the server in the kubeconfig has a name that no certificate can have")]
struct BadServerName;

/// A token that no request can carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the token in the kubeconfig has a line break, or another character that no token has")]
struct BadToken;

/// A server that cannot be connected to.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("the server in the kubeconfig: {0}")]
struct BadServer(BadUrl);

/// Why a URL cannot be connected to.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
enum BadUrl {
    #[error("no host and port to connect to: {0}")]
    Target(#[from] TargetError),
    /// Besides host and port: a user, or a port that is no number from 0 to 65535.
    #[error("expected https://HOST or https://HOST:PORT, without a user, and with a port up to 65535")]
    Authority,
}

/// Why there is no connection. Both say what was tried.
#[derive(Debug, Error)]
enum ConnectError {
    #[error("{0}: {1}")]
    Target(Uri, BadUrl),
    #[error(transparent)]
    Connect(#[from] ConnectAnyError),
}

/// Connects to the host that an URL names.
async fn connect(dialer: Arc<Dialer>, uri: Uri) -> Result<Stream, ConnectError> {
    let target = target(&uri).map_err(|error| ConnectError::Target(uri, error))?;
    Ok(Stream(TokioIo::new(dialer.connect_any(&target).await?)))
}

fn target(uri: &Uri) -> Result<Target, BadUrl> {
    let host = uri.host().unwrap_or_default();
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    let port = match uri.port_u16() {
        Some(port) if authority == format!("{host}:{port}") => port,
        // A port that is no number counts as none, and would lead to another server.
        None if authority == host && uri.scheme() == Some(&http::uri::Scheme::HTTP) => 80,
        None if authority == host => 443,
        _ => return Err(BadUrl::Authority),
    };
    Ok(format!("{host}:{port}").parse::<Target>()?)
}

/// A connection with the traits that hyper needs.
struct Stream(TokioIo<Socket>);

impl Connection for Stream {
    fn connected(&self) -> Connected {
        // Through CONNECT requests look as if there were no proxy.
        Connected::new()
    }
}

impl Read for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: ReadBufCursor<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl Write for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use portico_lab::refusing::Refusing;

    use super::*;

    #[test]
    fn an_url_leads_to_its_host_and_its_port_or_that_of_its_scheme() {
        for (url, expected) in [
            ("https://seed.example.com:6443/api", "seed.example.com:6443"),
            ("https://seed.example.com", "seed.example.com:443"),
            ("http://[::1]/version", "[::1]:80"),
        ] {
            assert_eq!(target(&url.parse().unwrap()).unwrap().to_string(), expected);
        }
        for url in
            ["/version", "https://:443", "https://a:99999", "https://a:", "https://u:p@a:443", "https://u@a"]
        {
            if let Ok(url) = url.parse() {
                assert!(target(&url).is_err(), "{url}");
            }
        }
    }

    #[test]
    fn only_the_proxy_url_of_the_current_context_is_the_files() {
        let file = |current: &str| {
            let text = format!(
                "{{clusters: [{{name: far, cluster: {{server: 'https://far:1', proxy-url: 'http://p:1'}}}}, \
                 {{name: near, cluster: {{server: 'https://127.0.0.1:6443'}}}}], contexts: [{{name: a, \
                 context: {{cluster: far}}}}, {{name: b, context: {{cluster: near}}}}], current-context: \
                 {current}}}"
            );
            Kubeconfig::from_yaml(&text).unwrap()
        };
        assert_eq!(proxy_url(&file("a")), Some("http://p:1"));
        assert_eq!((proxy_url(&file("b")), proxy_url(&file("c"))), (None, None));
    }

    #[test]
    fn of_two_files_the_earlier_one_wins_and_an_empty_context_is_none() {
        let of = |server: &str, current: &str| {
            let text = format!(
                "{{clusters: [{{name: x, cluster: {{server: '{server}'}}}}], current-context: '{current}'}}"
            );
            Kubeconfig::from_yaml(&text).unwrap()
        };
        let file = merged(of("https://a:1", ""), of("https://b:1", "second")).unwrap();
        assert_eq!((file.clusters.len(), file.current_context.as_deref()), (1, Some("second")));
        let server = file.clusters[0].cluster.as_ref().unwrap().server.as_deref();
        assert_eq!(server, Some("https://a:1"));
        let file = merged(file, of("https://c:1", "third")).unwrap();
        assert_eq!(file.current_context.as_deref(), Some("second"));
    }

    #[tokio::test]
    async fn a_failed_connection_says_what_was_tried_and_where() {
        let refusing = Refusing::start().unwrap();
        let address = refusing.address();
        let dialer = Dialer::with_environment(ProxySetting::Off, ProxyFiles::default(), |_| None).unwrap();
        let uri = format!("https://{address}/version").parse().unwrap();
        let error = connect(Arc::new(dialer), uri).await.err().unwrap().to_string();
        assert!(error.starts_with(&format!("connecting to {address}: ")), "{error}");
    }
}
