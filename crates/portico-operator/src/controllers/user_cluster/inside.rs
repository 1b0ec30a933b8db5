//! The objects inside one user cluster: applied in the order in which they are needed, then what a former
//! strategy left is removed.

use std::collections::BTreeMap;

use portico_dial::Dialer;
use portico_expose::user_cluster::{
    BAD_KUBECONFIG, ENVOY_AGENT, Facts, Id, Inside, Kind, Konnectivity, Object, inside,
};
use portico_kube::error::describe;
use portico_kube::untrusted_api::{Applied, UntrustedApi, UntrustedApiError};
use portico_pki::{Kubeconfig, cluster_info};
use tokio::time::timeout;

use super::context::Context;
use super::nodes::too_slow;
use super::subject::{Kept, Readiness, Subject, foreign};

/// The name of everything that belongs to the node agent.
const AGENT: &str = "portico-agent";

/// What one pass inside a user cluster did.
#[derive(Debug, Default)]
struct Done {
    /// A request had a proper answer, a refusal too.
    answered: bool,
    /// Objects written, by kind.
    writes: BTreeMap<&'static str, u64>,
    /// Objects that are somebody else's and not as wanted, each with its last writer.
    others: Vec<(Id, String)>,
    /// The first request that its API server refused. The others were made all the same.
    refused: Option<UntrustedApiError>,
    /// KKP's agent is there.
    envoy: bool,
}

impl Context {
    /// Makes what is inside the cluster as it should be. `konnectivity` is where that is by the first door,
    /// and by the second.
    pub(super) async fn reconcile_inside(
        &self,
        subject: &Subject,
        kubeconfig: &Kubeconfig,
        (konnectivity, next): (&Konnectivity, Option<&Konnectivity>),
        tunnel_ca: Option<&str>,
        hosted: Inside,
    ) -> Kept {
        let (cluster, exposed) = (&subject.cluster, &subject.exposed);
        // It holds programs and files no more: what was read is written anew.
        let api = match UntrustedApi::new(&kubeconfig.to_yaml(), Dialer::direct()).await {
            Ok(api) => api,
            Err(error) => {
                let readiness = Readiness::waits(BAD_KUBECONFIG, describe(&error));
                let (others, daemon_sets) = (Vec::new(), Vec::new());
                return Kept { readiness, answered: false, api: None, others, daemon_sets };
            }
        };
        let limit = self.settings.pass_timeout;
        let facts = Facts {
            exposed,
            second: subject.second.as_ref(),
            endpoints: !cluster.spec.components_override.apiserver.endpoint_reconciling_disabled,
            konnectivity,
            next,
            cluster_info: &cluster_info(&exposed.spec.address.url, &kubeconfig.authority),
            agents: &self.settings.agents,
            nodes: subject.settings().nodes,
            tunnel_ca,
        };
        let mut inside = inside(&facts);
        inside.wanted.extend(hosted.wanted);
        inside.unwanted.extend(hosted.unwanted);
        inside.waiting.extend(hosted.waiting);
        let mut done = Done::default();
        let ended = timeout(limit, write(&api, &inside, &mut done)).await;
        self.counters.wrote_many(std::mem::take(&mut done.writes));
        let server = &kubeconfig.server;
        let readiness = match ended {
            Ok(Ok(())) => readiness(&inside, &done),
            Ok(Err(error)) => {
                let message = format!(
                    "its API server at {server}: {error}; tried again, with pauses up to ten minutes"
                );
                Readiness::failed(error.reason(), message)
            }
            Err(_) => Readiness::failed("TooSlow", too_slow(server, limit)),
        };
        let wanted = inside.wanted.into_iter().map(|object| object.id);
        let daemon_sets = wanted.filter(|id| id.kind == Kind::DaemonSet).collect();
        let (answered, others, api) = (done.answered, done.others, Some(api));
        Kept { readiness, answered, api, others, daemon_sets }
    }
}

/// Applies the wanted objects and removes the unwanted ones. Ends at the first request without a proper
/// answer.
async fn write(api: &UntrustedApi, inside: &Inside, done: &mut Done) -> Result<(), UntrustedApiError> {
    // The first request is a read, under every strategy. An administrator of the cluster can make writes
    // hang, and kubelet certificates are approved only after an answer.
    let envoy = api.get(&ENVOY_AGENT.path()).await?.is_some();
    done.answered = true;
    done.envoy = inside.tunneling && envoy;
    for Object { id, fields } in &inside.wanted {
        // Two agents would take the address on each node from each other.
        if done.envoy && id.name == AGENT {
            continue;
        }
        let applied = api.apply(&id.path(), fields).await;
        done.answered |= applied.is_ok();
        match applied {
            Ok(Applied::Unchanged) => {}
            Ok(Applied::Changed) => *done.writes.entry(id.kind.name()).or_default() += 1,
            Ok(Applied::Foreign(writer)) => done.others.push((id.clone(), writer)),
            Err(error) => done.refusal(error)?,
        }
    }
    for id in &inside.unwanted {
        match api.remove(&id.path()).await {
            Ok(removed) if removed => *done.writes.entry(id.kind.name()).or_default() += 1,
            Ok(_) => {}
            Err(error) => done.refusal(error)?,
        }
    }
    Ok(())
}

impl Done {
    /// Goes on after a refusal, and after nothing else.
    fn refusal(&mut self, error: UntrustedApiError) -> Result<(), UntrustedApiError> {
        if !matches!(error, UntrustedApiError::Refused { .. }) {
            return Err(error);
        }
        self.answered = true;
        self.refused.get_or_insert(error);
        Ok(())
    }
}

/// Status of the inside after a pass that came to its end.
fn readiness(inside: &Inside, done: &Done) -> Readiness {
    if let Some(error) = &done.refused {
        return Readiness::failed("Refused", format!("its API server refuses: {error}"));
    }
    if done.envoy {
        let message = format!(
            "KKP's agent is there ({ENVOY_AGENT}), and a node can hold the agents' address once: no agent of \
             Portico is made. docs/agent.md says how to replace it"
        );
        return Readiness::waits("EnvoyAgent", message);
    }
    if let Some((id, writer)) = done.others.first() {
        return Readiness::waits("ForeignObject", foreign(id, writer));
    }
    if inside.waiting.is_empty() {
        let objects = inside.wanted.len();
        return Readiness::ready(format!("{objects} objects inside the cluster are as they should be"));
    }
    Readiness::waits("Incomplete", format!("left as they are: {}", inside.waiting.join("; ")))
}
