//! What is wrong with the objects that decide exposure, each with object, field, value and remedy.
//!
//! There are three degrees. *Refused*: using the object would expose something as it was not meant, so the
//! version before stays in force. *Void*: one field does not count, the rest of the object does. *Warning*:
//! it works, probably not as meant.

mod cluster;
mod configuration;
mod fields;
mod seed;

pub(crate) use cluster::strategy_change;
pub use cluster::{Before, cluster};
pub use configuration::configuration;
pub use seed::seed;

pub use crate::findings::Verdict;
