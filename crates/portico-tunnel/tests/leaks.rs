//! After everything ended, in every way it can, no descriptor and no task is left. A program of its own: it
//! counts what the whole process has.

#![allow(clippy::unwrap_used, reason = "the helpers of tests fail like tests")]

mod common;

use common::*;
use h2::Reason;

use tokio::io::AsyncWriteExt;

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn tasks() -> usize {
    tokio::runtime::Handle::current().metrics().num_alive_tasks()
}

#[tokio::test]
async fn nothing_is_left_after_tunnels_that_ended_in_every_way() {
    let mut server = Server::start(plaintext()).await;
    let before = (descriptors(), tasks());
    let mut half_closed = Vec::new();
    for round in 0..50 {
        let (client, mut ends, mut upstream) = server.tunnel().await;
        match round % 5 {
            0 => {
                ends.finish();
                drop(upstream);
            }
            1 => ends.send.send_reset(Reason::CANCEL),
            2 => {
                upstream.set_zero_linger().unwrap();
                drop(upstream);
            }
            3 => client.connection.abort(),
            _ => {
                upstream.shutdown().await.unwrap();
                half_closed.push((client, ends, upstream));
                continue;
            }
        }
        assert!(server.report().await.end.is_some());
    }
    for tunnel in half_closed.drain(..) {
        drop(tunnel);
        assert!(server.report().await.end.is_some());
    }
    for _ in 0..50 {
        let _ = server.result().await;
    }
    let gone = async {
        while (descriptors(), tasks()) != before {
            tokio::task::yield_now().await;
        }
    };
    let gone = tokio::time::timeout(PATIENCE, gone).await;
    assert!(gone.is_ok(), "before {before:?}, after {:?}", (descriptors(), tasks()));
}
