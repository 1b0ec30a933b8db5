//! The course of a migration of a cluster, shown before it begins. It lists both doors, what stands in the
//! way, and the steps. Each step has the party that acts, its proof, what users notice, and the way back.
//!
//! A [`MigrationPlan`] follows from plain values. Nothing is decided here: [`step`](super::step) decides. The
//! steps are per [`ManagedBy`], because not every cluster can have two doors. Two kinds of cluster cannot:
//! those beside KKP, and those whose pods another program manages. For them the page says what a change
//! costs.

use std::collections::BTreeSet;
use std::net::IpAddr;

use portico_api::annotations::{ENDPOINTS, LAYOUT, MAX_CONNECTIONS, MAX_CONNECTIONS_PER_SECOND};
use portico_api::cluster::{Address, CONTROL_PLANE_READY, Cluster, USER_CLUSTER_READY};
use portico_api::exposed_cluster::MigrationState;
use portico_api::names::ClusterName;
use portico_api::problem::{Problem, Severity};
use portico_api::strategy::ExposeStrategy;
use serde::Serialize;

use super::Now;
use crate::doors::{BothDoors, told_apart};
use crate::networks::DEFAULT_AGENT_IP;
use crate::plan::Plan;
use crate::services::{Entry, MLA_GATEWAY, runs_elsewhere};
use crate::strategy;
use crate::user_cluster::{BAD_KUBECONFIG, NO_KUBECONFIG};

mod steps;
mod text;

/// The manager of a cluster's control plane. It decides the effect of another strategy on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum ManagedBy {
    /// Portico hosts it.
    Hosted,
    /// It runs elsewhere, at addresses that the Cluster names.
    Elsewhere,
    /// Somebody's pods are behind the Services that Portico makes.
    Pods,
    /// KKP's controllers.
    Kkp,
}

/// The party that acts in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Party {
    /// Portico's operator.
    Operator,
    /// KKP's controllers.
    Kkp,
    /// The person responsible for the cluster.
    Administrator,
}

/// What a plan follows from.
#[derive(Debug, Clone, Copy)]
pub struct Facts<'a> {
    /// The Cluster as it is.
    pub cluster: &'a Cluster,
    /// What manages its control plane.
    pub managed_by: ManagedBy,
    /// The old door alone; its address is the one that users know.
    pub from: &'a Plan,
    /// The new door alone.
    pub to: &'a Plan,
    /// Both together.
    pub both: &'a BothDoors,
    /// The record of its doors, if that is known.
    pub now: Option<Now>,
    /// What keeps the Cluster from the new strategy.
    pub problems: &'a [Problem],
    /// Names of the certificate at the address of now, if somebody looked.
    pub presented: Option<&'a [Box<str>]>,
    /// Whether the operator has an image to start something with inside the cluster, if that is known.
    pub has_image: Option<bool>,
}

/// What a migration would do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MigrationPlan {
    /// The cluster.
    pub cluster: ClusterName,
    /// What manages its control plane.
    #[serde(rename = "keeper")]
    pub managed_by: ManagedBy,
    /// The door that closes.
    pub from: DoorPlan,
    /// The door that takes its place.
    pub to: DoorPlan,
    /// Whether its API server has to restart for it.
    pub restarts_api_server: bool,
    /// What stands in the way. With one of them it is not begun.
    pub blockers: Vec<Blocker>,
    /// Names that the certificate at the address of now lacks for the new door.
    pub missing_names: Vec<String>,
    /// The objects while both doors are open; `None` where they never are.
    pub both: Option<BothDoors>,
    /// What happens, in order.
    pub steps: Vec<Step>,
    /// What else is worth to know before.
    pub notes: Vec<String>,
}

/// One door.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DoorPlan {
    /// Its strategy.
    pub strategy: ExposeStrategy,
    /// Where users and nodes find the cluster by it, as far as that is known.
    pub address: Address,
    /// What the gateway knows its connections by.
    pub keys: Vec<String>,
    /// Where the agent on each worker node listens, if there is one.
    pub agent_ip: Option<IpAddr>,
}

/// Something that stands in the way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Blocker {
    /// What.
    pub what: String,
    /// What to do about it.
    pub remedy: String,
}

/// One step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Step {
    /// Its name: that of the state, where the operator leads.
    pub name: &'static str,
    /// The state of the machine that it is; `None` where another leads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<MigrationState>,
    /// The party that acts.
    pub who: Party,
    /// What is done.
    pub does: String,
    /// What proves that it is done.
    pub proof: String,
    /// What users notice.
    pub users: String,
    /// The way back from here.
    pub back: String,
}

/// What a migration of a cluster would do.
pub fn plan(facts: &Facts<'_>) -> MigrationPlan {
    let Facts { cluster, managed_by, from, to, both, .. } = *facts;
    let conflicts = !both.conflicts.is_empty();
    MigrationPlan {
        cluster: cluster.name(),
        managed_by,
        from: DoorPlan::of(from),
        to: DoorPlan::of(to),
        restarts_api_server: match managed_by {
            ManagedBy::Hosted | ManagedBy::Elsewhere => false,
            ManagedBy::Pods => conflicts,
            ManagedBy::Kkp => true,
        },
        blockers: blockers(facts),
        missing_names: missing_names(facts),
        both: has_two_doors(managed_by).then(|| both.clone()),
        steps: steps::steps(facts),
        notes: notes(facts),
    }
}

/// Whether a cluster that is managed like this can have two doors at once. Then the ports of its API server
/// are its own under every strategy. Somebody's pods behind the Services listen on the NodePort, as in KKP,
/// and on one port alone.
pub fn has_two_doors(managed_by: ManagedBy) -> bool {
    matches!(managed_by, ManagedBy::Hosted | ManagedBy::Elsewhere)
}

/// Whether `cluster`, as it runs now and without KKP, can have two doors at once. An order to host it that
/// was not carried out changes nothing of how it runs.
pub fn has_two_doors_now(cluster: &Cluster) -> bool {
    cluster.is_hosted() || runs_elsewhere(cluster)
}

/// The manager of `cluster`'s control plane, as far as the Cluster says. `kkp` says whether KKP's controllers
/// are at work. A Cluster that asks to be hosted counts as hosted: a manifest does not say what was begun.
pub fn managed_by(cluster: &Cluster, kkp: bool) -> ManagedBy {
    if kkp {
        ManagedBy::Kkp
    } else if cluster.has_layout() || cluster.is_hosted() {
        ManagedBy::Hosted
    } else if runs_elsewhere(cluster) {
        ManagedBy::Elsewhere
    } else {
        ManagedBy::Pods
    }
}

impl DoorPlan {
    fn of(plan: &Plan) -> Self {
        Self {
            strategy: plan.decision.strategy,
            address: plan.address.clone(),
            keys: plan.entries.iter().flat_map(keys).collect(),
            agent_ip: plan.agent_ip,
        }
    }

    /// Its URL, or why there is none yet.
    fn url(&self) -> &str {
        match (&*self.address.url, strategy::of(self.strategy).has_load_balancer()) {
            ("", true) => "not known before it has a load balancer",
            ("", false) => "not known before it is open",
            (url, _) => url,
        }
    }
}

/// What the gateway knows connections to a Service by.
fn keys(entry: &Entry) -> Vec<String> {
    let port = entry.node_port.map(|port| format!("port {port}"));
    let host = entry.host.as_ref().map(|host| format!("host {host}"));
    let authority = entry.authority.as_ref().map(|authority| format!("authority {authority}"));
    let keys: Vec<String> = [port, host, authority].into_iter().flatten().collect();
    if keys.is_empty() {
        vec![format!("a port for {}, allocated once it opens", entry.service)]
    } else {
        keys
    }
}

// === What stands in the way ===

/// Whether the door that is asked for is the published one, and another is open beside it.
fn takes_back(facts: &Facts<'_>) -> bool {
    let to = facts.to.decision.strategy;
    facts.now.is_some_and(|now| now.first == to && now.second.is_some())
}

fn blockers(facts: &Facts<'_>) -> Vec<Blocker> {
    let Facts { cluster, managed_by, from, to, both, .. } = *facts;
    let (old, new) = (from.decision.strategy, to.decision.strategy);
    let mut found = Vec::new();
    let mut block = |what: String, remedy: &str| found.push(Blocker { what, remedy: remedy.to_owned() });
    if cluster.metadata.deletion_timestamp.is_some() {
        block("the Cluster is being deleted".to_owned(), "let it go");
    }
    if old == new && !takes_back(facts) {
        block(format!("its strategy is {new} already"), "name another strategy");
    }
    if cluster.spec.pause {
        block("the Cluster is paused: nobody changes anything of it".to_owned(), "set spec.pause: false");
    }
    if managed_by == ManagedBy::Hosted && !cluster.has_layout() && !takes_back(facts) {
        block(
            format!("its annotation {LAYOUT} is gone, so its control plane stays as it is"),
            "set the annotation again",
        );
    }
    let not_begun = cluster.status.conditions.get(CONTROL_PLANE_READY).filter(|_| !cluster.is_hosted());
    if let Some(found) = not_begun.filter(|_| cluster.has_layout()) {
        block(format!("its control plane is not begun: {}", found.message), "do what that says first");
    }
    if from.address.url.is_empty() {
        block(
            "it has no address yet, so there is no door to keep open".to_owned(),
            "wait until its condition PorticoExposed is True, or change spec.exposeStrategy right away",
        );
    }
    let errors = facts.problems.iter().filter(|problem| problem.severity == Severity::Error);
    for problem in errors {
        block(format!("{}: {}", problem.field, problem.message), &problem.remedy);
    }
    let ranges = cluster.spec.api_server_allowed_ip_ranges.as_ref();
    let has_ranges = ranges.is_some_and(|ranges| !ranges.cidr_blocks.is_empty());
    if has_ranges && !strategy::of(new).has_load_balancer() {
        block(
            format!(
                "spec.apiServerAllowedIPRanges is set: the definition of the kind refuses {new} with it, and \
                 without it every client may come by either door"
            ),
            "decide whether every client may come, and remove the list first if so",
        );
    }
    if let (Some(before), Some(after)) = (pods_reach(from), pods_reach(to))
        && before.is_ipv4() != after.is_ipv4()
        && has_two_doors(managed_by)
    {
        block(
            format!(
                "pods reach the API server at {before} now and at {after} then: the EndpointSlice \
                 `kubernetes` cannot change its family"
            ),
            "give the new door an address of the same family",
        );
    }
    if has_two_doors(managed_by) && !takes_back(facts) {
        let inside = cluster.status.conditions.get(USER_CLUSTER_READY);
        if let Some(found) = inside.filter(|it| [NO_KUBECONFIG, BAD_KUBECONFIG].contains(&&*it.reason)) {
            block(
                format!("nothing inside the cluster can be looked at: {}", found.message),
                &format!("wait then until the reason of its condition {USER_CLUSTER_READY} is another one"),
            );
        }
        if facts.has_image == Some(false) {
            block(
                "the operator was started without --image: nothing can try the new door from the nodes"
                    .to_owned(),
                "give its Deployment the argument --image=IMAGE, as in deploy/operator.yaml",
            );
        }
    }
    if managed_by == ManagedBy::Pods {
        for conflict in &both.conflicts {
            let port = |port: &Option<_>| serde_json::to_string(port).unwrap_or_default();
            let what = format!(
                "the pods of Service {} would have to listen on {} by {old} and on {} by {new}, and one \
                 process has one port",
                conflict.service,
                port(&conflict.first),
                port(&conflict.second),
            );
            let remedy = format!(
                "let Portico host it ({LAYOUT}), or name where it runs ({ENDPOINTS}); or accept the outage: \
                 the steps below"
            );
            block(what, &remedy);
        }
    }
    found
}

/// Where the Service `kubernetes` leads pods by a door, as far as known.
fn pods_reach(plan: &Plan) -> Option<IpAddr> {
    plan.agent_ip.or(plan.address.ip)
}

/// Names that the certificate needs for the new door and that are not there. Portico and KKP issue those of
/// their own clusters anew.
fn missing_names(facts: &Facts<'_>) -> Vec<String> {
    let (Some(presented), ManagedBy::Elsewhere | ManagedBy::Pods) = (facts.presented, facts.managed_by)
    else {
        return Vec::new();
    };
    let has = |name: &String| presented.iter().any(|pattern| covers(pattern, name));
    needed_names(facts).into_iter().filter(|name| !has(name)).collect()
}

/// The names by which users and nodes come by the new door.
fn needed_names(facts: &Facts<'_>) -> BTreeSet<String> {
    let Facts { from, to, .. } = *facts;
    let dns = to.certificate.dns.difference(&from.certificate.dns).cloned();
    let ips = to.certificate.ips.difference(&from.certificate.ips).map(ToString::to_string);
    let agent = to.agent_ip.map(|ip| ip.to_string());
    let name = Some(to.address.external_name.to_string()).filter(|name| !name.is_empty());
    dns.chain(ips).chain(agent).chain(name).collect()
}

/// Whether a name of a certificate covers `name`: the same, or one label in place of `*`.
fn covers(pattern: &str, name: &str) -> bool {
    if pattern.eq_ignore_ascii_case(name) {
        return true;
    }
    let parent = name.split_once('.').map(|(_, parent)| parent);
    let is_address = name.parse::<IpAddr>().is_ok();
    let wildcard = pattern.strip_prefix("*.");
    !is_address && wildcard.zip(parent).is_some_and(|(ends, parent)| ends.eq_ignore_ascii_case(parent))
}

// === What else is worth to know ===

fn notes(facts: &Facts<'_>) -> Vec<String> {
    let Facts { cluster, managed_by, from, to, now, .. } = *facts;
    let (old, new) = (from.decision.strategy, to.decision.strategy);
    let name = &cluster.metadata.name;
    let mut notes = Vec::new();
    if let Some(second) = now.and_then(|now| now.second) {
        notes.push(if takes_back(facts) {
            format!("{new} is the door that users know; {old}, beside it, closes again.")
        } else if second.strategy == new {
            format!("This migration is under way: {}.", second.state.name())
        } else {
            format!(
                "{} is open beside {old} ({}): {new} waits until one door is left.",
                second.strategy,
                second.state.name()
            )
        });
    }
    notes.push(format!(
        "Firewalls, proxies and NetworkPolicies that name {} need the new address too, before step 3: \
         portico ports diff {old} {new}.",
        DoorPlan::of(from).url()
    ));
    if has_two_doors(managed_by) {
        notes.push(format!(
            "With nodes step 4 ends once you say so, and that closes {old} too (portico migrate {name} \
             --finish)."
        ));
        notes.push(match told_apart(from, to) {
            Ok(_) => format!(
                "Who still uses {old}: /doors?cluster={name} of each gateway. HTTP/2 clients stay on a \
                 connection that is open until they restart or it breaks."
            ),
            Err(why) => format!(
                "Whether {old} is still used cannot be counted: {why}. Look for clients of its address at \
                 load balancers and nodes; step 5 ends by --finish alone."
            ),
        });
        let budget = [MAX_CONNECTIONS, MAX_CONNECTIONS_PER_SECOND].into_iter();
        let budget = budget.filter_map(|key| Some(format!("{key}: {}", cluster.metadata.annotation(key)?)));
        let budget: Vec<String> = budget.collect();
        let of = if budget.is_empty() { String::new() } else { format!(" ({})", budget.join(", ")) };
        notes.push(format!(
            "Both doors are one tenant with one budget{of}, and during step 3 clients may be connected by \
             both."
        ));
    }
    agents(facts, &mut notes);
    if managed_by == ManagedBy::Elsewhere {
        elsewhere(facts, &mut notes);
    }
    if cluster.spec.components_override.apiserver.endpoint_reconciling_disabled {
        notes.push(
            "endpointReconcilingDisabled is set: nobody changes the endpoints of Service kubernetes for you \
             in step 3."
                .to_owned(),
        );
    }
    if to.entries.iter().any(|entry| entry.service == MLA_GATEWAY) {
        notes.push(
            "What sends metrics and logs from inside the cluster has the address of the MLA gateway in its \
             configuration, and follows once whoever made that changes it."
                .to_owned(),
        );
    }
    if managed_by == ManagedBy::Kkp {
        notes.push(
            "KKP's vendor does not support this: plan an outage, and rehearse it on a cluster with the same \
             provider and images."
                .to_owned(),
        );
    }
    notes
}

fn url_or<'a>(plan: &'a Plan, otherwise: &'a str) -> &'a str {
    if plan.address.url.is_empty() { otherwise } else { &plan.address.url }
}

/// The address of agents, where it is not the default, and where there are some on one side only.
fn agents(facts: &Facts<'_>, notes: &mut Vec<String>) {
    let custom = |plan: &Plan| plan.agent_ip.filter(|&ip| ip != DEFAULT_AGENT_IP);
    if let Some(ip) = custom(facts.from) {
        notes.push(format!(
            "tunnelingAgentIP {ip} has to leave the Cluster in the write that leaves {}. Until the old door \
             is closed, --rollback brings it back; after that, write it again yourself.",
            facts.from.decision.strategy
        ));
    }
    if let Some(ip) = facts.to.agent_ip.filter(|_| facts.from.agent_ip.is_none()) {
        notes.push(format!(
            "Agents will listen on {ip} of every node: no pod, Service or machine network may hold it."
        ));
    }
}

fn elsewhere(facts: &Facts<'_>, notes: &mut Vec<String>) {
    notes.push(
        "The API server runs elsewhere: Portico opens the door, and nodes, certificate and flags are yours."
            .to_owned(),
    );
    let missing = missing_names(facts);
    if !missing.is_empty() {
        notes.push(format!("Step 1 waits until its certificate has {}.", missing.join(", ")));
    } else if facts.presented.is_none() {
        let needed: Vec<String> = needed_names(facts).into_iter().collect();
        if !needed.is_empty() {
            notes.push(format!(
                "Nobody looked at its certificate. Step 1 waits until that has {}.",
                needed.join(", ")
            ));
        }
    }
}

#[cfg(test)]
mod tests;
