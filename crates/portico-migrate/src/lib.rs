//! What `portico migrate` does on a seed: plans, orders, and the look at many clusters.
//!
//! [`plans`] reads what the plan of a cluster follows from, [`order`] writes what a person wants of it, and
//! [`selection`] has the clusters with certain labels. The verb says when, and prints.
//!
//! What a plan says, whether an order may be given and whose turn it is, is decided in
//! `portico_expose::migration`. The operator carries it out.

pub mod order;
pub mod plans;
pub mod selection;
