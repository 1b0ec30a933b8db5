//! The settings of an agent, with the reasons for the defaults.

use std::sync::Arc;
use std::time::Duration;

use http::HeaderValue;
use kube::Client;
use portico_dial::{ClientTls, Dialer, Target, TokenFile};
use portico_net::MemoryBudget;

use super::policy::Policy;

/// How an agent reaches its servers, and what it does for them.
#[derive(Clone)]
pub struct Settings {
    /// The servers, or what leads to them. At least one.
    pub servers: Vec<Target>,
    /// Connects to servers.
    pub to_servers: Arc<Dialer>,
    /// Connects to endpoints. Without a proxy.
    pub to_endpoints: Arc<Dialer>,
    /// Our certificate, and the CA of the servers.
    pub tls: Arc<ClientTls>,
    /// The token that is shown to servers.
    pub token: Option<Arc<TokenFile>>,
    /// Unique among the agents of a cluster.
    pub agent_id: HeaderValue,
    /// The identifiers by which the agent is chosen, as a URL query.
    pub identifiers: HeaderValue,
    /// The name of this program and its version.
    pub user_agent: HeaderValue,
    /// Between two attempts, and the first wait after a failure.
    pub sync_interval: Duration,
    /// The longest wait after failures.
    pub sync_interval_cap: Duration,
    /// Whether to look for more servers once all that are known are connected.
    pub sync_forever: bool,
    /// How the number of servers is known.
    pub count: CountSource,
    /// Silence after which an upstream server gets a PING.
    pub keepalive_time: Duration,
    /// What may be dialled.
    pub policy: Policy,
    /// Bytes that may wait for one endpoint that does not read.
    pub connection_buffer: usize,
    /// The budget for bytes that all connections hold for peers that do not read.
    pub memory: MemoryBudget,
    /// The most connections to endpoints.
    pub max_connections: u32,
    /// The most dials under way.
    pub max_dials: u32,
    /// How long a server may take from the first packet to the head of its answer. That includes TCP, a
    /// proxy, TLS, HTTP/2 and the review of our token.
    pub hello_timeout: Duration,
}

/// How the number of servers is known.
#[derive(Clone)]
pub enum CountSource {
    /// Servers say it when they answer.
    Responses,
    /// By their Leases.
    Leases(Leases),
    /// The larger of both.
    Max(Leases),
}

impl CountSource {
    /// How many servers there are, as reported by one that answered and by the Leases listed last.
    pub(super) fn servers(&self, responses: u32, leases: Option<u32>) -> u32 {
        match self {
            Self::Responses => responses,
            Self::Leases(_) => leases.unwrap_or(1),
            Self::Max(_) => responses.max(leases.unwrap_or(1)),
        }
    }
}

/// Where the Leases of servers are.
#[derive(Clone)]
pub struct Leases {
    /// The API server of the user cluster.
    pub client: Client,
    /// Their namespace.
    pub namespace: String,
    /// Their labels, as a selector.
    pub selector: String,
}

impl std::fmt::Debug for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // A client of Kubernetes has no text, and the rest is in the flags.
        f.debug_struct("Settings").field("servers", &self.servers).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use portico_lab::faulty_api::nowhere;

    use super::*;

    #[tokio::test]
    async fn servers_are_counted_by_the_source_that_was_chosen_and_are_one_until_leases_are_listed() {
        let leases = Leases {
            client: nowhere(),
            namespace: "kube-system".into(),
            selector: "k8s-app=konnectivity-server".into(),
        };
        let sources = [CountSource::Responses, CountSource::Leases(leases.clone()), CountSource::Max(leases)];
        let counts = |responses, listed| sources.each_ref().map(|source| source.servers(responses, listed));
        assert_eq!(counts(3, Some(2)), [3, 2, 3]);
        assert_eq!(counts(2, Some(3)), [2, 3, 3]);
        assert_eq!(counts(2, None), [2, 1, 2]);
    }
}
