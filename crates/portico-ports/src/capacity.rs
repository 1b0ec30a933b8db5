//! How many clusters still fit on a seed, which limit is hit first, and which strategy would lift it.

use portico_api::port_range::PortRange;
use serde::Serialize;

use crate::model::{self, ClusterCost, LoadBalancer};
use crate::site::Site;

/// What is asked.
#[derive(Debug, Clone, Copy, Default)]
pub struct Question {
    /// The load balancer before the seed, if it is known.
    pub load_balancer: Option<&'static LoadBalancer>,
    /// How many addresses there are for load balancers, if that is limited (a pool of MetalLB).
    pub addresses: Option<u32>,
    /// Clusters to come, and their strategy.
    pub add: Option<(u32, &'static str)>,
}

/// The answer. The names of the fields are stable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Capacity {
    /// What is limited.
    pub limits: Vec<Limit>,
    /// How many clusters of each strategy still fit.
    pub strategies: Vec<Room>,
    /// Whether the clusters to come fit, where that was asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fits: Option<bool>,
    /// What that means, in a sentence or two.
    pub conclusion: String,
}

/// Something there is only so much of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Limit {
    /// What.
    pub name: &'static str,
    /// How much of it there is.
    pub size: u32,
    /// How much is taken.
    pub used: u32,
    /// How much is left.
    pub left: u32,
    /// Where that is from.
    pub origin: String,
}

/// How many clusters of a strategy still fit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Room {
    /// The strategy.
    pub strategy: &'static str,
    /// Clusters there are.
    pub clusters: u32,
    /// Clusters that still fit; `None` if no known limit holds for this strategy.
    pub room: Option<u32>,
    /// The limit that is hit first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_limit: Option<&'static str>,
    /// The needs of one cluster, and their source.
    pub origin: &'static str,
}

const NODE_PORTS: &str = "NodePorts";
const LISTENERS: &str = "listeners of the front load balancer";
const LOAD_BALANCERS: &str = "load balancers";
const ADDRESSES: &str = "addresses";

/// What is left on a seed.
pub fn capacity(site: &Site, question: &Question) -> Capacity {
    let takes_service_ports = site.has_front_service || question.load_balancer.is_some();
    let limits = limits(site, question, takes_service_ports);
    let rooms: Vec<Room> =
        model::cluster_costs().iter().map(|cost| room(site, cost, &limits, takes_service_ports)).collect();
    let (fits, conclusion) = match question.add {
        None => (None, summary(&rooms)),
        Some((count, strategy)) => verdict(&rooms, count, strategy),
    };
    Capacity { limits, strategies: rooms, fits, conclusion }
}

fn clusters_of(site: &Site, strategy: &str) -> u32 {
    let count = site.clusters.iter().filter(|cluster| cluster.strategy == strategy).count();
    u32::try_from(count).unwrap_or(u32::MAX)
}

fn limits(site: &Site, question: &Question, takes_service_ports: bool) -> Vec<Limit> {
    let mut limits = Vec::new();
    let mut limit = |name, size: u32, used: u32, origin: String| {
        limits.push(Limit { name, size, used, left: size.saturating_sub(used), origin });
    };
    let sum = |what: &dyn Fn(&ClusterCost) -> u32| -> u32 {
        model::cluster_costs().iter().map(|cost| what(cost) * clusters_of(site, cost.strategy)).sum()
    };
    let listeners = model::shared_listeners() + sum(&|cost| cost.listeners);
    let balancers = 1 + sum(&|cost| cost.load_balancers);
    let range = site.node_port_range.unwrap_or(PortRange::NODE_PORTS);
    let taken = site.node_ports.keys().filter(|port| range.contains(**port)).count();
    let mut taken = u32::try_from(taken).unwrap_or(u32::MAX);
    if takes_service_ports && !site.has_front_service {
        // The Service of the front is not among the objects: it has a NodePort for each listener.
        taken += listeners;
    }
    let origin = match site.node_port_range {
        Some(range) => format!("{range}, spec.userCluster.nodePortRange"),
        None => format!("{range}, the default of Kubernetes and KKP"),
    };
    limit(NODE_PORTS, range.size(), taken, origin);
    if let Some(known) = question.load_balancer {
        let origin = |adjustable: bool| {
            format!("{}{}", known.reference, if adjustable { "; raised on request" } else { "" })
        };
        if let Some(most) = known.listeners {
            limit(LISTENERS, most, listeners, origin(known.listeners_adjustable));
        }
        if let Some(most) = known.count {
            limit(LOAD_BALANCERS, most, balancers, origin(known.count_adjustable));
        }
    }
    if let Some(addresses) = question.addresses {
        limit(ADDRESSES, addresses, balancers, "--addresses".to_owned());
    }
    limits
}

fn room(site: &Site, cost: &'static ClusterCost, limits: &[Limit], takes_service_ports: bool) -> Room {
    let price = |name: &str| match name {
        // The Services of clusters with the strategy LoadBalancer are of that type in any case.
        NODE_PORTS if takes_service_ports || cost.load_balancers > 0 => cost.node_ports + cost.service_ports,
        NODE_PORTS => cost.node_ports,
        LISTENERS => cost.listeners,
        _ => cost.load_balancers,
    };
    let rooms =
        limits.iter().filter_map(|limit| Some((limit.left.checked_div(price(limit.name))?, limit.name)));
    let first = rooms.min_by_key(|(room, _)| *room);
    Room {
        strategy: cost.strategy,
        clusters: clusters_of(site, cost.strategy),
        room: first.map(|(room, _)| room),
        first_limit: first.map(|(_, name)| name),
        origin: cost.reference,
    }
}

fn summary(rooms: &[Room]) -> String {
    let text = |room: &Room| match (room.room, room.first_limit) {
        (Some(count), Some(limit)) => format!("{count} more with {} ({limit})", room.strategy),
        _ => format!("no known limit with {}", room.strategy),
    };
    let texts: Vec<String> = rooms.iter().map(text).collect();
    format!("Clusters that still fit: {}.", texts.join(", "))
}

fn verdict(rooms: &[Room], count: u32, strategy: &str) -> (Option<bool>, String) {
    let Some(wanted) = rooms.iter().find(|room| room.strategy == strategy) else {
        return (None, summary(rooms));
    };
    let (Some(room), Some(limit)) = (wanted.room, wanted.first_limit) else {
        return (Some(true), format!("{count} more clusters with {strategy} fit: no known limit holds."));
    };
    if count <= room {
        let text = format!("{count} more clusters with {strategy} fit; {limit} end after {room}.");
        return (Some(true), text);
    }
    let better: Vec<String> = rooms
        .iter()
        .filter(|other| other.room.is_none_or(|other| other >= count))
        .map(|other| match other.room {
            None => format!("{} (no known limit)", other.strategy),
            Some(room) => format!("{} (room for {room})", other.strategy),
        })
        .collect();
    let lifted = if better.is_empty() {
        "no strategy lifts it".to_owned()
    } else {
        format!("it is lifted by {}", better.join(" or "))
    };
    (
        Some(false),
        format!("{count} more clusters with {strategy} do not fit: {limit} end after {room}; {lifted}."),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::site::SiteCluster;

    fn site(node_port: u32, load_balancer: u32) -> Site {
        let cluster = |strategy| SiteCluster { strategy, ..SiteCluster::default() };
        let mut site = Site::default();
        site.clusters.extend((0..node_port).map(|_| cluster("NodePort")));
        site.clusters.extend((0..load_balancer).map(|_| cluster("LoadBalancer")));
        let taken = u16::try_from(2 * (node_port + load_balancer)).unwrap();
        site.node_ports = (0..taken).map(|offset| (30_000 + offset, String::new())).collect();
        site
    }

    fn room(capacity: &Capacity, strategy: &str) -> (Option<u32>, Option<&'static str>) {
        let room = capacity.strategies.iter().find(|room| room.strategy == strategy).unwrap();
        (room.room, room.first_limit)
    }

    #[test]
    fn two_node_ports_a_cluster_are_taken_of_the_range() {
        let capacity = capacity(&site(10, 0), &Question::default());
        assert_eq!(capacity.limits[0].left, 2_768 - 20);
        assert_eq!(room(&capacity, "NodePort"), (Some(1_374), Some(NODE_PORTS)));
        assert_eq!(room(&capacity, "LoadBalancer"), (Some(549), Some(NODE_PORTS)));
        assert_eq!(room(&capacity, "Tunneling"), (None, None));
    }

    #[test]
    fn an_aws_nlb_ends_long_before_the_range_and_tunneling_lifts_it() {
        let load_balancer = model::load_balancer("aws-nlb").ok();
        let question = Question { load_balancer, add: Some((20, "NodePort")), ..Question::default() };
        let capacity = capacity(&site(10, 0), &question);
        assert_eq!(room(&capacity, "NodePort"), (Some(13), Some(LISTENERS)));
        assert_eq!(capacity.fits, Some(false));
        assert!(capacity.conclusion.contains("Tunneling (no known limit)"), "{}", capacity.conclusion);
        // 20 of the clusters, 23 of the Service of the front.
        assert_eq!(capacity.limits[0].used, 43);
    }

    #[test]
    fn a_pool_of_addresses_limits_load_balancers() {
        let question = Question { addresses: Some(5), add: Some((2, "LoadBalancer")), ..Question::default() };
        let capacity = capacity(&site(0, 2), &question);
        assert_eq!(room(&capacity, "LoadBalancer"), (Some(2), Some(ADDRESSES)));
        assert_eq!(capacity.fits, Some(true));
    }

    #[test]
    fn a_full_seed_has_room_for_none() {
        let mut site = site(3, 0);
        site.node_port_range = "30000-30005".parse().ok();
        let question = Question { add: Some((1, "NodePort")), ..Question::default() };
        let capacity = capacity(&site, &question);
        assert_eq!(room(&capacity, "NodePort").0, Some(0));
        assert_eq!(capacity.fits, Some(false));
    }
}
