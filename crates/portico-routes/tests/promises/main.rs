//! The promises of the route index, each a sentence.
#![allow(clippy::unwrap_used, reason = "the words of the test language fail the test")]

mod conflicts;
mod deputies;
mod exposure;
mod follower;
mod histories;
mod kkp_rules;
mod objects;
mod policies;
mod readiness;
mod updates;
