//! What every controller needs to work with a Kubernetes API.
//!
//! [`mod@client`] connects, through a corporate proxy too. [`leader`] elects the replica that may write.
//! [`debounce`] says when a burst of changes is over. [`apply`] writes an object by server-side apply, and
//! only if that changes something. [`events`] puts Events on objects, [`conditions`] keeps the conditions of
//! a status, and [`error`] puts an error of the API into words.
//!
//! [`mod@watch`] lists and watches with deadlines, whatever the API server does. What a controller decides is
//! in `portico-expose` and its like; the controllers themselves are in `portico-operator`.

pub mod apply;
pub mod client;
pub mod conditions;
pub mod debounce;
pub mod error;
pub mod events;
pub mod leader;
pub mod watch;

pub use client::{ClientError, client};
pub use kube::Client;

/// The name under which Portico writes, in the managed fields of every object it touches.
pub const FIELD_MANAGER: &str = "portico";
