//! Selects the tunnel that gets a new stream: a live one with few streams. If it does not answer or does not
//! know our identity, another is asked. If there is none, the first that comes up is.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::{StatusCode, uri};
use portico_net::Socket;
use thiserror::Error;
use tokio::time::{Instant, timeout_at};

use super::endpoints::Endpoint;
use super::first_bytes::FirstBytes;
use super::status::AttemptStatus;
use super::stream::Stream;
use super::tunnel::{RequestError, Tunnel};
use super::view::View;

/// The most requests for one stream. Two or three do if something is wrong with a tunnel or two; after so
/// many, every gateway refuses.
const MOST_REQUESTS: u32 = 16;

/// Streams are spread over the tunnels in groups of this size. The frames of a group leave in one write and
/// wake the gateway once. With 16 connections that exchange small messages, one group costs a fifth less than
/// two halves.
const GROUP: u32 = 32;

/// How long a tunnel may take to answer: a third of the time to open a stream. A gateway may have to ask an
/// API server first, which takes 6 s at most. Many clients give up after 10 s: another has answered by then.
/// The last that can be asked has all that is `left`.
fn share_of(left: Duration, open_timeout: Duration, is_last: bool) -> Duration {
    if is_last { left } else { (open_timeout / 3).min(left) }
}

/// Why there is no stream.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The gateway refuses.
    #[error("gateway {gateway} refused with {status}: {reason}")]
    Refused {
        /// The gateway.
        gateway: String,
        /// The status of its answer.
        status: StatusCode,
        /// Its reason.
        reason: Box<str>,
    },
    /// No tunnel came up in time.
    #[error("no tunnel to a gateway within {waited:.1?}: {last}")]
    NoTunnel {
        /// How long that was.
        waited: Duration,
        /// What failed last.
        last: String,
    },
    /// The gateways that were asked did not answer, or reset the stream.
    #[error("no gateway has answered after {waited:.1?}; last asked: {gateway}: {why}")]
    Unanswered {
        /// How long that was.
        waited: Duration,
        /// The one that was asked last.
        gateway: String,
        /// What it did instead.
        why: String,
    },
    /// Every tunnel that is up is full, and no stream ended in time.
    #[error(
        "no room for a stream within {waited:.1?}: {tunnels} tunnels are up with {streams} streams, \
         as many as the gateways allow{}",
        why_no_more(last.as_deref())
    )]
    Full {
        /// How long that was.
        waited: Duration,
        /// How many tunnels are up.
        tunnels: usize,
        /// How many streams they carry.
        streams: u32,
        /// Why another tunnel did not come up, if one was tried.
        last: Option<String>,
    },
    /// The authority or the token makes no valid request.
    #[error("{0}")]
    Unsendable(String),
    /// [`Client::drain`](super::Client::drain) was called.
    #[error("no new streams: stopping")]
    Stopping,
}

impl View {
    /// Opens a stream to `authority` within the time of the settings, for a client of which nothing was read.
    pub(super) async fn open(
        &self,
        authority: &str,
        client: Option<&impl Socket>,
    ) -> Result<Stream, OpenError> {
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
        let mut first = FirstBytes::new(client);
        loop {
            if self.is_stopping() {
                return Err(OpenError::Stopping);
            }
            // The first is asked in any case.
            let is_late = requests > 0 && Instant::now() >= deadline;
            let Some(tunnel) = self.best(&tried).filter(|_| !is_late) else {
                // Every gateway that could be asked has refused. Waiting for another tunnel would not change
                // that.
                if let Some(refused) = refused {
                    return Err(refused);
                }
                let resets = failed.as_ref().is_some_and(|(_, error)| error.is_reset());
                let hopeless = is_late || requests >= MOST_REQUESTS || (resets && self.are_all_tried(&tried));
                if !hopeless && timeout_at(deadline, self.another(&tried)).await.is_ok() {
                    // A tunnel that was tried before may be back.
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
                self.totals().streams_retried += 1;
            }
            tried.push(Arc::clone(&tunnel));
            let now = Instant::now();
            let left = deadline.saturating_duration_since(now);
            let is_last = self.best(&tried).is_none();
            let until = now + share_of(left, self.settings.open_timeout, is_last);
            match tunnel.connect(parsed.clone(), token.as_ref(), &mut first, until, &self.settings).await {
                Ok((to_gateway, from_gateway, guard)) => {
                    self.totals().streams_opened += 1;
                    let (activity, idle) = (Arc::clone(&tunnel.activity), self.settings.stream_idle);
                    let sent = first.bytes().len();
                    return Ok(Stream::new(to_gateway, from_gateway, activity, guard, idle, sent));
                }
                Err(RequestError::Refused { status, reason }) => {
                    self.totals().streams_refused += 1;
                    let gateway = self.gateway_name(tunnel.origin.endpoint.gateway);
                    let no = OpenError::Refused { gateway, status, reason };
                    if !may_differ(status) {
                        return Err(no);
                    }
                    refused = Some(no);
                }
                Err(RequestError::Unsendable(error)) => return Err(unsendable(&error)),
                Err(error @ (RequestError::Broken(_) | RequestError::Silent)) => {
                    failed = Some((self.gateway_name(tunnel.origin.endpoint.gateway), error));
                }
            }
        }
    }

    /// Returns the live tunnel with the fewest groups of streams that was not `tried`. Gateways that refuse
    /// our identity come last, and before them those that have left a request unanswered.
    fn best(&self, tried: &[Arc<Tunnel>]) -> Option<Arc<Tunnel>> {
        let tunnels = self.tunnels();
        let fit = tunnels.iter().filter(|tunnel| {
            tunnel.is_live() && !tunnel.is_full() && !tried.iter().any(|other| Arc::ptr_eq(other, tunnel))
        });
        let order = |tunnel: &&Arc<Tunnel>| {
            (tunnel.is_refused(), tunnel.is_unanswering(), tunnel.streams() / GROUP, tunnel.rank)
        };
        fit.min_by_key(order).cloned()
    }

    /// Whether every live tunnel was `tried`, and no other is being connected.
    fn are_all_tried(&self, tried: &[Arc<Tunnel>]) -> bool {
        let live = self.live();
        let all_tried = live.iter().all(|tunnel| tried.iter().any(|other| Arc::ptr_eq(other, tunnel)));
        !live.is_empty() && all_tried && self.attempts().iter().all(|attempt| attempt.replaces)
    }

    /// Returns an error if every live tunnel is full.
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

    /// Returns once another tunnel can be asked, or the client stops. It may be new, or may have been tried
    /// and have come back. A full one may have room for one more stream.
    async fn another(&self, tried: &[Arc<Tunnel>]) {
        let _demand = self.wait_for_tunnel();
        loop {
            let available = self.signals.available.notified();
            if self.best(tried).is_some() || self.is_stopping() {
                return;
            }
            available.await;
            if self.best(&[]).is_some() {
                return;
            }
        }
    }

    fn last_error(&self) -> String {
        let attempts = self.attempts();
        let error = attempts.iter().find_map(|attempt| attempt.error.clone());
        error.unwrap_or_else(|| self.still_connecting(&attempts))
    }

    /// Names where `attempts` connect to, or all gateways while their addresses are not known; the first one
    /// only, as there may be hundreds.
    fn still_connecting(&self, attempts: &[AttemptStatus]) -> String {
        let endpoints: HashSet<Endpoint> = attempts.iter().filter_map(|attempt| attempt.endpoint).collect();
        let first = attempts.iter().find_map(|attempt| attempt.endpoint);
        let (first, places) = match first {
            Some(Endpoint { gateway, address }) => {
                (format!("{} at {address}", self.gateway_name(gateway)), endpoints.len())
            }
            None => (self.gateway_name(0), self.settings.gateways.len()),
        };
        match places.saturating_sub(1) {
            0 => format!("still connecting to {first}"),
            more => format!("still connecting to {first} and {more} more"),
        }
    }
}

fn why_no_more(last: Option<&str>) -> String {
    last.map(|last| format!("; and no other comes up: {last}")).unwrap_or_default()
}

/// Whether another gateway may accept the request. A gateway that does not know the cluster yet, is over its
/// budget or stops refuses alone. So does one that cannot have our token reviewed. An unauthenticated client
/// gets 401 whatever the cause, so that it does not learn which clusters exist.
fn may_differ(status: StatusCode) -> bool {
    let of_this_gateway = [StatusCode::UNAUTHORIZED, StatusCode::NOT_FOUND, StatusCode::TOO_MANY_REQUESTS];
    of_this_gateway.contains(&status) || status.is_server_error()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tunnel_has_a_third_of_the_time_and_the_last_what_is_left() {
        let shares = |tunnels: usize| {
            let whole = Duration::from_secs(20);
            let mut left = whole;
            let ask = |which| {
                let share = share_of(left, whole, which == tunnels);
                left -= share;
                share.as_secs()
            };
            (1..=tunnels).map(ask).collect::<Vec<_>>()
        };
        assert_eq!(shares(2), [6, 13], "the second is asked before clients of 10 s give up");
        assert_eq!(shares(3), [6, 6, 6]);
        assert_eq!(shares(5), [6, 6, 6, 0, 0], "of which the last two are not asked");
    }
}
