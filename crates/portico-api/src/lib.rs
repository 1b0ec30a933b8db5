//! The kinds Portico reads, as plain values: no I/O, no client, no clock.
//!
//! - [`configuration`], [`seed`], [`cluster`]: the KKP kinds that decide exposure. [`service`],
//!   [`endpoint_slice`]: the Kubernetes kinds that routes are made of. Each holds only the fields that
//!   concern exposure. [`exposed_cluster`]: Portico's own, what follows from the first three for a gateway.
//! - [`annotations`], [`strategy`], [`listener`], [`policy`], [`network`], [`api_server_ca`], [`endpoints`]:
//!   exposure. [`meta`], [`names`]: what every object carries, and identities that must never be mixed up.
//! - [`migration`]: how a Cluster's strategy changes. [`change`]: one change to one object. [`problem`]: what
//!   is wrong with one. [`text`]: what others say, on one line. [`intern`]: one copy of each name. [`kkp`].
//!
//! Reading is lenient: unknown fields are ignored, and a mistyped field keeps its text ([`setting`]). So a
//! mistake becomes a message, and the rest of the document counts.
//!
//! `portico-expose` computes the objects that should exist for a cluster, and `portico-routes` the routes.

pub mod annotations;
pub mod api_server_ca;
pub mod change;
pub mod cluster;
pub mod configuration;
pub mod duration;
pub mod endpoint_slice;
pub mod endpoints;
pub mod exposed_cluster;
pub mod hosting;
pub mod intern;
pub mod kkp;
pub mod listener;
pub mod meta;
pub mod migration;
pub mod names;
pub mod network;
pub mod policy;
pub mod port_range;
pub mod problem;
pub mod seed;
pub mod service;
pub mod setting;
pub mod strategy;
pub mod text;
