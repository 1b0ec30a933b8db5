//! The settings of the tunnel listener, and the arithmetic behind the defaults.
//!
//! A stream with a stalled upstream holds at most one stream window of bytes. They stay charged to the
//! connection window too: h2 gives both back together (RFC 9113 section 5.2). Stalled streams must not hold
//! the others, so the connection window is what all streams may hold at once, plus one stream window:
//!
//! ```text
//! 1,000 streams × 240 KiB + 240 KiB = 246,005,760 bytes  <  2^31 - 1, the most the protocol allows
//! ```
//!
//! A connection whose upstreams all stall could hold 246 MB. [`MemoryBudget`]s of the connection and of the
//! process bound that.

use std::sync::Arc;
use std::time::Duration;

use portico_net::MemoryBudget;

use crate::server::tls::Tls;

/// Most bytes of one stream between its socket and the connection's: as many as the peer takes before it
/// gives window again. Then a transfer comes in few large batches, and a peer that stops reading costs
/// little.
pub const SEND_BUFFER: usize = STREAM_WINDOW as usize;

/// Largest DATA frame that is accepted, and sent to peers that accept it. With the protocol's default of 16
/// KiB a gigabyte costs a third more. Below 128 KiB, from which on the C library maps and unmaps every
/// buffer.
pub const FRAME_SIZE: u32 = 120 * 1024;

/// Bytes of one stream that may be under way. Exactly two frames: a receiver gives window back by halves, so
/// each update asks for a whole frame.
pub const STREAM_WINDOW: u32 = 2 * FRAME_SIZE;

/// Largest header list of a request, as RFC 9113 section 6.5.2 counts it. A CONNECT request needs two fields.
pub const HEADER_LIST: u32 = 16 * 1024;

/// How many frames may come, in the life of a connection, for streams that we have reset and forgotten.
/// Frames under way when an upstream broke are no fault of the peer's, and h2 ends the connection after
/// 1,024. Each may keep some hundred bytes until the peer takes its answer.
pub const LATE_FRAMES: usize = 16 * 1024;

/// Requests of a client that has not authenticated: more are refused with 429 until one of them is answered.
/// Our own client sends no more.
pub(crate) const FIRST_REQUESTS: u32 = 16;

/// Most bytes that all tunnels of a gateway hold for receivers that do not take them: a fourth of its memory
/// limit in `deploy/gateway.yaml`. 10,000 clusters with their agents take most of the rest.
const MEMORY: usize = 128 << 20;

/// The most a flow control window can be (RFC 9113 section 6.9.1).
const WINDOW_MAX: u32 = (1 << 31) - 1;

/// Settings of one tunnel listener.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The certificate, its key and the CA of the clients. Without it, TLS is refused.
    pub tls: Option<Arc<Tls>>,
    /// Whether CONNECT without TLS is served.
    pub plaintext: bool,
    /// How long a client may take for each of three steps. They are its first bytes, the TLS handshake, and
    /// the HTTP/2 preface or HTTP/1.1 head under TLS. Without TLS the first bytes are all of the preface or
    /// head.
    pub hello_timeout: Duration,
    /// HTTP/2: how long a peer may be silent before it gets a PING.
    pub ping_interval: Duration,
    /// HTTP/2: how long after the PING a silent peer is given up. TCP doubles its retransmission timeout from
    /// 0.2 s: after a network was gone for half a minute, nothing comes before 51 s.
    pub ping_timeout: Duration,
    /// HTTP/2: streams open at once on one connection. A node agent carries all pods of a node on a few
    /// connections. 1,000 are enough for every pod of the largest nodes (250) with several watches each.
    pub max_streams: u32,
    /// HTTP/2: bytes a client may send on one stream before its upstream takes them. 240 KiB carries 20
    /// Mbit/s at 100 ms.
    pub stream_window: u32,
    /// Bounds what all connections hold for receivers that do not take it. Shared by all listeners and
    /// threads.
    pub memory: MemoryBudget,
    /// HTTP/2: close a connection that has had no stream for so long. Not set: keep it, PING finds dead ones.
    pub connection_idle: Option<Duration>,
    /// End a tunnel that has moved no byte for so long. Not set: keep it, watches are silent for hours.
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
    /// Enough for all streams to stall with a full window while one more still moves.
    pub(crate) fn connection_window(&self) -> u32 {
        connection_window(self.max_streams, self.stream_window)
    }
}

/// The bytes that all streams of a connection may hold at once, plus one stream window.
pub fn connection_window(max_streams: u32, stream_window: u32) -> u32 {
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
