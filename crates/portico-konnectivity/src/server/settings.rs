//! The settings of an operator, and the fixed bounds.

use std::time::Duration;

use super::registry::Strategy;

/// How long after the first dial that finds no agent, or after the first agent, dials wait while there is
/// none. Agents look for a server once a second, but may find it only once the API server beside it is ready.
/// That one dials before.
pub(crate) const STARTING: Duration = Duration::from_mins(2);

/// How long after its beginning one dial waits for an agent at most. A frontend by gRPC waits for 30 s, and
/// is to learn why it gets nothing.
pub(crate) const FIRST_AGENT: Duration = Duration::from_secs(20);

/// Dials that wait for an agent; more are refused at once. The first agent gets all of them at once. One of
/// ours takes twice as many by default (`--max-dials`), so that others find room beside them.
pub(crate) const MAX_STARTING: usize = 500;

/// How long a client may take for TLS and the HTTP/2 preface, and an agent for its Connect after that.
pub(crate) const HELLO: Duration = Duration::from_secs(10);

/// How long a frontend may take to say where it wants to. As upstream's server.
pub(crate) const REQUEST: Duration = Duration::from_secs(60);

/// How long the other side of a connection may take to end once one has, or to take some of what is left.
pub(crate) const CLOSING: Duration = Duration::from_secs(10);

/// How long a frontend may take to read that it is connected.
pub(crate) const ANSWER: Duration = Duration::from_secs(10);

/// Between two looks at an agent of ours, and how long its answer may take. The second look sends PING if
/// nothing came since the first. A half-open one is found within three of them: ten seconds.
pub(crate) const NATIVE_PING: Duration = Duration::from_secs(3);

/// How long an upstream peer may take to answer a PING. As upstream's server.
pub(crate) const PING_TIMEOUT: Duration = Duration::from_secs(20);

/// How long the kernel lets an agent take nothing. PING finds a silent one earlier. A connection that the
/// kernel has given up can no longer tell an agent that it is over.
pub(crate) const UNREAD: Duration = Duration::from_mins(2);

/// How long the end of a silent upstream agent's connection is sent again. By itself such an agent sends
/// nothing for an hour, and would wait as long on a connection of which the server knows nothing.
pub(crate) const AWAY: Duration = Duration::from_mins(15);

/// Connections of those at once; of more, each is just closed.
pub(crate) const MAX_AWAY: usize = 1_024;

/// Streams on one connection at once: connections of an agent of ours.
pub(crate) const MAX_STREAMS: u32 = 65_536;

/// Streams on one connection of a frontend at once. kube-apiserver has one on each connection.
pub(crate) const FRONTEND_STREAMS: u32 = 1_024;

/// Requests on one connection that are refused in a row: answers that nobody reads are not counted elsewhere.
/// An agent of ours may open a stream for each dial that was just abandoned.
pub(crate) const MAX_REFUSED: u32 = 4_096;

/// Connections of agents that have not authenticated yet: of more, the oldest are closed.
pub(crate) const MAX_UNAUTHENTICATED: u32 = 1_024;

/// Connections of frontends that have not asked for anything yet: of more, the oldest are closed.
/// kube-apiserver asks at once, on each.
pub(crate) const MAX_IDLE_FRONTENDS: u32 = 1_024;

/// Bytes that are read of a peer's TLS handshake: a chain of large certificates, and the rest.
pub(crate) const TLS_HANDSHAKE: usize = 20 * 1024;

/// Settings of a server.
#[derive(Debug, Clone)]
pub struct Settings {
    /// What it calls itself towards agents. Differs from all other servers of the cluster.
    pub id: String,
    /// How many servers there are, as agents are informed.
    pub count: u32,
    /// Streams of agents at once: of more, each is refused.
    pub max_agents: usize,
    /// How agents are chosen.
    pub strategies: Vec<Strategy>,
    /// Whether `cidr=` identifiers route.
    pub route_cidr: bool,
    /// How long a dial may take, by up to three agents.
    pub dial_timeout: Duration,
    /// Bytes of one connection that wait for a frontend that does not read.
    pub connection_buffer: usize,
    /// Bytes of all connections together that wait for frontends that do not read.
    pub memory: usize,
    /// Silence of an upstream agent before it gets a PING. One of ours gets it soon, whatever this is.
    pub keepalive: Duration,
    /// Silence of a frontend over TCP before it gets a PING.
    pub frontend_keepalive: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            id: "portico".to_owned(),
            count: 1,
            max_agents: 2_048,
            strategies: vec![Strategy::Default],
            route_cidr: false,
            dial_timeout: Duration::from_secs(30),
            connection_buffer: 1 << 20,
            memory: 64 << 20,
            // Upstream's server has an hour, and keeps vanished agents for as long.
            keepalive: Duration::from_secs(30),
            frontend_keepalive: Duration::from_secs(3_600),
        }
    }
}
