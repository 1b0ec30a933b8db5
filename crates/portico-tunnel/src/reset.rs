//! The codes of RST_STREAM and GOAWAY by which a client learns how its tunnel ended (RFC 9113, section 7).

use std::task::{Context, Poll, Waker};

use bytes::Bytes;
pub use h2::Reason;
use h2::SendStream;

/// The connection behind the tunnel was reset or broke.
pub const BROKEN: Reason = Reason::CONNECT_ERROR;
/// The tunnel was idle for too long, or cut.
pub const CUT: Reason = Reason::CANCEL;
/// It held bytes that its receiver did not take, and others needed the memory.
pub const MEMORY: Reason = Reason::ENHANCE_YOUR_CALM;
/// Its connection ended with all of its streams, by GOAWAY: the client costs more than it may.
pub const DISMISSED: Reason = Reason::ENHANCE_YOUR_CALM;

/// How a stream was reset, if it was. For one that is over: nothing wakes its task afterwards.
pub fn of(stream: &mut SendStream<Bytes>) -> Option<Reason> {
    match stream.poll_reset(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(reset) => reset.ok(),
        Poll::Pending => None,
    }
}
