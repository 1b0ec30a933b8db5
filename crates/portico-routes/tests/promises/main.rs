//! The promises of the route book, each a sentence.
#![allow(clippy::unwrap_used, reason = "the words of the test language fail the test")]

mod conflicts;
mod exposure;
mod objects;
mod policies;
mod readiness;
mod replay;
mod updates;
