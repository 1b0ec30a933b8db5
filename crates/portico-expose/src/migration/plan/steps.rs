//! The steps of a plan, per [`ManagedBy`]. The pair of strategies decides the difference: the new one says
//! what opens, the old one what closes.

use portico_api::annotations::MIGRATION_LABEL;
use portico_api::exposed_cluster::MigrationState;
use portico_api::migration::NodeMoves;

use super::{Facts, ManagedBy, Party, Step, takes_back, url_or};
use crate::doors::told_apart;
use crate::plan::Plan;
use crate::strategy::{self, Closing, Opening, Strategy};

/// What happens, in order.
pub(super) fn steps(facts: &Facts<'_>) -> Vec<Step> {
    match facts.managed_by {
        ManagedBy::Hosted | ManagedBy::Elsewhere => of_operator(facts),
        ManagedBy::Pods => of_pods(facts),
        ManagedBy::Kkp => of_kkp(facts),
    }
}

/// The rules of the strategy of a door.
fn rules(plan: &Plan) -> &'static dyn Strategy {
    strategy::of(plan.decision.strategy)
}

/// Whether the node agents go, and their address with them.
fn gives_up_agents(facts: &Facts<'_>) -> bool {
    rules(facts.from).has_agent() && !rules(facts.to).has_agent()
}

/// The states of the machine. A migration that is taken back before the other door was published begins with
/// Moving.
fn of_operator(facts: &Facts<'_>) -> Vec<Step> {
    let all =
        [opening(facts), proving(facts), moving(facts), moving_nodes(facts), quieting(facts), closing(facts)];
    let begins = if takes_back(facts) { MigrationState::Moving } else { MigrationState::Opening };
    all.into_iter().filter(|step| step.state >= Some(begins)).collect()
}

fn state(state: MigrationState, who: Party, does: String, proof: String, users: &str, back: String) -> Step {
    Step { name: state.name(), state: Some(state), who, does, proof, users: users.to_owned(), back }
}

/// Where the new door is, as far as known.
fn new_url<'a>(facts: &Facts<'a>) -> &'a str {
    url_or(facts.to, "the new address")
}

/// Before the flip.
fn back_at_once(facts: &Facts<'_>) -> String {
    format!(
        "at once, nobody was told: portico migrate {} --rollback closes the new door again",
        facts.cluster.metadata.name
    )
}

/// After it.
fn back_again(facts: &Facts<'_>) -> String {
    let (old, new) = (facts.from.decision.strategy, facts.to.decision.strategy);
    format!(
        "portico migrate {} --rollback: {old} is proven again, all are told of it, {new} closes",
        facts.cluster.metadata.name
    )
}

fn opening(facts: &Facts<'_>) -> Step {
    let (old, new) = (facts.from.decision.strategy, facts.to.decision.strategy);
    let Opening { does, proof } = rules(facts.to).opening();
    state(
        MigrationState::Opening,
        Party::Operator,
        format!("opens {new} beside {old}: {does}, on the same Services"),
        format!(
            "{proof}; the name resolves; every ready gateway routes each key; the certificate has the names"
        ),
        "nothing: nobody is told of it",
        back_at_once(facts),
    )
}

fn proving(facts: &Facts<'_>) -> Step {
    let (does, proof) = if rules(facts.to).has_agent() {
        (
            "starts an agent on each node and a second Konnectivity agent",
            " agents are ready on every ready node;",
        )
    } else {
        ("starts a second Konnectivity agent", "")
    };
    let url = new_url(facts);
    state(
        MigrationState::Proving,
        Party::Operator,
        format!("tries the new door from the seed and from each node; {does}"),
        format!(
            "the API server answers at {url} with its certificate; every ready node reaches it;{proof} \
             Konnectivity works by it"
        ),
        "nothing: a few more pods in kube-system",
        back_at_once(facts),
    )
}

fn moving(facts: &Facts<'_>) -> Step {
    let (old, new) = (facts.from.decision.strategy, facts.to.decision.strategy);
    state(
        MigrationState::Moving,
        Party::Operator,
        format!(
            "tells all of {new}: status.address, new kubeconfigs, Service kubernetes, cluster-info, \
             kube-proxy, Konnectivity agents; {old} stays open"
        ),
        "each of them leads to the new door, and rollouts are through".to_owned(),
        "kubeconfigs of before work on; an open exec or logs -f may end once, as Konnectivity agents are \
         replaced",
        back_again(facts),
    )
}

fn moving_nodes(facts: &Facts<'_>) -> Step {
    let old = facts.from.decision.strategy;
    let url = new_url(facts);
    let others = "clusters[].cluster.server in /etc/kubernetes/kubelet.conf and bootstrap-kubelet.conf \
                  becomes that, and systemctl restart kubelet";
    // What cannot be read touches no node.
    let by_hand = facts.cluster.migration_settings().map_or(true, |it| it.nodes == NodeMoves::ByHand);
    let (who, does) = match by_hand {
        true => (
            Party::Administrator,
            format!(
                "on each node: portico join move --server {url}; one that did not join by portico: {others}"
            ),
        ),
        false => (
            Party::Operator,
            format!(
                "leads each kubelet to {url}, one node after the other, or parallel= at once, by a pod there \
                 (privileged; nodes=by-hand if you want none); you do so where a machine did not join by \
                 portico: {others}"
            ),
        ),
    };
    state(
        MigrationState::MovingNodes,
        who,
        does,
        format!(
            "nothing on any ready node is connected to {old}: kubelet, kube-proxy, network plugin (Cilium: \
             k8sServiceHost is yours). Or --finish, which leaves behind what has not moved"
        ),
        "containers run on and the Node stays Ready; an open exec, logs -f or port-forward of that node \
         ends",
        format!("{}; nodes that moved are moved back before", back_again(facts)),
    )
}

fn quieting(facts: &Facts<'_>) -> Step {
    let name = &facts.cluster.metadata.name;
    let old = facts.from.decision.strategy;
    let kubeconfigs = format!("gives users new kubeconfigs (portico kubeconfig {name} -o {name}.kubeconfig)");
    let (does, proof) = match told_apart(facts.from, facts.to) {
        Ok(_) => (
            kubeconfigs,
            format!(
                "by the count of every gateway nobody has used {old} for as long as quiet= says, 10m without \
                 it; the condition names who still does. Or portico migrate {name} --finish, in use or not"
            ),
        ),
        Err(why) => (
            format!("{kubeconfigs}, then says that {old} may close"),
            format!("portico migrate {name} --finish: {why}"),
        ),
    };
    state(
        MigrationState::Quieting,
        Party::Administrator,
        does,
        proof,
        "nothing: the old address works until step 6",
        back_again(facts),
    )
}

fn closing(facts: &Facts<'_>) -> Step {
    let (old, new) = (facts.from.decision.strategy, facts.to.decision.strategy);
    let Closing { does, again, .. } = rules(facts.from).closing(rules(facts.to));
    state(
        MigrationState::Closing,
        Party::Operator,
        format!("closes {old}: {does}"),
        "nothing that belongs to it alone is left inside the cluster and on the seed".to_owned(),
        "what still has the old address ends here: kubeconfigs, and nodes that were not moved",
        format!("while it lasts as in step 3; then a new migration from {new} to {old}, {again}"),
    )
}

// === Without two doors ===

fn guidance(name: &'static str, who: Party, does: &str, proof: &str, users: &str, back: &str) -> Step {
    Step {
        name,
        state: None,
        who,
        does: does.to_owned(),
        proof: proof.to_owned(),
        users: users.to_owned(),
        back: back.to_owned(),
    }
}

/// The fields to write, as they are spelled.
fn write(facts: &Facts<'_>) -> String {
    let strategy = facts.to.decision.strategy;
    let agents = if gives_up_agents(facts) {
        ", and remove clusterNetwork.tunnelingAgentIP in the same write"
    } else {
        ""
    };
    format!("set spec.exposeStrategy: {strategy}{agents}")
}

const REVERSE: &str = "the same steps in the other direction, with the same outage";

/// Somebody's pods: the operator changes everything at once.
fn of_pods(facts: &Facts<'_>) -> Vec<Step> {
    let label = format!("label the Cluster {MIGRATION_LABEL}, and stop what must not lose its API server");
    let change = format!(
        "{}; the operator changes Services and address at once, and the old door is gone",
        write(facts)
    );
    let restart = if facts.both.conflicts.is_empty() {
        "the pods listen on the port of before"
    } else {
        "whoever keeps the pods of the API server starts them on the new port, with the new names in the \
         certificate"
    };
    let nodes = format!(
        "on each node: the server in /etc/kubernetes/kubelet.conf becomes {}; restart the kubelet",
        new_url(facts)
    );
    vec![
        guidance("Permit", Party::Administrator, &label, "the label is there", "nothing", "remove the label"),
        guidance(
            "Change",
            Party::Administrator,
            &change,
            "PorticoExposed names the new address",
            "an outage begins: every kubeconfig and every node has the address of before",
            REVERSE,
        ),
        guidance(
            "Restart",
            Party::Administrator,
            restart,
            "EndpointSlices of apiserver-external have ready endpoints",
            "the API is back at the new address",
            REVERSE,
        ),
        guidance(
            "Nodes",
            Party::Administrator,
            &nodes,
            "every Node is Ready",
            "nodes are NotReady until then, containers run on",
            REVERSE,
        ),
        guidance(
            "Kubeconfigs",
            Party::Administrator,
            "give users new kubeconfigs, remove the label",
            "users are back",
            "kubeconfigs of before do not work any more",
            REVERSE,
        ),
    ]
}

/// What KKP's controllers do, and what they leave to people.
fn of_kkp(facts: &Facts<'_>) -> Vec<Step> {
    let label = format!("label the Cluster {MIGRATION_LABEL}, with any value");
    let rest = if gives_up_agents(facts) {
        ". KKP's API cannot remove that field: edit the Cluster on the seed"
    } else {
        ""
    };
    let change = format!("{}{rest}", write(facts));
    let left = rules(facts.from).closing(rules(facts.to)).kkp_leaves;
    let left = left.map(|left| format!("; {left} stay behind")).unwrap_or_default();
    let clean = format!("delete Nodes that stay NotReady, and remove the label{left}");
    vec![
        guidance(
            "Prepare",
            Party::Administrator,
            "drain or stop workloads: from step 3 on nodes have no control plane that could stop them \
             cleanly",
            "nothing runs that must not be cut off",
            "workloads stop",
            "start them again",
        ),
        guidance("Permit", Party::Administrator, &label, "the label is there", "nothing", "remove the label"),
        guidance(
            "Change",
            Party::Kkp,
            &format!(
                "you {change}; KKP rewrites Services and restarts API servers, and the old door is gone"
            ),
            "the pods of the control plane are redeployed, and status.address is the new one",
            "an outage: the API is away, pods and Services change at different moments; nodes become \
             NotReady",
            REVERSE,
        ),
        guidance(
            "Kubeconfigs",
            Party::Administrator,
            "download new kubeconfigs for every user and every program",
            "kubectl works with the new one",
            "every kubeconfig of before has ended; so have tokens of service accounts whose issuer is the \
             old URL (the default)",
            REVERSE,
        ),
        guidance(
            "Nodes",
            Party::Administrator,
            "restart every MachineDeployment in kube-system (annotation forceRestart in its template); \
             machines without one are joined again by hand",
            "every new Node is Ready",
            "every node is replaced",
            REVERSE,
        ),
        guidance("Clean", Party::Administrator, &clean, "no Node is NotReady", "nothing", REVERSE),
    ]
}
