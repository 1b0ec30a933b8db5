//! Since when the door that is to close is out of use, as gateways report.
//!
//! Each gateway loses its count when it restarts, so two looks are compared. Each of these starts the idle
//! time again: the first look, a pause above `PAUSE`, an open connection, a count that differs, a gateway
//! that comes, goes or restarts. No gateway change is missed in between: each triggers a look.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use super::{Now, Use};

/// Longest time between two looks that still tell of what was between them.
const PAUSE: SignedDuration = SignedDuration::from_mins(1);

/// Clients that are named.
const NAMED: usize = 5;

/// For this long the same clients are named: each change of the text would be a write.
const SAME_NAMES: SignedDuration = SignedDuration::from_mins(1);

/// What one gateway says of a door.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Counted {
    /// Since when it counts, as the gateway reports it: another text is another count.
    pub since: Box<str>,
    /// Uses that have ended, ever.
    pub used: u64,
    /// Connections that are open.
    pub open: u64,
    /// Clients that used it last, and how long ago. Those with connections open are among them, at the top.
    pub clients: Vec<(IpAddr, Duration)>,
}

/// The memory of one door from look to look.
#[derive(Debug, Clone)]
pub struct LastUse {
    /// The record under which it is looked at.
    of: Now,
    /// What each gateway reported at the look before, if there was one.
    last: Option<BTreeMap<IpAddr, (Box<str>, u64)>>,
    looked: Timestamp,
    used: Timestamp,
    /// The clients that are named, and since when.
    names: Option<(Timestamp, String)>,
}

impl LastUse {
    /// Nothing was looked at yet.
    pub fn new(of: Now, clock: Timestamp) -> Self {
        Self { of, last: None, looked: clock, used: clock, names: None }
    }

    /// The record under which the door is looked at. Under another it is another door.
    pub fn of(&self) -> Now {
        self.of
    }

    /// Takes in the counts of every gateway; all of them have answered. Clients are named if they came
    /// `within` that time.
    pub fn update(&mut self, answers: &BTreeMap<IpAddr, Counted>, within: Duration, clock: Timestamp) -> Use {
        let last = answers.iter().map(|(&gateway, it)| (gateway, (it.since.clone(), it.used)));
        let last = Some(last.collect());
        let open = answers.values().any(|it| it.open > 0);
        let paused = clock.duration_since(self.looked).abs() > PAUSE;
        let changed = open || paused || last != self.last;
        if changed {
            self.used = clock;
        }
        (self.last, self.looked) = (last, clock);
        let stale = |since: Timestamp| clock.duration_since(since).abs() >= SAME_NAMES;
        if changed && self.names.as_ref().is_none_or(|(since, _)| stale(*since)) {
            self.names = names(answers, within).map(|names| (clock, names));
        }
        let by = self.names.as_ref().map(|(_, names)| format!("used by {names}"));
        if open {
            Use::Used(by.unwrap_or_else(|| "in use".to_owned()))
        } else {
            Use::Unused { since: self.used, by }
        }
    }
}

/// The clients that used the door `within` that time, the latest ones if there are many.
fn names(answers: &BTreeMap<IpAddr, Counted>, within: Duration) -> Option<String> {
    let mut latest: BTreeMap<IpAddr, Duration> = BTreeMap::new();
    for &(client, ago) in answers.values().flat_map(|it| &it.clients).filter(|(_, ago)| *ago < within) {
        latest.entry(client).and_modify(|known| *known = ago.min(*known)).or_insert(ago);
    }
    let mut clients: Vec<(Duration, IpAddr)> =
        latest.into_iter().map(|(client, ago)| (ago, client)).collect();
    clients.sort_unstable();
    let more = if clients.len() > NAMED { " and others" } else { "" };
    let named: BTreeSet<IpAddr> = clients.into_iter().take(NAMED).map(|(_, client)| client).collect();
    let named: Vec<String> = named.iter().map(ToString::to_string).collect();
    (!named.is_empty()).then(|| format!("{}{more}", named.join(", ")))
}

#[cfg(test)]
mod tests;
