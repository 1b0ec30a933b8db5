//! What the tests of several controllers need: an operator that runs, and the objects of a seed.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::ensure;
use kube::Client;
use portico_api::annotations::EXPOSE;
use portico_api::meta::ObjectKey;
use portico_expose::front::FrontSettings;
use portico_expose::user_cluster::AgentSettings;
use portico_kube::client;
use portico_lab::faulty_api::FaultyApi;
use portico_lab::{Access, Kubectl};
use portico_operator::{
    ClustersStatus, ExposureSettings, Operator, Settings, StatusHandle, UserClusterSettings, WorkStatus,
};
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::{manifest, until};

/// Longer than a request may take, so that one without an answer is reported as such.
const PASS_TIMEOUT: Duration = Duration::from_secs(12);

/// A running operator.
pub(crate) struct Running {
    pub(crate) status: StatusHandle,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Running {
    pub(crate) fn start(client: &Client, identity: &str) -> Self {
        Self::start_with(client, identity, |operator| operator)
    }

    pub(crate) fn start_with(
        client: &Client,
        identity: &str,
        with: impl FnOnce(Operator) -> Operator,
    ) -> Self {
        Self::start_asking(client, identity, Vec::new(), with)
    }

    /// One that asks these name servers.
    pub(crate) fn start_asking(
        client: &Client,
        identity: &str,
        name_servers: Vec<SocketAddr>,
        with: impl FnOnce(Operator) -> Operator,
    ) -> Self {
        Self::start_for(client, identity, ObjectKey::new("portico", "portico"), name_servers, with)
    }

    /// With this front Service.
    pub(crate) fn start_for(
        client: &Client,
        identity: &str,
        front: ObjectKey,
        name_servers: Vec<SocketAddr>,
        with: impl FnOnce(Operator) -> Operator,
    ) -> Self {
        let settings = Settings::new(plan(front.clone()), identity);
        let exposure = ExposureSettings { front, sni_port: 6_443, node_ips: Vec::new(), name_servers };
        Self::of(with(Operator::new(client.clone(), settings, exposure)))
    }

    /// One that keeps the insides of clusters, and leaves Clusters and ExposedClusters as they are.
    pub(crate) fn start_insides(client: &Client, identity: &str, insides: UserClusterSettings) -> Self {
        let settings = Settings::new(plan(ObjectKey::new("portico", "portico")), identity);
        Self::of(Operator::front(client.clone(), settings).with_user_clusters(insides))
    }

    fn of(operator: Operator) -> Self {
        let (stop, stopped) = oneshot::channel();
        let status = operator.status();
        let task = tokio::spawn(async move {
            operator.run(async move { drop(stopped.await) }).await.unwrap();
        });
        Self { status, stop, task }
    }

    pub(crate) fn clusters(&self) -> ClustersStatus {
        self.status.get().clusters.unwrap_or_default()
    }

    /// What a controller did.
    pub(crate) fn work(&self, controller: &str) -> WorkStatus {
        self.status.get().controllers.get(controller).cloned().unwrap_or_default()
    }

    pub(crate) async fn stop(self) {
        self.stop.send(()).unwrap();
        self.task.await.unwrap();
    }

    /// Ends it as a kill does: nothing is released.
    pub(crate) async fn kill(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

fn plan(front: ObjectKey) -> FrontSettings {
    FrontSettings {
        front,
        sni_port: Some(6_443),
        tunnel_port: None,
        listener_limit: None,
        expose_annotation: EXPOSE.into(),
        namespace: None,
    }
}

/// What is to be inside of clusters, with agents of this image.
pub(crate) fn insides(image: Option<&str>) -> UserClusterSettings {
    let image = image.map(str::to_owned);
    let agents =
        AgentSettings { image: image.clone(), gateways: Vec::new(), server_name: None, tunnel_port: 8_088 };
    let hosted =
        image.map(|image| portico_hosting::Settings { image, ..portico_hosting::Settings::default() });
    UserClusterSettings {
        agents,
        namespace: "portico".into(),
        pass_timeout: PASS_TIMEOUT,
        name_servers: Vec::new(),
        hosted,
    }
}

/// Installs everything, and a gateway by hand. Returns a client with the operator's rights alone.
pub(crate) async fn install(kubectl: &Kubectl, access: &Access) -> Client {
    kubectl.apply(&manifest("gateway.yaml")).unwrap();
    install_operator(kubectl, access).await
}

/// Installs everything as the manual says. Returns a client with the operator's rights alone.
pub(crate) async fn install_operator(kubectl: &Kubectl, access: &Access) -> Client {
    install_with(kubectl, access, &manifest("crds-kubermatic.yaml")).await
}

/// Installs everything, with these `definitions` of KKP's kinds.
pub(crate) async fn install_with(kubectl: &Kubectl, access: &Access, definitions: &str) -> Client {
    for manifest in [definitions, &manifest("crds.yaml"), &manifest("operator.yaml")] {
        kubectl.apply(manifest).unwrap();
    }
    for kind in ["clusters", "seeds", "kubermaticconfigurations"] {
        kubectl.wait_served(&format!("{kind}.kubermatic.k8c.io")).unwrap();
    }
    kubectl.wait_served("exposedclusters.portico.k8c.io").unwrap();
    let above = json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "kubermatic.k8c.io/v1", "kind": "KubermaticConfiguration",
            "metadata": {"name": "kkp", "namespace": "portico"},
            "spec": {"ingress": {"domain": "kkp.invalid"}, "exposeStrategy": "Tunneling"}},
        {"apiVersion": "kubermatic.k8c.io/v1", "kind": "Seed",
            "metadata": {"name": "north", "namespace": "portico"},
            // KKP asks for it.
            "spec": {"kubeconfig": {"name": "kubeconfig-north", "namespace": "portico"},
                "datacenters": {"lab-1": {"spec": {"bringyourown": {}}}}}}]});
    kubectl.apply_json(&above).unwrap();
    let user = access.kubeconfig("system:serviceaccount:portico:portico-operator", None).unwrap();
    client(Some(&user)).await.unwrap()
}

/// A Cluster; `strategy` may be empty.
pub(crate) fn cluster(name: &str, strategy: &str) -> Value {
    json!({"apiVersion": "kubermatic.k8c.io/v1", "kind": "Cluster", "metadata": {"name": name},
        "spec": {"humanReadableName": name, "version": "1.35.8", "exposeStrategy": strategy,
            "cloud": {"dc": "lab-1", "bringyourown": {}},
            // What KKP has and Portico does not know stays as it is.
            "updateWindow": {"start": "Thu 10:00", "length": "2h"}}})
}

/// Gives a load balancer its address, as a cloud does.
pub(crate) fn give_address(kubectl: &Kubectl, cluster: &str, ip: &str) {
    let status = json!({"status": {"loadBalancer": {"ingress": [{"ip": ip}]}}}).to_string();
    let namespace = format!("cluster-{cluster}");
    let patch = ["patch", "service", "front-loadbalancer", "-n", &namespace, "--subresource=status"];
    kubectl.run(&[&patch[..], &["--type=merge", "-p", &status]].concat()).unwrap();
}

/// KKP's Deployment, in this namespace.
pub(crate) fn kkp_deployment(namespace: &str) -> Value {
    let labels = json!({"app.kubernetes.io/name": "kubermatic-seed-controller-manager"});
    json!({"apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": "kubermatic-seed-controller-manager", "namespace": namespace},
        "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": {
            "metadata": {"labels": labels}, "spec": {"containers": [{"name": "x", "image": "x"}]}}}})
}

/// Has KKP's controllers there while `check` runs. `observing` is what a controller says of them: it has seen
/// them before the check, and that they are gone after it.
pub(crate) fn beside_kkp(kubectl: &Kubectl, observing: impl Fn() -> Option<String>, check: impl FnOnce()) {
    kubectl.apply_json(&kkp_deployment("portico")).unwrap();
    until("KKP to be seen", || {
        let text = observing().unwrap_or_default();
        ensure!(text.contains("Deployment portico/"), "{text}");
        Ok(())
    });
    check();
    kubectl.run(&["delete", "deployment", "kubermatic-seed-controller-manager", "-n", "portico"]).unwrap();
    until("KKP to be gone", || {
        ensure!(observing().is_none());
        Ok(())
    });
}

/// A killed process holds its Leases until they run out; an admin need not wait.
pub(crate) fn release(kubectl: &Kubectl) {
    let free = r#"{"spec": {"holderIdentity": ""}}"#;
    for (name, namespace) in [("portico-operator", "kube-system"), ("portico-front-portico", "portico")] {
        kubectl.run(&["patch", "lease", name, "-n", namespace, "--type=merge", "-p", free]).unwrap();
    }
}

/// Waits for the write that `faulty` withholds, or the end. Returns whether it is the end.
pub(crate) fn withheld_or(faulty: &FaultyApi, is_end: impl Fn() -> bool) -> bool {
    let mut ended = false;
    until("a write that is withheld, or the end", || {
        ended = is_end();
        ensure!(ended || faulty.rules(|rules| rules.withheld));
        Ok(())
    });
    ended
}
