//! The frames that a peer sends on an HTTP/2 connection, seen before h2 reads them (RFC 9113 section 4.1).
//!
//! h2 takes its limits once, at the handshake, for what an authenticated client needs. This module has the
//! limits of a client that has not authenticated, and those for frames that cost work and carry nothing. It
//! also bounds the bytes of an unfinished frame that h2 holds. h2 also ends a connection after a hundred
//! empty DATA frames over its life. Honest peers send those, so they stop here.
//!
//! [`Inbound`] sees each byte once, in the buffer that h2 reads into. It is part of `turn`, which bounds the
//! bytes of one turn.

use std::pin::Pin;
use std::task::{Context, Poll};

use thiserror::Error;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::time::Instant;

use crate::settings::{FRAME_SIZE, HEADER_LIST, STREAM_WINDOW};

/// Bytes before each frame's payload.
const HEADER: usize = 9;

/// Bytes that a client sends before its first frame (RFC 9113 section 3.4).
const PREFACE: u32 = 24;

/// So many bytes carried, in either direction, pay for one control frame. Libraries send two WINDOW_UPDATEs
/// for as little as 4 KiB. Our ACK is shorter than that, so a PING or SETTINGS does not pay for itself.
const BYTES_A_FRAME: u64 = 128;

/// The least that a DATA frame counts for. gRPC measures the bandwidth with a PING beside each small message.
/// It gives window back, or acknowledges, in the frames around it.
const SMALLEST_DATA: u64 = 4 * BYTES_A_FRAME;

/// Like [`SMALLEST_DATA`], for a turn in which bytes of streams go to the peer. A peer that sends no data
/// still sends such frames in answer.
const SMALLEST_TURN: u64 = 4 * BYTES_A_FRAME;

/// Of a client that has not authenticated so many bytes of data count as one frame. All its requests may have
/// sent 64 KiB ahead.
const UNPAID_DATA: u32 = 1024;

/// The cost of a SETTINGS frame, in frames: it may change the window of every stream. A peer sends one.
const SETTINGS: u32 = 32;

/// The weight of a byte of a header block in a turn. A turn takes no more than one block of the largest size:
/// its eight thousand changes of the table's size take milliseconds (RFC 7541 section 6.3).
const HEADER_BYTE: u32 = STREAM_WINDOW / HEADER_LIST;

/// Bytes that it counts for at least: a turn has 64 requests, each with its answer.
const SMALLEST_BLOCK: u32 = 256;

/// Added to the bytes of each DATA frame, for the CPU it costs. It bounds a turn to 480 DATA frames, give or
/// take one read.
const DATA_FRAME: usize = 512;

/// What a peer may send.
#[derive(Debug, Clone, Copy)]
struct Limits {
    /// Largest frame.
    frame: u32,
    /// Frames that carry nothing: so many at once, and
    burst: u32,
    /// so many a second.
    per_second: u32,
    /// What a request costs of these.
    request: u32,
    /// Whether bytes carried and requests pay for more of them.
    is_paid: bool,
}

/// An agent sends its SETTINGS, a PING, and some requests of which the first authenticates it. Where its
/// credential is not accepted, the pods of its node keep asking: 128 times a second, 28 at once.
const UNAUTHENTICATED: Limits =
    Limits { frame: 16 * 1024, burst: 256, per_second: 1024, request: 8, is_paid: false };

/// Every stream of a full connection may be cancelled at once, and its window given back.
const AUTHENTICATED: Limits =
    Limits { frame: FRAME_SIZE, burst: 4096, per_second: 1024, request: 0, is_paid: true };

/// Why the connection has to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Flood {
    /// A frame over 16 KiB before an identity was accepted.
    #[error("a frame over 16 KiB came before an identity was accepted")]
    Frame,
    /// More frames that cost work and carry nothing than any client needs.
    #[error("frames that carry nothing came faster than any client needs them")]
    Rate,
    /// h2 has had enough of requests that are cancelled before it has passed them on, of frames that continue
    /// headers, or of frames for streams that have ended.
    #[error(
        "requests were cancelled, headers continued or ended streams used more often than a client needs"
    )]
    Resets,
}

/// Kinds of frames (RFC 9113 section 6).
mod kind {
    pub(super) const DATA: u8 = 0;
    pub(super) const HEADERS: u8 = 1;
    pub(super) const SETTINGS: u8 = 4;
    pub(super) const CONTINUATION: u8 = 9;
}

/// On DATA; on SETTINGS it is ACK.
const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;

#[derive(Debug, Clone, Copy)]
struct Header {
    length: u32,
    kind: u8,
    flags: u8,
}

impl Header {
    fn parse(bytes: [u8; HEADER]) -> Self {
        let [high, middle, low, kind, flags, ..] = bytes;
        Self { length: u32::from_be_bytes([0, high, middle, low]), kind, flags }
    }

    fn has(self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// A DATA frame that says nothing.
    fn is_empty_data(self) -> bool {
        self.kind == kind::DATA && self.length == 0 && !self.has(END_STREAM)
    }
}

/// The frames of one connection.
#[derive(Debug)]
pub struct Inbound {
    /// `None` for a peer that is trusted.
    limits: Option<Limits>,
    /// Frames without payload that may still come, and when that was last counted.
    left: u32,
    counted: Instant,
    /// Bytes carried since then.
    carried: u64,
    /// The header of the next frame, as far as it came.
    header: [u8; HEADER],
    known: u8,
    /// How much of a complete header h2 has not been given yet.
    pending: u8,
    /// The frame that is being read: its size, and how much of its payload has to come.
    frame: u32,
    missing: u32,
    /// Bytes of earlier frames of the header block that is being read, and whether this frame ends it.
    block: u32,
    ends_block: bool,
    /// Bytes read since this was last asked, with those of header blocks for more.
    read: usize,
    /// Frames begun: tells one unfinished frame from the next.
    begun: u64,
}

impl Inbound {
    /// Limits for a client that has not authenticated. It sends the preface first.
    pub fn unauthenticated() -> Self {
        Self { missing: PREFACE, ..Self::new(Some(UNAUTHENTICATED)) }
    }

    /// For a peer that is trusted: nothing is limited.
    pub fn trusted() -> Self {
        Self::new(None)
    }

    fn new(limits: Option<Limits>) -> Self {
        Self {
            limits,
            left: limits.map_or(0, |limits| limits.burst),
            counted: Instant::now(),
            carried: 0,
            header: [0; HEADER],
            known: 0,
            pending: 0,
            frame: 0,
            missing: 0,
            block: 0,
            ends_block: false,
            read: 0,
            begun: 0,
        }
    }

    /// The client has authenticated.
    pub(crate) fn authenticate(&mut self) {
        self.limits = Some(AUTHENTICATED);
        self.left = AUTHENTICATED.burst;
    }

    /// Bytes went to the peer.
    pub(crate) fn note_sent(&mut self, bytes: usize) {
        self.carried += bytes as u64;
    }

    /// In this turn bytes of streams go to the peer.
    pub(crate) fn note_turn(&mut self) {
        self.carried += SMALLEST_TURN;
    }

    /// Bytes read since the last call. Each of a header block counts for more.
    pub(crate) fn take_read(&mut self) -> usize {
        std::mem::take(&mut self.read)
    }

    /// Bytes that h2 may hold for the frame or header block that is being read. It makes room for all of a
    /// frame once it knows its header.
    pub(crate) fn unfinished(&self) -> usize {
        let frame = if self.missing > 0 { self.frame } else { 0 };
        (frame + self.block) as usize
    }

    /// The number of that frame; `None` between two frames, and within neither a header nor a header block.
    pub(crate) fn unfinished_frame(&self) -> Option<u64> {
        (self.missing > 0 || self.known > 0 || self.block > 0).then_some(self.begun)
    }

    /// Reads until h2 has bytes to see. After `most` bytes that h2 does not see (empty DATA) it returns
    /// Pending, and the next turn polls again. `Err(Flood)`: the connection must end.
    pub(crate) fn poll_read<S: AsyncRead + Unpin>(
        &mut self,
        stream: &mut S,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
        most: usize,
    ) -> Result<Poll<std::io::Result<()>>, Flood> {
        loop {
            if self.pending > 0 {
                let rest = &self.header[HEADER - usize::from(self.pending)..];
                let given = rest.len().min(buf.remaining());
                buf.put_slice(&rest[..given]);
                self.pending -= u8::try_from(given).unwrap_or(self.pending);
                return Ok(Poll::Ready(Ok(())));
            }
            let into_header = self.known > 0;
            let polled = if into_header {
                // A header that was cut by the end of a read: its rest alone.
                let mut rest = ReadBuf::new(&mut self.header[usize::from(self.known)..]);
                Pin::new(&mut *stream).poll_read(cx, &mut rest).map_ok(|()| rest.filled().len())
            } else {
                let before = buf.filled().len();
                Pin::new(&mut *stream).poll_read(cx, buf).map_ok(|()| buf.filled().len() - before)
            };
            let count = match polled {
                Poll::Ready(Ok(count)) => count,
                other => return Ok(other.map_ok(drop)),
            };
            self.read += count;
            if count == 0 {
                return Ok(Poll::Ready(Ok(())));
            }
            if into_header {
                self.known += u8::try_from(count).unwrap_or(0);
                if usize::from(self.known) < HEADER {
                    continue;
                }
                self.known = 0;
                if self.begin(Header::parse(self.header))? {
                    self.pending = HEADER as u8;
                }
                continue;
            }
            let start = buf.filled().len() - count;
            let scanned = self.scan(&mut buf.filled_mut()[start..]);
            buf.set_filled(start + scanned.unwrap_or(0));
            let kept = scanned?;
            if kept > 0 {
                return Ok(Poll::Ready(Ok(())));
            }
            if self.read >= most {
                return Ok(Poll::Pending);
            }
        }
    }

    /// Looks at bytes that came. Takes out empty DATA frames and a header that is cut at the end. Returns how
    /// many bytes stay.
    fn scan(&mut self, bytes: &mut [u8]) -> Result<usize, Flood> {
        let (mut at, mut kept) = (0, 0);
        while at < bytes.len() {
            let rest = bytes.len() - at;
            let taken = if self.missing > 0 {
                let taken = rest.min(self.missing as usize);
                self.pass(taken);
                taken
            } else if let Some(header) = bytes[at..].first_chunk::<HEADER>() {
                if !self.begin(Header::parse(*header))? {
                    at += HEADER;
                    continue;
                }
                HEADER
            } else {
                self.header[..rest].copy_from_slice(&bytes[at..]);
                self.known = rest as u8;
                break;
            };
            if kept != at {
                bytes.copy_within(at..at + taken, kept);
            }
            at += taken;
            kept += taken;
        }
        Ok(kept)
    }

    /// Bytes of a payload came.
    fn pass(&mut self, bytes: usize) {
        self.missing -= u32::try_from(bytes).unwrap_or(self.missing);
        if self.missing == 0 && std::mem::take(&mut self.ends_block) {
            self.block = 0;
        }
    }

    /// A frame begins. Returns whether h2 is to see it.
    fn begin(&mut self, header: Header) -> Result<bool, Flood> {
        self.begun += 1;
        if let Some(limits) = self.limits {
            if header.length > limits.frame && !limits.is_paid {
                return Err(Flood::Frame);
            }
            self.charge(header, limits)?;
        }
        if header.is_empty_data() {
            return Ok(false);
        }
        (self.frame, self.missing) = (header.length, header.length);
        if matches!(header.kind, kind::HEADERS | kind::CONTINUATION) {
            self.read += header.length.max(SMALLEST_BLOCK) as usize * HEADER_BYTE as usize;
            self.ends_block = header.has(END_HEADERS);
            if !self.ends_block {
                self.block = self.block.saturating_add(header.length);
                // Counted with the block.
                self.frame = 0;
            }
            self.pass(0);
        } else if header.kind == kind::DATA {
            self.read += DATA_FRAME;
        }
        Ok(true)
    }

    fn charge(&mut self, header: Header, limits: Limits) -> Result<(), Flood> {
        let cost = match header.kind {
            kind::DATA if limits.is_paid && (header.length > 0 || header.has(END_STREAM)) => {
                self.carried += u64::from(header.length).max(SMALLEST_DATA);
                return Ok(());
            }
            kind::HEADERS if limits.is_paid => {
                // It will be cancelled, perhaps.
                self.left = (self.left + 1).min(limits.burst);
                return Ok(());
            }
            kind::HEADERS => limits.request,
            // Nothing that it sends is carried yet, and what comes for refused requests is in no budget.
            kind::DATA if !limits.is_paid => 1 + header.length / UNPAID_DATA,
            // END_STREAM is ACK here.
            kind::SETTINGS if !header.has(END_STREAM) => SETTINGS,
            _ => 1,
        };
        if self.left < cost {
            self.refill(limits);
        }
        self.left = self.left.checked_sub(cost).ok_or(Flood::Rate)?;
        Ok(())
    }

    /// Only when nothing is left: a clock costs more than a frame.
    fn refill(&mut self, limits: Limits) {
        let now = Instant::now();
        let millis = u64::try_from(now.duration_since(self.counted).as_millis()).unwrap_or(u64::MAX);
        let by_time = millis.saturating_mul(u64::from(limits.per_second)) / 1000;
        let by_bytes = if limits.is_paid { self.carried / BYTES_A_FRAME } else { 0 };
        if by_time + by_bytes == 0 {
            return;
        }
        (self.counted, self.carried) = (now, 0);
        let more = u32::try_from(by_time.saturating_add(by_bytes)).unwrap_or(u32::MAX);
        self.left = self.left.saturating_add(more).min(limits.burst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PING: u8 = 6;
    const WINDOW_UPDATE: u8 = 8;

    /// The header of a frame with `length` bytes of payload, and the payload.
    fn frame(kind: u8, length: u8) -> Vec<u8> {
        let mut bytes = vec![0, 0, length, kind, 0, 0, 0, 0, 1];
        bytes.resize(HEADER + usize::from(length), 0);
        bytes
    }

    fn authenticated() -> Inbound {
        let mut inbound = Inbound::unauthenticated();
        inbound.scan(&mut [0; PREFACE as usize]).unwrap();
        inbound.authenticate();
        inbound
    }

    /// No time passes: what is carried has to pay for all of it.
    #[tokio::test(start_paused = true)]
    async fn a_grpc_peer_that_exchanges_small_messages_as_fast_as_it_can_is_no_flood() {
        let mut inbound = authenticated();
        let update = frame(WINDOW_UPDATE, 4);
        let round = [frame(PING, 8), update.clone(), update, frame(kind::DATA, 150)].concat();
        for number in 0..100_000 {
            assert!(inbound.scan(&mut round.clone()).is_ok(), "round {number}");
            inbound.note_sent(150);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_grpc_peer_that_only_takes_small_messages_is_no_flood() {
        let mut inbound = authenticated();
        let update = frame(WINDOW_UPDATE, 4);
        let answer = [frame(PING, 8), update.clone(), update].concat();
        for number in 0..100_000 {
            inbound.note_turn();
            inbound.note_sent(20);
            assert!(inbound.scan(&mut answer.clone()).is_ok(), "message {number}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_has_one_of_the_largest_header_blocks() {
        let mut inbound = authenticated();
        inbound.scan(&mut [0, 0x40, 0, kind::HEADERS, END_HEADERS, 0, 0, 0, 1]).unwrap();
        assert!(inbound.take_read() >= STREAM_WINDOW as usize);
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_has_64_requests() {
        let mut inbound = authenticated();
        for _ in 0..64 {
            inbound.scan(&mut frame(kind::HEADERS, 1)).unwrap();
        }
        assert!(inbound.take_read() >= STREAM_WINDOW as usize);
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_has_480_frames_of_data_however_small() {
        let mut inbound = authenticated();
        for _ in 0..480 {
            inbound.scan(&mut frame(kind::DATA, 1)).unwrap();
        }
        assert!(inbound.take_read() >= STREAM_WINDOW as usize);
    }

    #[tokio::test(start_paused = true)]
    async fn data_before_an_identity_is_bounded_by_its_bytes() {
        let mut inbound = Inbound::unauthenticated();
        inbound.scan(&mut [0; PREFACE as usize]).unwrap();
        let full = [vec![0, 0x40, 0, kind::DATA, 0, 0, 0, 0, 1], vec![0; 0x4000]].concat();
        // What all its requests may send ahead, and then as much again.
        for _ in 0..8 {
            inbound.scan(&mut full.clone()).unwrap();
        }
        assert_eq!((0..8).find_map(|_| inbound.scan(&mut full.clone()).err()), Some(Flood::Rate));
    }

    #[tokio::test(start_paused = true)]
    async fn frames_that_are_answered_do_not_pay_for_themselves() {
        let mut inbound = authenticated();
        let mut sent = 0;
        while inbound.scan(&mut frame(PING, 8)).is_ok() {
            inbound.note_sent(HEADER + 8);
            sent += 1;
            assert!(sent < 3 * AUTHENTICATED.burst, "{sent} PINGs");
        }
    }
}
