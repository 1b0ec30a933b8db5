//! API servers that one should not trust, on loopback: of an authority that may be the wrong one, with an
//! answer that may have no end.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::Result;
use rustls::{ServerConnection, StreamOwned};

use crate::pki::Authority;

/// Bytes that an answer without end has before it ends all the same.
pub const ENDLESS: usize = 200 * 1_024 * 1_024;

/// An API server that gives every request the same answer.
pub struct HostileApi {
    port: u16,
    authority: Authority,
    sent: Arc<AtomicUsize>,
}

impl HostileApi {
    /// Starts one with a certificate for `127.0.0.1` and `localhost`. After `answer`, a head with or without
    /// a body, come [`ENDLESS`] bytes more if it is `endless`.
    pub fn start(answer: &'static str, endless: bool) -> Result<HostileApi> {
        let authority = Authority::new("hostile")?;
        let config = Arc::new(authority.server("api", &["127.0.0.1", "localhost"])?.server_config(&[])?);
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        let sent = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&sent);
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let Ok(connection) = ServerConnection::new(Arc::clone(&config)) else { return };
                // A client that goes ends the connection, and the next one is served.
                drop(serve(StreamOwned::new(connection, stream), answer, endless, &counted));
            }
        });
        Ok(HostileApi { port, authority, sent })
    }

    /// Its URL, by this name.
    pub fn url(&self, host: &str) -> String {
        format!("https://{host}:{}", self.port)
    }

    /// The authority of its certificate.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// Bytes that it could send without an end.
    pub fn sent(&self) -> usize {
        self.sent.load(Ordering::Relaxed)
    }
}

/// Answers requests without a body, until the client goes.
fn serve(
    mut stream: impl Read + Write,
    answer: &str,
    endless: bool,
    sent: &AtomicUsize,
) -> std::io::Result<()> {
    loop {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            if stream.read(&mut byte)? == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            head.push(byte[0]);
        }
        stream.write_all(answer.as_bytes())?;
        let filler = [b'x'; 16 * 1_024];
        let mut left = if endless { ENDLESS } else { 0 };
        while left > 0 {
            stream.write_all(&filler)?;
            sent.fetch_add(filler.len(), Ordering::Relaxed);
            left = left.saturating_sub(filler.len());
        }
        stream.flush()?;
    }
}
