//! One connection to an API server, HTTP/1.1 over TLS: what asks needs no more, and sees what comes back as
//! it is.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use portico_lab::pki::Identity;
use portico_pki::Credential;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use crate::support::{Way, given};

/// An answer takes milliseconds on an idle machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// An address of an API server, and the identity that asks there.
pub(super) struct Door {
    address: SocketAddr,
    name: ServerName<'static>,
    host: String,
    token: Option<String>,
    config: Arc<ClientConfig>,
}

impl Door {
    /// The one that the kubeconfig of this way names, for its user.
    pub(super) fn of(way: &Way) -> Result<Self> {
        let given = given(&way.kubectl);
        let host = given.server.strip_prefix("https://").context("a URL of HTTPS")?.to_owned();
        let (name, port) = host.rsplit_once(':').unwrap_or((&host, "443"));
        // As its user resolves it.
        let found = way.host.run(&["getent", "ahostsv4", name])?;
        let ip = found.split_whitespace().next().with_context(|| format!("{name} has no address"))?;
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(given.authority.as_bytes()) {
            roots.add(certificate?)?;
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots);
        let (mut config, token) = match given.credential {
            Credential::Token(token) => (builder.with_no_client_auth(), Some(token)),
            Credential::Certificate(pair) => {
                let identity = Identity { cert: pair.certificate, key: pair.key };
                let chain = vec![identity.certificate()?];
                (builder.with_client_auth_cert(chain, identity.private_key()?)?, None)
            }
        };
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let address = SocketAddr::new(ip.parse()?, port.parse()?);
        let name = ServerName::try_from(name.to_owned())?;
        Ok(Self { address, name, host, token, config: Arc::new(config) })
    }
}

/// A connection to it.
pub(super) struct Connection {
    stream: BufReader<StreamOwned<ClientConnection, TcpStream>>,
    head: String,
}

impl Connection {
    pub(super) fn open(door: &Door) -> Result<Self> {
        let socket = TcpStream::connect_timeout(&door.address, PATIENCE)
            .with_context(|| format!("connecting to {}", door.address))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        socket.set_nodelay(true)?;
        let tls = ClientConnection::new(Arc::clone(&door.config), door.name.clone())?;
        let mut head = format!("HTTP/1.1\r\nHost: {}\r\nAccept: application/json\r\n", door.host);
        if let Some(token) = &door.token {
            head.push_str(&format!("Authorization: Bearer {token}\r\n"));
        }
        Ok(Self { stream: BufReader::new(StreamOwned::new(tls, socket)), head })
    }

    /// Its socket, for another thread to end it.
    pub(super) fn socket(&self) -> Result<TcpStream> {
        Ok(self.stream.get_ref().sock.try_clone()?)
    }

    /// A request and its whole answer, which is a success.
    pub(super) fn ask(&mut self, method: &str, path: &str, body: &str) -> Result<()> {
        self.send(method, path, body)?;
        let (status, length) = self.answer().with_context(|| format!("{method} {path}"))?;
        let mut body = Vec::new();
        match length {
            Some(length) => drop((&mut self.stream).take(length).read_to_end(&mut body)?),
            None => while self.chunk(&mut body)? {},
        }
        ensure!(
            (200..300).contains(&status),
            "{method} {path}: {status}, {}",
            String::from_utf8_lossy(&body).trim()
        );
        Ok(())
    }

    /// A request whose answer is a stream.
    pub(super) fn begin(&mut self, path: &str) -> Result<()> {
        self.send("GET", path, "")?;
        let (status, length) = self.answer()?;
        ensure!(status == 200 && length.is_none(), "{path}: {status}, {length:?} bytes");
        Ok(())
    }

    /// The lines of a stream as they come, for as long as they do. Returns how it ended.
    pub(super) fn for_each_line(&mut self, mut see: impl FnMut(&str)) -> anyhow::Error {
        let _ = self.stream.get_ref().sock.set_read_timeout(None);
        let mut chunk = Vec::new();
        loop {
            chunk.clear();
            match self.chunk(&mut chunk) {
                // An event has one chunk of its own.
                Ok(true) => String::from_utf8_lossy(&chunk).lines().for_each(&mut see),
                Ok(false) => return anyhow!("the server ended it"),
                Err(error) => return error,
            }
        }
    }

    fn send(&mut self, method: &str, path: &str, body: &str) -> Result<()> {
        let request = format!(
            "{method} {path} {}Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            self.head,
            body.len()
        );
        let stream = self.stream.get_mut();
        stream.write_all(request.as_bytes()).and_then(|()| stream.flush()).context("sending a request")
    }

    /// Status and length of an answer; no length is one in chunks.
    fn answer(&mut self) -> Result<(u16, Option<u64>)> {
        let first = self.line()?;
        let status = first.split_whitespace().nth(1).and_then(|word| word.parse().ok());
        let status = status.with_context(|| format!("no status: {first:?}"))?;
        let mut length = None;
        loop {
            let line = self.line()?.to_ascii_lowercase();
            match line.split_once(": ") {
                None if line.is_empty() => return Ok((status, length)),
                Some(("content-length", value)) => length = Some(value.parse()?),
                _ => {}
            }
        }
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        if (&mut self.stream).take(16 * 1_024).read_line(&mut line)? == 0 {
            bail!("the connection ended");
        }
        Ok(line.trim_end().to_owned())
    }

    /// Reads one chunk; false if it was the last one.
    fn chunk(&mut self, into: &mut Vec<u8>) -> Result<bool> {
        let line = self.line()?;
        let length = u64::from_str_radix(&line, 16).with_context(|| format!("a chunk of {line:?} bytes"))?;
        let read = (&mut self.stream).take(length).read_to_end(into)?;
        ensure!(u64::try_from(read)? == length, "a chunk of {length} bytes ended after {read}");
        self.line()?;
        Ok(length > 0)
    }
}
