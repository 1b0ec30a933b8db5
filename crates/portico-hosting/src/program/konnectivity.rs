//! The Konnectivity server, beside each API server.

use super::{Program, pod_name, probe, resources};
use crate::config::{SOCKET_FOLDER, socket};
use crate::facts::Facts;

pub(crate) const NAME: &str = "konnectivity-server";
/// Port of agents.
pub(crate) const AGENT_PORT: u16 = 8_132;
/// Port of probes and metrics.
pub(crate) const HEALTH_PORT: u16 = 8_134;
pub(crate) const HEALTH_PORT_NAME: &str = "healthport";
/// The volume with the socket.
pub(crate) const SOCKET_VOLUME: &str = "konnectivity-uds";
/// The audience of the tokens of agents.
pub(crate) const AUDIENCE: &str = "system:konnectivity-server";
/// The service account of agents, which `deploy/konnectivity/agent.yaml` makes.
const AGENT_ACCOUNT: &str = "konnectivity-agent";

pub(crate) fn program(facts: &Facts<'_>) -> Program {
    let mut server = Program::new(NAME, facts.settings.own(), &[]);
    server.args = ["konnectivity", "server"].map(str::to_owned).to_vec();
    server.arg("mode", "grpc");
    server.arg("uds-name", socket());
    server.arg("server-port", 0);
    server.arg("agent-port", AGENT_PORT);
    server.arg("health-port", HEALTH_PORT);
    server.arg_secret("cluster-cert", "konnectivityproxy-tls", "konnectivityproxy-tls.crt");
    server.arg_secret("cluster-key", "konnectivityproxy-tls", "konnectivityproxy-tls.key");
    server.arg_kubeconfig(&["kubeconfig"], "konnectivity-kubeconfig");
    server.arg("agent-namespace", "kube-system");
    server.arg("agent-service-account", AGENT_ACCOUNT);
    server.arg("authentication-audience", AUDIENCE);
    server.arg("server-id", "$(POD_NAME)");
    server.arg("server-count", facts.api_servers);
    let written = facts.scope.cluster.spec.components_override.konnectivity_proxy.as_deref();
    if let Some(time) = written.and_then(|written| written.keepalive_time.get()) {
        server.arg("keepalive-time", time);
    }
    server.env.push(pod_name());
    server.ports = vec![("agentport", AGENT_PORT), (HEALTH_PORT_NAME, HEALTH_PORT)];
    server.mounts.push((SOCKET_VOLUME, SOCKET_FOLDER));
    // No readiness probe: a new cluster has no agent yet, and needs its API server to get one.
    server.liveness = probe("HTTP", "/healthz", HEALTH_PORT, 10, 5, 3);
    let default = [["10m", "16Mi"], ["2", "256Mi"]];
    server.resources = resources(written.and_then(|written| written.resources.as_ref()), default);
    server
}

#[cfg(test)]
mod tests {
    use super::{AGENT_ACCOUNT, AUDIENCE};

    #[test]
    fn the_server_expects_the_agents_that_portico_deploys() {
        let agents = include_str!("../../../../deploy/konnectivity/agent.yaml");
        assert!(agents.contains(&format!("      serviceAccountName: {AGENT_ACCOUNT}\n")));
        assert!(agents.contains(&format!(" audience: {AUDIENCE}\n")));
    }
}
