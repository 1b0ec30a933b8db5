//! The kinds Portico reads, as plain values: no I/O, no client, no clock.
//!
//! [`configuration`], [`seed`] and [`cluster`] are the three KKP kinds that decide exposure, [`service`] and
//! [`endpoint_slice`] the two Kubernetes kinds that routes are made of, each cut down to the fields that concern exposure.
//! [`annotations`] holds the keys by which objects ask for exposure, [`strategy`] the three ways to expose a control plane.
//! [`meta`] is what every object carries and [`names`] the identities that must never be mixed up; [`policy`] is what a
//! user cluster allows and may use, [`api_server_ca`] whom its API server is known by; [`intern`] keeps one copy of each name; [`problem`] is how every part of Portico reports what is wrong with an object.
//!
//! Reading is lenient: unknown fields are ignored, and a field that people mistype keeps what was written
//! ([`setting`]), so that it becomes a message and never the loss of a document.
//!
//! What should exist for a cluster is computed in `portico-expose`; which bytes go where, in `portico-routes`.

pub mod annotations;
pub mod api_server_ca;
pub mod change;
pub mod cluster;
pub mod configuration;
pub mod duration;
pub mod endpoint_slice;
pub mod intern;
pub mod meta;
pub mod names;
pub mod policy;
pub mod port_range;
pub mod problem;
pub mod seed;
pub mod service;
pub mod setting;
pub mod strategy;
