//! The expose strategies, one file each: everything that differs between them.
//!
//! A file says which Services exist, by which names they are reached, which address users and nodes get, what
//! the API server's certificate holds, and which checks apply to a Cluster. What the strategies with a
//! NodePort number for each Service share is in `by_port`.
//!
//! A new strategy is a variant of [`ExposeStrategy`], a file here, and its line in `of`. Most other code of
//! this crate asks through `Strategy`. `exposure`, `user_cluster` and `migration::plan::steps` also match on
//! all variants: the compiler asks for a new one. It does not ask at the few comparisons with one variant. A
//! migration is a pair of strategies over the same [`Inputs`](crate::inputs::Inputs).

mod by_port;
mod load_balancer;
mod node_port;
mod rules;
mod tunneling;

pub use portico_api::strategy::AnsweredBy;
use portico_api::strategy::ExposeStrategy;

pub use self::load_balancer::FRONT;
pub(crate) use self::rules::{Endpoint, Strategy};

/// The rules of a strategy.
pub(crate) fn of(strategy: ExposeStrategy) -> &'static dyn Strategy {
    match strategy {
        ExposeStrategy::NodePort => &node_port::NodePort,
        ExposeStrategy::LoadBalancer => &load_balancer::LoadBalancer,
        ExposeStrategy::Tunneling => &tunneling::Tunneling,
    }
}

/// The names of the strategies that have `property`, as in `A, B or C`.
pub(crate) fn names(property: impl Fn(&dyn Strategy) -> bool) -> String {
    ExposeStrategy::one_of(ExposeStrategy::ALL.into_iter().filter(|&strategy| property(of(strategy))))
}
