//! Live migration of a cluster between expose strategies: which step comes next, once its [`Proof`]s hold.
//!
//! A door is the way in by one strategy. A cluster has one, or two while it migrates, never three. The first
//! is published: users and nodes have its address. The second is opened, tried and then published, at which
//! the two change places. Or it is the former first door, and closes. The way back has the same states: only
//! the wanted strategy decides the direction.
//!
//! [`step`] takes one decision from plain values. The exposure controller observes. It writes the record
//! first, then opens and closes what the record says. So a process that is killed in between leaves no
//! unrecorded door. Nothing ends by a time limit. A missing proof is waited for and reported.

use std::collections::BTreeMap;
use std::fmt;

use jiff::{SignedDuration, Timestamp};
use portico_api::exposed_cluster::{ExposedClusterSpec, MigrationState};
use portico_api::migration::{BadMigrationSettings, MIGRATION, MigrationSettings};
use portico_api::strategy::ExposeStrategy;

pub mod last_use;
pub mod order;
pub mod plan;
pub mod waves;

/// A door that was used within that time is reported as in use.
const RESTS: SignedDuration = SignedDuration::from_mins(1);

/// The doors of a cluster, and how far it is between them: what its ExposedCluster records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Now {
    /// The published door, whose address users and nodes have.
    pub first: ExposeStrategy,
    /// The other one; `None` while nothing is under way.
    pub second: Option<Second>,
}

/// The second door.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Second {
    /// Its strategy.
    pub strategy: ExposeStrategy,
    /// What is under way.
    pub state: MigrationState,
    /// When that began. No state is entered twice at the same time, so this tells proofs of an earlier
    /// attempt from those of this one.
    pub since: Timestamp,
}

/// Something that must hold before the next state. Each is observed by one controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Proof {
    /// The label is there, and this cluster can have two doors.
    Permission,
    /// The second door has its NodePorts, its load balancer and its name.
    Address,
    /// Every ready gateway routes the second door.
    Routes,
    /// The certificate of the API server has the names of the second door.
    Certificate,
    /// The API server answers by the second door, with that certificate.
    Answer,
    /// Every ready node reaches the second door.
    Reach,
    /// The second door's node agents are ready on every ready node, if it has any.
    Agents,
    /// Konnectivity works by the second door, if there is Konnectivity.
    Konnectivity,
    /// The address of the second door is the one by which the others were tried. Where it is another one by
    /// now, they are worth nothing.
    SameAddress,
    /// `status.address` is that of the first door.
    Status,
    /// Kubeconfigs that are issued lead to the first door.
    Kubeconfigs,
    /// Service `kubernetes` and `cluster-info` lead to the first door.
    Endpoints,
    /// kube-proxy and the Konnectivity agents are rolled out with the first door.
    Rollouts,
    /// Every ready node uses the first door. One that is away is reported, and does not hold up the others.
    Nodes,
    /// Every node is ready. Nothing waits for that: one that is not is reported, for it keeps its address.
    Present,
    /// Nothing that belongs to the second door alone is left inside the cluster.
    GoneInside,
    /// Nothing that belongs to the second door alone is left on the seed.
    GoneOnSeed,
}

/// What was observed of one [`Proof`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fact {
    /// It holds.
    So,
    /// It does not, or that is unknown: which object, and why.
    NotSo(String),
}

/// The observed use of the second door.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Use {
    /// It is in use, or that is unknown: by which clients, or why.
    Used(String),
    /// No connection is open, and none was since then.
    Unused {
        /// Since when.
        since: Timestamp,
        /// The client that used it last, as far as is known.
        by: Option<String>,
    },
}

/// What was observed. What is not here is not known yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// What was recorded when the look began. Later it proves nothing: the doors may have changed places.
    pub of: Now,
    /// What is known of each proof.
    pub proofs: BTreeMap<Proof, Fact>,
    /// The known use of the second door.
    pub second_door: Option<Use>,
}

/// What a state waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Waiting {
    /// For a proof: why it does not hold, or `None` if it is not known yet.
    For(Proof, Option<String>),
    /// Until the second door is out of use. The text says how it is used; `None` if that is not known yet.
    Quiet(Option<String>),
}

/// What follows from one look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Next {
    /// What is to be recorded. Only these doors may be open.
    pub now: Now,
    /// Why it is as before; empty if it went on, or nothing is under way.
    pub waits_for: Vec<Waiting>,
    /// A third strategy that is wanted: its turn comes once one door is left.
    pub later: Option<ExposeStrategy>,
    /// What else is to be known, and holds nothing up.
    pub aside: Option<String>,
}

impl Now {
    /// One door, and nothing under way.
    pub fn settled(first: ExposeStrategy) -> Self {
        Self { first, second: None }
    }

    /// What is recorded of a cluster.
    pub fn of(exposed: &ExposedClusterSpec) -> Self {
        let second = exposed.migration.as_ref().map(|migration| Second {
            strategy: migration.second.expose_strategy,
            state: migration.state,
            since: migration.since,
        });
        Self { first: exposed.expose_strategy, second }
    }

    /// The record to assume for a cluster whose ExposedCluster is gone, for instance because somebody deleted
    /// it half-way. `open` are its doors that are there, each with the URL by which it is reached, and
    /// `published` is the URL in its status. `None` if no door is open: it is a new cluster.
    ///
    /// If two doors are open, the first is the published one. If neither is, the first is the one that is not
    /// wanted. Then the other is proven before it is published. Either way all proofs are made again, and
    /// nothing closes before.
    pub fn rebuilt(
        open: &[(ExposeStrategy, &str)],
        published: &str,
        wanted: ExposeStrategy,
        clock: Timestamp,
    ) -> Option<Self> {
        let of_url = || open.iter().find(|&&(_, url)| url == published);
        let of_others = || open.iter().find(|&&(strategy, _)| strategy != wanted);
        let &(first, _) = of_url().or_else(of_others).or(open.first())?;
        let others = || open.iter().map(|&(strategy, _)| strategy).filter(|&strategy| strategy != first);
        let second = others().find(|&strategy| strategy == wanted).or_else(|| others().next());
        let Some(strategy) = second else { return Some(Self::settled(first)) };
        let state = if strategy == wanted { MigrationState::Opening } else { MigrationState::Moving };
        Some(Self { first, second: Some(Second { strategy, state, since: clock }) })
    }

    /// The strategies of the doors that are to be open: the second one until it is being closed.
    pub fn open(&self) -> impl Iterator<Item = ExposeStrategy> {
        let second = self.second.filter(|second| second.state != MigrationState::Closing);
        [self.first].into_iter().chain(second.map(|second| second.strategy))
    }
}

impl Facts {
    /// Nothing is known yet of what is recorded as `of`.
    pub fn unknown(of: Now) -> Self {
        Self { of, proofs: BTreeMap::new(), second_door: None }
    }

    /// Adds what another controller observed, unless something else was recorded then.
    pub fn add(&mut self, other: &Self) {
        if self.of == other.of {
            self.proofs.extend(other.proofs.iter().map(|(&proof, fact)| (proof, fact.clone())));
            self.second_door = other.second_door.clone().or(self.second_door.take());
        }
    }

    /// Which of `proofs` do not hold, as far as is known.
    fn missing(&self, proofs: &[Proof]) -> Vec<Waiting> {
        let missing = |&proof: &Proof| match self.proofs.get(&proof) {
            Some(Fact::So) => None,
            Some(Fact::NotSo(why)) => Some(Waiting::For(proof, Some(why.clone()))),
            None => Some(Waiting::For(proof, None)),
        };
        proofs.iter().filter_map(missing).collect()
    }
}

/// The proofs that lead out of a state; those of [`MigrationState::Quieting`] are no list.
fn proofs(state: MigrationState) -> &'static [Proof] {
    match state {
        MigrationState::Opening => &[Proof::Address, Proof::Routes, Proof::Certificate],
        MigrationState::Proving => {
            &[Proof::Answer, Proof::Reach, Proof::Agents, Proof::Konnectivity, Proof::SameAddress]
        }
        MigrationState::Moving => &[Proof::Status, Proof::Kubeconfigs, Proof::Endpoints, Proof::Rollouts],
        MigrationState::MovingNodes => &[Proof::Nodes],
        MigrationState::Quieting => &[],
        MigrationState::Closing => &[Proof::GoneInside, Proof::GoneOnSeed],
    }
}

/// The next state of a cluster of which `now` is recorded and `wanted` is wanted: at most one transition.
///
/// Facts of another record count as unknown. If the settings cannot be read, everything about them is
/// unknown, so that the second door stays open.
pub fn step(
    now: Now,
    wanted: ExposeStrategy,
    settings: &Result<MigrationSettings, BadMigrationSettings>,
    facts: &Facts,
    clock: Timestamp,
) -> Next {
    use MigrationState::{Closing, Moving, MovingNodes, Opening, Proving, Quieting};

    let nothing = Facts::unknown(now);
    let facts = if facts.of == now { facts } else { &nothing };
    let first = now.first;
    let with_second = |first, strategy, state| {
        let second = Some(Second { strategy, state, since: clock });
        Next { now: Now { first, second }, waits_for: Vec::new(), later: None, aside: None }
    };
    let Some(second) = now.second else {
        if wanted == first {
            return Next { now, waits_for: Vec::new(), later: None, aside: None };
        }
        let waits_for = facts.missing(&[Proof::Permission]);
        if waits_for.is_empty() {
            return with_second(first, wanted, Opening);
        }
        return Next { now, waits_for, later: None, aside: None };
    };
    let Second { strategy, state, .. } = second;
    let forward = wanted == strategy;
    let to = |state| with_second(first, strategy, state);
    let has_moved = matches!(facts.proofs.get(&Proof::SameAddress), Some(Fact::NotSo(_)));
    let waits_for = match state {
        Quieting => quiet(second, settings, facts, clock),
        MovingNodes if ordered(settings, strategy) => Vec::new(),
        // What has not followed may never do. The door that the status names stays open all the same.
        Moving if ordered(settings, strategy) => facts.missing(&[Proof::Status]),
        _ => facts.missing(proofs(state)),
    };
    let next = match (state, forward) {
        // A change of mind. Proofs are made again, and closed doors are opened again.
        (Opening | Proving, false) => to(Moving),
        (Moving | MovingNodes | Quieting | Closing, true) => to(Opening),
        // An address that was not proven is not published.
        (Proving, true) if has_moved => to(Opening),
        _ if !waits_for.is_empty() => Next { now, waits_for, later: None, aside: None },
        (Opening, true) => to(Proving),
        // The two change places.
        (Proving, true) => with_second(strategy, first, Moving),
        (Moving, false) => to(MovingNodes),
        (MovingNodes, false) => to(Quieting),
        (Quieting, false) => to(Closing),
        (Closing, false) => Next { now: Now::settled(first), waits_for, later: None, aside: None },
    };
    let later = (!forward && wanted != first).then_some(wanted);
    let aside = match (next.now.second, facts.proofs.get(&Proof::Present)) {
        (Some(_), Some(Fact::NotSo(why))) => Some(why.clone()),
        _ => None,
    };
    Next { later, aside, ..next }
}

/// Whether the door by `strategy` is to close although it is in use.
fn ordered(settings: &Result<MigrationSettings, BadMigrationSettings>, strategy: ExposeStrategy) -> bool {
    settings.as_ref().is_ok_and(|settings| settings.close == Some(strategy))
}

/// What Quieting waits for.
fn quiet(
    second: Second,
    settings: &Result<MigrationSettings, BadMigrationSettings>,
    facts: &Facts,
    clock: Timestamp,
) -> Vec<Waiting> {
    let said = match (settings, &facts.second_door) {
        (Ok(settings), _) if settings.close == Some(second.strategy) => return Vec::new(),
        (Err(error), _) => Some(format!("the annotation {MIGRATION} cannot be read: {error}")),
        (Ok(_), None) => None,
        (Ok(_), Some(Use::Used(by))) => Some(by.clone()),
        (Ok(settings), Some(Use::Unused { since, by })) => {
            // Before this state something of ours may have led there.
            let began = second.since.max(*since);
            // An end beyond all time is never reached.
            let end = began.checked_add(settings.quiet).unwrap_or(Timestamp::MAX);
            if clock >= end {
                return Vec::new();
            }
            // No running time, because each new text is a write. Within a minute of a known client's last use
            // no time at all: it would change with each connection.
            Some(match by {
                Some(by) if clock.duration_since(began) < RESTS => by.clone(),
                Some(by) => format!("unused since {began:.0}, it closes at {end:.0}; last {by}"),
                None => format!("unused since {began:.0}, it closes at {end:.0}"),
            })
        }
    };
    vec![Waiting::Quiet(said)]
}

// === Display ===

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Permission => "permission to begin",
            Self::Address => "its address",
            Self::Routes => "routes on every gateway",
            Self::Certificate => "a certificate with its names",
            Self::Answer => "an answer of the API server",
            Self::Reach => "every node to reach it",
            Self::Agents => "node agents on every node",
            Self::Konnectivity => "Konnectivity",
            Self::SameAddress => "an address that stays",
            Self::Status => "status.address",
            Self::Kubeconfigs => "kubeconfigs",
            Self::Endpoints => "Service kubernetes and cluster-info",
            Self::Rollouts => "rollouts of kube-proxy and the Konnectivity agents",
            Self::Nodes => "nodes",
            Self::Present => "all nodes to be ready",
            Self::GoneInside => "removal inside the cluster",
            Self::GoneOnSeed => "removal on the seed",
        })
    }
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = match self {
            Self::For(proof, why) => {
                proof.fmt(f)?;
                why
            }
            Self::Quiet(said) => {
                f.write_str("quiet")?;
                said
            }
        };
        match why {
            Some(why) => write!(f, ": {why}"),
            None => f.write_str(" (not known yet)"),
        }
    }
}

impl fmt::Display for Next {
    /// One sentence for a condition: the current step, what that waits for, and the next step.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first = self.now.first;
        match self.now.second {
            None => write!(f, "{first} is the one way in")?,
            Some(Second { strategy: second, state, .. }) => match state {
                MigrationState::Opening => write!(f, "{second} is being opened beside {first}")?,
                MigrationState::Proving => write!(f, "{second} is open beside {first}, and is tried")?,
                MigrationState::Moving => write!(f, "all are told of {first}, {second} stays open")?,
                MigrationState::MovingNodes => write!(f, "nodes follow to {first}, {second} stays open")?,
                MigrationState::Quieting => {
                    write!(f, "{first} is in force, {second} closes once it is quiet")?
                }
                MigrationState::Closing => write!(f, "{first} is in force, {second} is being closed")?,
            },
        }
        for (index, waiting) in self.waits_for.iter().enumerate() {
            let before = if index == 0 { "; waits for " } else { "; for " };
            write!(f, "{before}{waiting}")?;
        }
        match (self.later, self.now.second) {
            (Some(later), Some(second)) => write!(f, "; {later} waits until {} is closed", second.strategy)?,
            (Some(later), None) => write!(f, "; {later} is next")?,
            (None, _) => {}
        }
        self.aside.as_ref().map_or(Ok(()), |aside| write!(f, "; {aside}"))
    }
}

#[cfg(test)]
mod tests;
