//! What a hosted cluster has inside: as it is written, what a Cluster leaves out, and accepted by a real API
//! server.

use std::fmt::Write;

use portico_api::cluster::Cluster;
use portico_expose::user_cluster::{Id, Inside, Object};
use portico_expose::validate::usable;
use portico_hosting::join::reach::{Purpose, Way};
use portico_hosting::{Reach, Settings, inside};
use portico_lab::ApiServer;
use serde_json::json;

use crate::{cluster, configuration, everything, seeds, settings};

const REACH: Reach<'_> = Reach {
    url: "https://a.north.example.com:6443",
    client_ca: Some("-----CLIENT CA-----\n"),
    ways: &[],
    is_new: false,
};

fn found_with(cluster: &Cluster, settings: &Settings, reach: Reach<'_>) -> Inside {
    let (seeds, configuration) = (seeds(), configuration());
    let scope = usable(cluster, &seeds, Some(&configuration)).unwrap();
    inside(&scope, settings, reach).unwrap()
}

fn found(cluster: &Cluster) -> Inside {
    found_with(cluster, &settings(), REACH)
}

fn names<'a>(ids: impl Iterator<Item = &'a Id>) -> Vec<String> {
    ids.map(ToString::to_string).collect()
}

#[test]
fn nodes_names_proxy_and_metrics_are_as_people_know_them() {
    let found = found(&cluster("compact", &json!({})));
    let text = found.wanted.iter().fold(String::new(), |mut text, object| {
        let _ = write!(text, "---\n{}", portico_yaml::write(&object.fields));
        text
    });
    insta::assert_snapshot!(text);
    assert!(found.unwanted.is_empty() && found.waiting.is_empty());
    assert!(!text.contains("REPLACE"), "no blank stays");
}

#[test]
fn what_a_cluster_leaves_out_goes_away_and_its_workload_first() {
    let all = found(&cluster("compact", &json!({})));
    let mut without = cluster("compact", &json!({"clusterNetwork": {"proxyMode": "ebpf"}}));
    without.metadata.annotations.insert("portico.k8c.io/without".into(), "coredns, metrics-server".into());
    let found = found(&without);
    let gone = names(found.unwanted.iter());
    assert_eq!(gone[0], "DaemonSet kube-system/kube-proxy");
    let first = |kind: &str| gone.iter().position(|id| id.starts_with(kind)).unwrap();
    assert!(first("APIService") < first("Deployment kube-system/metrics-server"), "{gone:?}");
    let kept = found.wanted.iter().map(|object| &object.id);
    let mut both = names(kept.chain(&found.unwanted));
    let mut every = names(all.wanted.iter().map(|object| &object.id));
    both.sort();
    every.sort();
    assert_eq!(both, every, "everything is either wanted or not");
    without.metadata.annotations.insert("portico.k8c.io/without".into(), "dns".into());
    let (seeds, configuration) = (seeds(), configuration());
    let scope = usable(&without, &seeds, Some(&configuration)).unwrap();
    let problems = inside(&scope, &settings(), REACH).unwrap_err();
    assert!(problems[0].to_string().contains("portico.k8c.io/without"), "{}", problems[0]);
}

#[test]
fn another_address_restarts_the_proxies_and_nothing_else() {
    let cluster = cluster("dedicated", &everything("dedicated"));
    let before = found(&cluster);
    let after = found_with(&cluster, &settings(), Reach { url: "https://203.0.113.9:31234", ..REACH });
    let changed = before.wanted.iter().zip(&after.wanted).filter(|(before, after)| before != after);
    let changed = names(changed.map(|(before, _)| &before.id));
    assert_eq!(changed, ["ConfigMap kube-system/kube-proxy", "DaemonSet kube-system/kube-proxy"]);
}

#[test]
fn while_a_new_address_is_made_known_no_node_that_is_away_holds_up_the_proxies() {
    let cluster = cluster("dedicated", &everything("dedicated"));
    let at_once = |is_new: bool| {
        let found = found_with(&cluster, &settings(), Reach { is_new, ..REACH });
        let proxy = |object: &&Object| object.id.to_string() == "DaemonSet kube-system/kube-proxy";
        let proxy = found.wanted.iter().find(proxy).unwrap();
        proxy.fields.pointer("/spec/updateStrategy/rollingUpdate/maxUnavailable").cloned()
    };
    assert_eq!(at_once(true), Some("100%".into()));
    assert_eq!(at_once(false), Some("10%".into()));
}

#[test]
fn another_way_of_agents_is_reported_to_machines_and_restarts_nothing() {
    let cluster = cluster("dedicated", &everything("dedicated"));
    let ways = [Way { purpose: Purpose::Tunnel, address: "a.north.example.com:8088".into() }];
    let (before, after) =
        (found(&cluster), found_with(&cluster, &settings(), Reach { ways: &ways, ..REACH }));
    let changed = before.wanted.iter().zip(&after.wanted).filter(|(before, after)| before != after);
    let changed: Vec<_> = changed.map(|(_, after)| after).collect();
    assert_eq!(names(changed.iter().map(|object| &object.id)), ["ConfigMap kube-system/kubelet-config"]);
    assert_eq!(changed[0].fields["data"]["reach"], "tunnel a.north.example.com:8088\n");
}

#[test]
fn the_name_server_has_the_tenth_address_and_images_come_from_the_mirror() {
    let digest = format!("sha256:{}", "a".repeat(64));
    let image = "mirror.example.com/k8s/kube-proxy:v1.34.4";
    let settings = Settings {
        registry_mirror: Some("mirror.example.com/k8s".into()),
        digests: [(image.to_owned(), digest.clone())].into(),
        ..settings()
    };
    let services = json!({"clusterNetwork": {"pods": {"cidrBlocks": ["fd01::/48"]},
        "services": {"cidrBlocks": ["fd02::/108"]}}});
    let found = found_with(&cluster("compact", &services), &settings, REACH);
    let object = |id: &str| &found.wanted.iter().find(|object| object.id.to_string() == id).unwrap().fields;
    assert_eq!(object("Service kube-system/kube-dns")["spec"]["clusterIP"], "fd02::a");
    let kubelet = object("ConfigMap kube-system/kubelet-config")["data"]["kubelet"].as_str().unwrap();
    assert!(kubelet.contains("fd02::a"), "{kubelet}");
    let image_of = |id: &str| &object(id)["spec"]["template"]["spec"]["containers"][0]["image"];
    assert_eq!(image_of("DaemonSet kube-system/kube-proxy"), &json!(format!("{image}@{digest}")));
    let core_dns = image_of("Deployment kube-system/coredns").as_str().unwrap();
    assert!(core_dns.starts_with("mirror.example.com/k8s/coredns/coredns:v1."), "{core_dns}");
}

#[test]
fn without_the_authority_of_clients_nodes_wait() {
    let found = found_with(&cluster("compact", &json!({})), &settings(), Reach { client_ca: None, ..REACH });
    assert_eq!(found.waiting.len(), 1);
    let ids = names(found.wanted.iter().map(|object| &object.id));
    assert!(!ids.iter().any(|id| id.contains("kubelet")), "{ids:?}");
    assert!(found.unwanted.is_empty());
}

#[test]
fn a_real_api_server_accepts_every_object_inside() {
    let api = ApiServer::start("hosting-inside").unwrap();
    let kubectl = api.kubectl();
    let mut cluster = cluster("compact", &json!({}));
    // The address of the name server must be in the network of this API server.
    let first = kubectl.get(&["service", "kubernetes"]).unwrap();
    let first = first["spec"]["clusterIP"].as_str().unwrap().to_owned();
    let network = format!("{}.0/24", first.rsplit_once('.').unwrap().0);
    let block = serde_json::from_value(json!({"cidrBlocks": [network]})).unwrap();
    cluster.spec.cluster_network.services = block;
    for object in found(&cluster).wanted {
        let args = ["apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"];
        let answer = kubectl.run_with_input(&args, &object.fields.to_string());
        answer.unwrap_or_else(|error| panic!("{}: {error:#}", object.id));
    }
}
