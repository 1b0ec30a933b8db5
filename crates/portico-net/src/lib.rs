//! Sockets: what every process that carries bytes needs, with no knowledge of routes or HTTP.
//!
//! [`socket`] and [`takeover`] open listening sockets and hand them to the next process. [`stream`] is a
//! connected socket, TCP or Unix. [`copy`](mod@copy) joins two of them, through pipes where a transfer is
//! large. `copy` and `portico-tunnel` both use [`error_watch`], [`idle`] and [`linger`], and report to a
//! [`meter`]. [`access`] writes one line a connection, by its [`ConnectionId`], through a [`line_queue`].
//! [`memory`], [`slots`] and [`permits`] bound what peers hold, [`rate`] and [`line_limit`] how often they
//! cause something, and [`turn`] lets the tasks of others go first. [`memory_limit`] and [`connections`] read
//! what the kernel says of this process and machine.

pub mod access;
mod batch;
mod connection_id;
pub mod connections;
pub mod copy;
pub mod error_watch;
mod forward_writes;
pub mod idle;
pub mod line_limit;
pub mod line_queue;
pub mod linger;
pub mod memory;
pub mod memory_limit;
pub mod meter;
pub mod permits;
mod pipe;
mod random;
pub mod rate;
pub mod read_ahead;
pub mod rewind;
pub mod shared_tcp;
pub mod slots;
pub mod socket;
pub mod stream;
mod sys;
pub mod takeover;
pub mod turn;

pub use connection_id::{ConnectionId, ConnectionIds};
pub use copy::copy;
pub use error_watch::ErrorWatch;
pub use idle::Idle;
pub use memory::MemoryBudget;
pub use meter::{End, Meter, Side};
pub use random::random;
pub use read_ahead::{ReadAhead, ReadLimit};
pub use rewind::Rewind;
pub use shared_tcp::SharedTcp;
pub use stream::{Socket, Stream, has_hung_up};
