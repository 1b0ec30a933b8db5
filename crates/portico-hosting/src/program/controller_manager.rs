//! The controller manager. It signs what kubelets and people ask for by CertificateSigningRequests.

use portico_expose::networks;

use super::{Program, feature_gates, leader_election, probe, readiness, resources};
use crate::facts::{Facts, joined};

pub(crate) const NAME: &str = "controller-manager";
pub(crate) const PORT: u16 = 10_257;
pub(crate) const PORT_NAME: &str = "ctrl-manager";

pub(crate) fn program(facts: &Facts<'_>) -> Program {
    let command = &["/usr/local/bin/kube-controller-manager"];
    let mut manager = Program::new(NAME, facts.kubernetes("kube-controller-manager"), command);
    let kubeconfigs = ["kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"];
    manager.arg_kubeconfig(&kubeconfigs, "controllermanager-kubeconfig");
    manager.arg_secret("client-ca-file", "client-ca", "ca.crt");
    manager.arg_secret("root-ca-file", "ca", "ca.crt");
    manager.arg_secret("service-account-private-key-file", "service-account-key", "sa.key");
    manager.arg("use-service-account-credentials", true);
    // Without one for everything: an authority signs what is its own, and "legacy-unknown" nothing.
    for (signer, authority) in
        [("kubelet-serving", "ca"), ("kubelet-client", "client-ca"), ("kube-apiserver-client", "client-ca")]
    {
        manager.arg_secret(&format!("cluster-signing-{signer}-cert-file"), authority, "ca.crt");
        manager.arg_secret(&format!("cluster-signing-{signer}-key-file"), authority, "ca.key");
    }
    manager.arg("controllers", "*,bootstrapsigner,tokencleaner");
    networks_of_nodes(&mut manager, facts);
    manager.arg("profiling", false);
    manager.small_heap(facts.layout);
    let settings = facts.scope.cluster.spec.components_override.controller_manager.as_deref();
    leader_election(&mut manager, facts, settings);
    feature_gates(&mut manager, facts);
    manager.ports = vec![(PORT_NAME, PORT)];
    manager.liveness = probe("HTTPS", "/healthz", PORT, 10, 15, 8);
    manager.readiness = readiness(facts, probe("HTTPS", "/healthz", PORT, 10, 15, 3));
    let default = [["20m", "48Mi"], ["2", "2Gi"]];
    manager.resources = resources(settings.and_then(|settings| settings.resources.as_ref()), default);
    manager
}

/// Each node gets a part of the pod networks, unless the network plugin has its own way.
fn networks_of_nodes(manager: &mut Program, facts: &Facts<'_>) {
    let (cluster, kubevirt) = (facts.scope.cluster, facts.kubevirt);
    if &*cluster.spec.cni_plugin.kind == "cilium" {
        return manager.arg("allocate-node-cidrs", false);
    }
    let pods = networks::pods(cluster, kubevirt);
    manager.arg("allocate-node-cidrs", true);
    manager.arg("cluster-cidr", joined(&pods));
    manager.arg("service-cluster-ip-range", joined(&networks::services(cluster, kubevirt)));
    let [v4, v6] = facts.node_masks();
    match &*pods {
        [one] => manager.arg("node-cidr-mask-size", if one.addr().is_ipv4() { v4 } else { v6 }),
        _ => {
            manager.arg("node-cidr-mask-size-ipv4", v4);
            manager.arg("node-cidr-mask-size-ipv6", v6);
        }
    }
}
