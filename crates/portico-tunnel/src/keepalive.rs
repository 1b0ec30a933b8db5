//! Tells dead peers from idle ones: PING on an HTTP/2 connection that has been silent (RFC 9113 section 6.7).

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use h2::{Ping, PingPong};
use tokio::time::{Instant, Sleep, sleep};

use crate::activity::Activity;

/// Sends PING to a peer that has been silent. A peer that sends anything gets none, and a connection at rest
/// wakes up once an interval.
pub struct KeepAlive {
    pings: Option<PingPong>,
    interval: Duration,
    timeout: Duration,
    timer: Pin<Box<Sleep>>,
    asked: bool,
}

impl KeepAlive {
    /// Sends PING after `interval` of silence, and gives up `timeout` later.
    pub fn new(pings: Option<PingPong>, interval: Duration, timeout: Duration) -> Self {
        Self { pings, interval, timeout, timer: Box::pin(sleep(interval)), asked: false }
    }

    /// The silent peer has sent something: begins again.
    pub fn restart(&mut self) {
        self.asked = false;
        self.timer.as_mut().reset(Instant::now() + self.interval);
    }

    /// Waits so long from now on. As if the peer had just sent something.
    pub fn set(&mut self, interval: Duration, timeout: Duration) {
        (self.interval, self.timeout) = (interval, timeout);
        self.restart();
    }

    /// Ready when the peer did not answer in time.
    pub async fn silent(&mut self, activity: &Activity) {
        poll_fn(|cx| self.poll_silent(cx, activity)).await;
    }

    fn poll_silent(&mut self, cx: &mut Context<'_>, activity: &Activity) -> Poll<()> {
        loop {
            ready!(self.timer.as_mut().poll(cx));
            // The response to a PING counts like any other bytes.
            let received = activity.take_received();
            if self.asked && !received {
                return Poll::Ready(());
            }
            self.asked = !received;
            if let (true, Some(pings)) = (self.asked, &mut self.pings) {
                // h2 sends the next PING only after the response to the last one was taken.
                let _ = pings.poll_pong(cx);
                // Fails only if the connection is closing, which its own task notices.
                let _ = pings.send_ping(Ping::opaque());
            }
            let wait = if self.asked { self.timeout } else { self.interval };
            self.timer.as_mut().reset(Instant::now() + wait);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Settings;

    /// When TCP tries again after a loss of 30 s. It doubles 0.2 s until the loss is over, and finishes the
    /// wait that it has begun.
    const TCP_TRIES_AGAIN: Duration = Duration::from_millis(51_000);

    #[tokio::test(start_paused = true)]
    async fn a_network_that_is_gone_for_half_a_minute_costs_no_connection() {
        let settings = Settings::default();
        let activity = Activity::new(&settings.memory);
        let mut keep_alive = KeepAlive::new(None, settings.ping_interval, settings.ping_timeout);
        // The last byte came just before a look, or just after one.
        for received in [Duration::from_millis(1), settings.ping_interval - Duration::from_millis(1)] {
            keep_alive.restart();
            let begun = Instant::now();
            tokio::time::sleep(received).await;
            activity.take_received();
            activity.note_received();
            let last = Instant::now();
            keep_alive.silent(&activity).await;
            assert!(last.elapsed() > TCP_TRIES_AGAIN, "given up after {:?}", last.elapsed());
            assert!(begun.elapsed() <= 2 * settings.ping_interval + settings.ping_timeout, "a dead peer is");
        }
    }
}
