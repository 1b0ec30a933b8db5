//! Cluster → [`ExposedCluster`]: the resolved form that a gateway reads instead of Clusters.

use portico_api::annotations::API_SERVER_CA;
use portico_api::cluster::Cluster;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::exposed_cluster::{ExposedCluster, ExposedClusterSpec, Migration, SecondDoor, Tunnel};
use portico_api::meta::ObjectMeta;
use portico_api::problem::Problem;
use portico_api::seed::Seed;

use crate::doors::{Doors, policy_of};
use crate::inputs::{LoadBalancers, Scope};
use crate::policy::policy;
use crate::resolve::Decision;
use crate::validate::usable;

/// The label of a Cluster by which people select its ExposedCluster too: the project.
pub const PROJECT_LABEL: &str = "project-id";

/// Returns the ExposedCluster of `cluster` as KKP runs it, on the one of `seeds` that hosts it. `cluster` is
/// the whole object, not [`Cluster::trimmed`]. With `doors` it has these; without, that of its own strategy,
/// and the address in its status. Neither owner nor resourceVersion is set.
///
/// # Errors
/// Everything wrong with the Cluster or its Seed, if one of them must not be used as written. The
/// ExposedCluster written earlier must stay then: it is the last usable version, and it outlives restarts.
/// While there is none, gateways admit nobody to the cluster.
pub fn exposed_cluster<S: AsRef<Seed>>(
    cluster: &Cluster,
    seeds: &[S],
    configuration: Option<&KubermaticConfiguration>,
    doors: Option<&Doors>,
) -> Result<ExposedCluster, Vec<Problem>> {
    let scope = usable(cluster, seeds, configuration)?;
    let own = Doors::new(cluster, scope.decision.strategy);
    Ok(ExposedCluster { metadata: metadata(cluster), spec: spec(&scope, doors.unwrap_or(&own)) })
}

fn metadata(cluster: &Cluster) -> ObjectMeta {
    let mut labels = cluster.metadata.labels.clone();
    labels.retain(|key, _| **key == *PROJECT_LABEL);
    ObjectMeta { name: cluster.metadata.name.clone(), labels, ..ObjectMeta::default() }
}

fn spec(scope: &Scope<'_>, doors: &Doors) -> ExposedClusterSpec {
    let Scope { cluster, seed, .. } = *scope;
    let of = |strategy| {
        let scope = Scope { decision: Decision { strategy, ..scope.decision }, ..*scope };
        (strategy, policy(&scope, LoadBalancers::Cloud))
    };
    let policy = policy_of(of(doors.now.first), doors.now.open().nth(1).map(of));
    let tunnel = |strategy| doors.agent_ip(cluster, strategy).map(|agent_ip| Tunnel { agent_ip });
    let migration = doors.now.second.map(|second| Migration {
        state: second.state,
        since: second.since,
        second: SecondDoor {
            expose_strategy: second.strategy,
            address: doors.second.clone(),
            tunnel: tunnel(second.strategy),
        },
    });
    let allowed = policy.allow.networks();
    ExposedClusterSpec {
        expose_strategy: doors.now.first,
        seed: (*seed.metadata.name).into(),
        datacenter: cluster.spec.cloud.dc.clone(),
        host_name: policy.host().map(|host| host.as_str().into()).unwrap_or_default(),
        paused: cluster.spec.pause,
        allowed_ip_ranges: (!allowed.is_empty()).then(|| allowed.into()),
        load_balancer_source_ranges: policy.source_ranges.networks().into(),
        node_port_listeners_disabled: !policy.node_port_listeners,
        budget: policy.budget,
        connection_settings: seed.spec.nodeport_proxy.envoy.connection_settings.clone(),
        api_server_ca: match policy.api_server_ca() {
            Some(_) => cluster.metadata.annotation(API_SERVER_CA).unwrap_or_default().into(),
            None => "".into(),
        },
        address: doors.first.clone(),
        tunnel: tunnel(doors.now.first),
        migration: migration.map(Box::new),
    }
}

#[cfg(test)]
mod tests {
    use portico_api::cluster::Address;
    use portico_api::exposed_cluster::MigrationState;
    use portico_api::strategy::ExposeStrategy;

    use super::*;
    use crate::migration::{Now, Second};
    use crate::policy::policy;
    use crate::resolve::DecidedBy;
    use crate::testing::{cluster, configuration, read, seed};

    const SEED: &str = r#"{"datacenters": {"lab-1": {}},
        "defaultAPIServerAllowedIPRanges": ["198.51.100.0/24"],
        "nodeportProxy": {"envoy": {"loadBalancerService": {"sourceRanges": ["203.0.113.0/24"]}}}}"#;

    fn whole() -> Cluster {
        let ca = include_str!("../../portico-api/src/testdata/ca.pem").replace('\n', "\\n");
        read(&format!(
            r#"{{"metadata": {{"name": "a", "uid": "7", "labels": {{"project-id": "p", "worker-name": "w"}},
                    "annotations": {{"portico.k8c.io/max-connections": "500", "secret": "s3cret",
                        "portico.k8c.io/api-server-ca": "{ca}"}}}},
                "spec": {{"exposeStrategy": "Tunneling", "cloud": {{"dc": "lab-1"}}, "pause": true,
                    "apiServerAllowedIPRanges": {{"cidrBlocks": ["192.0.2.0/24"]}}}},
                "status": {{"address": {{"adminToken": "s3cret", "url": "https://a.example.com:6443",
                    "externalName": "a.example.com", "ip": "203.0.113.9", "port": 6443,
                    "internalURL": "apiserver-external.cluster-a.svc.cluster.local."}}}}}}"#
        ))
    }

    fn project(cluster: &Cluster, seed: Seed) -> Result<ExposedCluster, Vec<Problem>> {
        let configuration = configuration(r#"{"ingress": {"domain": "example.com"}}"#);
        exposed_cluster(cluster, &[Box::new(seed)], Some(&configuration), None)
    }

    #[test]
    fn a_gateway_enforces_from_the_projection_what_it_would_from_the_cluster() {
        let same = |strategy: ExposeStrategy, seed: Seed| {
            let mut cluster = whole();
            cluster.spec.expose_strategy = read(&format!("\"{strategy}\""));
            let decision = Decision { strategy, decided_by: DecidedBy::Cluster };
            let configuration = configuration(r#"{"ingress": {"domain": "example.com"}}"#);
            let scope =
                Scope { cluster: &cluster, decision, seed: &seed, configuration: Some(&configuration) };
            let expected = policy(&scope, LoadBalancers::Cloud);
            let projected = project(&cluster, seed).unwrap();
            assert_eq!(projected.policy(), expected, "{strategy}");
        };
        for strategy in ExposeStrategy::ALL {
            same(strategy, seed("north", SEED));
        }
        same(ExposeStrategy::NodePort, seed("north", r#"{"nodeportProxy": {"disable": true}}"#));
    }

    #[test]
    fn the_record_of_two_doors_is_what_was_to_be_recorded() {
        let mut cluster = whole();
        cluster.spec.expose_strategy = read("\"NodePort\"");
        let second = Second {
            strategy: ExposeStrategy::Tunneling,
            state: MigrationState::Quieting,
            since: "2026-01-02T03:04:05.000000006Z".parse().unwrap(),
        };
        let at = |port| Address { port: Some(port), ..Address::default() };
        let doors = Doors {
            now: Now { first: ExposeStrategy::NodePort, second: Some(second) },
            first: at(31_234),
            second: at(6_443),
            // The Cluster has it no longer.
            agent_ip: Some("100.64.30.77".parse().unwrap()),
        };
        let configuration = configuration(r#"{"ingress": {"domain": "example.com"}}"#);
        let seeds = [Box::new(seed("north", SEED))];
        let projected = exposed_cluster(&cluster, &seeds, Some(&configuration), Some(&doors)).unwrap();
        assert_eq!(Doors::of(&projected.spec), doors);
        assert_eq!(projected.spec.tunnel, None, "that of the second door is with the second door");
        // After Tunneling the address of agents is nobody's.
        let settled = doors.moved_to(Now::settled(ExposeStrategy::NodePort));
        assert_eq!((settled.first, settled.second), (at(31_234), Address::default()));
        assert_eq!(settled.agent_ip, None);
        let back = Now {
            first: ExposeStrategy::Tunneling,
            second: Some(Second { strategy: ExposeStrategy::NodePort, ..second }),
        };
        let back = doors.moved_to(back);
        assert_eq!((back.first, back.second, back.agent_ip), (at(6_443), at(31_234), doors.agent_ip));
    }

    #[test]
    fn nothing_secret_is_in_the_projection() {
        let projected = project(&whole(), seed("north", SEED)).unwrap();
        let written = serde_json::to_value(&projected).unwrap();
        assert!(!written.to_string().contains("s3cret"), "{written}");
        assert_eq!(written["metadata"], serde_json::json!({"name": "a", "labels": {"project-id": "p"}}));
        assert_eq!(written["spec"]["address"]["ip"], "203.0.113.9");
        assert_eq!(written["spec"]["tunnel"]["agentIP"], "100.64.30.10");
        assert_eq!(written["spec"]["loadBalancerSourceRanges"][0], "203.0.113.0/24");
    }

    #[test]
    fn what_must_not_be_used_as_written_has_no_projection() {
        let (good, north) = (cluster("a", "{}"), seed("north", "{}"));
        assert!(project(&good, north.clone()).is_ok());
        let bad = cluster("a", r#"{"apiServerAllowedIPRanges": {"cidrBlocks": ["192.0.2.0/33"]}}"#);
        assert_eq!(project(&bad, north).unwrap_err().len(), 1);
        assert!(exposed_cluster::<Box<Seed>>(&good, &[], None, None).is_err());
        let bad_seed = seed("north", r#"{"defaultAPIServerAllowedIPRanges": ["192.0.2.0/33"]}"#);
        assert!(project(&good, bad_seed).is_err());
    }
}
