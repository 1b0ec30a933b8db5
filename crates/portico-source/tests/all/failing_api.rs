//! The Kubernetes source beside a real API server, behind a proxy that goes mute, refuses, denies or lies.
//!
//! Needs what the lab needs (`cargo run -p portico-lab -- install`), and root.

use std::path::Path;
use std::time::Duration;

use futures_util::future::join3;
use portico_api::meta::Kind;
use portico_kube::client;
use portico_lab::faulty_api::{Answer, FaultyApi, Rules};
use portico_lab::kkp;
use portico_source::kubernetes::{ClustersFrom, Lacking, WatchState};
use portico_source::{KubernetesSettings, KubernetesSource};

use crate::kubernetes::{Observer, World};

/// So many Services that losing them all at once is doubted.
const SERVICES: [&str; 12] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"];

fn exposed(name: &str) -> String {
    format!(
        "apiVersion: portico.k8c.io/v1alpha1\nkind: ExposedCluster\nmetadata: {{name: {name}}}\n\
         spec: {{exposeStrategy: NodePort, seed: north, allowedIPRanges: [192.0.2.0/24]}}\n"
    )
}

fn settings() -> KubernetesSettings {
    KubernetesSettings { discovery_period: Duration::from_millis(100), ..KubernetesSettings::default() }
}

fn deployed(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(file);
    std::fs::read_to_string(path).unwrap()
}

#[tokio::test]
async fn an_api_server_that_fails_or_lies_opens_nothing_and_loses_nothing() {
    let world = World::start("failing-api").await;
    world.kubectl().apply(&deployed("crds.yaml")).unwrap();
    world.kubectl().wait_served("exposedclusters.portico.k8c.io").unwrap();
    world.kubectl().run(&["create", "namespace", "cluster-a"]).unwrap();
    world.services(&SERVICES);
    for name in ["a", "b"] {
        world.kubectl().apply(&exposed(name)).unwrap();
    }

    the_schema_refuses_what_would_be_misread(&world);
    with_the_deployed_role_everything_needed_is_read_and_clusters_are_not(&world).await;
    with_rights_for_one_cluster_that_one_is_read(&world).await;
    a_kind_that_is_denied_at_the_start_is_not_believed_to_be_missing(&world).await;
    a_group_that_is_missing_for_a_moment_beside_that_of_kkp_is_waited_for(&world).await;
    a_right_that_is_missing_keeps_the_source_waiting(&world).await;
    // All of them wait until a watch is renewed, or lost.
    join3(
        a_kind_that_is_denied_later_is_not_believed_to_be_missing(&world),
        a_list_that_lies_once_takes_nothing_away(&world),
        after_silence_what_was_missed_arrives(&world),
    )
    .await;
}

fn the_schema_refuses_what_would_be_misread(world: &World) {
    for wrong in [
        exposed("wrong").replace("[192.0.2.0/24]", "[]"),
        exposed("wrong").replace("192.0.2.0/24", "192.0.2.0"),
        exposed("wrong").replace("NodePort", "Nodeport"),
        exposed("wrong").replace("NodePort", "Tunneling"),
        exposed("wrong").replace("seed: north", "tunnel: {agentIP: 100.64.30.10}"),
    ] {
        assert!(world.kubectl().apply(&wrong).is_err(), "{wrong}");
    }
}

async fn with_the_deployed_role_everything_needed_is_read_and_clusters_are_not(world: &World) {
    world.kubectl().apply(&deployed("gateway.yaml")).unwrap();
    let user = "system:serviceaccount:portico:portico-gateway";
    let kubeconfig = world.api.access().kubeconfig(user, None).unwrap();
    let source = KubernetesSource::start(client(Some(&kubeconfig)).await.unwrap(), settings());
    let mut gateway = Observer::of(source);
    gateway.until("ExposedCluster a", true).await;
    assert!(gateway.last.policies_required);
    let may_list = |kind: &str| world.kubectl().can_i(&["list", kind, &format!("--as={user}")]).unwrap();
    assert!(may_list("exposedclusters.portico.k8c.io") && !may_list("clusters.kubermatic.k8c.io"));
}

async fn with_rights_for_one_cluster_that_one_is_read(world: &World) {
    let rights = "apiVersion: rbac.authorization.k8s.io/v1\nkind: Role\n\
        metadata: {name: of-a, namespace: cluster-a}\nrules:\n\
        - {apiGroups: ['', discovery.k8s.io], resources: [services, endpointslices], verbs: [list, watch]}\n\
        ---\napiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRole\nmetadata: {name: of-a}\nrules:\n\
        - apiGroups: [portico.k8c.io]\n  resources: [exposedclusters]\n  resourceNames: [a]\n\
        \x20 verbs: [list, watch]\n";
    world.kubectl().apply(rights).unwrap();
    for binding in ["rolebinding", "clusterrolebinding"] {
        let role = if binding == "rolebinding" { "--role=of-a" } else { "--clusterrole=of-a" };
        world
            .kubectl()
            .run(&["create", binding, "of-a", role, "--user=gateway-of-a", "--namespace=cluster-a"])
            .unwrap();
    }
    let kubeconfig = world.api.access().kubeconfig("gateway-of-a", None).unwrap();
    let settings = KubernetesSettings { namespace: Some("cluster-a".into()), ..settings() };
    let source = KubernetesSource::start(client(Some(&kubeconfig)).await.unwrap(), settings);
    let mut gateway = Observer::of(source);
    gateway.until("ExposedCluster a", true).await;
    assert!(gateway.last.policies_required && !gateway.objects.contains("ExposedCluster b"));
}

/// The API server says that it has neither kind of clusters.
fn deny(rules: &mut Rules) {
    let denied = |group| (group, Answer::Status(404), usize::MAX);
    rules.answers = vec![denied("/apis/portico.k8c.io/v1alpha1"), denied("/apis/kubermatic.k8c.io/v1")];
}

async fn a_kind_that_is_denied_at_the_start_is_not_believed_to_be_missing(world: &World) {
    let service = "apiVersion: v1\nkind: Service\nmetadata: {name: api, namespace: cluster-a}\n\
        spec: {ports: [{port: 443}]}\n";
    world.kubectl().apply(service).unwrap();
    let proxy = FaultyApi::default();
    proxy.rules(deny);
    let mut gateway = Observer::of(KubernetesSource::start(proxy.client(&world.client), settings()));
    let status = gateway.source.status();
    let is_reported = || status().lacks == Some(Lacking::Kind);
    gateway.until_it_is_so("that the kinds are missing is reported", is_reported).await;
    assert!(!status().complete && status().clusters_from == ClustersFrom::Auto);
    // They are taken as soon as they are served.
    proxy.rules(|rules| rules.answers.clear());
    while !gateway.last.complete {
        gateway.step().await;
    }
    assert!(gateway.last.policies_required && gateway.objects.contains("ExposedCluster a"));
    assert_eq!((status().lacks, status().clusters_from), (None, ClustersFrom::ExposedClusters));

    // Without Services of clusters there is something to serve; what comes later admits nobody by that.
    world.kubectl().run(&["delete", "service", "-n", "cluster-a", "api"]).unwrap();
    proxy.rules(deny);
    let mut gateway = Observer::of(KubernetesSource::start(proxy.client(&world.client), settings()));
    while !gateway.last.complete {
        gateway.step().await;
    }
    assert_eq!(gateway.source.status()().clusters_from, ClustersFrom::Services);
    assert!(gateway.last.policies_required);
    let named = KubernetesSettings { clusters: ClustersFrom::Services, ..settings() };
    let mut gateway = Observer::of(KubernetesSource::start(proxy.client(&world.client), named));
    while !gateway.last.complete {
        gateway.step().await;
    }
    assert!(!gateway.last.policies_required, "the operator says that there are no clusters");
}

async fn a_group_that_is_missing_for_a_moment_beside_that_of_kkp_is_waited_for(world: &World) {
    world.kubectl().apply_json(&kkp::clusters()).unwrap();
    world.kubectl().wait_served("clusters.kubermatic.k8c.io").unwrap();
    let proxy = FaultyApi::default();
    proxy.rules(|rules| rules.answers = vec![("/apis/portico.k8c.io/v1alpha1", Answer::Status(404), 2)]);
    let mut gateway = Observer::of(KubernetesSource::start(proxy.client(&world.client), settings()));
    gateway.until("ExposedCluster a", true).await;
    assert!(proxy.has_answered());
    assert_eq!(gateway.source.status()().clusters_from, ClustersFrom::ExposedClusters);
}

async fn a_right_that_is_missing_keeps_the_source_waiting(world: &World) {
    let proxy = FaultyApi::default();
    proxy.rules(|rules| rules.answers = vec![("exposedclusters", Answer::Status(403), usize::MAX)]);
    let mut gateway = Observer::of(KubernetesSource::start(proxy.client(&world.client), settings()));
    let status = gateway.source.status();
    let refused = || {
        let watch = status().watches.get(&Kind::ExposedCluster).cloned();
        watch.and_then(|watch| watch.error).is_some_and(|error| error.contains("grant it"))
    };
    gateway.until_it_is_so("the missing right is named", refused).await;
    assert!(!status().complete);
    proxy.rules(|rules| rules.answers.clear());
    gateway.until("ExposedCluster a", true).await;
    assert!(gateway.last.policies_required && status().complete);
}

async fn a_kind_that_is_denied_later_is_not_believed_to_be_missing(world: &World) {
    let proxy = FaultyApi::default();
    let mut gateway = Observer::of(KubernetesSource::start(proxy.client(&world.client), settings()));
    gateway.until("ExposedCluster a", true).await;
    // The next watch is gone, so that there is a list again.
    proxy.rules(|rules| {
        deny(rules);
        rules.answers.insert(0, ("/exposedclusters?&watch", Answer::Status(410), 1));
    });
    let status = gateway.source.status();
    let is_met = || status().watches[&Kind::ExposedCluster].errors >= 3;
    gateway.until_it_is_so("the denial is met", is_met).await;
    assert_eq!((status().lacks, status().clusters_from), (None, ClustersFrom::ExposedClusters));
    assert!(gateway.last.policies_required && gateway.deleted.is_empty(), "{:?}", gateway.deleted);
}

async fn a_list_that_lies_once_takes_nothing_away(world: &World) {
    let proxy = FaultyApi::default();
    let mut gateway = Observer::of(KubernetesSource::start(proxy.client(&world.client), settings()));
    gateway.until("Service default/a", true).await;
    // The next watch of Services is gone, the list after it says that there are none.
    proxy.rules(|rules| {
        rules.answers = vec![
            ("/api/v1/services?&watch", Answer::Status(410), 1),
            ("/api/v1/services?&limit", Answer::Empty, 1),
        ];
    });
    gateway.until_it_is_so("the list has lied", || proxy.has_answered()).await;
    world.services(&["after-the-lie"]);
    gateway.until("Service default/after-the-lie", true).await;
    assert!(gateway.deleted.is_empty(), "{:?}", gateway.deleted);
}

async fn after_silence_what_was_missed_arrives(world: &World) {
    let proxy = FaultyApi::default();
    let mut gateway = Observer::of(KubernetesSource::start(proxy.client(&world.client), settings()));
    gateway.until("Service default/a", true).await;
    proxy.rules(|rules| rules.mute = true);
    world.services(&["missed"]);
    let status = gateway.source.status();
    let is_silent = || status().watches[&Kind::Service].state == WatchState::Failing;
    gateway.until_it_is_so("the silence is noticed", is_silent).await;
    assert!(gateway.deleted.is_empty() && !gateway.objects.contains("Service default/missed"));
    proxy.rules(|rules| rules.mute = false);
    gateway.until("Service default/missed", true).await;
    assert!(gateway.deleted.is_empty(), "{:?}", gateway.deleted);
}
