//! Network requirements proven from the real machines.
//!
//! A [`check`] is one attempt with a typed result, [`Observation`]. A [`responder`] is the other end of it,
//! on a machine where nothing is installed yet, or beside what is. [`plan`] says which checks follow from
//! roles, an inventory and the model of `portico-ports`. [`runner`] runs them at a pace that a network in
//! production does not feel. [`verdict`] says what the results mean, and who has to change what.
//!
//! Nothing here changes anything on a machine.

mod bucket;
pub mod check;
mod ip;
mod observation;
pub mod plan;
mod probe;
pub mod responder;
pub mod runner;
mod sys;
mod transport;
pub mod verdict;

pub use observation::{Observation, TlsSession};
pub use probe::Banner;
pub use transport::{Transport, TransportError};

/// The addresses of this machine's interfaces, without those that are unique to a link only.
pub fn local_addresses() -> std::io::Result<Vec<std::net::IpAddr>> {
    sys::addresses()
}
