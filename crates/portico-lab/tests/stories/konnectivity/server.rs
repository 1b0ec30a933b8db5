//! The Konnectivity server as `deploy/konnectivity` has it: a sidecar of the API server in the seed.

use std::net::Ipv4Addr;

use anyhow::{Context, Result, ensure};
use portico_lab::{Seed, UserCluster, konnectivity};
use rustix::process::Pid;
use serde_json::{Value, json};

use super::story::{AGENT_PORT, EXTERNAL_NAME};
use crate::own_gateway::{self, EXPOSE_NAMESPACED};
use crate::support::SOON;

/// The modes that kube-apiserver takes. It refuses gRPC over TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    GrpcUnix,
    HttpConnectUnix,
    HttpConnectTls,
}

impl Mode {
    /// The connection of the egress selector.
    fn connection(self) -> Value {
        let socket = json!({"uds": {"udsName": "/run/konnectivity/server.socket"}});
        let tls = json!({"caBundle": "/pki/ca.crt", "clientCert": "/pki/kubelet-client.crt",
                         "clientKey": "/pki/kubelet-client.key"});
        match self {
            Mode::GrpcUnix => json!({"proxyProtocol": "GRPC", "transport": socket}),
            Mode::HttpConnectUnix => json!({"proxyProtocol": "HTTPConnect", "transport": socket}),
            Mode::HttpConnectTls => {
                let transport = json!({"tcp": {"url": "https://127.0.0.1:8090", "tlsConfig": tls}});
                json!({"proxyProtocol": "HTTPConnect", "transport": transport})
            }
        }
    }

    /// The arguments of the server that say so, in place of those in `server-patch.yaml`.
    fn arguments(self) -> Vec<&'static str> {
        let socket = "--uds-name=/run/konnectivity/server.socket";
        match self {
            Mode::GrpcUnix => vec!["--mode=grpc", socket, "--server-port=0"],
            Mode::HttpConnectUnix => vec!["--mode=http-connect", socket, "--server-port=0"],
            Mode::HttpConnectTls => vec![
                "--mode=http-connect",
                "--server-port=8090",
                "--server-bind-address=127.0.0.1",
                "--server-cert=/etc/konnectivity/server.crt",
                "--server-key=/etc/konnectivity/server.key",
                "--server-ca-cert=/etc/konnectivity/ca.crt",
            ],
        }
    }
}

/// Does with the cluster's control plane what the manifests say.
pub(crate) fn deploy(seed: &Seed, cluster: &UserCluster, mode: Mode) {
    konnectivity::beside(seed, cluster, EXTERNAL_NAME, |_| true).unwrap();
    // Agents come by a NodePort first, and by the gateway then.
    let node_port = json!([
        {"op": "add", "path": "/spec/type", "value": "NodePort"},
        {"op": "add", "path": "/spec/ports/0/nodePort", "value": AGENT_PORT},
    ]);
    seed.kubectl().patch(cluster.namespace(), "service/konnectivity-server", "json", &node_port).unwrap();
    assert_eq!(mode, Mode::GrpcUnix, "that is what is shipped");
}

/// Another mode: the API server and its sidecar are replaced by a rolling update.
pub(crate) fn switch(seed: &Seed, cluster: &UserCluster, mode: Mode) {
    let (kubectl, namespace) = (seed.kubectl(), cluster.namespace());
    let selector = json!({
        "apiVersion": "apiserver.k8s.io/v1beta1",
        "kind": "EgressSelectorConfiguration",
        "egressSelections": [{"name": "cluster", "connection": mode.connection()}],
    });
    let data = json!({"data": {"egress-selector.yaml": selector.to_string()}});
    kubectl.patch(namespace, "configmap/konnectivity-egress", "merge", &data).unwrap();
    let deployment = kubectl.get(&["deployment", "apiserver", "-n", namespace]).unwrap();
    let arguments = deployment["spec"]["template"]["spec"]["initContainers"][0]["args"].clone();
    let said = |argument: &Value, names: &[&str]| {
        names.iter().any(|name| argument.as_str().is_some_and(|argument| argument.starts_with(name)))
    };
    let mut arguments: Vec<Value> = arguments.as_array().unwrap().clone();
    arguments.retain(|argument| !said(argument, &["--mode=", "--uds-name=", "--server-port="]));
    arguments.extend(mode.arguments().into_iter().map(Value::from));
    let path = "/spec/template/spec/initContainers/0/args";
    let change = json!([{"op": "replace", "path": path, "value": arguments}]);
    kubectl.patch(namespace, "deployment/apiserver", "json", &change).unwrap();
    cluster.wait_ready(seed).unwrap();
}

/// Exposes it by a load balancer of the cluster's own. Returns its address.
pub(crate) fn balance(seed: &Seed, cluster: &UserCluster) -> Ipv4Addr {
    let namespace = cluster.namespace();
    let exposed = json!({"metadata": {"annotations": {EXPOSE_NAMESPACED: "true"}}});
    seed.kubectl().patch(namespace, "service/konnectivity-server", "merge", &exposed).unwrap();
    own_gateway::deploy(seed, namespace, "portico-gateway-1", "services", AGENT_PORT);
    own_gateway::address(seed, namespace)
}

/// Its process.
pub(crate) fn process(seed: &Seed, cluster: &UserCluster) -> Pid {
    let pods = seed.kubectl().get(&["pods", "-n", cluster.namespace(), "-l=app=apiserver"]).unwrap();
    let uid = pods["items"][0]["metadata"]["uid"].as_str().unwrap();
    portico_lab::wait::until("the server to run", SOON, || {
        let processes = seed.node().pod_processes(uid, "portico")?;
        processes.first().copied().context("no portico runs beside the API server")
    })
    .unwrap()
}

/// Whether the server answers.
pub(crate) fn is_ready(seed: &Seed, cluster: &UserCluster) -> Result<()> {
    let pods = seed.kubectl().get(&["pods", "-n", cluster.namespace(), "-l=app=apiserver"])?;
    let address = pods["items"][0]["status"]["podIP"].as_str().context("it has no address")?;
    let answer =
        seed.host().run(&["curl", "-sS", "--max-time", "2", &format!("http://{address}:8134/healthz")])?;
    ensure!(answer.trim() == "ok", "it says {answer}");
    Ok(())
}
