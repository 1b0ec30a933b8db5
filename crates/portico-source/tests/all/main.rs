//! The sources over what they read: real files, and a real API server.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

mod directory;
#[cfg(feature = "kubernetes")]
mod failing_api;
#[cfg(feature = "kubernetes")]
mod kubernetes;
