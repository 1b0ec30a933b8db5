//! Which bytes go where: from Services, EndpointSlices and policies to the routes of a gateway.
//!
//! `apply` takes every object that is applied or deleted. `annotations` (with `port_mapping` for server
//! names) reads Services and `endpoints` reads EndpointSlices, as far as [`endpoint_rules`] and `cluster_ips`
//! allow. The [`index`] keeps what they say as `facts`.
//! `claims` decides which Service owns a key when several claim it. `policies` decides which clients may
//! come. `allow_lists`, with `targets`, decides whose allow list holds for an endpoint that several tenants
//! have. `commit` computes what changed since the last commit, and a [`table`] follows that. [`route`] holds
//! the values of a table. [`rows`] and `problems` say what became of each object. `front` says by which
//! Services clients reach the gateway itself.
//!
//! Pure functions over plain values: no I/O, no clock. Objects come from `portico-source`. The table itself
//! lives in `portico-gateway`.

mod allow_lists;
mod annotations;
mod apply;
mod claims;
mod cluster_ips;
mod commit;
pub mod endpoint_rules;
mod endpoints;
mod facts;
mod findings;
mod front;
pub mod index;
mod policies;
mod port_mapping;
mod problems;
pub mod route;
pub mod rows;
pub mod table;
mod targets;
