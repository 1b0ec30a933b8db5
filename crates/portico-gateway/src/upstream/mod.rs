//! The endpoints of one backend, and connections to them.
//!
//! [`endpoint`] knows the health of each, and [`pick`] chooses the one for the next connection.
//! [`connect`](mod@connect) makes it, unless it would come back to this gateway ([`own`]).

mod connect;
mod endpoint;
mod own;
mod pick;

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use arc_swap::ArcSwap;
use portico_net::socket::is_out_of_descriptors;
use portico_routes::route::{Backend, BackendId};
use smallvec::SmallVec;
use tokio::net::TcpStream;
use tokio::time::timeout;

pub use self::endpoint::Endpoint;
pub(crate) use self::endpoint::EndpointUse;
pub(crate) use self::own::OwnListeners;

use self::connect::{begin, send_once_connected};
use self::endpoint::Failure;
use self::pick::{Choice, pick};
use crate::cluster::Cluster;
use crate::outcome::Refusal;

/// Endpoints tried for one client.
const MOST_ATTEMPTS: usize = 3;

/// A backend as the workers see it: one identity, while its endpoints and settings change.
#[derive(Debug)]
pub struct Upstream {
    /// Whose it is.
    pub cluster: Arc<Cluster>,
    state: ArcSwap<State>,
}

/// What changes about an upstream.
#[derive(Debug)]
pub(crate) struct State {
    /// As the route table has it.
    pub(crate) backend: Arc<Backend>,
    /// Its endpoints, each with what is known of it.
    pub(crate) endpoints: SmallVec<[Arc<Endpoint>; 1]>,
    /// Endpoints that left, while they have connections: one that comes back is the same one. Nearly always
    /// none.
    removed: Option<Box<Removed>>,
}

/// Endpoints that left an upstream.
#[derive(Debug)]
struct Removed(Vec<Weak<Endpoint>>);

impl State {
    fn removed(&self) -> impl Iterator<Item = Arc<Endpoint>> {
        self.removed.iter().flat_map(|removed| &removed.0).filter_map(Weak::upgrade)
    }
}

/// A connection that was made.
#[derive(Debug)]
pub(crate) struct Connected {
    pub(crate) stream: TcpStream,
    pub(crate) endpoint: EndpointUse,
    /// How many of the first bytes the socket took.
    pub(crate) sent: usize,
}

impl Upstream {
    pub(crate) fn new(backend: Arc<Backend>, cluster: Arc<Cluster>) -> Self {
        let endpoints = backend.endpoints.iter().map(|&address| Arc::new(Endpoint::new(address))).collect();
        Self { cluster, state: ArcSwap::from_pointee(State { backend, endpoints, removed: None }) }
    }

    /// Which Service port this is; always the same.
    pub fn id(&self) -> BackendId {
        BackendId::clone(&self.state.load().backend.id)
    }

    /// Takes over new endpoints and settings. The state of an endpoint is kept if it stays, or comes back
    /// while it has connections. Returns the endpoints that left.
    pub(crate) fn update(&self, backend: Arc<Backend>) -> Vec<Arc<Endpoint>> {
        let old = self.state.load();
        let stays =
            |address: &SocketAddr| old.endpoints.iter().find(|known| known.address == *address).cloned();
        let returns = |address: &SocketAddr| {
            let endpoint = old.removed().find(|known| known.address == *address)?;
            endpoint.moved();
            // Its EndpointSlice now says ready. That is newer than its failures, so they are forgotten.
            endpoint.succeeded();
            Some(endpoint)
        };
        let endpoint = |address: &SocketAddr| {
            stays(address).or_else(|| returns(address)).unwrap_or_else(|| Arc::new(Endpoint::new(*address)))
        };
        let endpoints = backend.endpoints.iter().map(endpoint).collect();
        let is_gone = |endpoint: &Arc<Endpoint>| !backend.endpoints.contains(&endpoint.address);
        let leaving: Vec<_> = old.endpoints.iter().filter(|endpoint| is_gone(endpoint)).cloned().collect();
        leaving.iter().for_each(|endpoint| endpoint.moved());
        let still_gone = old.removed().filter(is_gone);
        let removed: Vec<_> =
            still_gone.chain(leaving.iter().cloned()).map(|gone| Arc::downgrade(&gone)).collect();
        let removed = (!removed.is_empty()).then(|| Box::new(Removed(removed)));
        self.state.store(Arc::new(State { backend, endpoints, removed }));
        leaving
    }

    /// Whether an endpoint that left has connections.
    pub(crate) fn has_removed_endpoints(&self) -> bool {
        self.state.load().removed().next().is_some()
    }

    /// The backend as the route table has it now.
    pub fn backend(&self) -> Arc<Backend> {
        Arc::clone(&self.state.load().backend)
    }

    /// The endpoints now.
    pub fn endpoints(&self) -> Vec<Arc<Endpoint>> {
        self.state.load().endpoints.to_vec()
    }

    /// [`Self::connect_and_send`] where there is nothing to send yet.
    pub(crate) async fn connect(
        &self,
        own: &OwnListeners,
        connect_timeout: Duration,
        clock: impl Fn() -> Duration,
        client_first: bool,
    ) -> Result<(TcpStream, EndpointUse), Refusal> {
        let connected = self.connect_and_send(own, connect_timeout, clock, client_first, &[]).await?;
        Ok((connected.stream, connected.endpoint))
    }

    /// Connects to one endpoint after the other, at most [`MOST_ATTEMPTS`], and sends the `first` bytes as
    /// far as the socket takes them. `client_first` promises that bytes are sent at once. They then travel
    /// with the last packet of the TCP handshake. Where the server may speak first, holding that packet back
    /// would cost 40 ms.
    pub(crate) async fn connect_and_send(
        &self,
        own: &OwnListeners,
        connect_timeout: Duration,
        clock: impl Fn() -> Duration,
        client_first: bool,
        first: &[u8],
    ) -> Result<Connected, Refusal> {
        let state = self.state.load_full();
        let mut tried: [Option<SocketAddr>; MOST_ATTEMPTS] = [None; MOST_ATTEMPTS];
        let mut refusal = if state.endpoints.is_empty() { Refusal::NotReady } else { Refusal::MaxConnecting };
        for attempt in 0..MOST_ATTEMPTS {
            let (endpoint, last_resort) = match pick(&state.endpoints, &tried[..attempt], clock()) {
                Some(Choice::Regular(endpoint)) => (endpoint, None),
                Some(Choice::LastResort(resort)) => (Arc::clone(&resort.0), Some(resort)),
                Some(Choice::Full) | None => break,
            };
            tried[attempt] = Some(endpoint.address);
            let in_use = EndpointUse::new(endpoint);
            let address = in_use.endpoint().address;
            let begun = match own.are_at(address) {
                Ok(true) => {
                    refusal = Refusal::OwnListener;
                    in_use.endpoint().failed(Failure::Refused, clock());
                    continue;
                }
                Ok(false) => begin(address, client_first),
                Err(error) => Err(error),
            };
            let outcome = match begun {
                Ok(stream) => {
                    let sent = timeout(connect_timeout, send_once_connected(&stream, first)).await;
                    sent.map(|sent| sent.map(|sent| (stream, sent)))
                }
                Err(error) => Ok(Err(error)),
            };
            let failure = match outcome {
                Ok(Ok((stream, sent))) => {
                    in_use.endpoint().succeeded();
                    return Ok(Connected { stream, endpoint: in_use, sent });
                }
                // Ours, not the endpoint's: it must not count against it.
                Ok(Err(error)) if is_out_of_descriptors(&error) => return Err(Refusal::OutOfDescriptors),
                Ok(Err(error)) if error.kind() == io::ErrorKind::TimedOut => Failure::Silent,
                Ok(Err(_)) => Failure::Refused,
                Err(_elapsed) => Failure::Silent,
            };
            self.cluster.count_connect_failure();
            // A last resort has already failed. Failing again changes nothing.
            if last_resort.is_none() {
                in_use.endpoint().failed(failure, clock());
            }
            refusal = match failure {
                Failure::Refused => Refusal::ConnectFailed,
                Failure::Silent => Refusal::ConnectTimedOut,
            };
        }
        Err(refusal)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use portico_api::meta::ObjectKey;
    use portico_api::names::Tenant;
    use portico_api::policy::ClusterPolicy;

    use super::endpoint::FAILURES_UNTIL_SKIPPED;
    use super::*;
    use crate::fair_share::FairShare;

    const NOW: Duration = Duration::from_secs(100);

    fn upstream(ports: &[u16]) -> (Upstream, impl Fn(&[u16]) -> Arc<Backend>) {
        let backend = |ports: &[u16]| {
            Arc::new(Backend {
                id: BackendId { service: ObjectKey::new("a", "api"), port_name: "".into(), port: 443 }.into(),
                endpoints: ports.iter().map(|&port| ([127, 0, 0, 1], port).into()).collect(),
                policy: ClusterPolicy::open_for_namespace("a"),
                send_proxy: false,
                api_server_ca: None,
            })
        };
        let cluster = Arc::new(Cluster::new(Tenant::of_text("a"), Arc::new(FairShare::unlimited())));
        (Upstream::new(backend(ports), cluster), backend)
    }

    #[test]
    fn an_endpoint_that_comes_back_while_it_has_connections_is_the_same_one() {
        let (upstream, backend) = upstream(&[1]);
        let first = upstream.endpoints().remove(0);
        let held = EndpointUse::new(Arc::clone(&first));
        (0..FAILURES_UNTIL_SKIPPED).for_each(|_| first.failed(Failure::Silent, NOW));
        let left = upstream.update(backend(&[2]));
        assert!(Arc::ptr_eq(&left[0], &first));
        let when_it_left = first.moves();
        upstream.update(backend(&[2, 3]));
        assert_eq!(first.moves(), when_it_left, "others came");
        upstream.update(backend(&[1, 2]));
        assert_ne!(first.moves(), when_it_left, "it came back");
        let back = upstream.endpoints().remove(0);
        assert!(Arc::ptr_eq(&back, &first) && back.connections() == 1 && !back.is_failing());
        drop((held, first, left, back));
        upstream.update(backend(&[2]));
        assert!(upstream.state.load().removed().next().is_none(), "it has no connection, so it is forgotten");
    }
}
