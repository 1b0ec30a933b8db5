//! The parts of `portico migrate` on a seed: plans, orders, and the look at many clusters.
//!
//! [`plans`] reads the inputs of a cluster's plan, and [`order`] writes the order of a person. [`selection`]
//! has the clusters with certain labels. The verb says when, and prints.
//!
//! `portico_expose::migration` decides on the content of a plan, on whether an order may be given, and on
//! whose turn it is. The operator carries it out.

pub mod order;
pub mod plans;
pub mod selection;
