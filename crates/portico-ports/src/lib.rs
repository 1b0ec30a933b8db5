//! Network requirements as data: which role talks to which, on which ports, under which condition.
//!
//! The model is the folder `model/`: one entry a flow, checked and turned into Rust by the build script.
//! [`model`] has its types. [`facts`] is what is known of an installation. [`flow`] has the rows that follow
//! for it, [`site`] those for objects of a running one. [`diff`] tells what changes between two, and
//! [`render`] makes tables. [`inventory`] says which addresses have which role, [`firewall`] which rules
//! follow, [`in_force`] how rules in force differ. [`capacity`] counts what is left. [`nearest`] helps where
//! a name is mistyped.
//!
//! Plain functions over plain values: nothing here opens a socket or reads a file.

pub mod capacity;
pub mod diff;
pub mod facts;
pub mod firewall;
pub mod flow;
pub mod in_force;
pub mod inventory;
pub mod model;
pub mod nearest;
pub mod port_set;
pub mod render;
pub mod site;

#[cfg(test)]
mod compile;

pub use facts::Facts;
pub use flow::{Flow, Query};
pub use inventory::Inventory;
pub use model::{Product, Role, Row};
