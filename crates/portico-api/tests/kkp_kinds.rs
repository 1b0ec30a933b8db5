//! What the three KKP kinds read from documents as people write them.

use std::time::Duration;

use portico_api::cluster::Cluster;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::seed::{Keepalive, Seed, Timeouts};
use portico_api::strategy::ExposeStrategy;
use serde::de::DeserializeOwned;

fn read<T: DeserializeOwned>(json: &str) -> T {
    serde_json::from_str(json).expect("documents as people write them are readable")
}

#[test]
fn the_shortest_documents_are_enough() {
    let configuration: KubermaticConfiguration = read(
        r#"{"apiVersion": "kubermatic.k8c.io/v1", "kind": "KubermaticConfiguration",
            "metadata": {"name": "kubermatic", "namespace": "kubermatic"},
            "spec": {"exposeStrategy": "NodePort", "ingress": {"domain": "kkp.example.com"}}}"#,
    );
    assert_eq!(configuration.spec.expose_strategy.get(), Some(&ExposeStrategy::NodePort));
    assert_eq!(&*configuration.spec.ingress.domain, "kkp.example.com");

    let seed: Seed = read(
        r#"{"apiVersion": "kubermatic.k8c.io/v1", "kind": "Seed",
            "metadata": {"name": "kubermatic", "namespace": "kubermatic"},
            "spec": {"exposeStrategy": "NodePort", "nodeportProxy": {"disable": true}}}"#,
    );
    assert!(seed.spec.nodeport_proxy.disable);
    assert_eq!(seed.dns_label(), "kubermatic");

    let cluster: Cluster = read(
        r#"{"apiVersion": "kubermatic.k8c.io/v1", "kind": "Cluster", "metadata": {"name": "clustername"},
            "spec": {"exposeStrategy": "Tunneling"}}"#,
    );
    assert_eq!(cluster.spec.expose_strategy.get(), Some(&ExposeStrategy::Tunneling));
}

#[test]
fn every_part_may_be_null_or_unknown() {
    let cluster: Cluster = read(
        r#"{"metadata": {"name": "a", "labels": null}, "status": null, "spec": {"exposeStrategy": null,
            "clusterNetwork": {"pods": {"cidrBlocks": null}}, "apiServerAllowedIPRanges": null, "pause": null,
            "componentsOverride": {"apiserver": null, "etcd": null, "coreDNS": {}}, "cloud": {"aws": null},
            "auditLogging": null, "version": null,
            "kubernetesDashboard": {"enabled": true}}}"#,
    );
    let bare: Cluster = read(r#"{"metadata": {"name": "a"}}"#);
    assert_eq!(cluster, bare);
    let seed: Seed =
        read(r#"{"metadata": {"name": "a"}, "spec": {"datacenters": {"lab": null}, "kubelb": 1}}"#);
    assert!(seed.spec.datacenters.contains_key("lab"));
}

#[test]
fn what_only_hosting_reads_is_dropped_by_what_only_exposes() {
    let cluster: Cluster = read(
        r#"{"metadata": {"name": "a"}, "spec": {"version": "1.35.8", "cniPlugin": {"type": "none"},
            "auditLogging": {"enabled": true, "policyPreset": "most"},
            "componentsOverride": {"etcd": {"clusterSize": "three"},
                "apiserver": {"replicas": 2, "nodePortRange": "30000-31000"}}}}"#,
    );
    let hosting = cluster.spec.hosting.as_ref().unwrap();
    assert_eq!(hosting.version.get().unwrap().to_string(), "1.35.8");
    assert_eq!(&*hosting.audit_logging.policy_preset.bad().unwrap().value, "most");
    let components = &cluster.spec.components_override;
    assert_eq!(components.apiserver.pods.as_ref().unwrap().replicas.get(), Some(&2));
    assert_eq!(&*components.etcd.as_ref().unwrap().cluster_size.bad().unwrap().value, "three");
    let range = components.apiserver.node_port_range.clone();
    let trimmed = cluster.trimmed();
    assert!(trimmed.spec.hosting.is_none());
    let components = trimmed.spec.components_override;
    assert!(components.etcd.is_none() && components.apiserver.pods.is_none());
    assert_eq!(components.apiserver.node_port_range, range);
}

#[test]
fn a_mistyped_strategy_does_not_lose_the_cluster() {
    let cluster: Cluster = read(
        r#"{"metadata": {"name": "a"}, "spec": {"exposeStrategy": "tunneling", "pause": true,
            "clusterNetwork": {"tunnelingAgentIP": 7}}}"#,
    );
    assert_eq!(&*cluster.spec.expose_strategy.bad().unwrap().value, "tunneling");
    assert_eq!(&*cluster.spec.cluster_network.tunneling_agent_ip.bad().unwrap().value, "7");
    assert!(cluster.spec.pause);
}

#[test]
fn the_dns_overwrite_is_read_in_both_spellings() {
    let new: Seed = read(r#"{"metadata": {"name": "s"}, "spec": {"seedDNSOverwrite": "north"}}"#);
    let old: Seed = read(r#"{"metadata": {"name": "s"}, "spec": {"seed_dns_overwrite": "south"}}"#);
    let both: Seed = read(
        r#"{"metadata": {"name": "s"},
            "spec": {"seed_dns_overwrite": "south", "seedDNSOverwrite": "north"}}"#,
    );
    assert_eq!((new.dns_label(), old.dns_label(), both.dns_label()), ("north", "south", "north"));
}

#[test]
fn connection_settings_hold_only_where_they_are_valid() {
    let seed: Seed = read(
        r#"{"spec": {"nodeportProxy": {"envoy": {"connectionSettings": {
            "sniListenerIdleTimeout": "1h30m", "tunnelingConnectionIdleTimeout": "0s",
            "tunnelingStreamIdleTimeout": "500ms",
            "downstreamTCPKeepaliveTime": "60.9s", "downstreamTCPKeepaliveProbes": 3,
            "upstreamTCPKeepaliveTime": "-1s", "upstreamTCPKeepaliveInterval": "soon"}}}}}"#,
    );
    assert_eq!(
        seed.spec.nodeport_proxy.envoy.connection_settings.effective(),
        Timeouts {
            sni_idle: Some(Duration::from_secs(5_400)),
            tunnel_connection_idle: None,
            tunnel_stream_idle: None,
            downstream_keepalive: Some(Keepalive {
                time: Some(Duration::from_secs(60)),
                interval: None,
                probes: Some(3),
            }),
            upstream_keepalive: None,
        }
    );
}

#[test]
fn an_admin_token_is_never_kept() {
    let cluster: Cluster = read(
        r#"{"metadata": {"name": "a"}, "status": {"address": {"adminToken": "secret.token", "port": 31234,
            "ip": "203.0.113.9", "internalURL": "a."}}}"#,
    );
    let text = format!("{cluster:?}{}", serde_json::to_string(&cluster.status.address).unwrap());
    assert!(!text.contains("secret"));
    assert_eq!(cluster.status.address.port, Some(31_234));
}
