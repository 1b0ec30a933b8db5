//! Bounds connections that have not yet sent a target or shown an identity: the oldest is evicted for the
//! next.
//!
//! There are two kinds. One has not yet sent its target, on every listener. The other is a tunnel connection
//! that has shown no accepted identity. An honest client is through within a round trip or two. Any other
//! belongs to a misconfigured agent or to a flood. The agent may stay while there is room. A flood evicts
//! itself: once the slots are used up, an address that holds more than half of them loses its oldest first.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use slab::Slab;
use tokio::time::Instant;

/// Once all slots are taken, one source may hold a half. Less would hit a site behind one NAT address. Only
/// one source can hold more than a half, so `heavy` is one field.
const SOURCE_SHARE: u32 = 2;

/// Between two log lines about evictions.
const WARN_INTERVAL: Duration = Duration::from_secs(10);

/// A bounded number of slots.
#[derive(Debug)]
pub struct Slots {
    max: u32,
    /// The connections that take them, for the log.
    what: &'static str,
    state: Mutex<State>,
}

/// The slot of one connection, freed on drop.
#[derive(Debug)]
pub struct Slot {
    of: Arc<Slots>,
    key: usize,
}

/// The unit that counts as one address. Of IPv6 it is the first half: the other half is for each host to
/// choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// The whole address.
    V4(u32),
    /// Its first 64 bits.
    V6(u64),
}

impl Source {
    /// What counts as one with this address.
    pub fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self::V4(address.to_bits()),
            IpAddr::V6(address) => Self::V6((address.to_bits() >> 64) as u64),
        }
    }
}

#[derive(Debug, Default)]
struct State {
    entries: Slab<Entry>,
    all: Queue,
    /// The entries whose source is known, by source. No queue is empty.
    sources: HashMap<Source, Queue>,
    /// The last source that held more than its share.
    heavy: Option<Source>,
    /// Evictions since the last line in the log.
    evicted: u64,
    warned: Option<Instant>,
}

#[derive(Debug)]
struct Entry {
    source: Option<Source>,
    evicted: bool,
    waker: Option<Waker>,
    /// Its neighbours in each [`Order`].
    links: [Link; 2],
}

/// The two queues that an entry is in, each a linked list: every step takes the same time with ten slots and
/// with ten thousand.
#[derive(Debug, Clone, Copy)]
enum Order {
    All,
    Source,
}

#[derive(Debug, Clone, Copy, Default)]
struct Link {
    older: Option<usize>,
    newer: Option<usize>,
}

#[derive(Debug, Default)]
struct Queue {
    oldest: Option<usize>,
    newest: Option<usize>,
    len: u32,
}

impl Slots {
    /// So many slots. `what` takes them, for the log.
    pub fn new(max: u32, what: &'static str) -> Arc<Self> {
        Arc::new(Self { max, what, state: Mutex::default() })
    }

    /// Takes a slot. If they are used up, a connection is evicted. Without a source it counts for all only: a
    /// trusted hop brings the connections of many clients.
    pub fn enter(self: &Arc<Self>, source: Option<Source>) -> Slot {
        let mut state = self.lock();
        let key = state.insert();
        let slot = Slot { of: Arc::clone(self), key };
        self.make_room(state, key, source);
        slot
    }

    /// Connections that have a slot now.
    pub fn count(&self) -> u32 {
        self.lock().all.len
    }

    /// Counts the entry for its source, and makes room for it.
    fn make_room(&self, mut state: MutexGuard<'_, State>, key: usize, source: Option<Source>) {
        state.set_source(key, source, self.max.div_ceil(SOURCE_SHARE));
        let Some(oldest) = state.surplus(self.max) else { return };
        let warning = state.note_eviction().map(|evicted| (evicted, state.entries[oldest].source));
        let waker = state.evict(oldest);
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
        if let Some((evicted, source)) = warning {
            let (max, source) = (self.max, source.map(tracing::field::display));
            tracing::warn!(evicted, max, source, "too many {}: the oldest are closed", self.what);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing in here can be left half done by a panic elsewhere.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slot {
    /// The connection is one of this source, as its PROXY header says.
    pub fn set_source(&self, source: Source) {
        let state = self.of.lock();
        if !state.entries[self.key].evicted {
            self.of.make_room(state, self.key, Some(source));
        }
    }

    /// Ready when the connection must end. Wakes the last task that polled it.
    pub fn poll_evicted(&self, cx: &mut Context<'_>) -> Poll<()> {
        let entry = &mut self.of.lock().entries[self.key];
        if entry.evicted {
            return Poll::Ready(());
        }
        match &mut entry.waker {
            Some(waker) => waker.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        Poll::Pending
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.of.lock();
        state.unlink(self.key);
        state.entries.remove(self.key);
    }
}

impl State {
    /// Adds the newest entry.
    fn insert(&mut self) -> usize {
        let entry = Entry { source: None, evicted: false, waker: None, links: Default::default() };
        let key = self.entries.insert(entry);
        self.all.push(Order::All, key, &mut self.entries);
        key
    }

    fn set_source(&mut self, key: usize, source: Option<Source>, share: u32) {
        self.leave_source(key);
        self.entries[key].source = source;
        let Some(source) = source else { return };
        let queue = self.sources.entry(source).or_default();
        queue.push(Order::Source, key, &mut self.entries);
        if queue.len > share {
            self.heavy = Some(source);
        }
    }

    fn leave_source(&mut self, key: usize) {
        let Some(source) = self.entries[key].source.take() else { return };
        let Some(queue) = self.sources.get_mut(&source) else { return };
        queue.remove(Order::Source, key, &mut self.entries);
        if queue.len == 0 {
            self.sources.remove(&source);
        }
    }

    /// The entry that must go, if one must. It is the oldest of the source that holds too much, or else the
    /// oldest of all.
    fn surplus(&self, max: u32) -> Option<usize> {
        if self.all.len <= max {
            return None;
        }
        let heavy = self.heavy.and_then(|source| self.sources.get(&source));
        match heavy {
            Some(queue) if queue.len > max.div_ceil(SOURCE_SHARE) => queue.oldest,
            _ => self.all.oldest,
        }
    }

    fn evict(&mut self, key: usize) -> Option<Waker> {
        self.unlink(key);
        self.entries[key].evicted = true;
        self.entries[key].waker.take()
    }

    fn unlink(&mut self, key: usize) {
        if !self.entries[key].evicted {
            self.leave_source(key);
            self.all.remove(Order::All, key, &mut self.entries);
        }
    }

    /// Counts an eviction. Returns how many there were if it is time for a line in the log.
    fn note_eviction(&mut self) -> Option<u64> {
        self.evicted += 1;
        let now = Instant::now();
        if self.warned.is_some_and(|last| now.duration_since(last) < WARN_INTERVAL) {
            return None;
        }
        self.warned = Some(now);
        Some(std::mem::take(&mut self.evicted))
    }
}

impl Queue {
    fn push(&mut self, order: Order, key: usize, entries: &mut Slab<Entry>) {
        let order = order as usize;
        let older = self.newest.replace(key);
        match older {
            Some(older) => entries[older].links[order].newer = Some(key),
            None => self.oldest = Some(key),
        }
        entries[key].links[order] = Link { older, newer: None };
        self.len += 1;
    }

    fn remove(&mut self, order: Order, key: usize, entries: &mut Slab<Entry>) {
        let order = order as usize;
        let Link { older, newer } = entries[key].links[order];
        match older {
            Some(older) => entries[older].links[order].newer = newer,
            None => self.oldest = newer,
        }
        match newer {
            Some(newer) => entries[newer].links[order].older = older,
            None => self.newest = older,
        }
        self.len -= 1;
    }
}

/// As an address, or the network of one.
impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::V4(bits) => Ipv4Addr::from_bits(bits).fmt(f),
            Self::V6(bits) => write!(f, "{}/64", Ipv6Addr::from_bits(u128::from(bits) << 64)),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::future::poll_immediate;
    use tokio::task::yield_now;

    use super::*;

    fn source(text: &str) -> Option<Source> {
        Some(Source::of(text.parse().unwrap()))
    }

    async fn is_evicted(slot: &Slot) -> bool {
        poll_immediate(std::future::poll_fn(|cx| slot.poll_evicted(cx))).await.is_some()
    }

    async fn evicted(slots: &[Slot]) -> Vec<usize> {
        let mut evicted = Vec::new();
        for (index, slot) in slots.iter().enumerate() {
            if is_evicted(slot).await {
                evicted.push(index);
            }
        }
        evicted
    }

    #[tokio::test]
    async fn the_oldest_is_evicted_and_one_that_is_through_is_not() {
        let slots = Slots::new(4, "");
        let mut taken: Vec<_> = (0..4).map(|host| slots.enter(source(&format!("192.0.2.{host}")))).collect();
        drop(taken.remove(0));
        taken.push(slots.enter(source("192.0.2.9")));
        assert_eq!((evicted(&taken).await, slots.count()), (vec![], 4), "there was room");
        taken.push(slots.enter(source("192.0.2.10")));
        taken.push(slots.enter(None));
        assert_eq!((evicted(&taken).await, slots.count()), (vec![0, 1], 4));
        drop(taken);
        assert_eq!(slots.count(), 0);
    }

    #[tokio::test]
    async fn a_flood_from_one_address_evicts_itself() {
        let slots = Slots::new(8, "");
        let mut honest = vec![slots.enter(source("2001:db8:0:1::1")), slots.enter(source("198.51.100.7"))];
        let flood: Vec<_> =
            (0..1_000).map(|host| slots.enter(source(&format!("2001:db8:0:2::{host:x}")))).collect();
        assert_eq!(evicted(&flood).await, (0..994).collect::<Vec<_>>(), "it may have what no other needs");
        honest.extend([slots.enter(source("198.51.100.8")), slots.enter(source("198.51.100.9"))]);
        assert_eq!(evicted(&flood).await, (0..996).collect::<Vec<_>>());
        assert!(evicted(&honest).await.is_empty());
        assert_eq!(slots.count(), 8);
        drop(flood);
        assert_eq!(slots.lock().sources.len(), 4);
    }

    #[tokio::test]
    async fn behind_a_trusted_hop_the_client_of_the_header_counts() {
        let slots = Slots::new(4, "");
        let clients: Vec<_> = (0..4).map(|_| slots.enter(None)).collect();
        assert!(evicted(&clients).await.is_empty(), "a hop brings many clients");
        for client in &clients {
            client.set_source(Source::of("192.0.2.1".parse().unwrap()));
        }
        let others = [slots.enter(source("192.0.2.2")), slots.enter(source("192.0.2.3"))];
        assert_eq!(evicted(&clients).await, [0, 1]);
        clients[0].set_source(Source::of("192.0.2.4".parse().unwrap()));
        assert_eq!(slots.count(), 4, "what is evicted counts no more");
        assert!(evicted(&others).await.is_empty());
    }

    #[tokio::test]
    async fn an_eviction_wakes_the_task() {
        let slots = Slots::new(1, "");
        let oldest = slots.enter(None);
        let task = tokio::spawn(async move { std::future::poll_fn(|cx| oldest.poll_evicted(cx)).await });
        yield_now().await;
        assert!(!task.is_finished());
        let _next = slots.enter(None);
        task.await.unwrap();
    }

    #[test]
    fn a_mapped_address_is_that_of_its_host() {
        assert_eq!(source("::ffff:192.0.2.1"), source("192.0.2.1"));
        assert_eq!(source("192.0.2.1").unwrap().to_string(), "192.0.2.1");
        assert_eq!(source("2001:db8::1").unwrap().to_string(), "2001:db8::/64");
    }
}
