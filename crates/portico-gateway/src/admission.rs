//! Decides whether a client may connect, and where it is led. The decision follows from its real address, its
//! route, the allow list, and the budget.
//!
//! Every entry goes through here in the same order: [`Arrival`] →
//! [`proxy_header`](Arrival::read_proxy_header) → a look-up of [`Learned`] → [`admit`](Learned::admit). A
//! failure is a [`Refusal`], counted and written by [`Learned::refuse`].

use std::borrow::Cow;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use portico_api::names::{Authority, HostName};
use portico_net::ConnectionId;
use portico_net::slots::{Slot, Source};
use portico_wire::proxy::Sniff;
use portico_wire::{Parse, hello, proxy};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::access::Refused;
use crate::cluster::OpenGuard;
use crate::config::ProxyMode;
use crate::descriptors::Promise;
use crate::fair_share::Cost;
use crate::first_bytes::read_more;
use crate::outcome::Refusal;
use crate::proxy_header::proxy_header;
use crate::record::Listener;
use crate::shared::Shared;
use crate::upstream::{Connected, Upstream};

/// An accepted connection, before anything is known of it.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) learned: Learned,
    /// The descriptor its connection to an endpoint will need.
    pub(crate) promise: Promise,
}

/// The facts about a connection or a CONNECT request. The access line has them, also where it is refused.
#[derive(Debug)]
pub(crate) struct Learned {
    pub(crate) id: ConnectionId,
    pub(crate) listener: Listener,
    /// The peer. If the peer is a trusted hop that sent a PROXY header, it is the address in that header.
    pub(crate) client: SocketAddr,
    /// Whether that is the client's own address, and not that of something in front.
    pub(crate) client_is_real: bool,
    /// When it was accepted, as time since the gateway started.
    pub(crate) accepted: Duration,
    /// The server name or authority it asks for.
    pub(crate) name: Option<Arc<str>>,
    /// Where that leads.
    pub(crate) upstream: Option<Arc<Upstream>>,
    /// Its cost for the gateway once it is open.
    pub(crate) cost: Cost,
}

/// A client that may be connected, and its part of the cluster's budget.
#[derive(Debug)]
pub(crate) struct Admitted {
    pub(crate) upstream: Arc<Upstream>,
    pub(crate) open: OpenGuard,
}

impl Arrival {
    pub(crate) fn new(shared: &Arc<Shared>, listener: Listener, peer: SocketAddr) -> Self {
        // Dual-stack listeners show IPv4 clients mapped into IPv6; people and allow lists want them plain.
        let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
        Self { learned: Learned::new(shared, listener, peer), promise: shared.descriptors.promise() }
    }

    /// Takes a slot among the handshakes, and learns the client's real address within the hello timeout.
    pub(crate) async fn learn_client(
        &mut self,
        shared: &Shared,
        stream: &TcpStream,
        mode: ProxyMode,
        bytes: &mut Vec<u8>,
    ) -> Result<Slot, Refusal> {
        let slot = shared.start_handshake(self.learned.client.ip(), mode);
        let learn = self.read_proxy_header(shared, stream, &slot, mode, bytes);
        timeout(shared.config.hello_timeout, learn).await.unwrap_or(Err(Refusal::TooSlow))?;
        Ok(slot)
    }

    /// Reads a PROXY header, if there is one, and learns the client's real address. What follows it stays in
    /// `bytes`.
    pub(crate) async fn read_proxy_header(
        &mut self,
        shared: &Shared,
        stream: &TcpStream,
        slot: &Slot,
        mode: ProxyMode,
        bytes: &mut Vec<u8>,
    ) -> Result<(), Refusal> {
        let Learned { client, client_is_real, .. } = &mut self.learned;
        if mode == ProxyMode::Off {
            return Ok(());
        }
        if !shared.config.proxy_protocol.trusts(client.ip()) {
            // An optional header is between the gateway and trusted hops: the bytes of others are not even
            // looked at.
            return if mode == ProxyMode::Required { Err(Refusal::ProxyHeader) } else { Ok(()) };
        }
        loop {
            match if bytes.is_empty() { Parse::NeedMore } else { proxy::parse(bytes) } {
                Parse::Complete(proxy::Header::Proxied { source, len, .. }) => {
                    (*client, *client_is_real) = (source, true);
                    slot.set_source(Source::of(source.ip()));
                    bytes.drain(..len);
                    return Ok(());
                }
                Parse::Complete(proxy::Header::Local { len }) => {
                    bytes.drain(..len);
                    return Ok(());
                }
                // Only bytes that do not begin a PROXY header pass. A broken header is refused, since
                // otherwise the hop would count as the client.
                Parse::Malformed(_) if mode == ProxyMode::Optional && proxy::sniff(bytes) == Sniff::Other => {
                    return Ok(());
                }
                Parse::Malformed(_) => return Err(Refusal::ProxyHeader),
                Parse::NeedMore => {}
            }
            read_more(stream, slot, bytes, proxy::MAX_V2 + hello::MAX_HELLO).await?;
        }
    }
}

impl Learned {
    pub(crate) fn new(shared: &Shared, listener: Listener, client: SocketAddr) -> Self {
        let (id, accepted) = (shared.next_id(), shared.now());
        let client_is_real =
            shared.config.proxy_protocol.direct || shared.front_keeps_addresses.load(Relaxed);
        let (name, upstream, cost) = (None, None, Cost::CONNECTION);
        Self { id, listener, client, client_is_real, accepted, name, upstream, cost }
    }

    /// Looks up the route of a server name. Upper case and a trailing dot make no difference.
    pub(crate) fn look_up_host(&mut self, shared: &Shared, name: &str) -> Result<(), Refusal> {
        let host = HostName::parse(name).map_err(|_| self.unreadable(name, Refusal::Unknown))?;
        let routes = shared.route_store.routes();
        self.learn(routes.host(&host), host);
        Ok(())
    }

    /// Looks up the route of a CONNECT authority.
    pub(crate) fn look_up_authority(&mut self, shared: &Shared, name: &str) -> Result<(), Refusal> {
        let authority = Authority::parse(name).map_err(|_| self.unreadable(name, Refusal::Malformed))?;
        let routes = shared.route_store.routes();
        self.learn(routes.authorities.get_key_value(&authority), authority);
        Ok(())
    }

    fn unreadable(&mut self, name: &str, refusal: Refusal) -> Refusal {
        self.name = Some(printable(name).into());
        refusal
    }

    /// Takes the route found for the name that was `asked` for. A known name is the table's own, so that ten
    /// thousand connections to one name share it. A name that a wildcard stands for is the client's own.
    fn learn<N: Clone + Eq + Into<Arc<str>>>(&mut self, found: Option<(&N, &Arc<Upstream>)>, asked: N) {
        let name = found.map(|(name, _)| name).filter(|name| **name == asked).cloned().unwrap_or(asked);
        (self.name, self.upstream) = (Some(name.into()), found.map(|(_, upstream)| Arc::clone(upstream)));
    }

    /// Looks up the route of a port.
    pub(crate) fn look_up_port(&mut self, shared: &Shared, port: u16) {
        self.upstream = shared.route_store.routes().ports.get(&port).cloned();
    }

    /// Whether the client may have a connection to the upstream found, and takes it out of the cluster's
    /// budget. The order tells as little as possible to clients that may not know more.
    pub(crate) fn admit(&self, shared: &Shared) -> Result<Admitted, Refusal> {
        let upstream = self.upstream.clone().ok_or(Refusal::Unknown)?;
        let backend = upstream.backend();
        if !backend.policy.admits(self.client.ip(), self.client_is_real) {
            return Err(Refusal::NotAllowed);
        }
        if backend.endpoints.is_empty() {
            return Err(Refusal::NotReady);
        }
        let budget = backend.policy.budget.or(shared.config.budget);
        let open = upstream.cluster.admit(budget, self.cost, shared.now())?;
        Ok(Admitted { upstream, open })
    }

    /// A PROXY v2 header with the name the client asked for and the id this connection has in access lines.
    pub(crate) fn proxy_header(&self, local: SocketAddr) -> Vec<u8> {
        proxy_header(self.client, local, self.name.as_deref(), self.id)
    }

    /// Counts and writes that the client is not served.
    pub(crate) fn refuse(&self, shared: &Shared, refusal: Refusal) {
        shared.refuse(&Refused {
            id: self.id,
            listener: self.listener,
            client: self.client,
            name: self.name.as_deref(),
            upstream: self.upstream.as_deref(),
            accepted: self.accepted,
            refusal,
        });
    }
}

impl Admitted {
    /// Connects to an endpoint and sends it the `first` bytes as far as it takes them. `client_first`
    /// promises that the client's bytes follow at once.
    pub(crate) async fn connect(
        &self,
        shared: &Shared,
        client_first: bool,
        first: &[u8],
    ) -> Result<Connected, Refusal> {
        let _connecting = self.upstream.cluster.start_connecting(shared.config.max_connecting)?;
        let (own, connect_timeout) = (&shared.own, shared.config.connect_timeout);
        self.upstream.connect_and_send(own, connect_timeout, || shared.now(), client_first, first).await
    }
}

/// The shown part of a name that cannot be parsed.
fn printable(name: &str) -> Cow<'_, str> {
    const SHOWN: usize = 64;
    match name.char_indices().nth(SHOWN) {
        Some((end, _)) => Cow::Owned(format!("{}...", &name[..end])),
        None => Cow::Borrowed(name),
    }
}
