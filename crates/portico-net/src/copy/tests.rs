//! The copy engine over Unix sockets, where no gateway is needed. Over TCP the gateway's tests hold its
//! promises.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::task::JoinHandle;

use super::*;

/// Counts into a value that outlives it.
struct Count(Arc<Mutex<(usize, usize)>>);

impl Meter for Count {
    fn carried(&mut self, up: usize, down: usize) {
        let mut count = self.0.lock().unwrap();
        *count = (count.0 + up, count.1 + down);
    }

    fn ended(self, _: End) {}
}

struct Joined {
    client: UnixStream,
    server: UnixStream,
    carried: Arc<Mutex<(usize, usize)>>,
    copying: JoinHandle<End>,
}

fn join(first: &[u8], idle: Option<Duration>) -> Joined {
    let (client, downstream) = UnixStream::pair().unwrap();
    let (upstream, server) = UnixStream::pair().unwrap();
    let carried = Arc::<Mutex<(usize, usize)>>::default();
    let (first, mut meter) = (first.to_vec(), Count(Arc::clone(&carried)));
    let copying =
        tokio::spawn(
            async move { copy(&downstream.into(), &upstream.into(), first, &mut meter, idle).await },
        );
    Joined { client, server, carried, copying }
}

async fn read_to_end(stream: &mut UnixStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).await.unwrap();
    bytes
}

#[tokio::test]
async fn unix_sockets_are_joined_like_tcp_with_half_close_and_first_bytes() {
    let Joined { mut client, mut server, carried, copying } = join(b"first ", None);
    client.write_all(b"request").await.unwrap();
    client.shutdown().await.unwrap();
    assert_eq!(read_to_end(&mut server).await, b"first request");
    server.write_all(b"answer").await.unwrap();
    drop(server);
    assert_eq!(read_to_end(&mut client).await, b"answer");
    assert_eq!(copying.await.unwrap(), End::Closed { first: Side::Downstream });
    assert_eq!(*carried.lock().unwrap(), (13, 6));
}

#[tokio::test]
async fn a_large_transfer_between_unix_sockets_arrives_whole() {
    const LENGTH: usize = 20_000_000;
    let sent: Vec<u8> = (0..LENGTH).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let Joined { mut client, mut server, carried, copying } = join(b"", None);
    let expected = sent.clone();
    let sending = tokio::spawn(async move {
        server.write_all(&sent).await.unwrap();
    });
    assert!(read_to_end(&mut client).await == expected, "bytes differ");
    sending.await.unwrap();
    drop(client);
    assert_eq!(copying.await.unwrap(), End::Closed { first: Side::Upstream });
    assert_eq!(*carried.lock().unwrap(), (0, LENGTH));
}

#[tokio::test(start_paused = true)]
async fn silence_ends_a_connection_after_the_idle_limit() {
    let joined = join(b"", Some(Duration::from_secs(60)));
    assert_eq!(joined.copying.await.unwrap(), End::Idle);
}
