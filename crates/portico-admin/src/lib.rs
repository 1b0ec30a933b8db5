//! The admin listener: what a Portico process is doing, for probes, Prometheus, people and scripts.
//!
//! [`server`] answers HTTP requests within bounds. [`Pages`](server::Pages) is what a verb implements: paths
//! to answers. [`body`] sends long answers piece by piece. [`readiness`] lays out `/readyz?verbose`,
//! [`exposition`] writes `/metrics`, [`process`] adds the descriptors and the memory of the process,
//! [`listing`] answers in JSON or as a [`table`]. [`controller_pages`] are those of every controller.
//!
//! The listener serves every client that reaches it. So it binds loopback unless configured otherwise, and it
//! only reads.

pub mod body;
pub mod controller_pages;
pub mod exposition;
pub mod listing;
pub mod process;
mod prometheus_text;
pub mod readiness;
pub mod recent;
pub mod server;
pub mod table;
