//! What went wrong with HTTP/2, fit for logs.

use std::io::ErrorKind;

/// Says why without the debug data of a GOAWAY, which are the peer's and may have a frame's length.
#[must_use]
pub fn cause(error: &h2::Error) -> String {
    // Such an error is the system's, or our own misuse of the library: nothing in it comes from the peer.
    let Some(reason) = error.reason() else {
        // The TLS library's sentence is for programmers, and longer than a line.
        let is_cut = error.get_io().is_some_and(|error| error.kind() == ErrorKind::UnexpectedEof);
        return if is_cut {
            "the peer has closed the connection without a word".into()
        } else {
            error.to_string()
        };
    };
    let what = if error.is_reset() { "stream" } else { "connection" };
    if reason == h2::Reason::NO_ERROR {
        return format!("the peer has ended the {what}");
    }
    let how = if error.is_remote() { "received" } else { "detected" };
    format!("{what} error {how}: {reason}")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use portico_lab::pki::Authority;
    use tokio::io::{AsyncWriteExt, duplex};
    use tokio_rustls::{TlsAcceptor, TlsConnector};

    use super::*;

    #[tokio::test]
    async fn a_connection_that_is_cut_under_tls_is_told_in_plain_words() {
        let authority = Authority::new("ca").unwrap();
        let identity = authority.server("localhost", &["localhost"]).unwrap();
        let (server, client) = duplex(1 << 16);
        let acceptor = TlsAcceptor::from(Arc::new(identity.server_config(&[]).unwrap()));
        let connector = TlsConnector::from(Arc::new(authority.client_config(None, &[]).unwrap()));
        let name = "localhost".try_into().unwrap();
        let (server, client) = tokio::join!(acceptor.accept(server), connector.connect(name, client));
        let (mut requests, connection) = h2::client::handshake(client.unwrap()).await.unwrap();
        let request = http::Request::get("https://localhost/").body(()).unwrap();
        let _response = requests.send_request(request, true).unwrap();
        drop(server);
        let error = connection.await.unwrap_err();
        assert!(error.to_string().contains("close_notify"), "{error}");
        assert_eq!(cause(&error), "the peer has closed the connection without a word");
    }

    #[tokio::test]
    async fn what_a_peer_says_with_its_goaway_is_in_no_line() {
        let (server, mut peer) = duplex(1 << 16);
        let text = "not for logs";
        let len = u8::try_from(8 + text.len()).unwrap();
        // SETTINGS, and GOAWAY with PROTOCOL_ERROR.
        let mut frames = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
        frames.extend([0, 0, len, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        frames.extend(text.as_bytes());
        peer.write_all(&frames).await.unwrap();
        let mut connection = h2::server::handshake(server).await.unwrap();
        let error = connection.accept().await.unwrap().unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
        assert_eq!(cause(&error), "connection error received: unspecific protocol error detected");
    }
}
