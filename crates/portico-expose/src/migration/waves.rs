//! Which of many clusters begins to migrate next: pure.
//!
//! There are slots for so many clusters at a time. A cluster that migrates has a slot until it is through,
//! whether this run began it or one before. So a run that was killed goes on where it ended. A failure must
//! not spread: after a cluster that could not be begun, or was taken back by somebody, no other one begins.

use std::collections::BTreeMap;

/// How far the migration of a cluster is, as one look shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// The strategy that is asked for is in force, and nothing is under way.
    There,
    /// It is wanted, and not yet all is done.
    UnderWay,
    /// Another change is under way.
    Elsewhere,
    /// Nothing is under way, and another strategy is in force.
    Waits,
    /// Nothing is recorded of its doors.
    Unknown,
}

/// What became of a cluster in this run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tried {
    /// It was ordered to migrate, or did so already.
    Ordered,
    /// It was not, and why: something stands in the way, of it alone.
    Skipped(String),
    /// Whether it may be ordered could not be found out, or the order could not be written.
    Failed(String),
    /// Somebody wrote another strategy meanwhile.
    WentBack,
}

/// How far the migrations of all clusters are, by the name of the cluster.
pub type AllProgress = BTreeMap<String, Progress>;

/// A run.
#[derive(Debug)]
pub struct Waves {
    /// How many slots there are.
    most: usize,
    tried: BTreeMap<String, Tried>,
    is_stopped: bool,
}

impl Waves {
    /// With slots for so many.
    pub fn new(most: usize) -> Self {
        Self { most, tried: BTreeMap::new(), is_stopped: false }
    }

    /// Takes in what a look shows. Returns those that somebody took back since the last one.
    pub fn observe(&mut self, seen: &AllProgress) -> Vec<String> {
        let mut back = Vec::new();
        for (name, progress) in seen {
            let was_ordered = self.tried.get(name) == Some(&Tried::Ordered);
            match progress {
                Progress::UnderWay => self.note(name, Tried::Ordered),
                Progress::Elsewhere | Progress::Waits if was_ordered => {
                    self.note(name, Tried::WentBack);
                    back.push(name.clone());
                }
                _ => {}
            }
        }
        back
    }

    /// Keeps what became of a cluster.
    pub fn note(&mut self, name: &str, tried: Tried) {
        self.is_stopped |= matches!(tried, Tried::Failed(_) | Tried::WentBack);
        self.tried.insert(name.to_owned(), tried);
    }

    /// The fate of a cluster, if its turn has come.
    pub fn tried(&self, name: &str) -> Option<&Tried> {
        self.tried.get(name)
    }

    /// The clusters that were ordered, or migrated already, and were not taken back.
    pub fn ordered(&self) -> impl Iterator<Item = &str> {
        self.tried.iter().filter(|(_, tried)| **tried == Tried::Ordered).map(|(name, _)| &**name)
    }

    /// Whether no other one begins, because something went wrong.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// The next cluster: the first by name that has had no turn. `None` while no slot is free, or once no
    /// other may begin.
    pub fn next<'a>(&self, seen: &'a AllProgress) -> Option<&'a str> {
        if self.is_stopped || self.slots_taken(seen) >= self.most {
            return None;
        }
        let may_begin = |(name, progress): &(&String, &Progress)| {
            matches!(progress, Progress::Waits | Progress::Unknown) && !self.tried.contains_key(*name)
        };
        seen.iter().find(may_begin).map(|(name, _)| &**name)
    }

    fn slots_taken(&self, seen: &AllProgress) -> usize {
        let elsewhere = seen.values().filter(|&&progress| progress == Progress::Elsewhere).count();
        elsewhere + seen.iter().filter(|(name, progress)| self.is_on_its_way(name, **progress)).count()
    }

    /// Whether it migrates to the strategy that is asked for. An order of a moment ago does not show in an
    /// earlier look.
    fn is_on_its_way(&self, name: &str, progress: Progress) -> bool {
        match progress {
            Progress::UnderWay => true,
            Progress::Waits | Progress::Unknown => self.tried.get(name) == Some(&Tried::Ordered),
            Progress::There | Progress::Elsewhere => false,
        }
    }

    /// Whether there is nothing left to begin or to wait for.
    pub fn is_over(&self, seen: &AllProgress) -> bool {
        let is_awaited = |(name, progress): (&String, &Progress)| {
            let has_its_turn_to_come = *progress == Progress::Elsewhere && !self.tried.contains_key(name);
            self.is_on_its_way(name, *progress) || !self.is_stopped && has_its_turn_to_come
        };
        !seen.iter().any(is_awaited) && self.next(seen).is_none()
    }
}

#[cfg(test)]
mod tests;
