//! What `portico` can be asked to do: one file a verb.

pub(crate) mod agent;
pub(crate) mod check;
pub(crate) mod demo;
pub(crate) mod front;
pub(crate) mod gateway;
pub(crate) mod routes;
