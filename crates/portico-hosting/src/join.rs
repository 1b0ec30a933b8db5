//! Makes a machine a node of a hosted cluster: `portico join`, as plain functions.
//!
//! [`token`] is what an administrator makes for machines. [`trust`] decides by a pinned hash which authority
//! a machine trusts. [`reach`] names the addresses that its agents go to. [`options`] are what a node may say
//! of itself. [`machine`] says what is written on the machine, with which its kubelet asks for a certificate.
//! [`moving`] says what becomes of that when the cluster gets another address.
//!
//! Data from a cluster is only parsed here, and never believed before its authority is pinned.

pub mod machine;
pub mod moving;
pub mod options;
pub mod reach;
pub mod token;
pub mod trust;
