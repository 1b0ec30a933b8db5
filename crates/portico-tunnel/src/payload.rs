//! What a DATA frame carries: bytes in memory, or bytes in a pipe that never come to memory.
//!
//! A bulk transfer through a tunnel without TLS costs two copies at the end that sends it, and the kernel can move the bytes
//! without them (splice(2)). But h2 owns the connection's socket, and writes what a [`Buf`] shows it. So for bytes in a pipe [`Piped`]
//! shows as many bytes of [`NOTHING`], and leaves word with the connection's [`Pulse`] which pipe is meant. The
//! [`Probe`](crate::io::Probe) around the socket knows those bytes by their address, and moves that many from the pipe to the socket instead.
//!
//! What this counts on: h2 asks a frame for its slices immediately before it writes them. Whoever asks for bytes by themselves gets them, read
//! from the pipe (h2 copies the beginning of a frame behind its header), so that nothing else about h2 matters.

use std::cell::OnceCell;
use std::io::IoSlice;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::{Buf, Bytes};
use portico_net::pipe::Pipe;
use rustix::io::Errno;

use crate::chunk;
use crate::io::Pulse;
use crate::settings::STREAM_WINDOW;

/// Most bytes one payload may have in a pipe: the window of a stream.
pub(crate) const MOST: usize = STREAM_WINDOW as usize;

/// What stands for bytes in a pipe. Nobody reads it, so it takes no memory.
static NOTHING: [u8; MOST] = [0; MOST];

/// What is read from a pipe when bytes by themselves are asked for: what h2 puts behind a frame's header of 9 bytes.
const HEAD: usize = 256 - 9;

/// The pipe of one stream. It goes back to the pool with the stream and the last frame that has bytes in it.
#[derive(Debug)]
pub(crate) struct SharedPipe(Mutex<Option<Box<Pipe>>>);

impl SharedPipe {
    /// An empty pipe, if one is to be had.
    pub(crate) fn lend() -> Option<Arc<Self>> {
        Pipe::lend().map(|pipe| Arc::new(Self(Mutex::new(Some(pipe)))))
    }

    /// Moves what the socket has into the pipe; 0 is its end. `EAGAIN` says that the pipe is full or the socket empty.
    pub(crate) fn fill(&self, from: impl AsFd, most: usize) -> Result<usize, Errno> {
        self.with(|pipe| pipe.fill(from, most.min(MOST)))
    }

    /// Moves what the pipe holds into the socket, as far as it takes it.
    pub(crate) fn drain(&self, to: impl AsFd, most: usize) -> Result<usize, Errno> {
        self.with(|pipe| pipe.drain(to, most))
    }

    fn with<T>(&self, act: impl FnOnce(&mut Pipe) -> Result<T, Errno>) -> Result<T, Errno> {
        // Nothing in here can be left half done by a panic elsewhere.
        let mut pipe = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        pipe.as_deref_mut().map_or(Err(Errno::PIPE), act)
    }
}

impl Drop for SharedPipe {
    fn drop(&mut self) {
        if let Some(pipe) = self.0.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            pipe.give_back();
        }
    }
}

/// The payload of a frame, or of several in a row. As long as it is there it is in the connection's [`Ledger`](crate::account::Ledger).
#[derive(Debug)]
pub(crate) struct Payload {
    content: Content,
    /// Whom it is charged to, and how much.
    charge: Option<(Arc<Pulse>, usize)>,
}

#[derive(Debug)]
enum Content {
    /// Bytes in memory.
    Memory(Bytes),
    /// Bytes in a pipe.
    Piped(Piped),
}

/// Bytes in a pipe.
#[derive(Debug)]
struct Piped {
    pipe: Arc<SharedPipe>,
    pulse: Arc<Pulse>,
    /// Bytes that are not sent yet, those of `head` included.
    left: usize,
    /// The first of them, if they were asked for by themselves.
    head: OnceCell<Bytes>,
}

impl Payload {
    /// The next `bytes` of the pipe, for the connection of `pulse`.
    pub(crate) fn piped(pipe: &Arc<SharedPipe>, pulse: &Arc<Pulse>, bytes: usize) -> Self {
        let (pipe, of) = (Arc::clone(pipe), Arc::clone(pulse));
        let piped = Piped { pipe, pulse: of, left: bytes, head: OnceCell::new() };
        Self::charged(Content::Piped(piped), pulse, bytes)
    }

    /// A chunk for the connection of `pulse`.
    pub(crate) fn memory(bytes: Bytes, pulse: &Arc<Pulse>) -> Self {
        let cost = chunk::cost(bytes.len());
        Self::charged(Content::Memory(bytes), pulse, cost)
    }

    fn charged(content: Content, pulse: &Arc<Pulse>, bytes: usize) -> Self {
        pulse.ledger.begin(bytes);
        Self { content, charge: Some((Arc::clone(pulse), bytes)) }
    }

    /// Whether a slice stands for bytes in a pipe.
    pub(crate) fn is_piped(slice: &[u8]) -> bool {
        NOTHING.as_ptr_range().contains(&slice.as_ptr())
    }
}

/// A few bytes of our own, charged to nobody.
impl From<Bytes> for Payload {
    fn from(bytes: Bytes) -> Self {
        Self { content: Content::Memory(bytes), charge: None }
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        if let Some((pulse, bytes)) = &self.charge {
            pulse.ledger.end(*bytes);
        }
    }
}

impl Piped {
    fn head(&self) -> &Bytes {
        self.head.get_or_init(|| {
            let mut head = [0; HEAD];
            let wanted = self.left.min(HEAD);
            let read = self.pipe.with(|pipe| pipe.read(&mut head[..wanted]));
            if read != Ok(wanted) {
                // They are in the pipe, for we have put them there. Should the kernel not give them, the connection must end rather than
                // send something else in their place.
                self.pulse.fail();
            }
            Bytes::copy_from_slice(&head[..wanted])
        })
    }
}

impl Buf for Payload {
    fn remaining(&self) -> usize {
        match &self.content {
            Content::Memory(bytes) => bytes.len(),
            Content::Piped(piped) => piped.left,
        }
    }

    fn chunk(&self) -> &[u8] {
        match &self.content {
            Content::Memory(bytes) => bytes,
            Content::Piped(piped) if piped.left == 0 => &[],
            Content::Piped(piped) => piped.head(),
        }
    }

    fn chunks_vectored<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let piped = match &self.content {
            Content::Memory(bytes) => return bytes.chunks_vectored(slices),
            Content::Piped(piped) => piped,
        };
        let head: &[u8] = piped.head.get().map_or(&[], |head| head);
        let nothing = &NOTHING[..piped.left - head.len()];
        if !nothing.is_empty() {
            piped.pulse.set_outlet(&piped.pipe);
        }
        let parts = [head, nothing].into_iter().filter(|part| !part.is_empty());
        let filled = slices.iter_mut().zip(parts).map(|(slice, part)| *slice = IoSlice::new(part));
        filled.count()
    }

    fn advance(&mut self, count: usize) {
        let piped = match &mut self.content {
            Content::Memory(bytes) => return bytes.advance(count),
            Content::Piped(piped) => piped,
        };
        piped.left -= count;
        if let Some(head) = piped.head.get_mut() {
            if count < head.len() {
                head.advance(count);
            } else {
                piped.head.take();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::account::Account;

    fn piped(bytes: &[u8]) -> (Arc<Pulse>, Payload) {
        let (mut writer, reader) = UnixStream::pair().unwrap();
        writer.write_all(bytes).unwrap();
        let (pipe, pulse) = (SharedPipe::lend().unwrap(), Arc::new(Pulse::new(&Account::new(MOST))));
        assert_eq!(pipe.fill(&reader, MOST), Ok(bytes.len()));
        let payload = Payload::piped(&pipe, &pulse, bytes.len());
        (pulse, payload)
    }

    fn slices(payload: &Payload) -> Vec<(usize, bool)> {
        let mut slices = [IoSlice::new(&[]); 8];
        let count = payload.chunks_vectored(&mut slices);
        slices[..count].iter().map(|slice| (slice.len(), Payload::is_piped(slice))).collect()
    }

    #[test]
    fn bytes_asked_for_by_themselves_are_those_of_the_pipe() {
        let bytes: Vec<u8> = (0..1000).map(|number| number as u8).collect();
        let (pulse, mut payload) = piped(&bytes);
        let mut copied = Vec::new();
        while payload.has_remaining() {
            let chunk = payload.chunk();
            copied.extend_from_slice(chunk);
            let length = chunk.len();
            payload.advance(length);
        }
        assert_eq!(copied, bytes);
        assert!(!pulse.has_failed());
    }

    #[test]
    fn what_was_fetched_comes_before_what_is_in_the_pipe() {
        let (_pulse, mut payload) = piped(&[7; 1000]);
        assert_eq!(slices(&payload), [(1000, true)]);
        assert_eq!(payload.chunk().len(), HEAD);
        assert_eq!(slices(&payload), [(HEAD, false), (1000 - HEAD, true)]);
        payload.advance(100);
        assert_eq!(slices(&payload), [(HEAD - 100, false), (1000 - HEAD, true)]);
        payload.advance(HEAD - 100);
        assert_eq!(slices(&payload), [(1000 - HEAD, true)]);
        assert_eq!(payload.remaining(), 1000 - HEAD);
    }

    #[test]
    fn a_pipe_that_lost_its_bytes_fails_the_connection() {
        let (pulse, payload) = piped(&[7; 10]);
        let Content::Piped(piped) = &payload.content else { panic!("it is piped") };
        let mut rest = [0; 5];
        assert_eq!(piped.pipe.with(|pipe| pipe.read(&mut rest)), Ok(5));
        assert_eq!(payload.chunk().len(), 10);
        assert!(pulse.has_failed());
    }

    #[test]
    fn bytes_in_memory_are_never_taken_for_a_pipe() {
        let memory = Payload::from(Bytes::from_static(&[0; 32]));
        assert_eq!(slices(&memory), [(32, false)]);
    }
}
