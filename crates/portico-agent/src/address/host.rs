//! The network of this host: interfaces, addresses and routes, read and changed by rtnetlink(7).
//!
//! Plain values in the kernel's own terms, and the few requests the agent makes. `check` and `interface`
//! decide on their meaning for the address.

use std::fmt::{self, Display, Formatter};
use std::io;
use std::net::IpAddr;
use std::pin::pin;
use std::time::Duration;

use futures_util::{Stream, StreamExt, TryStreamExt};
use ipnet::IpNet;
use rtnetlink::packet_core::{NetlinkMessage, NetlinkPayload};
use rtnetlink::packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage, AddressScope};
use rtnetlink::packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
};
use rtnetlink::packet_route::route::{
    RouteAddress, RouteAttribute, RouteMessage, RouteProtocol, RouteType, RouteVia,
};
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::proto::Connection;
use rtnetlink::sys::SocketAddr;
use rtnetlink::{Handle, LinkDummy, LinkUnspec, LinkVeth, MulticastGroup};
use tokio::time::timeout;

/// What the agent's interfaces carry as their alias (`ip link` shows it). A restarted agent knows them by it.
pub(super) const ALIAS: &str = "portico agent";

/// The kernel replies within the request. A reply that the library cannot decode is dropped, and ends here.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// An interface.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) index: u32,
    pub(super) name: Box<str>,
    pub(super) alias: Box<str>,
    /// `dummy`, `veth`, `bridge`, ...; empty for a device.
    pub(super) kind: Box<str>,
    pub(super) up: bool,
}

impl Link {
    /// Whether an agent made it.
    pub(super) fn is_ours(&self) -> bool {
        &*self.alias == ALIAS
    }
}

impl From<&LinkMessage> for Link {
    fn from(message: &LinkMessage) -> Self {
        let up = message.header.flags.contains(LinkFlags::Up);
        let mut link = Self { index: message.header.index, up, ..Self::default() };
        for attribute in &message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name = name.as_str().into(),
                LinkAttribute::IfAlias(alias) => link.alias = alias.as_str().into(),
                LinkAttribute::LinkInfo(info) => {
                    let kind = info.iter().find_map(|info| match info {
                        LinkInfo::Kind(kind) => Some(kind.to_string().into()),
                        _ => None,
                    });
                    link.kind = kind.unwrap_or_default();
                }
                _ => {}
            }
        }
        link
    }
}

/// An address of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Address {
    /// The interface that has it.
    pub(super) index: u32,
    pub(super) address: IpAddr,
    /// The network that the address puts the interface in. On a point-to-point link that of the other end.
    pub(super) network: IpNet,
}

impl Address {
    /// `None` for a message without an address, which says nothing about one.
    fn read(message: &AddressMessage) -> Option<Self> {
        let (mut local, mut network) = (None, None);
        for attribute in &message.attributes {
            match attribute {
                AddressAttribute::Local(address) => local = Some(*address),
                AddressAttribute::Address(address) => network = Some(*address),
                _ => {}
            }
        }
        let address = local.or(network)?;
        let network = IpNet::new(network.unwrap_or(address), message.header.prefix_len).ok()?;
        Some(Self { index: message.header.index, address, network })
    }

    /// Whether its network is this one address, as that of the agent is.
    pub(super) fn is_single(&self) -> bool {
        self.network.prefix_len() == self.network.max_prefix_len()
    }
}

impl Display for Address {
    /// As `ip address` writes it.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.network.prefix_len())
    }
}

/// A route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Route {
    pub(super) kind: RouteType,
    pub(super) to: IpNet,
    pub(super) table: u32,
    /// Its maker: the kernel itself for the network of an interface.
    pub(super) origin: RouteProtocol,
    /// The interface it leads through (the first, if several).
    pub(super) through: Option<u32>,
    pub(super) gateway: Option<IpAddr>,
}

/// The table of `ip route`, and the one for addresses of the host itself.
const MAIN_TABLE: u32 = 254;
const LOCAL_TABLE: u32 = 255;

impl Route {
    /// `None` for routes of other families, such as those of multicast routing.
    fn read(message: &RouteMessage) -> Option<Self> {
        let header = &message.header;
        let mut base = match header.address_family {
            AddressFamily::Inet => IpAddr::from([0; 4]),
            AddressFamily::Inet6 => IpAddr::from([0; 16]),
            _ => return None,
        };
        let (mut table, mut through, mut gateway) = (u32::from(header.table), None, None);
        for attribute in &message.attributes {
            match attribute {
                RouteAttribute::Destination(to) => base = ip(to)?,
                RouteAttribute::Table(number) => table = *number,
                RouteAttribute::Oif(index) => through = Some(*index),
                RouteAttribute::MultiPath(hops) => {
                    through = through.or(hops.first().map(|hop| hop.interface_index));
                }
                RouteAttribute::Gateway(address) => gateway = ip(address),
                // An IPv4 route through an IPv6 gateway.
                RouteAttribute::Via(RouteVia::Inet6(address)) => gateway = Some((*address).into()),
                _ => {}
            }
        }
        let to = IpNet::new(base, header.destination_prefix_length).ok()?;
        Some(Self { kind: header.kind, to, table, origin: header.protocol, through, gateway })
    }

    /// The route as `ip route show table all` writes it, where `name` is that of the interface.
    pub(super) fn describe(&self, name: Option<&str>) -> Box<str> {
        let kind = match self.kind {
            RouteType::Local => "local ",
            RouteType::Broadcast => "broadcast ",
            RouteType::Anycast => "anycast ",
            RouteType::Multicast => "multicast ",
            RouteType::BlackHole => "blackhole ",
            RouteType::Unreachable => "unreachable ",
            RouteType::Prohibit => "prohibit ",
            RouteType::Throw => "throw ",
            _ => "",
        };
        let mut text = format!("{kind}{}", self.to.trunc());
        if let Some(gateway) = self.gateway {
            text.push_str(&format!(" via {gateway}"));
        }
        if let Some(name) = name {
            text.push_str(&format!(" dev {name}"));
        }
        match self.table {
            MAIN_TABLE => {}
            table => text.push_str(&format!(" table {}", table_name(table))),
        }
        text.into()
    }
}

/// The name of a routing table, as `ip route` writes it.
pub(super) fn table_name(table: u32) -> Box<str> {
    match table {
        MAIN_TABLE => "main".into(),
        LOCAL_TABLE => "local".into(),
        table => table.to_string().into(),
    }
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(address) => Some((*address).into()),
        RouteAddress::Inet6(address) => Some((*address).into()),
        _ => None,
    }
}

/// A connection to the kernel for requests. Opened for a few of them: at rest the agent holds none.
#[derive(Debug)]
pub(super) struct Host(Handle);

impl Host {
    /// Opens a connection in the network namespace of this thread. It ends when the value is dropped.
    pub(super) fn open() -> io::Result<Self> {
        let (connection, handle, _) = rtnetlink::new_connection()?;
        tokio::spawn(connection);
        Ok(Self(handle))
    }

    /// All interfaces.
    pub(super) async fn links(&self) -> io::Result<Vec<Link>> {
        let mut links = Vec::new();
        each(self.0.link().get().execute(), |message| links.push(Link::from(&message))).await?;
        Ok(links)
    }

    /// The interface of this name, if there is one.
    pub(super) async fn link(&self, name: &str) -> io::Result<Option<Link>> {
        let mut link = None;
        let request = self.0.link().get().match_name(name);
        match each(request.execute(), |message| link = Some(Link::from(&message))).await {
            Err(error) if error.raw_os_error() == Some(ENODEV) => Ok(None),
            result => result.map(|()| link),
        }
    }

    /// All addresses of the family of `family` that `wanted` picks.
    pub(super) async fn addresses(
        &self,
        family: IpAddr,
        mut wanted: impl FnMut(&Address) -> bool,
    ) -> io::Result<Vec<Address>> {
        let mut addresses = Vec::new();
        let mut request = self.0.address().get();
        request.message_mut().header.family = family.into();
        let keep = |message| addresses.extend(Address::read(&message).filter(&mut wanted));
        each(request.execute(), keep).await?;
        // A kernel older than 4.20 lists every family.
        addresses.retain(|held| held.address.is_ipv4() == family.is_ipv4());
        Ok(addresses)
    }

    /// All routes of one family, in any table, that `wanted` picks. Only those are kept: a host may have a
    /// full table of the Internet.
    pub(super) async fn routes(
        &self,
        family: IpAddr,
        mut wanted: impl FnMut(&Route) -> bool,
    ) -> io::Result<Vec<Route>> {
        let mut routes = Vec::new();
        let mut message = RouteMessage::default();
        message.header.address_family = family.into();
        let keep = |message| routes.extend(Route::read(&message).filter(&mut wanted));
        each(self.0.route().get(message).execute(), keep).await?;
        Ok(routes)
    }

    /// Makes a dummy interface.
    pub(super) async fn add_dummy(&self, name: &str) -> io::Result<()> {
        done(self.0.link().add(LinkDummy::new(name).build()).execute()).await
    }

    /// Makes a pair of interfaces.
    pub(super) async fn add_veth(&self, name: &str, peer: &str) -> io::Result<()> {
        done(self.0.link().add(LinkVeth::new(name, peer).build()).execute()).await
    }

    /// Marks an interface as the agent's, and sets it up, without ARP on it.
    pub(super) async fn set_up(&self, index: u32) -> io::Result<()> {
        // No link-local IPv6 address, which nothing uses, and no traffic for it. Fails where there is no
        // IPv6.
        let none = AfSpecInet6::AddrGenMode(In6AddrGenMode::None);
        let families = LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet6(vec![none])]);
        let message = LinkUnspec::new_with_index(index).append_extra_attribute(families).build();
        if let Err(error) = done(self.0.link().change(message).execute()).await {
            tracing::debug!(%error, "the interface may get a link-local IPv6 address");
        }
        let alias = LinkAttribute::IfAlias(ALIAS.to_owned());
        let message = LinkUnspec::new_with_index(index).append_extra_attribute(alias).arp(false).up();
        done(self.0.link().change(message.build()).execute()).await
    }

    /// Removes an interface. The other end of a pair goes with it.
    pub(super) async fn remove_link(&self, index: u32) -> io::Result<()> {
        done(self.0.link().del(index).execute()).await
    }

    /// Adds an address that this host alone uses (scope `host`). Returns false if it is there already.
    pub(super) async fn add_address(&self, index: u32, address: IpAddr) -> io::Result<bool> {
        let mut request = self.0.address().add(index, address, max_prefix(address));
        *request.message_mut() = host_address(index, address);
        match done(request.execute()).await {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            result => result.map(|()| true),
        }
    }

    /// Removes an address that the agent added, if it is there.
    pub(super) async fn remove_address(&self, index: u32, address: IpAddr) -> io::Result<()> {
        match done(self.0.address().del(host_address(index, address)).execute()).await {
            Err(error) if error.raw_os_error() == Some(ENODEV) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => Ok(()),
            result => result,
        }
    }
}

/// `ENODEV` of errno(3): there is no such interface.
const ENODEV: i32 = 19;

fn max_prefix(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn host_address(index: u32, address: IpAddr) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = address.into();
    message.header.prefix_len = max_prefix(address);
    message.header.index = index;
    message.header.scope = AddressScope::Host;
    if address.is_ipv6() {
        // No duplicate address detection: there is no neighbour on an interface of the agent's own.
        message.header.flags |= AddressHeaderFlags::Nodad;
    }
    message.attributes = vec![AddressAttribute::Local(address), AddressAttribute::Address(address)];
    message
}

/// Hands each message of a reply to `take`.
async fn each<T>(
    reply: impl Stream<Item = Result<T, rtnetlink::Error>>,
    mut take: impl FnMut(T),
) -> io::Result<()> {
    let mut reply = pin!(reply);
    while let Some(message) = timeout(REPLY_TIMEOUT, reply.try_next()).await?.map_err(to_io)? {
        take(message);
    }
    Ok(())
}

/// Waits for the acknowledgement of a change.
async fn done(request: impl Future<Output = Result<(), rtnetlink::Error>>) -> io::Result<()> {
    timeout(REPLY_TIMEOUT, request).await?.map_err(to_io)
}

fn to_io(error: rtnetlink::Error) -> io::Error {
    match error {
        rtnetlink::Error::NetlinkError(message) => message.to_io(),
        error => io::Error::other(error),
    }
}

/// A notification of the kernel, as far as the address is concerned.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum HostChange {
    Link(Link),
    Address(Address),
    /// The kernel had to drop notifications.
    Lost,
}

/// Notifications about interfaces and addresses of this host.
///
/// The socket is read only while [`next`](Self::next) is polled. So its buffer bounds the waiting
/// notifications, and the kernel says when it had to drop something.
pub(super) struct Changes {
    connection: Connection<RouteNetlinkMessage>,
    messages: Messages,
}

type Messages = futures_util::stream::BoxStream<'static, (NetlinkMessage<RouteNetlinkMessage>, SocketAddr)>;

impl Changes {
    pub(super) fn subscribe() -> io::Result<Self> {
        let groups = [MulticastGroup::Link, MulticastGroup::Ipv4Ifaddr, MulticastGroup::Ipv6Ifaddr];
        let (connection, _, messages) = rtnetlink::new_multicast_connection(&groups)?;
        Ok(Self { connection, messages: messages.boxed() })
    }

    /// Returns the next change. Cancel-safe.
    pub(super) async fn next(&mut self) -> io::Result<HostChange> {
        loop {
            let message = tokio::select! {
                biased;
                message = self.messages.next() => message,
                () = &mut self.connection => None,
            };
            let closed = || io::Error::from(io::ErrorKind::NotConnected);
            let (message, sender) = message.ok_or_else(closed)?;
            // Another process can send to this socket, too. The kernel's port is 0.
            if sender.port_number() != 0 {
                continue;
            }
            use RouteNetlinkMessage::{DelAddress, DelLink, NewAddress, NewLink};
            let change = match message.payload {
                NetlinkPayload::InnerMessage(NewLink(link) | DelLink(link)) => {
                    Some(HostChange::Link(Link::from(&link)))
                }
                NetlinkPayload::InnerMessage(NewAddress(address) | DelAddress(address)) => {
                    Address::read(&address).map(HostChange::Address)
                }
                NetlinkPayload::Overrun(_) => Some(HostChange::Lost),
                _ => None,
            };
            if let Some(change) = change {
                return Ok(change);
            }
        }
    }
}
