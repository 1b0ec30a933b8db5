//! The address of the `kubernetes` service on this node: made, supervised, and taken away again.
//!
//! The API server of the user cluster tells its pods to find it at one address, the same on every worker node
//! (100.64.30.10 by default). So the agent of each node holds that address for its node. [`check()`] looks
//! whether something on this host stands against it. [`AssignedAddress::take`] makes it and puts it back when
//! it is removed. [`AssignedAddress::release`] takes it away. All of it needs `CAP_NET_ADMIN` and nothing
//! else.
//!
//! What the kernel does with packets for the address that come from outside is in `docs/threat-model.md`.

mod assigned;
mod backoff;
mod check;
mod collision;
mod error;
mod host;
mod interface;
mod settings;
mod users;

pub use assigned::{AssignedAddress, Status};
pub use check::check;
pub use collision::{Collision, Report};
pub use error::AddressError;
pub use interface::Placement;
pub use settings::{DEFAULT_ADDRESS, Kind, Settings};
