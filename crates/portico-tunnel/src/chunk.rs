//! Reads an upstream into memory that can be sent without copying it again. The memory costs nothing while
//! nobody reads.
//!
//! One buffer a thread. A large read leaves with the buffer itself. Others are copied out of it: a copy costs
//! less than another buffer of 120 KiB. A chunk that waits for a slow client must not pin a buffer.

use std::cell::RefCell;
use std::io;

use bytes::{BufMut, Bytes, BytesMut};
use portico_net::Socket;

use crate::settings::FRAME_SIZE;

/// Most bytes of one read: one frame.
pub const CHUNK: usize = FRAME_SIZE as usize;

/// Reads up to this are copied out of the buffer. A larger chunk is counted with the buffer that it pins, a
/// factor of four at most.
const COPIED: usize = 32 * 1024;

thread_local! {
    static BUFFER: RefCell<BytesMut> = RefCell::new(BytesMut::new());
}

/// Reads at most `limit` bytes of what is there; empty at the end of the stream.
pub fn read(socket: &impl Socket, limit: usize) -> io::Result<Bytes> {
    BUFFER.with_borrow_mut(|buffer| {
        if buffer.capacity() < CHUNK {
            *buffer = BytesMut::with_capacity(CHUNK);
        }
        let limit = limit.min(CHUNK);
        let read = socket.try_read_buf(&mut (&mut *buffer).limit(limit))?;
        if read > 0 && read < limit {
            socket.emptied();
        }
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
