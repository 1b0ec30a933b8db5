//! The kinds Portico reads, as plain values: no I/O, no client, no clock.
//!
//! [`annotations`] holds the keys by which objects ask for exposure; [`meta`] is what every object carries and [`names`] the identities that must never be mixed up; [`service`] and
//! [`endpoint_slice`] are the two Kubernetes kinds that routes are made of, cut down to the fields that concern exposure;
//! [`policy`] is what a user cluster allows and may use; [`problem`] is how every part of Portico reports what is wrong
//! with an object.
//!
//! What should exist for a cluster is computed in `portico-expose`; which bytes go where, in `portico-routes`.

pub mod annotations;
pub mod endpoint_slice;
pub mod meta;
pub mod names;
pub mod policy;
pub mod problem;
pub mod service;
