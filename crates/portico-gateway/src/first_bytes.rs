//! Reads what a client sends before it is known where it wants to go.

use std::cell::RefCell;
use std::future::poll_fn;
use std::task::Poll;

use portico_net::slots::Slot;
use portico_net::stream::{receive, receive_now};
use rustix::io::Errno;
use tokio::net::TcpStream;

use crate::outcome::Refusal;

/// One read of a hello: any but the longest arrive whole.
const READ: usize = 16 * 1024;

thread_local! {
    static BUFFER: RefCell<Box<[u8]>> = RefCell::new(vec![0; READ].into());
}

/// Appends what the client has sent, at least one byte, to `bytes`, which holds at most `cap`. Others may
/// need the `slot` meanwhile; what the client has sent by then is read all the same.
pub(crate) async fn read_more(
    stream: &TcpStream,
    slot: &Slot,
    bytes: &mut Vec<u8>,
    cap: usize,
) -> Result<(), Refusal> {
    loop {
        let is_evicted = poll_fn(|cx| match stream.poll_read_ready(cx) {
            Poll::Ready(ready) => Poll::Ready(ready.map(|()| false)),
            Poll::Pending => slot.poll_evicted(cx).map(|()| Ok(true)),
        });
        let is_evicted = is_evicted.await.map_err(|_| Refusal::ClosedEarly)?;
        let read = BUFFER.with_borrow_mut(|buffer| {
            let room = cap.saturating_sub(bytes.len()).min(READ);
            let buffer = &mut buffer[..room];
            // The event that says there is something may not have reached tokio yet.
            let read = if is_evicted { receive_now(stream, buffer) } else { receive(stream, buffer) }?;
            bytes.extend_from_slice(&buffer[..read]);
            Ok(read)
        });
        match read {
            Ok(0) => return Err(Refusal::ClosedEarly),
            Ok(_) => return Ok(()),
            Err(Errno::WOULDBLOCK) if is_evicted => return Err(Refusal::MaxHandshakes),
            Err(Errno::WOULDBLOCK) => {}
            Err(_) => return Err(Refusal::ClosedEarly),
        }
    }
}

/// Reads and discards until the client closes, or others need the slot.
pub(crate) async fn discard_rest(stream: &TcpStream, slot: &Slot) {
    let mut rest = Vec::new();
    while read_more(stream, slot, &mut rest, READ).await.is_ok() {
        rest.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use futures_util::future::poll_immediate;
    use tokio::net::TcpListener;

    use super::*;
    use portico_net::slots::Slots;

    #[tokio::test]
    async fn what_a_client_has_sent_when_others_need_its_slot_is_read() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        client.write_all(b"hello").unwrap();
        let slots = Slots::new(1, "");
        let slot = slots.enter(None);
        let _next = slots.enter(None);
        let mut bytes = Vec::new();
        // One poll: tokio has had no time to learn that there is something to read.
        assert_eq!(poll_immediate(read_more(&stream, &slot, &mut bytes, READ)).await, Some(Ok(())));
        assert_eq!(bytes, b"hello");
        let refused = poll_immediate(read_more(&stream, &slot, &mut bytes, READ)).await;
        assert_eq!(refused, Some(Err(Refusal::MaxHandshakes)));
    }
}
