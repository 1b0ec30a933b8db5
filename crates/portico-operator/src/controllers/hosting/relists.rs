//! Reacts to lists that are made anew. After an outage of the seed's API server every watch of this
//! controller lists again within moments. Each list may have missed a change of any cluster. So all clusters
//! are looked at once for all lists together, and not once for each.

use futures_util::stream::{self, Stream};
use portico_kube::debounce::{DEFAULT_MAX_WAIT, DEFAULT_QUIET, Debounce};
use tokio::sync::watch as channel;
use tokio::time::{Instant, timeout_at};

use crate::clusters::Work;

/// Tells of such lists.
#[derive(Debug, Clone)]
pub(super) struct Relists(channel::Sender<()>);

impl Relists {
    pub(super) fn new() -> Self {
        Self(channel::Sender::new(()))
    }

    /// Notes a list. The work follows from all of them together.
    pub(super) fn note(&self) -> Work {
        self.0.send_replace(());
        Work::new()
    }

    /// Yields `all` after each burst of lists. Until everything `is_known`, it does so after each list, so
    /// that a start waits for nothing.
    pub(super) fn work<A, I>(&self, all: A, is_known: I) -> impl Stream<Item = Work> + Send + use<A, I>
    where
        A: Fn() -> Work + Send,
        I: Fn() -> bool + Send,
    {
        let begin = (self.0.subscribe(), false, all, is_known);
        stream::unfold(begin, async |(mut lists, mut known, all, is_known)| {
            lists.changed().await.ok()?;
            if known {
                burst(&mut lists).await;
            }
            known |= is_known();
            Some((all(), (lists, known, all, is_known)))
        })
    }
}

/// Waits until no more lists follow, or it has been long enough.
async fn burst(lists: &mut channel::Receiver<()>) {
    let mut burst = Debounce::new(DEFAULT_QUIET, DEFAULT_MAX_WAIT);
    burst.changed(Instant::now());
    while let Some(due) = burst.due()
        && let Ok(Ok(())) = timeout_at(due, lists.changed()).await
    {
        burst.changed(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::time::Duration;

    use futures_util::StreamExt;
    use tokio::time::{sleep, timeout};

    use super::*;

    /// How often all clusters are looked at while so many lists are made, one each 300 ms.
    async fn looks(lists: usize, known: bool) -> usize {
        let relists = Relists::new();
        let mut work = pin!(relists.work(Work::new, move || known));
        if known {
            relists.note();
            work.next().await;
        }
        tokio::spawn(async move {
            for _ in 0..lists {
                relists.note();
                sleep(Duration::from_millis(300)).await;
            }
            sleep(Duration::from_secs(60)).await;
        });
        let mut looks = 0;
        while timeout(Duration::from_secs(30), work.next()).await.is_ok() {
            looks += 1;
        }
        looks
    }

    #[tokio::test(start_paused = true)]
    async fn lists_that_follow_each_other_are_one_look_and_none_waits_for_ever() {
        assert_eq!(looks(24, true).await, 1);
        assert_eq!(looks(1, true).await, 1);
        // A minute of lists.
        assert!((6..=7).contains(&looks(200, true).await));
    }

    #[tokio::test(start_paused = true)]
    async fn until_everything_is_known_each_list_is_a_look() {
        assert_eq!(looks(24, false).await, 24);
    }
}
