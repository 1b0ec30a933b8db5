//! Which server to try next, and when: pure decisions of the supervisor.
//!
//! One address may lead to any of several servers, through a load balancer that tells nobody which. So the
//! agent connects, looks at the server's id, and leaves again if it is connected already. It goes on until it
//! has as many servers as there are, like upstream.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::time::Duration;

/// What a growing wait is multiplied by. Upstream's.
const GROWTH: f64 = 1.5;

/// The most that is added to a wait at random: agents that fail together must not return together.
const JITTER: f64 = 0.1;

/// Attempts in a row, for each wanted server, that may lead to one that is connected already, because a load
/// balancer draws at random. After that the servers that lack are out of reach, and waits grow. With
/// `--sync-forever` they do not: draws go on while no server lacks.
const DRAWS: u32 = 10;

/// While a server is not there, the first wait is this part of the interval, and none is longer than the
/// interval. An attempt costs next to nothing, and requests of the API server beside it wait for us.
const ABSENT: u32 = 4;

/// How an attempt went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Attempt {
    /// A new server.
    Joined,
    /// A new server, while another one has ended soon after it was connected. Servers that answer may do so
    /// each time.
    Unsteady,
    /// One that is connected.
    Duplicate,
    /// No server, or one that cannot say yet whether it takes us.
    Absent,
    /// The server that answered does not take us as we are.
    Refused,
    /// None: each address is being tried, or its name looked up, by another one; or no server lacks any more.
    Busy,
}

/// The waits between attempts.
#[derive(Debug)]
pub(super) struct Pace {
    interval: Duration,
    cap: Duration,
    wait: Duration,
    /// The next wait while a server is not there.
    absence: Duration,
    duplicates: u32,
    sync_forever: bool,
}

impl Pace {
    pub(super) fn new(interval: Duration, cap: Duration, sync_forever: bool) -> Self {
        let (cap, absence) = (cap.max(interval), interval / ABSENT);
        Self { interval, cap, wait: interval, absence, duplicates: 0, sync_forever }
    }

    /// The servers have changed: a draw may lead to another one again.
    pub(super) fn draw_anew(&mut self) {
        self.duplicates = 0;
    }

    /// The wait after an attempt. `random` is between 0 and 1.
    pub(super) fn after(&mut self, attempt: Attempt, wanted: u32, random: f64) -> Duration {
        let grown = self.wait.mul_f64(GROWTH).min(self.cap);
        let wait = match attempt {
            Attempt::Joined => {
                self.duplicates = 0;
                self.absence = self.interval / ABSENT;
                self.wait = self.interval;
                self.wait
            }
            // Leaves waits after refusals as long as they are: no server that refuses is tried more often.
            Attempt::Duplicate if self.sync_forever => self.interval,
            Attempt::Duplicate => {
                self.duplicates = self.duplicates.saturating_add(1);
                let is_drawing = self.duplicates <= DRAWS.saturating_mul(wanted);
                self.wait = if is_drawing { self.interval } else { grown };
                self.wait
            }
            Attempt::Absent => {
                let wait = self.absence;
                self.absence = wait.mul_f64(GROWTH).min(self.interval);
                wait
            }
            Attempt::Busy => self.interval,
            Attempt::Refused | Attempt::Unsteady => {
                let wait = self.wait;
                self.wait = grown;
                wait
            }
        };
        wait.mul_f64(1.0 + JITTER * random)
    }

    /// The wait while no attempt is wanted.
    pub(super) fn rest(&self, random: f64) -> Duration {
        self.interval.mul_f64(1.0 + JITTER * random)
    }
}

/// The address for an attempt: one with the fewest connections, another one each time. One where the last
/// attempt failed takes turns with the one that has most. It may never lead anywhere, and one of the others
/// may lead to all servers. Unless the attempt `may_draw`, only those are tried.
pub(super) fn choose(
    addresses: &[SocketAddr],
    connected: &HashMap<SocketAddr, usize>,
    failed: &HashSet<SocketAddr>,
    attempt: usize,
    may_draw: bool,
) -> Option<SocketAddr> {
    let addresses: Vec<_> =
        addresses.iter().filter(|address| may_draw || failed.contains(address)).copied().collect();
    let sessions = |address: &SocketAddr| connected.get(address).copied().unwrap_or(0);
    let most = addresses.iter().map(sessions).max()?;
    let load = |address: &SocketAddr| if failed.contains(address) { most } else { sessions(address) };
    let least = addresses.iter().map(load).min()?;
    let fit: Vec<_> = addresses.iter().filter(|address| load(address) == least).collect();
    fit.get(attempt % fit.len()).copied().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn pace() -> Pace {
        Pace::new(SECOND, 10 * SECOND, false)
    }

    #[test]
    fn waits_after_refusals_grow_to_the_cap_and_begin_anew_after_a_success() {
        let mut pace = pace();
        let waits: Vec<f64> = (0..8).map(|_| pace.after(Attempt::Refused, 1, 0.0).as_secs_f64()).collect();
        assert_eq!(waits[..4], [1.0, 1.5, 2.25, 3.375]);
        assert_eq!(waits[7], 10.0);
        assert_eq!(pace.after(Attempt::Refused, 1, 1.0), 11 * SECOND);
        assert_eq!(pace.after(Attempt::Joined, 1, 0.0), SECOND);
        assert_eq!(pace.after(Attempt::Refused, 1, 0.0), SECOND);
    }

    #[test]
    fn waits_grow_too_while_servers_end_their_connections_at_once() {
        let mut pace = pace();
        let waits: Vec<_> = (0..8).map(|_| pace.after(Attempt::Unsteady, 2, 0.0)).collect();
        assert_eq!((waits[0], waits[7]), (SECOND, 10 * SECOND));
        assert_eq!(pace.after(Attempt::Joined, 2, 0.0), SECOND, "one stays");
    }

    #[test]
    fn a_server_that_is_gone_is_looked_for_at_once_and_then_every_interval() {
        let mut pace = pace();
        let absent = |pace: &mut Pace| -> Vec<f64> {
            (0..8).map(|_| pace.after(Attempt::Absent, 1, 0.0).as_secs_f64()).collect()
        };
        let waits = absent(&mut pace);
        assert_eq!(waits[..3], [0.25, 0.375, 0.5625]);
        assert_eq!(waits[7], 1.0);
        pace.after(Attempt::Joined, 1, 0.0);
        assert_eq!(absent(&mut pace), waits, "as before, the next time");
    }

    #[test]
    fn duplicates_are_drawn_again_soon_until_the_rest_must_be_out_of_reach() {
        let mut pace = pace();
        for draw in 0..30 {
            assert_eq!(pace.after(Attempt::Duplicate, 3, 0.0), SECOND, "draw {draw}");
        }
        let waits: Vec<_> = (0..8).map(|_| pace.after(Attempt::Duplicate, 3, 0.0)).collect();
        assert!(waits[0] > SECOND && waits[7] == 10 * SECOND, "{waits:?}");
        pace.draw_anew();
        assert_eq!(pace.after(Attempt::Duplicate, 3, 0.0), SECOND, "a server has been replaced");
    }

    #[test]
    fn with_sync_forever_each_draw_waits_the_interval_and_refusals_wait_ever_longer() {
        let mut pace = Pace::new(SECOND, 10 * SECOND, true);
        for draw in 0..100 {
            assert_eq!(pace.after(Attempt::Duplicate, 3, 0.0), SECOND, "draw {draw}");
        }
        let refused: Vec<_> = (0..8)
            .map(|_| {
                pace.after(Attempt::Duplicate, 3, 0.0);
                pace.after(Attempt::Refused, 3, 0.0)
            })
            .collect();
        assert!(refused[1] > SECOND && refused[7] == 10 * SECOND, "{refused:?}");
        assert_eq!(pace.after(Attempt::Duplicate, 3, 0.0), SECOND);
    }

    #[test]
    fn addresses_without_a_connection_go_first_and_take_turns() {
        let [one, two, three] = [1, 2, 3].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let all = [one, two, three];
        let chosen = |connected: &[SocketAddr]| -> Vec<SocketAddr> {
            let connected = connected.iter().map(|address| (*address, 1)).collect();
            (0..3).map(|attempt| choose(&all, &connected, &HashSet::new(), attempt, true).unwrap()).collect()
        };
        assert_eq!(chosen(&[]), [one, two, three]);
        assert_eq!(chosen(&[one]), [two, three, two]);
        assert_eq!(chosen(&[one, two, three]), [one, two, three]);
        assert_eq!(choose(&[], &HashMap::new(), &HashSet::new(), 0, true), None);
    }

    #[test]
    fn an_address_that_fails_takes_turns_with_the_one_that_leads_to_all_servers() {
        let [balancer, dead, new] = [1, 2, 3].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let connected = HashMap::from([(balancer, 2)]);
        let failed = HashSet::from([dead]);
        let chosen = |addresses: &[SocketAddr]| -> Vec<SocketAddr> {
            (0..4).map(|attempt| choose(addresses, &connected, &failed, attempt, true).unwrap()).collect()
        };
        assert_eq!(chosen(&[balancer, dead]), [balancer, dead, balancer, dead]);
        assert_eq!(chosen(&[balancer, dead, new]), [new; 4], "without a connection, nor a failure");
        assert_eq!(chosen(&[dead]), [dead; 4]);
        let without_a_draw = |addresses: &[SocketAddr]| choose(addresses, &connected, &failed, 0, false);
        assert_eq!(without_a_draw(&[balancer, dead, new]), Some(dead));
        assert_eq!(without_a_draw(&[balancer, new]), None);
    }
}
