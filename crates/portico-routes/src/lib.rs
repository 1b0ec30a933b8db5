//! Which bytes go where: Services, EndpointSlices and policies in, one immutable route table out.
//!
//! [`book`] is told of every object that comes, changes or goes, and works out what that changes; [`annotations`] reads the
//! expose annotations of a Service; [`table`] is the result, shared with the gateway and cheap to copy; [`route`] holds the
//! values it is made of.
//!
//! Nothing here does I/O or knows the time. Objects come from `portico-source`, tables go to `portico-gateway`.

pub mod annotations;
pub mod book;
pub mod route;
pub mod table;
