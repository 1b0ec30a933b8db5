//! The clients that a cluster allows and its share of a gateway, from its own spec and its seed's.

use ipnet::IpNet;
use portico_api::annotations::{FAIR_SHARE, MAX_CONNECTIONS, MAX_CONNECTIONS_PER_SECOND};
use portico_api::cluster::Cluster;
use portico_api::network::Network;
use portico_api::policy::{AllowList, Budget, ClusterFacts, ClusterPolicy};
use portico_api::seed::Seed;
use portico_api::setting::Setting;

use crate::inputs::{LoadBalancers, Scope};
use crate::strategy;

/// The policy of the Cluster of `scope`.
///
/// The allow list is the cluster's own, on every strategy. The seed's defaults are joined to one that is set,
/// even empty, and restrict no cluster by themselves, as in KKP. The load balancer in front admits the ranges
/// of the seed. A load balancer of the cluster's own changes this where the cluster sets a list. Then the two
/// lists are joined, and both the load balancer and the gateway admit all of them.
///
/// With the seed's nodeport-proxy disabled no NodePort listeners are opened, except by a proxy of the
/// cluster's own.
pub fn policy(scope: &Scope<'_>, load_balancers: LoadBalancers) -> ClusterPolicy {
    let Scope { cluster, seed, .. } = *scope;
    let strategy = strategy::of(scope.decision.strategy);
    let list = |ranges: &mut dyn Iterator<Item = &Setting<Network>>| {
        AllowList::new(ranges.filter_map(|range| range.get().copied().map(IpNet::from)))
    };
    let of_seed = || seed.spec.nodeport_proxy.envoy.load_balancer_service.source_ranges.iter();
    let own = || own_ranges(cluster, seed);
    let joined = list(&mut own().chain(of_seed()));
    let (allow, source_ranges) = match (strategy.has_load_balancer(), own().next().is_some()) {
        (true, true) => (joined.clone(), joined),
        _ => (list(&mut own()), list(&mut of_seed())),
    };
    let annotation = |key| cluster.metadata.annotation(key).and_then(bound);
    ClusterPolicy {
        tenant: cluster.name().into(),
        allow,
        source_ranges,
        budget: Budget {
            max_connections: annotation(MAX_CONNECTIONS),
            max_connections_per_second: annotation(MAX_CONNECTIONS_PER_SECOND),
            fair_share: cluster.metadata.annotation(FAIR_SHARE).and_then(|value| value.parse().ok()),
        },
        node_port_listeners: strategy.opens_node_ports(seed, load_balancers),
        cluster: ClusterFacts::of(scope.host(), cluster.api_server_ca().and_then(Result::ok)),
    }
}

/// The client networks of a cluster, with the defaults of its seed; none if the cluster sets none.
pub(crate) fn own_ranges<'a>(
    cluster: &'a Cluster,
    seed: &'a Seed,
) -> impl Iterator<Item = &'a Setting<Network>> {
    let own = cluster.spec.api_server_allowed_ip_ranges.iter();
    own.flat_map(|own| own.cidr_blocks.iter().chain(&seed.spec.default_api_server_allowed_ip_ranges))
}

/// The value of a budget annotation: a whole number, at least 1. With 0 the cluster would be unreachable.
pub(crate) fn bound(value: &str) -> Option<u32> {
    value.trim().parse().ok().filter(|&bound| bound > 0)
}

#[cfg(test)]
mod tests {
    use portico_api::strategy::ExposeStrategy;

    use super::*;
    use crate::resolve::{DecidedBy, Decision};
    use crate::testing::{cluster, configuration, read, seed};

    fn scope<'a>(cluster: &'a Cluster, strategy: ExposeStrategy, seed: &'a Seed) -> Scope<'a> {
        let decision = Decision { strategy, decided_by: DecidedBy::Cluster };
        Scope { cluster, decision, seed, configuration: None }
    }

    fn policy(cluster: &Cluster, strategy: ExposeStrategy, seed: &Seed) -> ClusterPolicy {
        super::policy(&scope(cluster, strategy, seed), LoadBalancers::Gateway)
    }

    const OWN: &str = r#"{"apiServerAllowedIPRanges": {"cidrBlocks": ["192.0.2.0/24"]}}"#;
    const SEED: &str = r#"{"defaultAPIServerAllowedIPRanges": ["198.51.100.0/24"],
        "nodeportProxy": {"envoy": {"loadBalancerService": {"sourceRanges": ["203.0.113.0/24"]}}}}"#;

    #[test]
    fn the_defaults_of_the_seed_are_joined_to_a_list_that_is_set_and_restrict_nobody_by_themselves() {
        let seed = seed("north", SEED);
        for strategy in [ExposeStrategy::NodePort, ExposeStrategy::Tunneling] {
            let allow = |spec| policy(&cluster("a", spec), strategy, &seed).allow.to_string();
            assert_eq!(allow(OWN), "192.0.2.0/24,198.51.100.0/24");
            assert_eq!(allow(r#"{"apiServerAllowedIPRanges": {}}"#), "198.51.100.0/24");
            assert_eq!(allow(r#"{"apiServerAllowedIPRanges": {"cidrBlocks": []}}"#), "198.51.100.0/24");
            assert_eq!(allow(r#"{"apiServerAllowedIPRanges": null}"#), "any");
            assert_eq!(allow("{}"), "any");
        }
    }

    #[test]
    fn a_load_balancer_admits_what_all_load_balancers_of_the_seed_admit() {
        let policy = policy(&cluster("a", OWN), ExposeStrategy::LoadBalancer, &seed("north", SEED));
        assert_eq!(policy.allow.to_string(), "192.0.2.0/24,198.51.100.0/24,203.0.113.0/24");
        assert_eq!(policy.source_ranges, policy.allow);
    }

    #[test]
    fn the_source_ranges_of_the_seed_count_where_the_address_is_the_clients_own() {
        let (inside, outside) = ("203.0.113.7".parse().unwrap(), "192.0.2.7".parse().unwrap());
        for strategy in ExposeStrategy::ALL {
            let policy = policy(&cluster("a", "{}"), strategy, &seed("north", SEED));
            assert!(policy.admits(inside, true) && !policy.admits(outside, true), "{strategy}");
            assert!(policy.admits(outside, false), "{strategy}: what is masked is no client");
        }
    }

    #[test]
    fn a_disabled_proxy_opens_no_node_ports() {
        let disabled = seed("north", r#"{"nodeportProxy": {"disable": true}}"#);
        let cluster = cluster("a", "{}");
        for strategy in ExposeStrategy::ALL {
            assert!(!policy(&cluster, strategy, &disabled).node_port_listeners, "{strategy}");
        }
        let own_proxy =
            super::policy(&scope(&cluster, ExposeStrategy::LoadBalancer, &disabled), LoadBalancers::Cloud);
        assert!(own_proxy.node_port_listeners, "that is another proxy than the one disabled");
    }

    #[test]
    fn on_every_strategy_a_cluster_has_its_host_name_where_there_is_a_domain() {
        let (cluster, seed) = (cluster("a", "{}"), seed("north", "{}"));
        let configuration = configuration(r#"{"ingress": {"domain": "Example.com"}}"#);
        for strategy in ExposeStrategy::ALL {
            let without = scope(&cluster, strategy, &seed);
            assert_eq!(super::policy(&without, LoadBalancers::Cloud).host(), None);
            let scope = Scope { configuration: Some(&configuration), ..without };
            let host = super::policy(&scope, LoadBalancers::Cloud).host().cloned();
            assert_eq!(host.map(|host| host.to_string()).as_deref(), Some("a.north.example.com"));
        }
    }

    #[test]
    fn budgets_come_from_annotations_and_bad_ones_from_nowhere() {
        let cluster: Cluster = read(
            r#"{"metadata": {"name": "a", "annotations": {"portico.k8c.io/max-connections": "500",
                "portico.k8c.io/max-connections-per-second": "0", "portico.k8c.io/fair-share": "75"}}}"#,
        );
        let budget = policy(&cluster, ExposeStrategy::NodePort, &seed("north", "{}")).budget;
        let fair_share = Some("75".parse().unwrap());
        let expected = Budget { max_connections: Some(500), max_connections_per_second: None, fair_share };
        assert_eq!(budget, expected);
    }
}
