//! The connections that came by each kind of listener for one cluster, and their last clients. They show
//! whether a way in may close.
//!
//! A connection counts as used when it ends. So `last` is the end of the last connection, not its start.
//! Counters are atomics. The list of clients is locked for a moment, and a connection never waits for it. A
//! client that is missed there is counted all the same.

use std::net::IpAddr;
use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use portico_api::listener::ListenerKind;

/// Clients that are kept of one cluster and kind: enough to find them.
pub const LAST_CLIENTS: usize = 16;

/// The kinds of listeners, for one cluster.
#[derive(Debug, Default)]
pub(crate) struct Doors([Door; ListenerKind::ALL.len()]);

#[derive(Debug, Default)]
struct Door {
    opened: AtomicU64,
    ended: AtomicU64,
    used: AtomicU64,
    /// When it was last used, in milliseconds since the gateway started.
    last: AtomicU64,
    clients: Mutex<Vec<Client>>,
}

/// The connections by one kind of listener until now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DoorSnapshot {
    /// Connections and tunnel streams that reached an endpoint, ever.
    pub opened: u64,
    /// How many of those are open now.
    pub open: u64,
    /// Connections and streams that have ended, and clients that were turned away by no fault of their own. A
    /// connection by a port over which its client sent nothing is not counted: health checks of load
    /// balancers do that.
    pub used: u64,
    /// When the last of them was, in the time since the gateway started.
    pub last: Option<Duration>,
}

/// A client that used a kind of listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Client {
    /// Its address. If a hop in front of the gateway hides it and sends no PROXY header, it is the address of
    /// that hop.
    pub address: IpAddr,
    /// When it last did, in seconds since the gateway started.
    pub last: u32,
}

impl Doors {
    pub(crate) fn opened(&self, listener: ListenerKind) {
        self.of(listener).opened.fetch_add(1, Relaxed);
    }

    /// A connection has ended; `client` is the one that used it, unless it was no use.
    pub(crate) fn ended(&self, listener: ListenerKind, client: Option<IpAddr>, now: Duration) {
        if let Some(client) = client {
            self.used(listener, client, now);
        }
        // After the use: a reader that sees the end sees that too.
        self.of(listener).ended.fetch_add(1, Release);
    }

    pub(crate) fn used(&self, listener: ListenerKind, client: IpAddr, now: Duration) {
        let door = self.of(listener);
        door.last.store(u64::try_from(now.as_millis()).unwrap_or(u64::MAX), Relaxed);
        door.used.fetch_add(1, Relaxed);
        if let Ok(mut clients) = door.clients.try_lock() {
            note(&mut clients, client, now);
        }
    }

    /// In the order of [`ListenerKind::ALL`].
    pub(crate) fn snapshots(&self) -> [DoorSnapshot; ListenerKind::ALL.len()] {
        ListenerKind::ALL.map(|listener| self.snapshot(listener))
    }

    fn snapshot(&self, listener: ListenerKind) -> DoorSnapshot {
        let door = self.of(listener);
        // First, so that no connection is missed that is open or was one.
        let ended = door.ended.load(Acquire);
        let used = door.used.load(Relaxed);
        let opened = door.opened.load(Relaxed);
        let last = (used > 0).then(|| Duration::from_millis(door.last.load(Relaxed)));
        DoorSnapshot { opened, open: opened.saturating_sub(ended), used, last }
    }

    pub(crate) fn clients(&self, listener: ListenerKind) -> Vec<Client> {
        // Nothing in here can be left half done by a panic elsewhere.
        self.of(listener).clients.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn of(&self, listener: ListenerKind) -> &Door {
        &self.0[listener as usize]
    }
}

/// The one that was away for longest makes room.
fn note(clients: &mut Vec<Client>, address: IpAddr, now: Duration) {
    let last = u32::try_from(now.as_secs()).unwrap_or(u32::MAX);
    if let Some(known) = clients.iter_mut().find(|client| client.address == address) {
        known.last = last;
    } else if clients.len() < LAST_CLIENTS {
        clients.push(Client { address, last });
    } else if let Some(oldest) = clients.iter_mut().min_by_key(|client| client.last) {
        *oldest = Client { address, last };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SNI: ListenerKind = ListenerKind::Sni;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn address(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    #[test]
    fn a_door_is_used_until_its_last_connection_has_ended() {
        let doors = Doors::default();
        assert_eq!(doors.snapshot(SNI), DoorSnapshot::default());
        doors.opened(SNI);
        doors.opened(SNI);
        doors.ended(SNI, Some(address(7)), seconds(5));
        let once = DoorSnapshot { opened: 2, open: 1, used: 1, last: Some(seconds(5)) };
        assert_eq!(doors.snapshot(SNI), once);
        doors.ended(SNI, None, seconds(9));
        assert_eq!(doors.snapshot(SNI), DoorSnapshot { open: 0, ..once }, "the second was no use");
        doors.used(SNI, address(8), seconds(10));
        let turned_away = DoorSnapshot { opened: 2, open: 0, used: 2, last: Some(seconds(10)) };
        assert_eq!(doors.snapshot(SNI), turned_away);
        assert_eq!(doors.snapshot(ListenerKind::NodePort), DoorSnapshot::default(), "another door");
    }

    #[test]
    fn the_newest_clients_are_kept_each_once_and_never_more_than_the_bound() {
        let doors = Doors::default();
        let clients = || {
            let clients = doors.clients(SNI).into_iter().map(|client| (client.last, client.address));
            clients.collect::<std::collections::BTreeSet<_>>()
        };
        doors.used(SNI, address(1), seconds(1));
        doors.used(SNI, address(2), seconds(2));
        doors.used(SNI, address(1), seconds(3));
        assert_eq!(clients().into_iter().collect::<Vec<_>>(), [(2, address(2)), (3, address(1))]);
        for number in 10..=250 {
            doors.used(SNI, address(number), seconds(number.into()));
        }
        let newest = 250 - LAST_CLIENTS as u32 + 1..=250;
        assert_eq!(clients(), newest.map(|last| (last, address(u8::try_from(last).unwrap()))).collect());
    }

    #[test]
    fn a_look_while_connections_end_misses_none_that_was_open_or_a_use() {
        const CONNECTIONS: u64 = 20_000;
        let doors = Doors::default();
        std::thread::scope(|scope| {
            let worker = scope.spawn(|| {
                for _ in 0..CONNECTIONS {
                    doors.opened(SNI);
                    doors.ended(SNI, Some(address(1)), seconds(1));
                }
            });
            while !worker.is_finished() {
                let seen = doors.snapshot(SNI);
                assert!(seen.open + seen.used >= seen.opened, "{seen:?}");
            }
            worker.join().unwrap();
        });
        let all = DoorSnapshot { opened: CONNECTIONS, open: 0, used: CONNECTIONS, last: Some(seconds(1)) };
        assert_eq!(doors.snapshot(SNI), all);
    }
}
