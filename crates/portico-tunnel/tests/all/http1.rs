//! HTTP/1.1 CONNECT, with raw bytes and with curl.

use std::net::SocketAddr;
use std::time::Duration;

use crate::common::*;
use http::StatusCode;
use portico_net::linger;
use portico_tunnel::{End, Failure, Finished, Settings, Side};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

async fn ask(server: &Server, request: &str) -> String {
    let mut stream = raw(server, request.as_bytes()).await;
    let (answer, end) = read_to_end(&mut stream).await;
    end.unwrap();
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn bytes_after_the_head_go_to_the_upstream() {
    let server = Server::start(plaintext()).await;
    let mut stream =
        raw(&server, format!("CONNECT {UPSTREAM} HTTP/1.1\r\nHost: {UPSTREAM}\r\n\r\nearly").as_bytes())
            .await;
    let mut upstream = server.upstream().await;
    let mut early = [0; 5];
    patiently(upstream.read_exact(&mut early)).await.unwrap();
    assert_eq!(&early, b"early");
    assert!(server.routes.requests.lock().unwrap()[0].client_first);
    upstream.write_all(b"answer").await.unwrap();
    drop(upstream);
    let (answer, _) = read_to_end(&mut stream).await;
    assert_eq!(answer, b"HTTP/1.1 200 Connection established\r\n\r\nanswer");
}

#[tokio::test]
async fn a_head_that_comes_byte_by_byte_is_read() {
    let server = Server::start(plaintext()).await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    for byte in format!("CONNECT {UPSTREAM} HTTP/1.1\r\n\r\n").bytes() {
        stream.write_all(&[byte]).await.unwrap();
        tokio::task::yield_now().await;
    }
    let _upstream = server.upstream().await;
    assert!(!server.routes.requests.lock().unwrap()[0].client_first, "the upstream may speak first");
    let mut answer = [0; 12];
    patiently(stream.read_exact(&mut answer)).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200");
}

#[tokio::test]
async fn every_refusal_carries_its_status_and_a_sentence() {
    let mut server = Server::start(plaintext()).await;
    for (status, line) in [
        (400, "400 Bad Request"),
        (403, "403 Forbidden"),
        (404, "404 Not Found"),
        (429, "429 Too Many Requests"),
        (502, "502 Bad Gateway"),
        (503, "503 Service Unavailable"),
        (504, "504 Gateway Timeout"),
    ] {
        let answer = ask(&server, &format!("CONNECT {status}.test:443 HTTP/1.1\r\n\r\n")).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {line}\r\n")), "{answer}");
        assert!(answer.contains("\r\nContent-Length: 21\r\nConnection: close\r\n\r\n"), "{answer}");
        assert!(answer.ends_with("\r\n\r\nas the test wants it\n"), "{answer}");
        assert_eq!(server.result().await.unwrap(), Finished::Closed);
    }
}

#[tokio::test]
async fn a_client_that_leaves_before_its_response_is_the_side_that_ended_the_tunnel() {
    let mut server = Server::start(plaintext()).await;
    server.routes.gate.send_replace(false);
    let client = raw(&server, format!("CONNECT {UPSTREAM} HTTP/1.1\r\n\r\n").as_bytes()).await;
    patiently(async {
        while server.routes.requests.lock().unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    linger::abort(&client);
    drop(client);
    server.routes.gate.send_replace(true);
    assert_eq!(server.report().await.end, Some(End::Reset { by: Side::Downstream }));
}

#[tokio::test]
async fn other_methods_are_told_which_one_is_served() {
    let server = Server::start(plaintext()).await;
    let answer = ask(&server, "GET / HTTP/1.1\r\nHost: test\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 405 Method Not Allowed\r\nAllow: CONNECT\r\n"), "{answer}");
    assert_eq!(*server.routes.refusals.lock().unwrap(), [StatusCode::METHOD_NOT_ALLOWED]);
}

#[tokio::test]
async fn a_response_to_head_has_no_content_and_says_how_long_it_would_be() {
    let server = Server::start(plaintext()).await;
    let answer = ask(&server, "HEAD / HTTP/1.1\r\nHost: test\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 405 "), "{answer}");
    assert!(answer.contains("\r\nContent-Length: 28\r\n") && answer.ends_with("\r\n\r\n"), "{answer}");
    let malformed = ask(&server, "HEAD / HTTP/1.1\r\nHost: test\n\r\n").await;
    assert!(malformed.starts_with("HTTP/1.1 400 ") && malformed.ends_with("\r\n\r\n"), "{malformed}");
    let get = ask(&server, "GET / HTTP/1.1\r\nHost: test\r\n\r\n").await;
    assert!(get.ends_with("\r\n\r\nonly CONNECT is served here\n"), "{get}");
    let tls_only = Server::start(Settings::default()).await;
    let answer = ask(&tls_only, "HEAD / HTTP/1.1\r\nHost: test\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 403 ") && answer.ends_with("\r\n\r\n"), "{answer}");
}

#[tokio::test]
async fn a_request_whose_slot_is_needed_is_answered_with_a_429() {
    let mut server = Server::start(plaintext()).await;
    server.routes.gate.send_replace(false);
    server.routes.full.send_replace(true);
    let answer = ask(&server, &format!("CONNECT {UPSTREAM} HTTP/1.1\r\n\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 429 "), "{answer}");
    assert!(matches!(server.result().await, Err(Failure::Evicted)));
}

#[tokio::test]
async fn malformed_requests_are_answered_with_a_400() {
    let server = Server::start(plaintext()).await;
    let long = format!("CONNECT {UPSTREAM} HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(17_000));
    for request in
        ["CONNECT a b HTTP/1.1\r\n\r\n", "CONNECT a:1 HTTP/3.0\r\n\r\n", "CONNECT a:1 HTTP/1.1\n\n", &long]
    {
        let answer = ask(&server, request).await;
        assert!(answer.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{request}: {answer}");
    }
    assert!(server.routes.requests.lock().unwrap().is_empty());
}

#[tokio::test]
async fn bytes_of_no_protocol_just_end() {
    let mut server = Server::start(plaintext()).await;
    for bytes in [&b"\0\0\0\0"[..], b"SSH-2.0-x\r\n", b"PRI * HTTP/2.0\r\n\r\nXX"] {
        let mut stream = raw(&server, bytes).await;
        stream.shutdown().await.unwrap();
        let _ = read_to_end(&mut stream).await;
        let failed = matches!(
            server.result().await,
            Err(Failure::Malformed(_)) | Ok(Finished::Closed) | Err(Failure::Http1(_))
        );
        assert!(failed, "{bytes:?}");
    }
    assert!(server.routes.requests.lock().unwrap().is_empty());
}

#[tokio::test]
async fn slow_clients_are_ended_wherever_they_stop() {
    let mut server =
        Server::start(Settings { hello_timeout: Duration::from_millis(30), ..plaintext() }).await;
    for bytes in [&b""[..], b"PRI * HTTP/2.0\r\n"] {
        let _stream = raw(&server, bytes).await;
        assert!(matches!(server.result().await, Err(Failure::TooSlow)), "{bytes:?}");
    }
    let answer = ask(&server, "CONNECT a:1 HTTP/1.1\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 408 Request Timeout\r\n"), "{answer}");
}

#[tokio::test]
async fn a_client_that_leaves_at_once_is_told_apart() {
    let mut server = Server::start(plaintext()).await;
    drop(raw(&server, b"").await);
    assert!(matches!(server.result().await, Err(Failure::ClosedEarly)));
}

#[tokio::test]
async fn without_permission_plaintext_is_refused() {
    let mut server = Server::start(Settings::default()).await;
    let answer = ask(&server, &format!("CONNECT {UPSTREAM} HTTP/1.1\r\n\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 403 Forbidden\r\n") && answer.contains("TLS"), "{answer}");
    assert!(matches!(server.result().await, Err(Failure::PlaintextNotServed)));
    let _stream = raw(&server, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
    assert!(matches!(server.result().await, Err(Failure::PlaintextNotServed)));
    assert!(server.routes.requests.lock().unwrap().is_empty());
}

#[tokio::test]
async fn without_a_certificate_tls_is_refused() {
    let mut server = Server::start(plaintext()).await;
    let _stream = raw(&server, b"\x16\x03\x01").await;
    assert!(matches!(server.result().await, Err(Failure::TlsNotServed)));
}

#[tokio::test]
async fn curl_passes_through_and_understands_refusals() {
    let server = Server::start(plaintext()).await;
    let serve = async {
        let mut upstream = server.upstream().await;
        let mut request = vec![0; 1024];
        let length = upstream.read(&mut request).await.unwrap();
        assert!(request[..length].starts_with(b"GET /version "), "{}", String::from_utf8_lossy(&request));
        upstream
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nv1")
            .await
            .unwrap();
    };
    let url = format!("http://{UPSTREAM}/version");
    let (output, ()) = tokio::join!(curl(server.address, &url), serve);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "v1");
    let output = curl(server.address, "http://503.test:443/").await;
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("503"), "{said}");
}

async fn curl(proxy: SocketAddr, url: &str) -> std::process::Output {
    let proxy = format!("http://{proxy}");
    let mut command = tokio::process::Command::new("curl");
    command.args(["-sS", "--max-time", "20", "--noproxy", "", "--proxytunnel", "--proxy", &proxy, url]);
    command.output().await.expect("curl runs; apt-get install curl")
}
