//! The node agent: holds the address of the `kubernetes` service on a worker node and carries its connections to a gateway.
//!
//! [`address`] makes the address exist on the node, and only there. On it an [`Agent`] listens, as its [`forward`]s say: `listen` accepts,
//! `connection` opens a stream and carries bytes, `record` keeps count, `shared` has what all connections share, `refusal` names every
//! reason not to carry one, and `access` is the line that is left. [`IdentityFiles`] says when certificate or token are new.
//!
//! What lives elsewhere: tunnels, TLS, proxies and the carrying of bytes (`portico-tunnel`); flags, signals, the admin listener and the
//! order at start and end (`portico`).

mod access;
pub mod address;
mod agent;
mod connection;
mod files;
pub mod forward;
mod listen;
mod record;
mod refusal;
mod shared;
mod sys;

pub use agent::{Agent, Settings, StartError};
pub use files::{IdentityFiles, Renewed};
pub use listen::Inherited;
pub use record::{ConnectionId, Record};
pub use refusal::{ENDS, Refusal};
pub use shared::{ForwardState, OPEN_BUCKETS, Shared, Totals};
