//! The scheduler.

use super::{Program, feature_gates, leader_election, probe, readiness, resources};
use crate::facts::Facts;

pub(crate) const NAME: &str = "scheduler";
pub(crate) const PORT: u16 = 10_259;
pub(crate) const PORT_NAME: &str = "scheduler";

pub(crate) fn program(facts: &Facts<'_>) -> Program {
    let mut scheduler =
        Program::new(NAME, facts.kubernetes("kube-scheduler"), &["/usr/local/bin/kube-scheduler"]);
    let kubeconfigs = ["kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"];
    scheduler.arg_kubeconfig(&kubeconfigs, "scheduler-kubeconfig");
    scheduler.arg_secret("client-ca-file", "client-ca", "ca.crt");
    scheduler.arg("profiling", false);
    scheduler.small_heap(facts.layout);
    let settings = facts.scope.cluster.spec.components_override.scheduler.as_deref();
    leader_election(&mut scheduler, facts, settings);
    feature_gates(&mut scheduler, facts);
    scheduler.ports = vec![(PORT_NAME, PORT)];
    scheduler.liveness = probe("HTTPS", "/healthz", PORT, 10, 15, 8);
    scheduler.readiness = readiness(facts, probe("HTTPS", "/readyz", PORT, 10, 15, 3));
    let default = [["10m", "32Mi"], ["1", "512Mi"]];
    scheduler.resources = resources(settings.and_then(|settings| settings.resources.as_ref()), default);
    scheduler
}
