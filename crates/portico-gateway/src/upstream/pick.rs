//! Chooses the endpoint that gets the next connection: the healthy one with the fewest connections.
//!
//! Where every endpoint is skipped, one is tried all the same, as a last resort: an API server may have
//! recovered a moment ago. One that *refuses* costs nothing. One that *does not answer* holds a client for a
//! second. So only [`MOST_LAST_RESORTS`](super::endpoint::MOST_LAST_RESORTS) clients wait for it at a time.
//! Thousands of them would take the descriptors of all other clusters.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::endpoint::{Endpoint, LastResort};

/// The endpoint for the next attempt.
#[derive(Debug)]
pub(super) enum Choice {
    /// One of the healthy ones, or one that is due for a probe.
    Regular(Arc<Endpoint>),
    /// All are skipped.
    LastResort(LastResort),
    /// All are skipped, and enough clients wait for them.
    Full,
}

/// The endpoint for the next attempt. The first attempt takes one that is due for a probe, else a healthy
/// one; later attempts the other way round. Next come endpoints that at least refuse fast, then those that do
/// not answer. `None` if all were tried.
pub(super) fn pick(
    endpoints: &[Arc<Endpoint>],
    tried: &[Option<SocketAddr>],
    now: Duration,
) -> Option<Choice> {
    let untried = || endpoints.iter().filter(|endpoint| !tried.contains(&Some(endpoint.address)));
    // A probe must happen while healthy endpoints take the load, or a recovered one would never be seen
    // again.
    let probe = || untried().find(|endpoint| endpoint.is_failing() && endpoint.may_probe(now));
    let healthy =
        || untried().filter(|endpoint| !endpoint.is_failing()).min_by_key(|endpoint| endpoint.connections());
    let first_attempt = tried.is_empty();
    let regular = if first_attempt { probe().or_else(healthy) } else { healthy().or_else(probe) };
    if let Some(endpoint) = regular {
        return Some(Choice::Regular(Arc::clone(endpoint)));
    }
    if let Some(refusing) = untried().find(|endpoint| !endpoint.last_failure_was_silent()) {
        return Some(Choice::Regular(Arc::clone(refusing)));
    }
    let silent = untried().min_by_key(|endpoint| endpoint.last_resorts.load(Relaxed))?;
    Some(LastResort::new(silent).map_or(Choice::Full, Choice::LastResort))
}

#[cfg(test)]
mod tests {
    use super::super::endpoint::{
        EndpointUse, FAILURES_UNTIL_SKIPPED, FIRST_SKIP, Failure, MOST_LAST_RESORTS,
    };
    use super::*;

    const NOW: Duration = Duration::from_secs(100);

    fn endpoints(count: u16) -> Vec<Arc<Endpoint>> {
        (1..=count).map(|port| Arc::new(Endpoint::new(([127, 0, 0, 1], port).into()))).collect()
    }

    fn break_(endpoint: &Endpoint, failure: Failure) {
        for _ in 0..FAILURES_UNTIL_SKIPPED {
            endpoint.failed(failure, NOW);
        }
    }

    fn port_of(choice: Option<Choice>) -> Option<u16> {
        match choice? {
            Choice::Regular(endpoint) => Some(endpoint.address.port()),
            Choice::LastResort(resort) => Some(resort.0.address.port()),
            Choice::Full => None,
        }
    }

    #[test]
    fn the_endpoint_with_the_fewest_connections_is_next() {
        let all = endpoints(3);
        let _held: Vec<_> = [0, 0, 1, 2, 2].map(|index| EndpointUse::new(Arc::clone(&all[index]))).into();
        assert_eq!(port_of(pick(&all, &[], NOW)), Some(2));
    }

    #[test]
    fn an_endpoint_is_picked_after_one_failure_all_the_same() {
        let all = endpoints(1);
        all[0].failed(Failure::Refused, NOW);
        assert_eq!(port_of(pick(&all, &[], NOW)), Some(1));
    }

    #[test]
    fn a_failing_endpoint_is_skipped_while_another_is_healthy() {
        let all = endpoints(2);
        break_(&all[0], Failure::Refused);
        assert_eq!(port_of(pick(&all, &[], NOW)), Some(2));
    }

    #[test]
    fn after_a_skip_exactly_one_connection_probes() {
        let all = endpoints(2);
        break_(&all[0], Failure::Silent);
        let later = NOW + FIRST_SKIP;
        assert_eq!(port_of(pick(&all, &[], later)), Some(1));
        assert_eq!(port_of(pick(&all, &[], later)), Some(2));
        all[0].succeeded();
        assert_eq!(port_of(pick(&all, &[], later)), Some(1), "a successful probe brings it back");
    }

    #[test]
    fn where_all_fail_one_is_tried_all_the_same_and_first_one_that_refuses() {
        let all = endpoints(3);
        for (endpoint, failure) in all.iter().zip([Failure::Silent, Failure::Refused, Failure::Silent]) {
            break_(endpoint, failure);
        }
        assert_eq!(port_of(pick(&all, &[], NOW)), Some(2));
        let refusing = Some(all[1].address);
        assert_eq!(port_of(pick(&all, &[refusing], NOW)), Some(1));
    }

    #[test]
    fn few_wait_for_endpoints_that_do_not_answer_and_they_are_shared_out() {
        let all = endpoints(2);
        all.iter().for_each(|endpoint| break_(endpoint, Failure::Silent));
        let most = 2 * usize::from(MOST_LAST_RESORTS);
        let mut waiting: Vec<_> = (0..most).filter_map(|_| pick(&all, &[], NOW)).collect();
        let of = |waiting: &[Choice], port: u16| {
            let at =
                |choice: &&Choice| matches!(choice, Choice::LastResort(it) if it.0.address.port() == port);
            waiting.iter().filter(at).count()
        };
        assert_eq!((of(&waiting, 1), of(&waiting, 2)), (most / 2, most / 2));
        assert!(matches!(pick(&all, &[], NOW), Some(Choice::Full)));
        waiting.pop();
        assert!(matches!(pick(&all, &[], NOW), Some(Choice::LastResort(_))), "one that leaves makes room");
    }

    #[test]
    fn no_endpoint_is_tried_twice_for_one_client() {
        let all = endpoints(2);
        let first = all[0].address;
        assert_eq!(port_of(pick(&all, &[Some(first)], NOW)), Some(2));
        assert_eq!(port_of(pick(&all[..1], &[Some(first)], NOW)), None);
    }
}
