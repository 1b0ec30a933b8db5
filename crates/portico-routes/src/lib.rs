//! Which bytes go where: Services, EndpointSlices and policies in, one immutable route table out.
//!
//! [`book`] is told of every object that comes, changes or goes. It reads Services in `annotations` (with `mapping` for server
//! names) and EndpointSlices in `endpoints`, keeps what they say as `facts`, settles in `claims` who owns which key, and
//! works out in `commit` what that changes in the [`table`], which is shared with the gateway and cheap to copy. [`route`]
//! holds the values a table is made of; [`rows`] and `problems` say what became of each object.
//!
//! Nothing here does I/O or knows the time. Objects come from `portico-source`, tables go to `portico-gateway`.

mod annotations;
pub mod book;
mod claims;
mod commit;
mod endpoints;
mod facts;
mod findings;
mod mapping;
mod problems;
pub mod route;
pub mod rows;
mod shared_map;
pub mod table;
