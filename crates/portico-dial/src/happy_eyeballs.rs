//! Connecting to any of several addresses (RFC 8305). The next attempt starts without waiting for the failure
//! of the one before. So an address that does not answer costs a quarter of a second and not a time-out.
//!
//! For callers that have no choice among addresses of their own, see [`Dialer::connect_any`](crate::Dialer).

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::time::sleep;

/// After this time the next address is tried beside those under way (RFC 8305 section 5).
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// Returns the first connection, or the last failure. `None`: there are no addresses.
pub(crate) async fn connect_first<T, E, F: Future<Output = Result<T, E>>>(
    addresses: &[SocketAddr],
    connect: impl Fn(SocketAddr) -> F,
) -> Option<Result<T, E>> {
    let mut waiting = interleaved(addresses);
    let mut attempts = FuturesUnordered::new();
    let mut failed = None;
    loop {
        // At the start, after the delay, and at once when an attempt has failed.
        attempts.extend(waiting.pop_front().map(&connect));
        let next = async {
            // Without another address no timer: mostly there is one address.
            if waiting.is_empty() {
                std::future::pending().await
            }
            sleep(ATTEMPT_DELAY).await;
        };
        tokio::select! {
            result = attempts.next() => match result {
                None => return failed,
                Some(Ok(connection)) => return Some(Ok(connection)),
                Some(Err(error)) => failed = Some(Err(error)),
            },
            () = next => {}
        }
    }
}

/// Alternates between address families, beginning with that of the first address (RFC 8305 section 4).
fn interleaved(addresses: &[SocketAddr]) -> VecDeque<SocketAddr> {
    let first = addresses.first().is_some_and(SocketAddr::is_ipv6);
    let of = |ipv6: bool| addresses.iter().filter(move |address| address.is_ipv6() == ipv6).copied();
    let (mut one, mut other) = (of(first), of(!first));
    let mut sorted = VecDeque::new();
    while sorted.len() < addresses.len() {
        sorted.extend(one.next());
        sorted.extend(other.next());
    }
    sorted
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use tokio::time::Instant;

    use super::*;

    fn addresses(texts: &[&str]) -> Vec<SocketAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn families_take_turns_and_the_first_address_stays_first() {
        let given =
            addresses(&["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1", "[2001:db8::1]:1", "[2001:db8::2]:1"]);
        let expected =
            addresses(&["10.0.0.1:1", "[2001:db8::1]:1", "10.0.0.2:1", "[2001:db8::2]:1", "10.0.0.3:1"]);
        assert_eq!(interleaved(&given), expected);
        assert_eq!(interleaved(&[]), []);
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_that_does_not_answer_costs_a_quarter_of_a_second() {
        let given = addresses(&["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"]);
        let begin = Instant::now();
        let connected = connect_first(&given, |address| async move {
            if address.ip().to_string() != "10.0.0.3" {
                sleep(Duration::from_secs(1)).await;
                return Err("no answer");
            }
            Ok(address)
        });
        assert_eq!(connected.await, Some(Ok(given[2])));
        assert_eq!(begin.elapsed(), 2 * ATTEMPT_DELAY);
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_is_followed_by_the_next_address_at_once_and_the_last_one_is_reported() {
        let given = addresses(&["10.0.0.1:1", "10.0.0.2:1"]);
        let begin = Instant::now();
        let tried = RefCell::new(Vec::new());
        let refused = connect_first(&given, |address| {
            tried.borrow_mut().push(address);
            async move { Err::<(), _>(address) }
        });
        assert_eq!(refused.await, Some(Err(given[1])));
        assert_eq!(*tried.borrow(), given);
        assert_eq!(begin.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_address_that_answers_first_is_taken() {
        let given = addresses(&["10.0.0.1:1", "10.0.0.2:1"]);
        let connected = connect_first(&given, |address| async move {
            let slow = if address.ip().to_string() == "10.0.0.1" { 400 } else { 900 };
            sleep(Duration::from_millis(slow)).await;
            Ok::<_, ()>(address)
        });
        assert_eq!(connected.await, Some(Ok(given[0])));
    }

    #[tokio::test]
    async fn no_address_is_no_result() {
        assert_eq!(connect_first(&[], |_| async { Ok::<(), ()>(()) }).await, None);
    }
}
