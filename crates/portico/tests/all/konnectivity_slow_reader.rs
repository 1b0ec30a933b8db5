//! Our server with upstream's agent, whose connections share one stream: a frontend that reads slowly.

use std::cell::Cell;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::time::sleep;

use crate::konnectivity::endpoint::{self, Endpoint};
use crate::konnectivity::site::{Make, Mode, Pair, Transport};

/// What a line of 1 Mbit/s carries in [`TICK`]: a period of the pattern.
const PART: u64 = 65_521;

const TICK: Duration = Duration::from_millis(524);

/// Parts of the download, 105 MB: more than all that is ever held.
const PARTS: u64 = 1_600;

#[tokio::test]
async fn a_reader_at_1_mbit_s_holds_up_no_echo_and_gets_all_once_it_reads_faster() {
    let pair = Pair::start(Make::Ours, Make::Upstream, Mode::HttpConnect, Transport::Unix).await;
    let (sender, echo) = (Endpoint::sender(PARTS * PART).await, Endpoint::echo().await);
    let mut slow = pair.frontend.connect(&sender.target()).await;
    let mut other = pair.frontend.connect(&echo.target()).await;
    slow.write_all(b"?").await.unwrap();
    let (is_done, full) = (Cell::new(false), "konnectivity_network_proxy_server_full_receive_channels");
    let reads = async {
        let mut parts = 0;
        while !is_done.get() {
            endpoint::take(&mut slow, PART).await.unwrap();
            parts += 1;
            sleep(TICK).await;
        }
        parts
    };
    let echoes = async {
        pair.server.program.wait_for_metric(full, "Connect", 1.0).await;
        // Soon enough, on a busy machine too: a reader that is as slow for half a minute is given up.
        for turn in 0..10_u32 {
            endpoint::send(&mut other, u64::from(turn) * 1_000).await.unwrap();
            endpoint::take(&mut other, u64::from(turn) * 1_000).await.unwrap();
        }
        // New connections, too.
        endpoint::fetch(&mut pair.frontend.connect(&Endpoint::sender(1).await.target()).await, 1)
            .await
            .unwrap();
        pair.server.program.wait_for_metric(full, "Connect", 1.0).await;
        is_done.set(true);
    };
    let (parts, ()) = tokio::join!(reads, echoes);
    endpoint::take(&mut slow, (PARTS - parts) * PART).await.expect("it was slow, and never closed");
}
