//! `rustls-client PORT NAME [MAX_FRAGMENT]`: one TLS connection to a loopback port, asking for the name, with
//! records no longer than the fragment size.

use std::error::Error;
use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;

use rustls::{ClientConfig, ClientConnection, RootCertStore, Stream};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [port, name, fragment @ ..] = arguments.as_slice() else {
        return Err("usage: rustls-client PORT NAME [MAX_FRAGMENT]".into());
    };
    let mut config =
        ClientConfig::builder().with_root_certificates(RootCertStore::empty()).with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    config.max_fragment_size = fragment.first().map(|size| size.parse()).transpose()?;
    let mut connection = ClientConnection::new(Arc::new(config), name.clone().try_into()?)?;
    let mut socket = TcpStream::connect(("127.0.0.1", port.parse()?))?;
    Stream::new(&mut connection, &mut socket).flush()?;
    Ok(connection.complete_io(&mut socket).map(drop)?)
}
