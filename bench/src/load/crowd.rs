//! Thousands of clients of one cluster that come again and again, whatever the answer.
//!
//! Each connects, sends its hello and waits until the proxy ends the connection. Every client comes once a
//! [`PERIOD`], at a moment of its own. So the number of attempts a second is the same whether they are
//! answered, held or refused. Slices then differ in nothing but what the proxy does with them.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::Greeting;
use super::beside::Door;
use crate::backend::receive;
use crate::hello::ANSWER_BYTES;
use crate::random::Random;

/// How many (the number).
pub(crate) const CLIENTS: usize = 5000;
/// A second that a client is held until the proxy's attempt to connect times out, and two that it waits.
const PERIOD: Duration = Duration::from_secs(3);

/// The clients, some of them waiting.
pub(crate) struct Crowd<'a> {
    hello: &'a [u8],
    begin: Instant,
    /// When each client comes, from the begin of a period; in ascending order.
    moments: Vec<Duration>,
    /// Attempts that were due so far.
    turn: usize,
    waiting: Vec<Option<Attempt>>,
    count: Count,
}

/// What became of the attempts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Count {
    /// Got the backend's answer in full.
    pub(crate) answered: u64,
    /// Ended without it.
    pub(crate) unanswered: u64,
    /// Not made, as the client still waited for the end of its last one.
    pub(crate) skipped: u64,
    /// Clients that wait now.
    pub(crate) waiting: usize,
    /// Clients that waited at the same time, at most.
    pub(crate) most_waiting: usize,
}

struct Attempt {
    greeting: Greeting,
    received: usize,
}

impl<'a> Crowd<'a> {
    /// Clients that send `hello`; the first come now.
    pub(crate) fn new(hello: &'a [u8]) -> Self {
        let mut random = Random::default();
        let mut moments: Vec<_> = (0..CLIENTS).map(|_| PERIOD.mul_f64(random.fraction())).collect();
        moments.sort_unstable();
        let waiting = (0..CLIENTS).map(|_| None).collect();
        Self { hello, begin: Instant::now(), moments, turn: 0, waiting, count: Count::default() }
    }

    /// When the next client comes.
    pub(crate) fn next_due(&self) -> Instant {
        let periods = u32::try_from(self.turn / CLIENTS).expect("a slice has a few periods");
        self.begin + PERIOD * periods + self.moments[self.turn % CLIENTS]
    }

    /// Lets the clients come whose time it is. Their tokens begin at `tokens`.
    pub(crate) fn start_due(&mut self, now: Instant, tokens: usize, door: &mut Door) -> Result<()> {
        while self.next_due() <= now {
            let client = self.turn % CLIENTS;
            self.turn += 1;
            if self.waiting[client].is_some() {
                self.count.skipped += 1;
            } else if let Some(greeting) = door.knock(self.hello, tokens + client)? {
                self.waiting[client] = Some(Attempt { greeting, received: 0 });
                self.count.waiting += 1;
                self.count.most_waiting = self.count.most_waiting.max(self.count.waiting);
            } else {
                self.count.unanswered += 1;
            }
        }
        Ok(())
    }

    /// To be called when the socket of this client is readable.
    pub(crate) fn proceed(&mut self, client: usize, scratch: &mut [u8]) {
        let Some(attempt) = &mut self.waiting[client] else { return };
        match receive(&attempt.greeting.socket, scratch) {
            Ok(None) => return,
            Ok(Some(bytes)) if bytes > 0 => {
                attempt.received += bytes;
                return;
            }
            // Its end, or a reset; a TLS alert that came before is shorter than an answer.
            Ok(_) | Err(_) => {}
        }
        let outcome = if attempt.received < ANSWER_BYTES {
            &mut self.count.unanswered
        } else {
            &mut self.count.answered
        };
        *outcome += 1;
        self.count.waiting -= 1;
        self.waiting[client] = None;
    }

    /// What became of the attempts so far.
    pub(crate) fn count(&self) -> Count {
        self.count
    }
}
