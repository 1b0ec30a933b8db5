//! After tunnels that ended in every way they can, no descriptor and no task is left.

use crate::common::*;
use h2::Reason;
use portico_lab::leaks::{descriptors, run_alone, tasks};

use tokio::io::AsyncWriteExt;

/// Descriptors and tasks.
fn counted() -> (usize, usize) {
    (descriptors().unwrap(), tasks())
}

/// In a process without other tests, whose descriptors it would count.
#[test]
fn nothing_is_left_after_tunnels_that_ended_in_every_way() {
    run_alone("leaks::tunnels_that_end_in_every_way").unwrap();
}

#[ignore = "run by the test above, in a process of its own"]
#[tokio::test]
async fn tunnels_that_end_in_every_way() {
    let mut server = Server::start(plaintext()).await;
    let before = counted();
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
        while counted() != before {
            tokio::task::yield_now().await;
        }
    };
    let gone = tokio::time::timeout(PATIENCE, gone).await;
    assert!(gone.is_ok(), "before {before:?}, after {:?}", counted());
}
