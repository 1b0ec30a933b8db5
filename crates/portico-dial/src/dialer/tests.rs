//! CONNECT against proxies that answer oddly, slowly, or not at all; real sockets, scripted peers.

#![allow(clippy::unwrap_used, reason = "the helpers of tests fail like tests")]

use std::fs;
use std::net::SocketAddr;
use std::time::Duration;

use portico_lab::log_lines::LogLines;
use portico_lab::pki::Pki;
use portico_lab::refusing::Refusing;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tracing::Level;

use super::{DialTimeouts, Dialer, ProxyFiles};
use crate::error::DialError;
use crate::socket::Socket;
use crate::target::Target;

/// Where the tests want to go. It is not resolved here: the proxy would.
const GATEWAY: &str = "gateway.test:8088";

/// A proxy on loopback that takes one request and then does as its script says.
struct Proxy {
    address: SocketAddr,
    script: JoinHandle<String>,
}

impl Proxy {
    async fn start<F>(script: impl FnOnce(TcpStream) -> F + Send + 'static) -> Self
    where
        F: Future<Output = ()> + Send,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let script = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                assert_ne!(stream.read_buf(&mut request).await.unwrap(), 0, "{request:?}");
            }
            script(stream).await;
            String::from_utf8(request).unwrap()
        });
        Self { address, script }
    }

    /// One that says something and hangs up.
    async fn saying(answer: &'static [u8]) -> Self {
        Self::start(move |mut stream| async move {
            // The client may be gone before the end.
            let _ = stream.write_all(answer).await;
        })
        .await
    }

    async fn dial(&self) -> Result<Socket, DialError> {
        self.dial_within(DialTimeouts { tcp: Duration::from_secs(30), proxy: Duration::from_secs(30) }).await
    }

    async fn dial_within(&self, timeouts: DialTimeouts) -> Result<Socket, DialError> {
        let target: Target = GATEWAY.parse().unwrap();
        let proxy = format!("http://{}", self.address).parse().unwrap();
        let environment = |name: &str| (name == "PORTICO_PROXY_AUTH").then(|| "user:password".to_owned());
        let dialer = Dialer::with_environment(proxy, ProxyFiles::default(), environment).unwrap();
        let dialer = Dialer { timeouts, ..dialer };
        let resolved = dialer.resolve(&target).await.unwrap();
        assert_eq!(*resolved.addresses, [self.address], "of the proxy");
        dialer.connect(&target, self.address).await
    }

    /// The result of dialling, without the proxy's port, which is another in each run.
    async fn error(&self) -> String {
        let error = self.dial().await.unwrap_err().to_string();
        assert!(!error.contains("password"), "{error}");
        error.replace(&self.address.to_string(), "PROXY")
    }
}

#[tokio::test]
async fn the_request_names_the_gateway_and_bytes_behind_the_answer_are_not_lost() {
    let proxy = Proxy::start(|mut stream| async move {
        stream.write_all(b"HTTP/1.1 200 Connection established\r\nVia: x\r\n\r\nfirst ").await.unwrap();
        let mut received = [0; 5];
        stream.read_exact(&mut received).await.unwrap();
        assert_eq!(&received, b"hello");
        stream.write_all(b"second").await.unwrap();
    })
    .await;
    let mut socket = proxy.dial().await.unwrap();
    assert_eq!(socket.route().to_string(), format!("{GATEWAY} through http://{}", proxy.address));
    socket.write_all(b"hello").await.unwrap();
    let mut all = String::new();
    socket.read_to_string(&mut all).await.unwrap();
    assert_eq!(all, "first second");
    let request = proxy.script.await.unwrap();
    assert_eq!(
        request,
        format!(
            "CONNECT {GATEWAY} HTTP/1.1\r\nHost: {GATEWAY}\r\nUser-Agent: portico/{}\r\n\
             Proxy-Authorization: Basic dXNlcjpwYXNzd29yZA==\r\n\r\n",
            env!("CARGO_PKG_VERSION")
        )
    );
}

#[tokio::test]
async fn an_answer_that_comes_byte_by_byte_after_an_interim_one_is_an_answer() {
    let proxy = Proxy::start(|mut stream| async move {
        for byte in b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.0 200 OK\r\n\r\n!" {
            stream.write_all(&[*byte]).await.unwrap();
            tokio::task::yield_now().await;
        }
    })
    .await;
    let mut rest = String::new();
    proxy.dial().await.unwrap().read_to_string(&mut rest).await.unwrap();
    assert_eq!(rest, "!");
}

#[tokio::test]
async fn a_proxy_that_hangs_up_is_said_to() {
    for answer in [&b""[..], b"HTTP/1.1 200 Connec", b"HTTP/1.1 200 OK\r\nVia: x\r\n"] {
        assert_eq!(
            Proxy::saying(answer).await.error().await,
            format!(
                "proxy http://PROXY hung up on CONNECT {GATEWAY} without an answer: unexpected end of file"
            )
        );
    }
}

#[tokio::test]
async fn what_does_not_speak_http_is_quoted() {
    let advice = "; is this the proxy's port, and is it an http:// and not an https:// one?";
    for (answer, said) in [
        (&b"SSH-2.0-OpenSSH_9.2\r\n"[..], "it says \"SSH-2.0-OpenSSH_9.2\\r\\n\""),
        (b"\x05\x00", "it says \"\\x05\\x00\""),
        (b"\x15\x03\x01\x00\x02\x02\x46", "it speaks TLS"),
    ] {
        assert_eq!(
            Proxy::saying(answer).await.error().await,
            format!("proxy http://PROXY does not answer in HTTP ({said}){advice}")
        );
    }
}

#[tokio::test]
async fn a_head_with_too_many_fields_is_said_to_be_one() {
    let fields: String = (0..65).map(|number| format!("X-{number}: x\r\n")).collect();
    let proxy = Proxy::start(|mut stream| async move {
        stream.write_all(format!("HTTP/1.1 403 Forbidden\r\n{fields}\r\n").as_bytes()).await.unwrap();
    })
    .await;
    assert_eq!(
        proxy.error().await,
        format!(
            "proxy http://PROXY answers CONNECT {GATEWAY} with a head of more than 64 fields; is it an HTTP \
             proxy?"
        )
    );
}

#[tokio::test]
async fn an_endless_head_is_given_up() {
    let proxy = Proxy::start(|mut stream| async move {
        let mut said = stream.write_all(b"HTTP/1.1 200 OK\r\nX-Endless: ").await;
        // Until it is hung up on.
        while said.is_ok() {
            said = stream.write_all(&[b'a'; 4096]).await;
        }
    })
    .await;
    assert_eq!(
        proxy.error().await,
        format!(
            "proxy http://PROXY answers CONNECT {GATEWAY} with a head of more than 16384 bytes; is it an \
             HTTP proxy?"
        )
    );
    proxy.script.await.unwrap();
}

#[tokio::test]
async fn endless_interim_answers_are_given_up() {
    let proxy = Proxy::start(|mut stream| async move {
        // Until the client hangs up.
        while stream.write_all(b"HTTP/1.1 102 Processing\r\n\r\n").await.is_ok() {}
    })
    .await;
    let error = proxy.error().await;
    assert!(error.contains("more than 16384 bytes of interim answers (1xx)"), "{error}");
}

#[tokio::test]
async fn a_silent_proxy_costs_no_more_than_the_limit() {
    let proxy = Proxy::start(|mut stream| async move {
        assert_eq!(stream.read(&mut [0]).await.unwrap(), 0, "the client hangs up");
    })
    .await;
    let timeouts = DialTimeouts { tcp: Duration::from_secs(30), proxy: Duration::from_millis(50) };
    let error = proxy.dial_within(timeouts).await.unwrap_err();
    assert!(matches!(error, DialError::ProxyTooSlow { .. }), "{error}");
    assert!(
        error.to_string().contains("did not let us through to gateway.test:8088 within 50 ms"),
        "{error}"
    );
    proxy.script.await.unwrap();
}

#[tokio::test]
async fn a_proxy_without_basic_is_said_to_want_what_is_not_spoken_here() {
    let proxy = Proxy::saying(
        b"HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Negotiate\r\nProxy-Authenticate: \
          NTLM\r\n\r\n",
    )
    .await;
    assert_eq!(
        proxy.error().await,
        format!(
            "proxy http://PROXY asks for credentials for CONNECT {GATEWAY} (it offers Negotiate, NTLM); only \
             Basic can be spoken \
             here: have Basic offered, or this machine let through without"
        )
    );
}

#[tokio::test]
async fn a_refusal_is_reported_in_the_proxys_words() {
    let forbids = format!("proxy http://PROXY forbids CONNECT {GATEWAY}: ");
    let advice = format!("; have {GATEWAY} allowed for CONNECT there");
    for (answer, words) in [
        (
            &b"HTTP/1.1 403 Forbidden\r\nContent-Length: 27\r\n\r\nCategory: uncategorised\nno more"[..],
            "403 Forbidden: Category: uncategorised",
        ),
        (b"HTTP/1.1 405 Method Not Allowed\r\n\r\n", "405 Method Not Allowed"),
        (
            b"HTTP/1.1 403\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nno\x1b[1m\r\n0\r\n\r\n",
            "403: \
            no [1m",
        ),
        (
            b"HTTP/1.1 302 Found\r\nContent-Type: text/html; charset=utf-8\r\n\r\n<html><title>Log in \
              first</title>",
            "302 Found: Log in first",
        ),
    ] {
        assert_eq!(Proxy::saying(answer).await.error().await, format!("{forbids}{words}{advice}"));
    }
}

#[tokio::test]
async fn a_body_that_does_not_end_does_not_hide_the_refusal() {
    let proxy = Proxy::start(|mut stream| async move {
        stream.write_all(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 99999\r\n\r\nno route").await.unwrap();
        // The client hangs up after a while.
        while matches!(stream.read(&mut [0; 64]).await, Ok(1..)) {}
    })
    .await;
    assert!(
        proxy
            .error()
            .await
            .starts_with(&format!("proxy http://PROXY cannot reach {GATEWAY}: 502 Bad Gateway: no route; "))
    );
    proxy.script.await.unwrap();
}

#[tokio::test]
async fn a_proxy_that_is_not_there_is_named_with_where_it_would_lead() {
    let refusing = Refusing::start().unwrap();
    let address = refusing.address();
    let target: Target = GATEWAY.parse().unwrap();
    let proxy = format!("http://user:password@{address}").parse().unwrap();
    let dialer = Dialer::with_environment(proxy, ProxyFiles::default(), |_| None).unwrap();
    assert_eq!(
        dialer.connect(&target, address).await.unwrap_err().to_string(),
        format!(
            "connecting to {address} (proxy http://{address}, on the way to {GATEWAY}): Connection refused \
             (os error 111)"
        )
    );
    assert!(!format!("{dialer:?}").contains("password"), "{dialer:?}");
}

#[tokio::test]
async fn a_target_in_no_proxy_is_reached_directly() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let environment = |name: &str| match name {
        "HTTPS_PROXY" => Some("http://192.0.2.1:3128".to_owned()),
        "NO_PROXY" => Some("example.com,127.0.0.0/8".to_owned()),
        _ => None,
    };
    let proxy = "http://192.0.2.1:3128".parse().unwrap();
    let dialer = Dialer::with_environment(proxy, ProxyFiles::default(), environment).unwrap();
    let listed = Target { host: "127.0.0.1".into(), port: address.port() };
    assert!(dialer.via(&listed).is_none());
    assert_eq!(dialer.via(&GATEWAY.parse().unwrap()).unwrap().to_string(), "http://192.0.2.1:3128");
    let resolved = dialer.resolve(&listed).await.unwrap();
    assert_eq!(*resolved.addresses, [address]);
    let socket = dialer.connect(&listed, address).await.unwrap();
    assert!(socket.route().proxy().is_none());
    let (mut server, _) = listener.accept().await.unwrap();
    server.write_all(b"direct").await.unwrap();
    drop(server);
    let mut all = String::new();
    { socket }.read_to_string(&mut all).await.unwrap();
    assert_eq!(all, "direct");
}

#[test]
fn a_proxy_of_the_environment_is_not_used_to_reach_this_machine_and_a_configured_one_is() {
    let environment = |name: &str| (name == "HTTPS_PROXY").then(|| "http://192.0.2.1:3128".to_owned());
    for target in ["localhost:1", "LOCALHOST:1", "127.0.0.1:1", "127.1.2.3:1", "[::1]:1", "192.0.2.7:1"] {
        let target: Target = target.parse().unwrap();
        let is_used = |setting: &str| {
            let proxy = setting.parse().unwrap();
            let dialer = Dialer::with_environment(proxy, ProxyFiles::default(), environment).unwrap();
            dialer.via(&target).is_some()
        };
        assert!(is_used("http://192.0.2.1:3128"), "{target}");
        assert_eq!(is_used("env"), target.host.starts_with("192."), "{target}");
    }
}

#[tokio::test]
async fn a_ca_of_the_proxy_that_cannot_be_read_is_news_once_and_not_with_each_attempt() {
    let (warnings, _collected) = LogLines::collect(|metadata| *metadata.level() == Level::WARN);
    let (pki, target) = (Pki::new(), GATEWAY.parse().unwrap());
    // Nobody accepts there, so that each attempt ends after the file was looked at.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let files = ProxyFiles { ca: Some(pki.file("ca.crt")), credentials: None };
    let proxy = format!("https://{address}").parse().unwrap();
    let dialer = Dialer::with_environment(proxy, files, |_| None).unwrap();
    let dialer = Dialer { timeouts: DialTimeouts { proxy: Duration::ZERO, ..dialer.timeouts }, ..dialer };
    let good = fs::read_to_string(pki.file("ca.crt")).unwrap();
    for (content, news) in [("broken", 1), (&good, 1), ("broken", 2)] {
        pki.write("ca.crt", content);
        for _ in 0..3 {
            assert!(dialer.connect(&target, address).await.is_err());
        }
        assert_eq!(warnings.messages().len(), news);
        let problem = dialer.file_problem();
        assert_eq!(problem.is_some_and(|text| text.starts_with("CA of the proxy: ")), content == "broken");
    }
}
