//! The model against the tables it comes from, and the documentation against the model.

#![allow(clippy::unwrap_used, reason = "the helpers of tests fail like tests")]

mod cloud;
mod docs;
mod tables;
