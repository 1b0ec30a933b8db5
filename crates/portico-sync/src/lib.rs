//! Objects → plan → routes: everything between a source and the data plane, as a library.
//!
//! [`source`] opens a directory or a Kubernetes API, with the [`pipeline`] that suits it. The pipeline asks
//! `portico-expose` which Services and policies follow from Clusters, and `portico-routes` which routes
//! follow from Services and EndpointSlices. [`persisted`] keeps what must outlive a restart. [`site`] reads
//! objects once, for verbs that only report. [`kkp_proxy`] compares them with KKP's routes.
//!
//! A gateway, `portico check` and `portico routes` use the same pipeline, so that they cannot disagree.
//! Flags, logs of problems and the data plane are elsewhere.

pub mod kkp_proxy;
pub mod persisted;
pub mod pipeline;
pub mod site;
pub mod source;

pub use pipeline::Pipeline;
pub use site::{ReadAs, Site, SiteSettings};
pub use source::{Source, SourceSettings};
