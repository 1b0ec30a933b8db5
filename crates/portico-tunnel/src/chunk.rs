//! Reads an upstream into memory that can be sent without copying it again, and that costs nothing while
//! nobody reads.
//!
//! One buffer a thread. A large read leaves with the buffer itself; a small one is copied out of it: copying
//! 8 KiB costs less than an allocation of 64 KiB, and a small chunk that waits for a slow client must not pin
//! a large buffer.

use std::cell::RefCell;
use std::io;

use bytes::{BufMut, Bytes, BytesMut};
use tokio::net::TcpStream;

use crate::settings::FRAME_SIZE;

/// Most bytes of one read: one frame.
pub(crate) const CHUNK: usize = FRAME_SIZE as usize;

/// Reads up to this are copied out of the buffer.
pub(crate) const COPIED: usize = 8 * 1024;

thread_local! {
    static BUFFER: RefCell<BytesMut> = RefCell::new(BytesMut::new());
}

/// Reads at most `limit` bytes of what is there; empty at the end of the stream.
pub(crate) fn read(stream: &TcpStream, limit: usize) -> io::Result<Bytes> {
    BUFFER.with_borrow_mut(|buffer| {
        if buffer.capacity() < CHUNK {
            *buffer = BytesMut::with_capacity(CHUNK);
        }
        let read = stream.try_read_buf(&mut (&mut *buffer).limit(limit.min(CHUNK)))?;
        if read <= COPIED {
            let chunk = Bytes::copy_from_slice(buffer);
            buffer.clear();
            Ok(chunk)
        } else {
            Ok(std::mem::take(buffer).freeze())
        }
    })
}

/// Memory that a chunk of so many bytes takes.
pub(crate) const fn cost(bytes: usize) -> usize {
    if bytes <= COPIED { bytes } else { CHUNK }
}
