//! The way through a real corporate proxy: squid, as an unprivileged process on loopback, with a
//! configuration as companies have it.

#![allow(clippy::unwrap_used, reason = "the helpers of tests fail like tests")]

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::time::Duration;

use super::echo::Echo;
use portico_dial::{
    ClientTls, ClientTlsFiles, DialError, Dialer, HandshakeError, ProxyFiles, ProxySetting, Socket, Target,
};
use portico_lab::pki::{Authority, Certificate, Pki};
use portico_net::ReadAhead;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

const SQUID: &str = "/usr/sbin/squid";

/// The user of the process of squid if we are root: it refuses to be root.
const NOBODY: u32 = 65534;

/// Serves every client.
const OPEN: u16 = 13128;
/// Serves every client, under TLS.
const TLS: u16 = 13129;
/// Asks for user and password.
const AUTH: u16 = 13130;
/// Intercepts TLS.
const BUMP: u16 = 13131;

/// A port on the allow list without a listener: no program takes it by chance.
const NOBODY_LISTENS: u16 = 1;

/// The name only squid can resolve.
const GATEWAY: &str = "gateway.test";

/// A squid, a gateway behind it, and their certificates.
struct Corporation {
    squid: Child,
    /// The gateway's CA, and all files.
    pki: Pki,
    gateway: Echo,
    /// Where squid listens.
    ip: Ipv4Addr,
}

impl Corporation {
    async fn new() -> Self {
        assert!(
            Path::new(SQUID).exists(),
            "{SQUID} is not there; scripts/setup test installs it (squid-openssl)"
        );
        let pki = Pki::new();
        let identity = pki.issue("gateway", Certificate::server(&[GATEWAY]));
        let gateway = Echo::start(&identity, &[b"portico-tunnel", b"h2"]).await;
        let ip = own_address();
        let proxy_ca = Authority::new("proxy CA").unwrap();
        pki.write("proxy-ca.crt", &proxy_ca.cert());
        let proxy = proxy_ca.issue(Certificate::server(&[ip.to_string()])).unwrap();
        proxy.write(pki.folder(), "proxy").unwrap();
        let corporate = Authority::new("Corporate Inspection CA").unwrap();
        corporate.identity().write(pki.folder(), "inspection").unwrap();
        // What `openssl passwd -apr1 secret` says.
        pki.write("passwd", "agent:$apr1$portico.$AK0AtmneGEd9U/GperX3M0\n");
        pki.write("hosts", &format!("127.0.0.1 {GATEWAY}\n"));
        let at = |name: &str| pki.path(name);
        let gateway_port = gateway.address.port();
        pki.write(
            "squid.conf",
            &format!(
                "http_port {ip}:{OPEN} name=open\n\
                 https_port {ip}:{TLS} name=tls tls-cert={proxy_crt} tls-key={proxy_key}\n\
                 http_port {ip}:{AUTH} name=auth\n\
                 http_port {ip}:{BUMP} name=bump ssl-bump tls-cert={inspection_crt} tls-key={inspection_key} \
                 generate-host-certificates=on dynamic_cert_mem_cache_size=1MB\n\
                 sslcrtd_program /usr/lib/squid/security_file_certgen -s {certificates} -M 4MB\n\
                 sslcrtd_children 1\n\
                 acl bump myportname bump\n\
                 ssl_bump bump bump\n\
                 tls_outgoing_options cafile={gateway_ca}\n\
                 auth_param basic program /usr/lib/squid/basic_ncsa_auth {passwd}\n\
                 auth_param basic children 1\n\
                 auth_param basic realm corporation, inc.\n\
                 acl CONNECT method CONNECT\n\
                 acl gateway dstdomain {GATEWAY}\n\
                 acl gateway_port port {gateway_port} {NOBODY_LISTENS}\n\
                 acl auth myportname auth\n\
                 acl known proxy_auth REQUIRED\n\
                 http_access deny auth !known\n\
                 http_access allow CONNECT gateway gateway_port\n\
                 # What comes out of an intercepted tunnel.\n\
                 http_access allow bump gateway\n\
                 http_access deny all\n\
                 connect_retries 0\n\
                 hosts_file {hosts}\n\
                 dns_nameservers 127.0.0.1\n\
                 cache deny all\n\
                 memory_cache_shared off\n\
                 pinger_enable off\n\
                 access_log none\n\
                 cache_log {log}\n\
                 pid_filename {pid}\n\
                 coredump_dir {folder}\n\
                 visible_hostname proxy.test\n\
                 shutdown_lifetime 0 seconds\n",
                proxy_crt = at("proxy.crt"),
                proxy_key = at("proxy.key"),
                inspection_crt = at("inspection.crt"),
                inspection_key = at("inspection.key"),
                certificates = at("certificates"),
                gateway_ca = at("ca.crt"),
                passwd = at("passwd"),
                hosts = at("hosts"),
                log = at("cache.log"),
                pid = at("squid.pid"),
                folder = pki.folder().display(),
            ),
        );
        if rustix::process::geteuid().is_root() {
            chown(pki.folder(), Some(NOBODY), Some(NOBODY)).unwrap();
        }
        std::fs::set_permissions(pki.folder(), PermissionsExt::from_mode(0o755)).unwrap();
        let made = unprivileged("/usr/lib/squid/security_file_certgen", pki.folder())
            .args(["-c", "-s", &at("certificates"), "-M", "4MB"])
            .stdout(Stdio::null())
            .status()
            .expect("squid can generate certificates: Debian's squid-openssl brings security_file_certgen");
        assert!(made.success(), "{made:?}");
        let squid = start(&pki, ip);
        for port in [OPEN, TLS, AUTH, BUMP] {
            listens(SocketAddr::new(ip.into(), port)).await;
        }
        Self { squid, pki, gateway, ip }
    }

    fn gateway(&self) -> Target {
        Target { host: GATEWAY.into(), port: self.gateway.address.port() }
    }

    /// Through a port of squid, as `http://` or `https://`.
    async fn dial(&self, url: &str, target: &Target, files: ProxyFiles) -> Result<Socket, DialError> {
        let proxy = url.parse::<ProxySetting>().unwrap();
        let dialer = Dialer::with_environment(proxy, files, |_| None).unwrap();
        let resolved = dialer.resolve(target).await.unwrap();
        dialer.connect(target, resolved.addresses[0]).await
    }

    async fn tls(&self, socket: Socket) -> Result<TlsStream<ReadAhead<Socket>>, HandshakeError> {
        let files = ClientTlsFiles { ca: Some(self.pki.file("ca.crt")), ..ClientTlsFiles::default() };
        ClientTls::load(files).unwrap().connect(GATEWAY, socket).await
    }

    fn with_credentials(&self, pair: &str) -> ProxyFiles {
        ProxyFiles { credentials: Some(self.pki.write("credentials", pair)), ca: None }
    }
}

impl Drop for Corporation {
    fn drop(&mut self) {
        // Asked, not killed, squid removes its shared memory. It does not wait for connections, and its
        // helpers end when it does.
        let _ = kill_process(Pid::from_child(&self.squid), Signal::TERM);
        let _ = self.squid.wait();
    }
}

/// A loopback address of this squid's own, so that its ports are free.
fn own_address() -> Ipv4Addr {
    static STARTED: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, high | 0x80, low, STARTED.fetch_add(1, Relaxed))
}

fn service_name(ip: Ipv4Addr) -> String {
    format!("portico{}", ip.to_bits())
}

fn unprivileged(program: &str, folder: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir(folder);
    if rustix::process::geteuid().is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    command
}

/// Squid says that it accepts connections a moment before it does.
async fn listens(address: SocketAddr) {
    const TRIES: usize = 1_000;
    for _ in 0..TRIES {
        if TcpStream::connect(address).await.is_ok() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("squid does not listen on {address}");
}

/// Waits until squid says that all of its ports are open.
fn start(pki: &Pki, ip: Ipv4Addr) -> Child {
    let mut squid = unprivileged(SQUID, pki.folder())
        // Under a name of its own: all squids of one name share memory.
        .args(["-N", "-d", "1", "-n", &service_name(ip), "-f"])
        .arg(pki.file("squid.conf"))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    let mut lines = BufReader::new(squid.stderr.take().unwrap()).lines();
    for _ in 0..4 {
        loop {
            let Some(line) = lines.next() else { panic!("squid did not start: {said}") };
            let line = line.unwrap();
            if line.contains("Accepting") {
                break;
            }
            said.push_str(&line);
            said.push('\n');
        }
    }
    // Read on, for squid may say more.
    std::thread::spawn(move || lines.for_each(drop));
    squid
}

async fn echoes(mut stream: TlsStream<ReadAhead<Socket>>) {
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"portico-tunnel"[..]));
    stream.write_all(b"hello").await.unwrap();
    let mut answer = [0; 5];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"hello");
}

#[tokio::test]
async fn a_tunnel_goes_through_an_http_and_an_https_proxy() {
    let corporation = Corporation::new().await;
    let target = corporation.gateway();
    let plain = format!("http://{}:{}", corporation.ip, OPEN);
    let socket = corporation.dial(&plain, &target, ProxyFiles::default()).await.unwrap();
    assert_eq!(socket.route().to_string(), format!("{target} through {plain}"));
    echoes(corporation.tls(socket).await.unwrap()).await;

    let files = ProxyFiles { ca: Some(corporation.pki.file("proxy-ca.crt")), credentials: None };
    let secure = format!("https://{}:{}", corporation.ip, TLS);
    let socket = corporation.dial(&secure, &target, files).await.unwrap();
    echoes(corporation.tls(socket).await.unwrap()).await;
}

#[tokio::test]
async fn a_proxy_whose_certificate_is_of_another_ca_is_not_used() {
    let corporation = Corporation::new().await;
    let (ip, port, ca) = (corporation.ip, TLS, corporation.pki.file("ca.crt"));
    let files = ProxyFiles { ca: Some(ca.clone()), credentials: None };
    let url = format!("https://{ip}:{port}");
    let error = corporation.dial(&url, &corporation.gateway(), files).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "proxy {url}: TLS to {ip}:{port}: --proxy-ca {} does not sign the certificate that came: its \
             issuer is CN=proxy CA, \
             its subject CN={ip}; give the CA that issued it, if it is the right one",
            ca.display()
        )
    );
}

#[tokio::test]
async fn credentials_that_are_missing_wrong_or_new_are_told_apart() {
    let corporation = Corporation::new().await;
    let target = corporation.gateway();
    let url = format!("http://{}:{}", corporation.ip, AUTH);
    let asks = format!("proxy {url} asks for credentials for CONNECT {target} (it offers Basic); ");
    let error = corporation.dial(&url, &target, ProxyFiles::default()).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        asks.clone()
            + "none were sent: give USER:PASSWORD in a file (--proxy-credentials), in PORTICO_PROXY_AUTH or \
               in the proxy's URL"
    );

    let in_url = format!("http://agent:wrong@{}:{}", corporation.ip, AUTH);
    let error = corporation.dial(&in_url, &target, ProxyFiles::default()).await.unwrap_err();
    assert_eq!(error.to_string(), asks.clone() + "those from the proxy's URL were sent and not taken");

    // One dialer, and a file that changes.
    let files = corporation.with_credentials("agent:old\n");
    let file = files.credentials.clone().unwrap();
    let dialer = Dialer::with_environment(url.parse().unwrap(), files, |_| None).unwrap();
    let address = dialer.resolve(&target).await.unwrap().addresses[0];
    let error = dialer.connect(&target, address).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("{asks}those from file {} were sent and not taken", file.display())
    );
    corporation.with_credentials("agent:secret\n");
    echoes(corporation.tls(dialer.connect(&target, address).await.unwrap()).await.unwrap()).await;
}

#[tokio::test]
async fn what_is_not_on_the_allow_list_is_said_to_be_forbidden() {
    let corporation = Corporation::new().await;
    let target = Target { host: GATEWAY.into(), port: OPEN };
    let url = format!("http://{}:{}", corporation.ip, OPEN);
    let error = corporation.dial(&url, &target, ProxyFiles::default()).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "proxy {url} forbids CONNECT {target}: 403 Forbidden: ERR_ACCESS_DENIED 0: ERROR: The requested \
             URL could not be \
             retrieved; have {target} allowed for CONNECT there"
        )
    );
}

#[tokio::test]
async fn a_gateway_the_proxy_cannot_reach_is_not_called_forbidden() {
    let corporation = Corporation::new().await;
    let target = Target { host: GATEWAY.into(), port: NOBODY_LISTENS };
    let url = format!("http://{}:{}", corporation.ip, OPEN);
    let error = corporation.dial(&url, &target, ProxyFiles::default()).await.unwrap_err();
    assert!(
        error.to_string().starts_with(&format!(
            "proxy {url} cannot reach {target}: 503 Service Unavailable: ERR_CONNECT_FAIL 111: "
        )),
        "{error}"
    );
}

#[tokio::test]
async fn interception_is_recognised_and_names_the_signer() {
    let corporation = Corporation::new().await;
    let target = corporation.gateway();
    let url = format!("http://{}:{}", corporation.ip, BUMP);
    let with_password = format!("http://agent:secret@{}:{}", corporation.ip, BUMP);
    let socket = corporation.dial(&with_password, &target, ProxyFiles::default()).await.unwrap();
    let error = corporation.tls(socket).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "TLS to {target} through {url}: proxy {url} seems to intercept TLS: the certificate that came \
             was issued by \
             CN=Corporate Inspection CA (its subject is CN={GATEWAY}), and --tls-ca {} does not sign it; \
             have {target} exempted \
             from interception there, for the tunnel's TLS must reach the gateway. Should that issuer be the \
             gateway's own, give \
             its CA",
            corporation.pki.path("ca.crt")
        )
    );
}
