//! Networks of pods and Services: of a size that Kubernetes takes, apart from each other and from the seed's.

use ipnet::IpNet;
use portico_api::setting::Setting;
use portico_expose::findings::Findings;
use portico_expose::inputs::Scope;
use portico_expose::networks;

use crate::settings::Settings;

/// Most bits of addresses in a network of Services (kube-apiserver).
const MOST_SERVICE_BITS: u8 = 20;
/// Fewest: the DNS server of a cluster has the tenth address.
const FEWEST_SERVICE_BITS: u8 = 4;
/// Most bits by which the pod network of a node is smaller than that of all (kube-controller-manager).
const MOST_NODE_BITS: u8 = 16;

pub(super) fn check(scope: &Scope<'_>, settings: &Settings, findings: &mut Findings) {
    let (cluster, kubevirt) = (scope.cluster, scope.is_on("kubevirt"));
    let all =
        [("pods", networks::pods(cluster, kubevirt)), ("services", networks::services(cluster, kubevirt))];
    let field = |name: &str| format!("spec.clusterNetwork.{name}.cidrBlocks");
    let [(_, pods), (_, services)] = &all;
    for (name, networks) in &all {
        let families: Vec<bool> = networks.iter().map(|network| network.addr().is_ipv4()).collect();
        if families.is_empty() || families.len() > 2 || families.len() == 2 && families[0] == families[1] {
            let message = format!("{} networks of these families cannot be used", families.len());
            findings.refuse(
                "networks",
                &field(name),
                message,
                "write one network, or one of IPv4 and one of IPv6",
            );
        }
    }
    let families =
        |networks: &[IpNet]| networks.iter().map(|network| network.addr().is_ipv4()).collect::<Vec<_>>();
    if families(pods) != families(services) {
        let message = "pods and Services must have the same families, in the same order".to_owned();
        findings.refuse(
            "networks",
            &field("services"),
            message,
            "write as many of each, and of the same kind",
        );
    }
    for network in services {
        let bits = network.max_prefix_len() - network.prefix_len();
        let longest = network.max_prefix_len() - FEWEST_SERVICE_BITS;
        let shortest = network.max_prefix_len() - MOST_SERVICE_BITS;
        if !(FEWEST_SERVICE_BITS..=MOST_SERVICE_BITS).contains(&bits) {
            let message = format!("{network} has a size that Kubernetes does not take for Services");
            let remedy = format!("write a prefix length from {shortest} to {longest}");
            findings.refuse("networks", &field("services"), message, &remedy);
        }
    }
    node_masks(scope, pods, findings);
    overlaps(scope, settings, &all, findings);
}

fn node_masks(scope: &Scope<'_>, pods: &[IpNet], findings: &mut Findings) {
    let network = &scope.cluster.spec.cluster_network;
    for (name, setting, default, v4) in [
        ("nodeCidrMaskSizeIPv4", &network.node_cidr_mask_size_ipv4, 24, true),
        ("nodeCidrMaskSizeIPv6", &network.node_cidr_mask_size_ipv6, 64, false),
    ] {
        let field = format!("spec.clusterNetwork.{name}");
        if let Setting::Bad(bad) = setting {
            let message = format!("{:?} is no prefix length: {}", bad.value, bad.why);
            findings.refuse("node-mask", &field, message, "write a number, such as 24");
            continue;
        }
        let size = setting.get().copied().unwrap_or(default);
        for pods in pods.iter().filter(|pods| pods.addr().is_ipv4() == v4) {
            let shortest = pods.prefix_len();
            let longest = (shortest + MOST_NODE_BITS).min(pods.max_prefix_len());
            if size <= shortest || size > longest {
                let message = format!("networks of nodes with prefix length {size} do not fit into {pods}");
                let remedy = format!(
                    "write a number from {} to {longest}, or choose another pod network",
                    shortest + 1
                );
                findings.refuse("node-mask", &field, message, &remedy);
            }
        }
    }
}

fn overlaps(scope: &Scope<'_>, settings: &Settings, own: &[(&str, Vec<IpNet>); 2], findings: &mut Findings) {
    let overlap = |a: &IpNet, b: &IpNet| a.contains(b) || b.contains(a);
    let machines = networks::machines(scope.cluster);
    let [(_, pods), (_, services)] = own;
    let others = [
        ("services", services, "the pod network", pods),
        ("pods", pods, "the network of machines", &machines),
        ("services", services, "the network of machines", &machines),
        ("pods", pods, "the seed's network", &settings.seed_networks),
        ("services", services, "the seed's network", &settings.seed_networks),
    ];
    for (name, networks, what, others) in others {
        for network in networks {
            for other in others.iter().filter(|other| overlap(network, other)) {
                let message = format!("{network} overlaps {what} {other}");
                let field = format!("spec.clusterNetwork.{name}.cidrBlocks");
                findings.refuse("network-overlap", &field, message, "choose one that is not in use");
            }
        }
    }
}
