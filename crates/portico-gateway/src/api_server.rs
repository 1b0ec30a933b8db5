//! The API servers of user clusters, as reviewers of tokens: found in the route table, reached like any
//! upstream.

use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use portico_api::api_server_ca::ApiServerCa;
use portico_api::names::{Authority, Tenant};
use tokio::io::AsyncWriteExt;

use crate::auth::{self, Answer, Hash, TokenReviewer, hash};
use crate::proxy_header::proxy_header;
use crate::shared::Shared;
use crate::upstream::Upstream;

/// The Service of a user cluster's API server, in KKP and wherever Portico plans it.
const API_SERVER: &str = "apiserver-external";

/// One API server that says by which CA it is known.
struct ApiServer {
    shared: Arc<Shared>,
    /// As it was found.
    upstream: Arc<Upstream>,
    /// By which it is exposed; the host is the name in its certificate.
    authority: Authority,
    id: Hash,
}

/// Returns the API server that reviews tokens for `upstream`, which was asked for by `authority`. It is the
/// one behind `upstream`, if that has the API server's name or a CA for it. Otherwise it is the API server of
/// the same cluster. `None` if there is none, or if its CA is not known.
pub(crate) fn reviewer_of(
    shared: &Arc<Shared>,
    upstream: &Arc<Upstream>,
    authority: &str,
) -> Option<Arc<dyn TokenReviewer>> {
    let backend = upstream.backend();
    let service = &backend.id.service;
    let is_api_server = backend.api_server_ca.is_some() || *service.name == *API_SERVER;
    let (upstream, authority) = if is_api_server {
        (Arc::clone(upstream), Authority::parse(authority).ok()?)
    } else {
        let authority =
            Authority::parse(&format!("{API_SERVER}.{}.svc.cluster.local:443", service.namespace)).ok()?;
        let other = shared.route_store.routes().authorities.get(&authority).cloned()?;
        (other.cluster.name == upstream.cluster.name).then_some((other, authority))?
    };
    let ca = ca_of(&upstream)?;
    let mut parts = vec![upstream.cluster.name.as_str().as_bytes(), authority.as_str().as_bytes()];
    parts.extend(ca.certificates().iter().map(AsRef::as_ref));
    let id = hash(&parts);
    Some(Arc::new(ApiServer { shared: Arc::clone(shared), upstream, authority, id }))
}

fn ca_of(upstream: &Upstream) -> Option<ApiServerCa> {
    let backend = upstream.backend();
    backend.api_server_ca.clone().or_else(|| backend.policy.api_server_ca().cloned())
}

impl ApiServer {
    /// A Service that was made anew is found under the same authority. One that is gone is asked where it
    /// was. One of another cluster has no say.
    fn current(&self) -> Arc<Upstream> {
        let routes = self.shared.route_store.routes();
        let current = routes.authorities.get(&self.authority);
        let current = current.filter(|current| current.cluster.name == self.upstream.cluster.name);
        Arc::clone(current.unwrap_or(&self.upstream))
    }

    async fn ask(&self, token: &str) -> Answer {
        let (shared, upstream) = (&self.shared, self.current());
        let Some(ca) = ca_of(&upstream) else {
            return Answer::Failed("the annotation portico.k8c.io/api-server-ca is gone".into());
        };
        let connect = upstream.connect(&shared.own, shared.config.connect_timeout, || shared.now(), true);
        let (mut stream, _in_use) = match connect.await {
            Ok(connected) => connected,
            Err(refusal) => return Answer::Failed(refusal.message().into()),
        };
        // An API server that expects a PROXY header gets one from this gateway as the client.
        if upstream.backend().send_proxy {
            let addresses = stream.local_addr().and_then(|local| Ok((local, stream.peer_addr()?)));
            let sent = match addresses {
                Ok((local, peer)) => {
                    stream.write_all(&proxy_header(local, peer, None, shared.next_id())).await
                }
                Err(error) => Err(error),
            };
            if let Err(error) = sent {
                return Answer::Failed(format!("PROXY header: {error}").into());
            }
        }
        let authority = self.authority.as_str();
        let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
        auth::review(stream, &ca, host, token).await
    }
}

impl TokenReviewer for ApiServer {
    fn cluster(&self) -> &Tenant {
        &self.upstream.cluster.name
    }

    fn id(&self) -> &Hash {
        &self.id
    }

    fn review<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Answer> {
        Box::pin(self.ask(token))
    }
}

impl fmt::Debug for ApiServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiServer").field("authority", &self.authority).finish_non_exhaustive()
    }
}
