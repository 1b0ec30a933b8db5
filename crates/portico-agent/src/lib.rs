//! The node agent: holds the address of the `kubernetes` service on a worker node and carries its connections
//! to a gateway.
//!
//! [`address`] makes the address exist on the node, and only there. On it an [`Agent`] listens, as its
//! [`forward`]s say. A connection passes `listen` (accept), `connection` (open a stream, carry bytes) and
//! `session` (count, write the line of `access`). `record` is what is known of it meanwhile, `shared` what
//! all connections share, `refusal` names every reason not to carry one. [`IdentityFiles`] reports when
//! certificate or token are new.
//!
//! Elsewhere are tunnels, TLS, proxies and the carrying of bytes (`portico-tunnel`, `portico-dial`). Flags,
//! signals, the admin listener and the order at start and end are in `portico`.

mod access;
pub mod address;
mod agent;
mod connection;
mod files;
pub mod forward;
mod listen;
mod record;
mod refusal;
mod session;
mod shared;

pub use agent::{Agent, Settings, StartError};
pub use files::{IdentityFiles, Renewed};
pub use portico_net::takeover::Inherited;
pub use record::{Record, Upstream};
pub use refusal::{ENDS, Refusal};
pub use shared::{OPEN_BUCKETS, Shared, Totals};
