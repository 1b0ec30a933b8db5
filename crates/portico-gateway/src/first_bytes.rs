//! Reads what a client sends before it is known where it wants to go.

use std::cell::RefCell;
use std::future::poll_fn;

use portico_net::stream::receive;
use rustix::io::Errno;
use tokio::net::TcpStream;

use crate::outcome::Refusal;

/// One read of a hello: any but the longest arrive whole.
const READ: usize = 16 * 1024;

thread_local! {
    static BUFFER: RefCell<Box<[u8]>> = RefCell::new(vec![0; READ].into());
}

/// Appends what the client has sent, at least one byte, to `bytes`, which holds at most `cap`.
pub(crate) async fn read_more(stream: &TcpStream, bytes: &mut Vec<u8>, cap: usize) -> Result<(), Refusal> {
    loop {
        poll_fn(|cx| stream.poll_read_ready(cx)).await.map_err(|_| Refusal::ClosedEarly)?;
        let read = BUFFER.with_borrow_mut(|buffer| {
            let room = cap.saturating_sub(bytes.len()).min(READ);
            let read = receive(stream, &mut buffer[..room])?;
            bytes.extend_from_slice(&buffer[..read]);
            Ok(read)
        });
        match read {
            Ok(0) => return Err(Refusal::ClosedEarly),
            Ok(_) => return Ok(()),
            Err(Errno::WOULDBLOCK) => {}
            Err(_) => return Err(Refusal::ClosedEarly),
        }
    }
}

/// Reads and discards until the client closes.
pub(crate) async fn discard_rest(stream: &TcpStream) {
    let mut rest = Vec::new();
    while read_more(stream, &mut rest, READ).await.is_ok() {
        rest.clear();
    }
}
