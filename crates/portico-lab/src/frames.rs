//! HTTP/2 by hand, for clients that no library would be: frames as bytes (RFC 9113 section 4), over TLS.
//!
//! Nothing here keeps the protocol's rules. Functions make bytes; a [`RawClient`] sends them and reads what
//! comes back, or does not read.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};

/// What a client sends first (RFC 9113 section 3.4), without the SETTINGS that must follow.
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Kinds of frames (RFC 9113 section 6).
#[allow(missing_docs, reason = "the names are the RFC's")]
pub mod kind {
    pub const DATA: u8 = 0;
    pub const HEADERS: u8 = 1;
    pub const PRIORITY: u8 = 2;
    pub const RST_STREAM: u8 = 3;
    pub const SETTINGS: u8 = 4;
    pub const PING: u8 = 6;
    pub const GOAWAY: u8 = 7;
    pub const WINDOW_UPDATE: u8 = 8;
    pub const CONTINUATION: u8 = 9;
}

/// Flag of DATA and HEADERS: the stream's last frame.
pub const END_STREAM: u8 = 0x1;
/// Flag of SETTINGS and PING.
pub const ACK: u8 = 0x1;
/// Flag of HEADERS and CONTINUATION: the last of the header block.
pub const END_HEADERS: u8 = 0x4;

/// The setting SETTINGS_INITIAL_WINDOW_SIZE (RFC 9113 section 6.5.2).
pub const INITIAL_WINDOW_SIZE: u16 = 4;

/// The nine bytes before a frame's payload, of which `length` says how many there will be.
#[must_use]
pub fn header(length: u32, kind: u8, flags: u8, stream: u32) -> [u8; 9] {
    let [_, high, middle, low] = length.to_be_bytes();
    let [a, b, c, d] = stream.to_be_bytes();
    [high, middle, low, kind, flags, a, b, c, d]
}

/// A whole frame.
#[must_use]
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    [&header(length, kind, flags, stream)[..], payload].concat()
}

/// SETTINGS with these values.
#[must_use]
pub fn settings(values: &[(u16, u32)]) -> Vec<u8> {
    let payload: Vec<u8> = values
        .iter()
        .flat_map(|(id, value)| [&id.to_be_bytes()[..], &value.to_be_bytes()].concat())
        .collect();
    frame(kind::SETTINGS, 0, 0, &payload)
}

/// The preface and SETTINGS with these values.
#[must_use]
pub fn opening(values: &[(u16, u32)]) -> Vec<u8> {
    [PREFACE, &settings(values)].concat()
}

/// A header block with these fields (RFC 7541 section 6.2.2): all literal, none indexed.
#[must_use]
pub fn header_block(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.push(0);
        for text in [name, value] {
            push_length(&mut block, text.len());
            block.extend(text.as_bytes());
        }
    }
    block
}

/// An integer with a prefix of seven bits (RFC 7541 section 5.1).
fn push_length(block: &mut Vec<u8>, length: usize) {
    const MOST: usize = 127;
    block.push(length.min(MOST) as u8);
    let Some(mut rest) = length.checked_sub(MOST) else { return };
    while rest >= 128 {
        block.push((rest % 128) as u8 | 128);
        rest /= 128;
    }
    block.push(rest as u8);
}

/// A CONNECT request on `stream`, with a bearer token or without one.
#[must_use]
pub fn connect(stream: u32, authority: &str, token: Option<&str>) -> Vec<u8> {
    let bearer = token.map(|token| format!("Bearer {token}"));
    let mut fields = vec![(":method", "CONNECT"), (":authority", authority)];
    fields.extend(bearer.as_deref().map(|bearer| ("authorization", bearer)));
    frame(kind::HEADERS, END_HEADERS, stream, &header_block(&fields))
}

/// A frame that came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Received {
    /// One of [`kind`].
    pub kind: u8,
    /// What they mean depends on the kind.
    pub flags: u8,
    /// 0 for the connection.
    pub stream: u32,
    /// After the nine bytes of the header.
    pub payload: Vec<u8>,
}

/// A connection that sends bytes as they are. Blocking.
pub struct RawClient {
    stream: StreamOwned<ClientConnection, TcpStream>,
}

impl RawClient {
    /// Connects to `gateway` and finishes the TLS handshake. `config` names the protocol (`h2`) and the
    /// certificate, if there is one. No read or write waits longer than `patience`.
    ///
    /// # Errors
    /// Says that the gateway does not accept, or what is wrong with its TLS.
    pub fn connect(gateway: SocketAddr, config: &Arc<ClientConfig>, patience: Duration) -> Result<Self> {
        let socket = TcpStream::connect_timeout(&gateway, patience)
            .with_context(|| format!("connecting to {gateway}"))?;
        Self::over(socket, gateway.ip(), config, patience)
    }

    /// Like [`Self::connect`], over a socket that is connected already.
    ///
    /// # Errors
    /// Says what is wrong with the TLS of the gateway.
    pub fn over(
        socket: TcpStream,
        gateway: IpAddr,
        config: &Arc<ClientConfig>,
        patience: Duration,
    ) -> Result<Self> {
        socket.set_read_timeout(Some(patience))?;
        socket.set_write_timeout(Some(patience))?;
        socket.set_nodelay(true)?;
        let tls = ClientConnection::new(Arc::clone(config), ServerName::IpAddress(gateway.into()))?;
        let mut stream = StreamOwned::new(tls, socket);
        while stream.conn.is_handshaking() {
            stream.conn.complete_io(&mut stream.sock).context("the TLS handshake")?;
        }
        Ok(Self { stream })
    }

    /// Sends these bytes.
    ///
    /// # Errors
    /// Those of the connection; `WouldBlock` or `TimedOut` if the gateway did not take them in time.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)?;
        self.stream.flush()
    }

    /// Reads the next frame. `None` at the end of the connection, a reset included.
    ///
    /// # Errors
    /// `WouldBlock` or `TimedOut` if none came in time.
    pub fn receive(&mut self) -> io::Result<Option<Received>> {
        let mut head = [0; 9];
        if !self.fill(&mut head)? {
            return Ok(None);
        }
        let [high, middle, low, kind, flags, a, b, c, d] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, high, middle, low]) as usize];
        let stream = u32::from_be_bytes([a, b, c, d]);
        Ok(self.fill(&mut payload)?.then_some(Received { kind, flags, stream, payload }))
    }

    /// The socket below TLS.
    pub fn socket(&self) -> &TcpStream {
        &self.stream.sock
    }

    /// Whether all of `buffer` came before the connection ended.
    fn fill(&mut self, buffer: &mut [u8]) -> io::Result<bool> {
        match self.stream.read_exact(buffer) {
            Ok(()) => Ok(true),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => Err(error),
            Err(_) => Ok(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connect_request_is_what_the_rfc_says() {
        let bytes = connect(1, "a:1", None);
        let block = b"\0\x07:method\x07CONNECT\0\x0a:authority\x03a:1";
        let length = u8::try_from(block.len()).unwrap();
        assert_eq!(bytes, [&[0, 0, length, 1, 4, 0, 0, 0, 1], &block[..]].concat());
    }

    #[test]
    fn a_long_field_says_its_length_in_several_bytes() {
        for (length, bytes) in [(126, &[126][..]), (127, &[127, 0]), (1_337, &[127, 186, 9])] {
            let block = header_block(&[("", &"x".repeat(length))]);
            assert_eq!((&block[2..2 + bytes.len()], block.len()), (bytes, 2 + bytes.len() + length));
        }
    }

    #[test]
    fn settings_are_six_bytes_each() {
        assert_eq!(
            settings(&[(INITIAL_WINDOW_SIZE, 65_535)]),
            [0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0, 0, 255, 255]
        );
    }
}
