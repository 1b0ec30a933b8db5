//! The common tools of every controller for a Kubernetes API.
//!
//! [`mod@client`] connects, through a corporate proxy too. [`leader`] elects the replica that may write.
//! [`debounce`] says when a burst of changes is over. [`apply`] writes an object by server-side apply, and
//! only if that changes something. It compares with the object in [`cached`]. [`events`] puts Events on
//! objects, [`conditions`] keeps the conditions of a status, and [`error`] puts an error of the API into
//! words.
//!
//! [`mod@watch`] lists and watches with deadlines, whatever the API server does. [`mod@read`] reads one
//! object or a list, [`patch`] merges into one, [`mod@page`] reads a part of a list. [`untrusted_api`] talks
//! to an API server that is not trusted. [`json`] bounds the size of parsed JSON. The decisions of a
//! controller are in `portico-expose` and its like; the controllers are in `portico-operator`.

pub mod apply;
pub mod cached;
pub mod client;
pub mod conditions;
pub mod debounce;
pub mod error;
pub mod events;
pub mod json;
pub mod leader;
pub mod page;
pub mod patch;
pub mod read;
pub mod untrusted_api;
pub mod watch;

pub use client::{ClientError, client, client_of};
pub use kube::Client;
pub use read::{Selector, list, read, read_of_pod};

/// The name under which Portico writes by itself, in the managed fields of an object. Two write under others.
/// `portico migrate` has a name of its own, since a person writes by it. [`apply::make_once`] has one that is
/// nobody else's, so that the second writer gets a conflict.
pub const FIELD_MANAGER: &str = "portico";
