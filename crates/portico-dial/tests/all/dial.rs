//! Names as a name server gives them, and connecting to what they lead to; real sockets, a scripted server.

use std::time::Duration;

use super::names::{NameServer, Says};
use portico_dial::{Dialer, ProxyFiles, ProxySetting, Target};
use portico_lab::refusing::Refusing;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::time::Instant;

/// A dialer without a proxy that asks this name server.
fn dialer(server: &NameServer) -> Dialer {
    let dialer = Dialer::with_environment(ProxySetting::Off, ProxyFiles::default(), |_| None);
    dialer.expect("one without a proxy needs nothing").with_name_servers(&[server.address])
}

#[tokio::test]
async fn all_addresses_of_both_kinds_hold_as_long_as_dns_says() {
    const TTL: u32 = 60;
    let known = Says::Addresses(vec!["192.0.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap()]);
    let server = NameServer::with_ttl(TTL, known).await;
    let dialer = dialer(&server);

    let target: Target = "gateway.example.com:443".parse().unwrap();
    let before = Instant::now();
    let resolved = dialer.resolve(&target).await.unwrap();
    assert_eq!(server.last(), "gateway.example.com.");
    let mut addresses = resolved.addresses.to_vec();
    addresses.sort();
    assert_eq!(addresses, ["192.0.2.1:443".parse().unwrap(), "[2001:db8::1]:443".parse().unwrap()],);
    let ttl = Duration::from_secs(TTL.into());
    let until = resolved.until.unwrap();
    assert!((before + ttl..=Instant::now() + ttl).contains(&until), "{until:?}");

    server.says.send_replace(Says::Unknown);
    let target: Target = "unknown.example.com:443".parse().unwrap();
    let error = dialer.resolve(&target).await.unwrap_err();
    // Not which of the two questions came last: what writes it down must not write again each time.
    let text = error.to_string();
    assert!(text.starts_with("resolving unknown.example.com: DNS has no address of this name"), "{text}");
}

#[tokio::test]
async fn any_address_of_a_name_that_accepts_will_do() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    // Nothing listens on the other two.
    let all = ["127.0.0.2", "::1", "127.0.0.1"].map(|text| text.parse().unwrap());
    let server = NameServer::start(Says::Addresses(all.to_vec())).await;
    let dialer = dialer(&server);
    let target: Target = format!("api.example.com:{}", address.port()).parse().unwrap();
    let mut socket = dialer.connect_any(&target).await.unwrap();
    socket.write_all(b"hello").await.unwrap();
    let (mut accepted, _) = listener.accept().await.unwrap();
    let mut received = [0; 5];
    accepted.read_exact(&mut received).await.unwrap();
    assert_eq!(&received, b"hello");
}

#[tokio::test]
async fn addresses_that_all_refuse_are_named_with_their_name() {
    let first = Refusing::start().unwrap();
    let port = first.address().port();
    let _second = Refusing::at(([127, 0, 0, 2], port).into()).unwrap();
    let all = ["127.0.0.2", "127.0.0.1"].map(|text| text.parse().unwrap());
    let server = NameServer::start(Says::Addresses(all.to_vec())).await;
    let dialer = dialer(&server);
    let target: Target = format!("api.example.com:{port}").parse().unwrap();
    let error = dialer.connect_any(&target).await.unwrap_err().to_string();
    assert!(error.contains("connecting to ") && error.contains("(api.example.com:"), "{error}");
}
