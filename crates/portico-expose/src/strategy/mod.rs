//! The expose strategies, one file each: everything that differs between them.
//!
//! A file says which Services exist, by which names they are reached, and which address users and nodes get.
//! It also has the names on the API server's certificate, the checks of a Cluster, and how a migration opens
//! and closes the strategy. `by_port` has the parts that all strategies with a NodePort for each Service
//! share.
//!
//! A new strategy is a variant of [`ExposeStrategy`], a file here, and its line in [`of`]. Code that depends
//! on a strategy asks [`Strategy`] for a property. It neither matches on a variant nor compares with one. A
//! migration is a pair of strategies over the same [`Inputs`](crate::inputs::Inputs).
//! [`both`](crate::doors::both) merges their plans. The steps of a migration are the opening of one and the
//! closing of the other.

mod by_port;
mod load_balancer;
mod node_port;
mod rules;
mod tunneling;

pub use portico_api::strategy::AnsweredBy;
use portico_api::strategy::ExposeStrategy;

pub use self::load_balancer::FRONT;
pub use self::rules::{Closing, Endpoint, Names, NoAddress, Opening, Strategy};

/// The rules of a strategy.
pub fn of(strategy: ExposeStrategy) -> &'static dyn Strategy {
    match strategy {
        ExposeStrategy::NodePort => &node_port::NodePort,
        ExposeStrategy::LoadBalancer => &load_balancer::LoadBalancer,
        ExposeStrategy::Tunneling => &tunneling::Tunneling,
    }
}

/// The names of the strategies that have `property`: see [`Names`].
pub(crate) fn names(property: fn(&dyn Strategy) -> bool) -> String {
    ExposeStrategy::one_of(ExposeStrategy::ALL.into_iter().filter(|&strategy| property(of(strategy))))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Portico's own kinds, and KKP's.
    const DEFINITIONS: [&str; 2] = [
        include_str!("../../../../deploy/crds.yaml"),
        include_str!("../../../../deploy/crds-kubermatic.yaml"),
    ];

    fn lines() -> impl Iterator<Item = &'static str> {
        DEFINITIONS.into_iter().flat_map(str::lines).map(str::trim)
    }

    /// Messages name strategies by what they have.
    #[test]
    fn each_property_has_its_strategies() {
        assert_eq!(names(|strategy| strategy.has_node_ports()), "NodePort or LoadBalancer");
        assert_eq!(names(|strategy| strategy.has_load_balancer()), "LoadBalancer");
        assert_eq!(names(|strategy| strategy.has_agent()), "Tunneling");
        assert_eq!(names(|strategy| strategy.needs_domain()), "Tunneling");
    }

    #[test]
    fn the_definitions_of_kinds_list_all_strategies() {
        let all = ExposeStrategy::ALL.map(ExposeStrategy::name).join(", ");
        let lines: Vec<_> = lines().collect();
        let fields: Vec<_> = lines.windows(3).filter(|lines| lines[0] == "exposeStrategy:").collect();
        assert_eq!(fields.len(), 5);
        for field in fields {
            let [or_none, list] = [format!("enum: [\"\", {all}]"), format!("enum: [{all}]")];
            assert!(field[2] == list || field[2] == or_none, "{field:?}");
        }
    }

    #[test]
    fn the_definitions_of_kinds_allow_fields_of_agents_and_load_balancers_to_strategies_that_have_them() {
        let named = |line: &str| {
            let all = ExposeStrategy::ALL.into_iter();
            ExposeStrategy::one_of(all.filter(|strategy| line.contains(&format!("'{strategy}'"))))
        };
        let rules: Vec<_> = lines().map(named).filter(|names| !names.is_empty()).collect();
        let agents = names(|strategy| strategy.has_agent());
        let load_balancers = names(|strategy| strategy.has_load_balancer());
        assert_eq!(rules, [&agents, &agents, &load_balancers, &agents].map(String::as_str));
    }
}
