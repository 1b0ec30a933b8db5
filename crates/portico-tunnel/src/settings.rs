//! What the operator may set about the tunnel listener, and the arithmetic behind the defaults.
//!
//! **Windows (RFC 9113 section 5.2).** A stream whose upstream stopped reading keeps at most one stream window of bytes with us, and
//! those bytes stay charged to the connection window too (h2 gives both back together). If the stalled streams of a connection
//! could use up its window, they would hold all the others. So the connection window is what *all* streams may hold at once,
//! plus one stream window to breathe:
//!
//! ```text
//! 1,000 streams × 240 KiB + 240 KiB = 246,005,760 bytes  <  2^31 - 1, the most the protocol allows
//! ```
//!
//! So one connection all of whose upstreams stopped reading could make us hold 246 MB, and a client may have many connections. What all of
//! them hold together is bounded by an [`MemoryBudget`]; in the direction down, what one of them holds is bounded by it, too.

use std::sync::Arc;
use std::time::Duration;

use portico_net::MemoryBudget;

use crate::server::Tls;

/// Most bytes of one stream between its socket and the connection's: as many as the peer takes before it gives window again, so
/// that a transfer comes in few large batches, and a peer that stops reading its socket costs little.
pub(crate) const SEND_BUFFER: usize = STREAM_WINDOW as usize;

/// Largest DATA frame we accept, and send to peers that accept it: with the protocol's default of 16 KiB a gigabyte costs a third more. Below
/// 128 KiB, from which on the C library fetches every buffer from the system and gives it back.
pub(crate) const FRAME_SIZE: u32 = 120 * 1024;

/// Bytes of one stream that may be under way. Two frames exactly: a receiver gives window back by halves, so that each update asks for
/// one whole frame and none is cut short.
pub(crate) const STREAM_WINDOW: u32 = 2 * FRAME_SIZE;

/// Largest header list of a request, as RFC 9113 section 6.5.2 counts it. A CONNECT request needs two fields.
pub(crate) const HEADER_LIST: u32 = 16 * 1024;

/// Most bytes that all tunnels of a gateway hold for receivers that do not take them. A fourth of what `deploy/gateway.yaml` lets a gateway
/// have; that of 10,000 clusters with their agents takes most of the rest.
const MEMORY: usize = 128 << 20;

/// The most a flow control window can be (RFC 9113 section 6.9.1).
const WINDOW_MAX: u32 = (1 << 31) - 1;

/// How one tunnel listener treats its connections.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The certificate, its key and the CA of the clients. Without it, TLS is refused.
    pub tls: Option<Arc<Tls>>,
    /// Whether CONNECT without TLS is served.
    pub plaintext: bool,
    /// How long a client may take to say what it wants: until its first bytes (and what is in them, without TLS), then for the TLS handshake,
    /// then for the HTTP/2 preface or the HTTP/1.1 head.
    pub hello_timeout: Duration,
    /// HTTP/2: how often the peer is asked for a sign of life.
    pub ping_interval: Duration,
    /// HTTP/2: how long after that a silent peer is given up. A network that was gone for half a minute lets TCP try again after 51 s, for
    /// it doubles its wait from 0.2 s; until then nobody hears anything.
    pub ping_timeout: Duration,
    /// HTTP/2: streams open at once on one connection. A node agent carries all pods of a node on a few connections; 1,000 is
    /// room for every pod of the largest nodes (250) with several watches each.
    pub max_streams: u32,
    /// HTTP/2: bytes a client may send on one stream before its upstream takes them. 240 KiB carries 20 Mbit/s at 100 ms.
    pub stream_window: u32,
    /// What all connections hold for receivers that do not take it. To be shared by all listeners and threads.
    pub memory: MemoryBudget,
    /// HTTP/2: close a connection that has had no stream for so long. Not set: keep it, PING tells the dead from the idle.
    pub connection_idle: Option<Duration>,
    /// End a tunnel that has moved no byte for so long. Not set: watches are silent for hours.
    pub stream_idle: Option<Duration>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            tls: None,
            plaintext: false,
            hello_timeout: Duration::from_secs(5),
            ping_interval: Duration::from_secs(30),
            ping_timeout: Duration::from_secs(30),
            max_streams: 1_000,
            stream_window: STREAM_WINDOW,
            memory: MemoryBudget::new(MEMORY),
            connection_idle: None,
            stream_idle: None,
        }
    }
}

impl Settings {
    /// Enough for every stream to be stalled with a full window while one more still moves.
    pub(crate) fn connection_window(&self) -> u32 {
        connection_window(self.max_streams, self.stream_window)
    }
}

/// What all streams of a connection may hold at once, plus one stream window.
pub(crate) fn connection_window(max_streams: u32, stream_window: u32) -> u32 {
    max_streams.saturating_add(1).saturating_mul(stream_window).min(WINDOW_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_streams_stalled_leave_room_in_the_connection_window() {
        let settings = Settings::default();
        assert_eq!(settings.connection_window(), 246_005_760);
        assert!(
            settings.connection_window() - settings.max_streams * settings.stream_window
                >= settings.stream_window
        );
    }

    #[test]
    fn the_connection_window_never_exceeds_the_protocol() {
        let settings = Settings { max_streams: u32::MAX, ..Settings::default() };
        assert_eq!(settings.connection_window(), WINDOW_MAX);
    }
}
