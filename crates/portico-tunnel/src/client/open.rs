//! A stream for whoever asks: on the tunnel with the fewest, on another if that one does not answer or cannot tell who we are, on the first
//! that comes up if there is none.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use http::{StatusCode, uri};
use thiserror::Error;
use tokio::time::{Instant, timeout_at};

use super::pool::Pool;
use super::stream::Stream;
use super::tunnel::{RequestError, Tunnel};

/// The most requests for one stream. Two or three will do where something is amiss with a tunnel or two; who is turned away more often than this
/// is so by all.
const MOST_REQUESTS: u32 = 16;

/// Why there is no stream.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The gateway says no.
    #[error("gateway {gateway} refused with {status}: {reason}")]
    Refused {
        /// Which.
        gateway: String,
        /// The status of its answer.
        status: StatusCode,
        /// Its reason.
        reason: Box<str>,
    },
    /// No tunnel came up in time.
    #[error("no tunnel to a gateway within {waited:?}: {last}")]
    NoTunnel {
        /// How long that was.
        waited: Duration,
        /// What failed last.
        last: String,
    },
    /// The gateways that were asked did not answer, or broke the stream off.
    #[error("no gateway has answered after {waited:?}; last asked: {gateway}: {why}")]
    Unanswered {
        /// How long that was.
        waited: Duration,
        /// The one asked last.
        gateway: String,
        /// What it did instead.
        why: String,
    },
    /// The tunnels that are up carry as many streams as they may, and none of these ended in time.
    #[error(
        "no place for a stream within {waited:?}: {tunnels} tunnels are up with {streams} streams, as many as the gateways allow{}",
        why_no_more(last.as_deref())
    )]
    Full {
        /// How long that was.
        waited: Duration,
        /// How many.
        tunnels: usize,
        /// And what they carry.
        streams: u32,
        /// Why there is not another tunnel, if more might be up.
        last: Option<String>,
    },
    /// No request can be made of the authority or the token.
    #[error("{0}")]
    Unsendable(String),
    /// [`Client::drain`](super::Client::drain) was called.
    #[error("no new streams: stopping")]
    Stopping,
}

impl Pool {
    pub(super) async fn open(&self, authority: &str) -> Result<Stream, OpenError> {
        let unsendable = |error: &dyn fmt::Display| OpenError::Unsendable(format!("{authority}: {error}"));
        let parsed = uri::Authority::try_from(authority).map_err(|error| unsendable(&error))?;
        let token = self.token().map_err(|error| unsendable(&error))?;
        let started = Instant::now();
        let deadline = started + self.settings.open_timeout;
        let mut tried: Vec<Arc<Tunnel>> = Vec::new();
        // Which of the gateways was asked last, and how that failed.
        let mut failed: Option<(String, RequestError)> = None;
        let mut refused = None;
        let mut requests = 0;
        loop {
            if *self.stopping.borrow() {
                return Err(OpenError::Stopping);
            }
            let Some(tunnel) = self.best(&tried) else {
                // Every gateway that could be asked has said no; waiting for another would not change its mind.
                if let Some(refused) = refused {
                    return Err(refused);
                }
                let resets = failed.as_ref().is_some_and(|(_, error)| error.is_reset());
                let hopeless = requests >= MOST_REQUESTS || (resets && self.is_all_there_is(&tried));
                if !hopeless && timeout_at(deadline, self.another(&tried)).await.is_ok() {
                    // Also one that was silent before may be back.
                    tried.clear();
                    continue;
                }
                let waited = started.elapsed();
                if let Some(full) = self.full(waited) {
                    return Err(full);
                }
                return Err(match failed {
                    Some((gateway, error)) => {
                        OpenError::Unanswered { waited, gateway, why: error.to_string() }
                    }
                    None => OpenError::NoTunnel { waited, last: self.last_error() },
                });
            };
            requests += 1;
            if requests > 1 {
                self.counters.streams_retried.fetch_add(1, Relaxed);
            }
            match tunnel.connect(parsed.clone(), token.as_ref(), deadline, &self.settings).await {
                Ok(stream) => {
                    self.counters.streams_opened.fetch_add(1, Relaxed);
                    return Ok(stream);
                }
                Err(RequestError::Refused { status, reason }) => {
                    self.counters.streams_refused.fetch_add(1, Relaxed);
                    let gateway = self.name_of(&tunnel);
                    let no = OpenError::Refused { gateway, status, reason };
                    if !may_differ(status) {
                        return Err(no);
                    }
                    refused = Some(no);
                }
                Err(RequestError::Unsendable(error)) => return Err(unsendable(&error)),
                Err(error @ (RequestError::Broken(_) | RequestError::Silent)) => {
                    failed = Some((self.name_of(&tunnel), error));
                }
            }
            tried.push(tunnel);
        }
    }

    /// The live tunnel with the fewest streams, of those not `tried`; first among those whose gateway does not refuse our identity.
    pub(super) fn best(&self, tried: &[Arc<Tunnel>]) -> Option<Arc<Tunnel>> {
        let tunnels = self.tunnels();
        let fit = tunnels.iter().filter(|tunnel| {
            tunnel.is_live() && !tunnel.is_full() && !tried.iter().any(|other| Arc::ptr_eq(other, tunnel))
        });
        fit.min_by_key(|tunnel| (tunnel.is_refused(), tunnel.streams())).cloned()
    }

    /// Whether all live tunnels were `tried`, and none is being connected.
    fn is_all_there_is(&self, tried: &[Arc<Tunnel>]) -> bool {
        let live = self.live();
        let all_tried = live.iter().all(|tunnel| tried.iter().any(|other| Arc::ptr_eq(other, tunnel)));
        !live.is_empty() && all_tried && !self.attempts().iter().any(|attempt| attempt.connecting)
    }

    /// That all live tunnels are full, if they are.
    fn full(&self, waited: Duration) -> Option<OpenError> {
        let live = self.live();
        let full = !live.is_empty() && live.iter().all(|tunnel| tunnel.is_full());
        full.then(|| OpenError::Full {
            waited,
            tunnels: live.len(),
            streams: live.iter().map(|tunnel| tunnel.streams()).sum(),
            last: self.attempts().iter().find_map(|attempt| attempt.error.clone()),
        })
    }

    /// Waits for a tunnel that was not tried, for one that has come back since, and for a place on one that is full.
    pub(super) async fn another(&self, tried: &[Arc<Tunnel>]) {
        let _waiting = Waiting::new(self);
        loop {
            let (arrived, freed) = (self.signals.arrived.notified(), self.signals.freed.notified());
            if self.best(tried).is_some() {
                return;
            }
            tokio::select! {
                () = arrived => {}
                () = freed => {}
            }
            if self.best(&[]).is_some() {
                return;
            }
        }
    }

    fn last_error(&self) -> String {
        let attempts = self.attempts();
        let error = attempts.iter().find_map(|attempt| attempt.error.clone());
        error.unwrap_or_else(|| "still connecting".to_owned())
    }
}

fn why_no_more(last: Option<&str>) -> String {
    last.map(|last| format!("; and no other comes up: {last}")).unwrap_or_default()
}

/// Whether another gateway may have another answer: one that does not know the cluster yet, is over its budget, or stops. So is one that
/// cannot have our token reviewed: who has proved nothing yet is told 401 whatever the cause, lest it learn which clusters exist.
fn may_differ(status: StatusCode) -> bool {
    let of_this_gateway = [StatusCode::UNAUTHORIZED, StatusCode::NOT_FOUND, StatusCode::TOO_MANY_REQUESTS];
    of_this_gateway.contains(&status) || status.is_server_error()
}

/// Somebody who waits for a tunnel, counted.
struct Waiting<'a>(&'a Pool);

impl<'a> Waiting<'a> {
    fn new(pool: &'a Pool) -> Self {
        pool.waiting.fetch_add(1, Relaxed);
        pool.wanted.notify_waiters();
        Self(pool)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Relaxed);
    }
}
