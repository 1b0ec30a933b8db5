//! How our server and our agent agree on an HTTP/2 stream for each connection, in place of packets on the
//! stream that they share.
//!
//! The agent sends [`OFFER`] in the metadata of Connect, and the server answers with the same. An upstream
//! peer ignores it. A dial then goes over the Connect stream as ever. Once it has succeeded, the agent opens
//! a stream on the same connection: POST [`STREAM_PATH`] with the dial's number in [`DIAL`]. The server
//! answers 200 if it waits for that dial, once its frontend has taken the connection. DATA is what the
//! connection carries.

/// In the metadata of both sides.
pub const OFFER: &str = "portico-streams";

/// The value of [`OFFER`]: the version of what is described here.
pub const VERSION: &str = "1";

/// Begins the answer of an agent that has no room for a dial: another agent may have.
pub const NO_ROOM: &str = "the agent has no room: ";

/// Longest name of an agent or server. It is held, and logged, with each. Names are those of nodes, or UUIDs.
pub const LONGEST_NAME: usize = 512;

/// The path of the stream of a connection.
pub const STREAM_PATH: &str = "/portico.Konnectivity/Stream";

/// The number of the dial that a stream answers, as the DIAL_REQ has it.
pub const DIAL: &str = "portico-dial";
