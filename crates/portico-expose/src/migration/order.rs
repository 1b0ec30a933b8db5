//! The change of a Cluster that carries out an order, and when the order is done: pure.

use portico_api::annotations::{MIGRATION_LABEL, MIGRATION_LABEL_OURS};
use portico_api::cluster::Cluster;
use portico_api::exposed_cluster::{ExposedClusterSpec, MigrationState};
use portico_api::migration::{MIGRATION, MigrationSettings, ROLLBACK};
use portico_api::strategy::ExposeStrategy;
use serde_json::{Value, json};

use super::{Now, Second};
use crate::strategy;

/// What a person wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    /// Another strategy, with these items of the annotation instead of those that are there.
    To {
        /// The strategy.
        strategy: ExposeStrategy,
        /// Each `KEY=VALUE`.
        settings: Vec<String>,
    },
    /// The way in that is not wanted now; of a cluster that goes back already, the one that is wanted.
    Rollback,
    /// The end of the old way in.
    Finish,
}

/// What follows from an order.
#[derive(Debug, Clone, PartialEq)]
pub struct OrderedChange {
    /// What is merged into the Cluster; `None` if it is so already.
    pub patch: Option<Value>,
    /// What to wait for.
    pub until: Until,
    /// The message to the person.
    pub said: String,
}

/// What a person waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// This strategy is in force, and nothing is under way.
    Settled(ExposeStrategy),
    /// The door by this strategy is closed, whatever comes next; this one is wanted.
    Closed {
        /// What closes.
        door: ExposeStrategy,
        /// What is wanted instead.
        wanted: ExposeStrategy,
    },
}

impl Until {
    /// The strategy that is wanted as long as nobody changes their mind.
    pub fn wanted(self) -> ExposeStrategy {
        match self {
            Self::Settled(wanted) | Self::Closed { wanted, .. } => wanted,
        }
    }
}

/// The change of `cluster` by `order`. `record` is its record.
///
/// # Errors
/// Why it cannot be carried out.
pub fn change(
    order: &Order,
    cluster: &Cluster,
    record: &ExposedClusterSpec,
) -> Result<OrderedChange, String> {
    if cluster.spec.pause {
        return Err("the Cluster is paused, and the operator stands still: set spec.pause: false".to_owned());
    }
    if cluster.metadata.deletion_timestamp.is_some() {
        return Err("the Cluster is being deleted".to_owned());
    }
    let now = Now::of(record);
    let wanted = cluster.spec.expose_strategy.get().copied().unwrap_or(now.first);
    match order {
        Order::To { strategy, .. } => to(*strategy, order, wanted, cluster, record),
        Order::Rollback => {
            let goes_back = cluster.metadata.annotation(ROLLBACK) == Some(wanted.name());
            if goes_back && now == Now::settled(wanted) {
                let said = format!("{wanted} is the one way in again already");
                return Ok(OrderedChange { patch: None, until: Until::Settled(wanted), said });
            }
            if goes_back {
                let said =
                    format!("goes back to {wanted} already; --to with another strategy turns it round");
                return Ok(OrderedChange { said, ..to(wanted, order, wanted, cluster, record)? });
            }
            let target = match now.second {
                // What waits is given up, and then what is under way.
                None if wanted != now.first => now.first,
                Some(second) if wanted == now.first => second.strategy,
                Some(_) => now.first,
                None => {
                    return Err(format!(
                        "there is nothing to roll back: {} is the one way in, and nothing is under way; \
                         back to a former strategy is a migration of its own (--to)",
                        now.first
                    ));
                }
            };
            to(target, order, wanted, cluster, record)
        }
        Order::Finish => finish(now, wanted, cluster),
    }
}

/// Makes `target`, to which `order` leads, the wanted strategy.
fn to(
    target: ExposeStrategy,
    order: &Order,
    wanted: ExposeStrategy,
    cluster: &Cluster,
    record: &ExposedClusterSpec,
) -> Result<OrderedChange, String> {
    let now = Now::of(record);
    if target == wanted && target == now.first && now.second.is_none() {
        return Err(format!("its strategy is {target} already"));
    }
    let mut patch = json!({});
    if !cluster.may_migrate() {
        patch["metadata"]["labels"] = json!({MIGRATION_LABEL: MIGRATION_LABEL_OURS});
    }
    // An order of an earlier day to close this or the other door would come too early.
    let keeps_order = target == wanted;
    let given: &[String] = if let Order::To { settings, .. } = order { settings } else { &[] };
    let settings = edited(cluster, keeps_order, given)?;
    if let Some(settings) = settings {
        patch["metadata"]["annotations"][MIGRATION] = settings;
    }
    let mark = cluster.metadata.annotation(ROLLBACK);
    let new_mark = match order {
        Order::Rollback => Some(target.name()),
        _ => mark.filter(|_| target == wanted),
    };
    if new_mark != mark {
        patch["metadata"]["annotations"][ROLLBACK] = json!(new_mark);
    }
    if cluster.spec.expose_strategy.get() != Some(&target) {
        patch["spec"]["exposeStrategy"] = json!(target);
    }
    let written = &cluster.spec.cluster_network.tunneling_agent_ip;
    if !strategy::of(target).has_agent() {
        if !written.is_unset() {
            patch["spec"]["clusterNetwork"] = json!({"tunnelingAgentIP": null});
        }
    } else if let Some(ip) = agents(record).filter(|_| written.is_unset()) {
        // The operator would write the default, and nodes have agents at this one.
        patch["spec"]["clusterNetwork"] = json!({"tunnelingAgentIP": ip});
    }
    let patch = Some(patch).filter(|patch| *patch != json!({}));
    Ok(OrderedChange { patch, until: Until::Settled(target), said: said(target, now, cluster) })
}

/// Where agents listen by the recorded door that has some.
fn agents(record: &ExposedClusterSpec) -> Option<std::net::IpAddr> {
    let second = record.migration.as_ref().and_then(|migration| migration.second.tunnel);
    record.tunnel.or(second).map(|tunnel| tunnel.agent_ip)
}

fn waits(third: ExposeStrategy, closes: ExposeStrategy) -> String {
    format!("{third} waits until one door is left: {closes} closes first (--finish), then it begins")
}

/// What becomes of the doors.
fn said(target: ExposeStrategy, now: Now, cluster: &Cluster) -> String {
    let name = &cluster.metadata.name;
    let first = now.first;
    match now.second {
        None if target == first => format!("{first} stays the one way in; nothing else was open"),
        None => format!(
            "from {first} to {target}. `portico status {name}` says how far it is. {first} closes once \
             nobody uses it, or by portico migrate {name} --finish; --rollback goes back"
        ),
        Some(Second { strategy, state: MigrationState::Opening | MigrationState::Proving, .. }) => {
            if target == first {
                format!("{first} stays, nobody was told of {strategy}, which closes again (--finish)")
            } else if target == strategy {
                format!("from {first} to {target}; that is under way already")
            } else {
                waits(target, strategy)
            }
        }
        Some(Second { strategy, .. }) => {
            if target == first {
                format!("{first} is in force already, {strategy} closes (--finish)")
            } else if target == strategy {
                format!(
                    "back from {first} to {target}: it is proven again, all are told of it, {first} closes"
                )
            } else {
                waits(target, strategy)
            }
        }
    }
}

/// Orders the door that is not in force to be closed.
fn finish(now: Now, wanted: ExposeStrategy, cluster: &Cluster) -> Result<OrderedChange, String> {
    let first = now.first;
    let Some(Second { strategy, state, .. }) = now.second else {
        return Err(format!("there is no second door to close: {first} is the one way in"));
    };
    if wanted == strategy {
        return Err(format!(
            "{strategy} is wanted and not in force yet ({}): --finish closes {first} once all are told of \
             {strategy}; --rollback closes {strategy}",
            state.name()
        ));
    }
    let settings = edited(cluster, false, &[format!("close={strategy}")])?;
    let patch = settings.map(|settings| json!({"metadata": {"annotations": {MIGRATION: settings}}}));
    let until =
        if wanted == first { Until::Settled(first) } else { Until::Closed { door: strategy, wanted } };
    let early = match state {
        MigrationState::Moving => "; what has not followed by then is cut off",
        _ => "",
    };
    let then = if wanted == first { String::new() } else { format!("; then {wanted} is opened") };
    Ok(OrderedChange {
        patch,
        until,
        said: format!("{strategy} closes, whoever still uses it{early}; {first} stays{then}"),
    })
}

/// The annotation with the `given` settings in place of the present ones, or `null` if none is left. `None`
/// if nothing changes. An order to close is kept if `keeps_order`.
///
/// # Errors
/// The annotation cannot be read. Its settings must not be lost unseen.
fn edited(cluster: &Cluster, keeps_order: bool, given: &[String]) -> Result<Option<Value>, String> {
    let written = cluster.metadata.annotation(MIGRATION);
    MigrationSettings::of(written).map_err(|error| {
        format!("its annotation {MIGRATION} cannot be read: {error}; correct it, or remove it")
    })?;
    let items = written.into_iter().flat_map(|text| text.split(',')).map(str::trim);
    let stays = |item: &&str| match key(item) {
        "close" => keeps_order,
        key => given.iter().all(|given| self::key(given) != key),
    };
    let all: Vec<&str> = items.filter(stays).chain(given.iter().map(String::as_str)).collect();
    Ok(match (written, &*all.join(",")) {
        (None, "") => None,
        (Some(before), after) if before == after => None,
        (Some(_), "") => Some(Value::Null),
        (_, after) => Some(after.into()),
    })
}

/// Which setting an item of the annotation is.
fn key(item: &str) -> &str {
    item.split_once('=').map_or(item, |(key, _)| key)
}

#[cfg(test)]
mod tests;
