//! Connections that come and go.
//!
//! One connection is: TCP handshake, hello, answer of the backend in full, then its end.
//! * *orderly*: the client sends its FIN, waits until the proxy has ended the other half, and closes. By then
//!   the proxy has closed towards the backend too, or has at least passed the FIN on.
//! * *abort*: the client resets (`SO_LINGER {1, 0}`), as a killed `kubectl` or a lost process does.
//! * *close*: the client closes its socket as soon as it has read the answer, as a short `kubectl get` does.
//!   Used with an answer of one byte, so that nothing is left unread and the close is a FIN and no reset.
//!
//! A fixed number are under way at any time, so that a proxy finds about the same number of events at each
//! wake-up however quick it is.

use std::net::SocketAddrV4;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::epoll::EventFlags;
use rustix::net::{Shutdown, shutdown, sockopt};

use super::{Dialer, Greeted, Greeting, Watch, Work};
use crate::backend::receive;
use crate::hello::ANSWER_BYTES;

/// Connections under way at once, unless the row says otherwise: enough to keep a core busy, few enough that
/// no backlog overflows.
pub(crate) const AT_ONCE: usize = 32;

/// How the client ends a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// FIN, then wait for the other side's.
    Orderly,
    /// RST.
    Abort,
    /// FIN by close(2), without a wait for the other side's.
    Close,
}

struct Client {
    greeting: Greeting,
    closing: bool,
}

/// Opens and ends connections with the given hellos in turn, `at_once` at a time, until `length` is over, and
/// waits for the last to end.
pub(crate) fn run(
    proxy: SocketAddrV4,
    hellos: &[Vec<u8>],
    ending: Ending,
    at_once: usize,
    length: Duration,
) -> Result<Work> {
    let mut dialer = Dialer::default();
    let mut watch = Watch::new()?;
    let mut hellos = hellos.iter().cycle();
    let mut open = |token: usize, watch: &Watch| -> Result<Client> {
        let hello = hellos.next().context("a run has at least one cluster")?;
        let greeting = Greeting::start(&mut dialer, proxy, hello)
            .with_context(|| format!("cannot connect to the proxy at {proxy}"))?;
        watch.add(&greeting.socket, token, EventFlags::IN)?;
        Ok(Client { greeting, closing: false })
    };

    let end = Instant::now() + length;
    let mut clients = Vec::with_capacity(at_once);
    for token in 0..at_once {
        clients.push(Some(open(token, &watch)?));
    }
    let mut under_way = clients.len();
    let mut work = Work::default();
    let mut scratch = [0; ANSWER_BYTES];
    let mut ready = Vec::with_capacity(at_once);
    while under_way > 0 {
        watch.wait()?;
        let over = Instant::now() >= end;
        ready.clear();
        ready.extend(watch.ready());
        for &token in &ready {
            let Some(client) = &mut clients[token] else { continue };
            match client.proceed(ending, &mut scratch) {
                Progress::Waits => continue,
                Progress::Done => work.units += 1,
                Progress::Refused => work.failed("connections", proxy)?,
            }
            // Closing the old socket before the new one opens takes it out of the epoll set.
            clients[token] = None;
            if over {
                under_way -= 1;
            } else {
                clients[token] = Some(open(token, &watch)?);
            }
        }
    }
    Ok(work)
}

enum Progress {
    Waits,
    Done,
    Refused,
}

impl Client {
    fn proceed(&mut self, ending: Ending, scratch: &mut [u8]) -> Progress {
        let socket = &self.greeting.socket;
        if self.closing {
            return match receive(socket, scratch) {
                Ok(Some(0)) => Progress::Done,
                // A reset is less work than the end that was asked for.
                Err(_) => Progress::Refused,
                Ok(_) => Progress::Waits,
            };
        }
        match self.greeting.proceed(scratch) {
            Greeted::NotYet => Progress::Waits,
            Greeted::Refused => Progress::Refused,
            Greeted::Yes => {
                let socket = &self.greeting.socket;
                let asked = match ending {
                    Ending::Orderly => shutdown(socket, Shutdown::Write),
                    Ending::Abort => sockopt::set_socket_linger(socket, Some(Duration::ZERO)),
                    Ending::Close => Ok(()),
                };
                match (asked, ending) {
                    (Err(_), _) => Progress::Refused,
                    (Ok(()), Ending::Abort | Ending::Close) => Progress::Done,
                    (Ok(()), Ending::Orderly) => {
                        self.closing = true;
                        Progress::Waits
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;
    use crate::hello::{Order, client_hello};

    /// What a connection counts for at a proxy that answers the client's FIN with a FIN or with a reset.
    fn work_of_one_connection(with_reset: bool) -> Work {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let proxy = SocketAddrV4::new(Ipv4Addr::LOCALHOST, listener.local_addr().unwrap().port());
        let hello = client_hello("kubernetes.example.com", Order::Answer);
        let bytes = hello.len();
        let server = std::thread::spawn(move || {
            let (mut connection, _) = listener.accept().unwrap();
            connection.read_exact(&mut vec![0; bytes]).unwrap();
            connection.write_all(&[0x16; ANSWER_BYTES]).unwrap();
            assert_eq!(connection.read(&mut [0]).unwrap(), 0, "the client's end");
            if with_reset {
                sockopt::set_socket_linger(&connection, Some(Duration::ZERO)).unwrap();
            }
        });
        let work = run(proxy, &[hello], Ending::Orderly, 1, Duration::ZERO).unwrap();
        server.join().unwrap();
        work
    }

    #[test]
    fn a_reset_in_place_of_the_end_is_a_failure_and_no_work() {
        let Work { units, failures } = work_of_one_connection(false);
        assert_eq!((units, failures), (1, 0));
        let Work { units, failures } = work_of_one_connection(true);
        assert_eq!((units, failures), (0, 1));
    }
}
