//! The networks of a user cluster: as written, or KKP's defaults.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use portico_api::cluster::{Cluster, NetworkRanges};

/// Default address on which the agent on each worker node listens. It is in 100.64.0.0/10, the shared address
/// space of RFC 6598, which no pod, Service or machine network should use.
pub const DEFAULT_AGENT_IP: IpAddr = IpAddr::V4(Ipv4Addr::new(100, 64, 30, 10));

const PODS: IpNet = v4(172, 25, 0, 0, 16);
const SERVICES: IpNet = v4(10, 240, 16, 0, 20);
/// On KubeVirt, user clusters run inside a cluster that may itself have the default networks.
const KUBEVIRT_PODS: IpNet = v4(172, 26, 0, 0, 16);
const KUBEVIRT_SERVICES: IpNet = v4(10, 241, 0, 0, 20);
const PODS_V6: IpNet = IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(0xfd01, 0, 0, 0, 0, 0, 0, 0), 48));
const SERVICES_V6: IpNet = IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(0xfd02, 0, 0, 0, 0, 0, 0, 0), 108));

const fn v4(a: u8, b: u8, c: u8, d: u8, prefix: u8) -> IpNet {
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), prefix))
}

/// Address on which the agent on each worker node listens. A text that is no address counts as unset here;
/// validation refuses it.
pub fn agent_ip(cluster: &Cluster) -> IpAddr {
    cluster.spec.cluster_network.tunneling_agent_ip.get().copied().unwrap_or(DEFAULT_AGENT_IP)
}

/// Pod networks. `kubevirt` is whether the cluster runs on KubeVirt.
pub fn pods(cluster: &Cluster, kubevirt: bool) -> Vec<IpNet> {
    let default = if kubevirt { KUBEVIRT_PODS } else { PODS };
    written_or(cluster, &cluster.spec.cluster_network.pods, default, PODS_V6)
}

/// Service networks.
pub fn services(cluster: &Cluster, kubevirt: bool) -> Vec<IpNet> {
    let default = if kubevirt { KUBEVIRT_SERVICES } else { SERVICES };
    written_or(cluster, &cluster.spec.cluster_network.services, default, SERVICES_V6)
}

/// Machine networks. There is no default.
pub fn machines(cluster: &Cluster) -> Vec<IpNet> {
    cluster.spec.machine_networks.iter().filter_map(|network| network.cidr.get().copied()).collect()
}

/// ClusterIP of the `kubernetes` Service in the user cluster: the first address of the first Service network.
pub fn in_cluster_api_address(cluster: &Cluster, kubevirt: bool) -> Option<IpAddr> {
    match services(cluster, kubevirt).first()?.network() {
        IpAddr::V4(network) => Some(Ipv4Addr::from(u32::from(network).checked_add(1)?).into()),
        IpAddr::V6(network) => Some(Ipv6Addr::from(u128::from(network).checked_add(1)?).into()),
    }
}

fn written_or(cluster: &Cluster, written: &NetworkRanges, v4: IpNet, v6: IpNet) -> Vec<IpNet> {
    if !written.cidr_blocks.is_empty() {
        return written.cidr_blocks.iter().filter_map(|block| block.get().copied()).collect();
    }
    let network = &cluster.spec.cluster_network;
    let dual_stack = &*network.ip_family == "IPv4+IPv6" || network.pods.cidr_blocks.len() > 1;
    if dual_stack { vec![v4, v6] } else { vec![v4] }
}
