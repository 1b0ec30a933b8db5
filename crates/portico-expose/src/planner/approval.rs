//! Whether a version of a Cluster may be put into force, and with which strategy.
//!
//! A Cluster keeps its strategy unless its label allows a migration. [`Judge::approve`] compares with the
//! version in force or, after a restart, with the persisted strategy.

use std::sync::Arc;

use portico_api::annotations::MIGRATION_LABEL;
use portico_api::cluster::Cluster;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::meta::{Kind, ObjectRef};
use portico_api::policy::{AllowList, ClusterPolicy};
use portico_api::problem::{Problem, Severity};
use portico_api::seed::Seed;
use portico_api::strategy::ExposeStrategy;

use super::entry::InForce;
use super::levels::{Active, LevelObject, Levels};
use super::settings::{Mode, Settings};
use crate::inputs::{Known, LoadBalancers, Scope};
use crate::persisted::PersistedState;
use crate::policy::{own_ranges, policy};
use crate::resolve::{self, DecidedBy, Decision};
use crate::strategy;
use crate::validate::{self, Before};

/// A Cluster that may be put into force.
pub(super) struct Approved {
    pub(super) decision: Decision,
    pub(super) seed: Arc<Seed>,
    /// What is wrong with it all the same.
    pub(super) problems: Vec<Problem>,
}

/// Everything a version of a Cluster is judged by.
pub(super) struct Judge<'a> {
    pub(super) settings: &'a Settings,
    pub(super) levels: &'a Levels,
    pub(super) persisted: &'a PersistedState,
}

impl Judge<'_> {
    /// Judges a version of a Cluster by the Seeds and configuration that are active now.
    ///
    /// # Errors
    /// Everything wrong with it, if it must not be put into force.
    pub(super) fn approve(
        &self,
        cluster: &Cluster,
        before: Option<&InForce>,
    ) -> Result<Approved, Vec<Problem>> {
        let (seed, configuration) = self.levels_of(cluster).map_err(|problem| vec![*problem])?;
        // KKP's webhook checks a change of strategy, and a watch may skip the version with the label.
        let before = before.filter(|_| self.settings.mode == Mode::Plan);
        let decided = resolve::strategy(cluster, &seed, configuration);
        let (decision, kept) = self.keep_strategy(cluster, before, decided);

        let scope = Scope { cluster, decision, seed: &seed, configuration };
        let version_before =
            before.map(|before| Before { cluster: &before.cluster, strategy: before.decision.strategy });
        let verdict = validate::cluster(&scope, version_before);
        let no_address = self.no_address(&scope);
        let problems = kept.into_iter().chain(verdict.problems).chain(no_address).collect();
        if verdict.refused { Err(problems) } else { Ok(Approved { decision, seed, problems }) }
    }

    /// The seed and configuration of a Cluster; the problem to report if it must wait for one of them.
    fn levels_of(
        &self,
        cluster: &Cluster,
    ) -> Result<(Arc<Seed>, Option<&KubermaticConfiguration>), Box<Problem>> {
        let seed = self.levels.seed_of(cluster)?;
        if seed.refused {
            return Err(Box::new(waits_for(cluster, &*seed.object)));
        }
        match self.levels.configuration() {
            Some(found) if found.refused => Err(Box::new(waits_for(cluster, &*found.object))),
            found => Ok((seed.object.clone(), found.map(|found| &*found.object))),
        }
    }

    /// The strategy that a Cluster keeps although `decided` names another, with the problem to report.
    fn keep_strategy(
        &self,
        cluster: &Cluster,
        before: Option<&InForce>,
        decided: Decision,
    ) -> (Decision, Option<Problem>) {
        let strategy = match before {
            // Validation refuses the whole version if the Cluster's own field changed.
            Some(before) if cluster.spec.expose_strategy != before.cluster.spec.expose_strategy => None,
            Some(before) => Some(before.decision.strategy),
            None => self.persisted.strategies.get(&cluster.name()).copied(),
        };
        let Some(strategy) = strategy else { return (decided, None) };
        if decided.strategy == strategy || cluster.may_migrate() {
            return (decided, None);
        }
        let problem = match (before, decided.decided_by) {
            // The Cluster's own field changed while no gateway ran. The rest of the object is used.
            (None, DecidedBy::Cluster) => validate::strategy_change(cluster, strategy, decided),
            _ => keeps_strategy(cluster, strategy, decided),
        };
        (Decision { strategy, decided_by: DecidedBy::Before }, Some(problem))
    }

    /// The warning that users cannot be given an address. Where KKP is at work, it finds the address.
    fn no_address(&self, scope: &Scope<'_>) -> Option<Problem> {
        if self.settings.mode == Mode::Observe || scope.host_suffix().is_some() {
            return None;
        }
        let known = known(scope.cluster, self.settings);
        let found = strategy::of(scope.decision.strategy).no_address(scope, &known)?;
        Some(Problem {
            severity: Severity::Warning,
            reason: "address-unknown",
            object: ObjectRef::new(Kind::Cluster, &scope.cluster.metadata),
            field: String::new(),
            message: format!("no address can be given to its users: there is no domain, and {}", found.why),
            remedy: format!("set spec.ingress.domain of the KubermaticConfiguration, or {}", found.remedy),
        })
    }
}

/// What is known outside the objects. A Cluster copied from an installation brings the address found there.
pub(super) fn known(cluster: &Cluster, settings: &Settings) -> Known {
    Known {
        resolved: cluster.status.address.ip.into_iter().collect(),
        node_ips: settings.node_ips.clone(),
        ..Known::default()
    }
}

/// The policy of a Cluster that was never approved. If its allow list cannot be known, no client is admitted.
pub(super) fn unapproved_policy(
    cluster: &Cluster,
    levels: &Levels,
    load_balancers: LoadBalancers,
) -> ClusterPolicy {
    let readable = |seed: &Seed| own_ranges(cluster, seed).all(|network| network.get().is_some());
    let (seed, known) = match levels.seed_of(cluster) {
        Ok(active) => (active.object.clone(), readable(&active.object)),
        Err(_) => {
            let no_defaults =
                |active: &Active<Seed>| active.object.spec.default_api_server_allowed_ip_ranges.is_empty();
            let none = Arc::<Seed>::default();
            let own = cluster.spec.api_server_allowed_ip_ranges.as_ref();
            let is_whole = own.is_none_or(|own| {
                !own.cidr_blocks.is_empty() || levels.seeds.active().iter().all(no_defaults)
            });
            let known = readable(&none) && is_whole;
            (none, known)
        }
    };
    let configuration = levels.configuration().map(|active| &*active.object);
    let decision = resolve::strategy(cluster, &seed, configuration);
    let mut policy = policy(&Scope { cluster, decision, seed: &seed, configuration }, load_balancers);
    if !known {
        policy.allow = AllowList::nobody();
    }
    policy
}

/// A paused cluster stays as it is. That is a problem only if something was changed meanwhile.
pub(super) fn paused(wanted: &Cluster, in_force: &Cluster) -> Vec<Problem> {
    let mut running = in_force.clone();
    running.spec.pause = true;
    running.status = wanted.status.clone();
    running.metadata = wanted.metadata.clone();
    if *wanted == running {
        return Vec::new();
    }
    vec![Problem {
        severity: Severity::Warning,
        reason: "paused",
        object: ObjectRef::new(Kind::Cluster, &wanted.metadata),
        field: "spec.pause".into(),
        message: "it is true, so later changes of this Cluster wait".into(),
        remedy: "set it to false to apply them".into(),
    }]
}

fn waits_for<T: LevelObject>(cluster: &Cluster, upper: &T) -> Problem {
    let upper = ObjectRef::new(T::KIND, upper.meta());
    Problem {
        severity: Severity::Error,
        reason: "waits-for-another",
        object: ObjectRef::new(Kind::Cluster, &cluster.metadata),
        field: String::new(),
        message: format!("it cannot be exposed while {upper} has problems of its own"),
        remedy: format!("mend {upper}"),
    }
}

fn keeps_strategy(cluster: &Cluster, old: ExposeStrategy, decided: Decision) -> Problem {
    let new = decided.strategy;
    Problem {
        severity: Severity::Warning,
        reason: "keeps-strategy",
        object: ObjectRef::new(Kind::Cluster, &cluster.metadata),
        field: "spec.exposeStrategy".into(),
        message: format!(
            "it stays at {old} although {} now says {new}: existing clusters are not moved",
            decided.decided_by
        ),
        remedy: format!("write {old} to make it plain, or add the label {MIGRATION_LABEL} to move it"),
    }
}
