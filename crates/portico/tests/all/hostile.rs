//! Attacks on the binary: each test is named as the promise that it checks.
//!
//! One file a subject. [`support`] has what they share: a gateway under a memory limit, and a [`Bystander`].
//! That is a client of another cluster that makes requests beside the attack. Every one of them has to
//! succeed. Frames that no library would send are made by `portico_lab::frames`.
//!
//! [`Bystander`]: support::Bystander

mod authenticated;
mod identity;
mod objects;
mod silent;
mod slices;
mod sources;
pub(crate) mod support;
mod tenants;
mod unauthenticated;
