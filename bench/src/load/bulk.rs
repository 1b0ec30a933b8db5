//! Many bytes: transfers of fixed length, a few at a time, one direction at a time.
//!
//! A download is over when all bytes are there; an upload with one byte by which the backend says that it has
//! them. Then the client closes. So every byte counted went through in full, and no proxy is asked for
//! half-close here.

use std::net::SocketAddrV4;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{self, SendFlags};

use super::{Watch, Work, greet_all};
use crate::backend::{discard, receive};
use crate::hello::{Order, client_hello};

/// Transfers at once: as if a few clients listed large collections.
pub(crate) const AT_ONCE: usize = 4;
/// Length of one transfer. Next to it, what the connection costs does not show (0.1 %).
const TRANSFER: u64 = 64 << 20;
/// One write, and the most one read takes.
const CHUNK: usize = 256 * 1024;
/// Reads or writes of one transfer before the others get their turn.
const CHUNKS_A_TURN: usize = 4;

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the backend to the client.
    Download,
    /// From the client to the backend.
    Upload,
}

impl Direction {
    /// What the backend is to do.
    pub(crate) fn order(self) -> Order {
        match self {
            Self::Download => Order::Send(TRANSFER),
            Self::Upload => Order::Take(TRANSFER),
        }
    }
}

/// Transfers until `length` is over, and finishes those under way; counts bytes.
pub(crate) fn run(
    proxy: SocketAddrV4,
    hosts: &[String],
    direction: Direction,
    length: Duration,
) -> Result<Work> {
    let hellos: Vec<_> =
        hosts.iter().take(AT_ONCE).map(|host| client_hello(host, direction.order())).collect();
    over(length, direction, || greet_all(proxy, &hellos, AT_ONCE))
}

/// Like [`run`], over connections that `open` makes. They must order from the backend what `direction` needs.
pub(crate) fn over(
    length: Duration,
    direction: Direction,
    mut open: impl FnMut() -> Result<Vec<OwnedFd>>,
) -> Result<Work> {
    let mut room = vec![0x17; CHUNK];
    let mut work = Work::default();
    let end = Instant::now() + length;
    while Instant::now() < end {
        work.units += transfer(&open()?, direction, &mut room)?;
    }
    Ok(work)
}

fn transfer(sockets: &[OwnedFd], direction: Direction, room: &mut [u8]) -> Result<u64> {
    let mut watch = Watch::new()?;
    let first = if direction == Direction::Download { EventFlags::IN } else { EventFlags::OUT };
    for (token, socket) in sockets.iter().enumerate() {
        watch.add(socket, token, first)?;
    }
    let mut left = vec![TRANSFER; sockets.len()];
    let mut under_way = sockets.len();
    while under_way > 0 {
        watch.wait()?;
        let ready: Vec<usize> = watch.ready().collect();
        for token in ready {
            let (socket, left) = (&sockets[token], &mut left[token]);
            let done = match direction {
                Direction::Download => download_turn(socket, left, room)?,
                Direction::Upload if *left > 0 => {
                    upload_turn(socket, left, room)?;
                    if *left == 0 {
                        watch.change(socket, token, EventFlags::IN)?;
                    }
                    false
                }
                Direction::Upload => {
                    receive(socket, &mut room[..1]).context("an upload broke before its receipt")? == Some(1)
                }
            };
            if done {
                under_way -= 1;
                // A socket the proxy ends now would be readable for ever.
                watch.change(socket, token, EventFlags::empty())?;
            }
        }
    }
    Ok(TRANSFER * sockets.len() as u64)
}

fn download_turn(socket: &OwnedFd, left: &mut u64, room: &mut [u8]) -> Result<bool> {
    for _ in 0..CHUNKS_A_TURN {
        match discard(socket, room).context("a download broke")? {
            None => return Ok(false),
            Some(0) => bail!("a download ended {left} bytes early"),
            Some(bytes) => {
                *left = left.checked_sub(bytes as u64).context("a download brought more than was sent")?
            }
        }
        if *left == 0 {
            return Ok(true);
        }
    }
    Ok(false)
}

fn upload_turn(socket: &OwnedFd, left: &mut u64, bytes: &[u8]) -> Result<()> {
    for _ in 0..CHUNKS_A_TURN {
        let chunk = bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
        match net::send(socket, &bytes[..chunk], SendFlags::NOSIGNAL) {
            Ok(sent) => *left -= sent as u64,
            Err(Errno::AGAIN) => break,
            Err(error) => return Err(error).context("an upload broke"),
        }
        if *left == 0 {
            break;
        }
    }
    Ok(())
}
