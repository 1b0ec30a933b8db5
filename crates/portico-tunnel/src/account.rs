//! How many bytes tunnels hold that nobody has taken yet, and what happens when they are too many.
//!
//! Windows bound what *one* stream can make us hold. One tenant has thousands of streams, and what is under way for a window comes, whatever is said later; so
//! all connections of a process count into one [`Account`], and it has a limit:
//!
//! - **Towards the HTTP/2 peer** nothing was promised: sockets are read only for window that the peer has given, so what was read waits for
//!   the TCP socket of the connection, unless the peer takes window back (RFC 9113 section 6.9.2). A connection holds [`ROOM`] of that; streams above it wait, in
//!   line ([`Ledger::room`]). It costs no throughput, for the socket is the bottleneck then, and a peer that gives window and does not read, or takes it
//!   back, costs that much. From half of the limit on it is less, in proportion to what is left ([`STEP`] at least): who has little there goes on as before,
//!   and however many fill theirs, together they do not come to the limit (16,384 of them would, with a step each).
//! - **From the HTTP/2 peer** windows are out, and a socket that does not read must hold nobody else. Over the limit such streams are reset, as Envoy does
//!   (overload action `reset_high_memory_stream`): of the connections that hold no less than the average, so that nobody pays for another tenant, the stream whose
//!   socket has taken nothing for longest. A connection whose peer has left what waits for it for longer than any of these, and for longer than [`WORKS`], goes
//!   before them.
//!
//! Not counted is what every connection has, at rest or not: the buffer of one frame that comes in, TLS records, the kernel's socket buffers.

use std::cmp::Reverse;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use futures_util::task::AtomicWaker;
use slab::Slab;
use tokio::sync::Notify;

use crate::chunk::COPIED;

/// Most bytes that wait for the TCP socket of one connection: four streams with a full window each, a few milliseconds of a fast network.
const ROOM: usize = 1 << 20;

/// The least that is read at once, and all that waits for a connection's socket when the limit is reached. So much is copied out of the read buffer,
/// and takes no more memory than it is.
const STEP: usize = COPIED;

/// A connection whose peer took within this all that had waited for it is at work, and is not ended: 1 MiB at 8 Mbit/s.
const WORKS: Duration = Duration::from_secs(1);

/// Between two lines about streams that were reset.
const COMPLAIN_AGAIN: Duration = Duration::from_secs(10);

/// Bytes held by all connections that share it, and the most they may hold. Cheap to clone; the clones are one account.
#[derive(Debug, Clone)]
pub struct Account(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    limit: usize,
    held: AtomicUsize,
    /// At most so much of it belongs to those that were told to end and are still there, or nobody was found who could be told.
    told: AtomicUsize,
    begun: Instant,
    book: Mutex<Book>,
}

#[derive(Debug, Default)]
struct Book {
    connections: Slab<Arc<Connection>>,
    complained: Option<Instant>,
    /// Reset since then.
    untold: usize,
}

impl Account {
    /// An account with a limit in bytes.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        let (held, told, book) = (AtomicUsize::default(), AtomicUsize::default(), Mutex::default());
        Self(Arc::new(Shared { limit, held, told, begun: Instant::now(), book }))
    }

    /// Bytes held now.
    #[must_use]
    pub fn held(&self) -> usize {
        self.0.held.load(Relaxed)
    }

    /// The most that may be held.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.0.limit
    }

    /// What one connection may hold for its peer: all of [`ROOM`] up to half of the limit, nothing at the limit. This is the dynamic threshold of shared-memory
    /// switches (Choudhury and Hahne, 1998): what is left bounds each one, so no share of it has to be kept for anybody.
    fn share(&self) -> usize {
        let left = self.0.limit.saturating_sub(self.held());
        (2 * ROOM).saturating_mul(left).checked_div(self.0.limit).unwrap_or(0).min(ROOM)
    }

    fn add(&self, bytes: usize) {
        self.0.held.fetch_add(bytes, Relaxed);
        if self.is_over() {
            self.shed();
        }
    }

    /// Whether those that were not told to end are over the limit. All connections are looked at only then, not with each frame until the others have gone.
    fn is_over(&self) -> bool {
        self.held().saturating_sub(self.0.told.load(Relaxed)) > self.0.limit
    }

    fn subtract(&self, bytes: usize) {
        self.0.held.fetch_sub(bytes, Relaxed);
        if self.0.told.load(Relaxed) > 0 {
            // As if all that leaves were theirs: too little has us look again too early, too much would let others be over the limit.
            let less = |told: usize| Some(told.saturating_sub(bytes));
            let _ = self.0.told.fetch_update(Relaxed, Relaxed, less);
        }
    }

    /// Microseconds since the account was opened, never 0.
    fn now(&self) -> u64 {
        micros(self.0.begun.elapsed()).max(1)
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        // Nothing in here can be left half done by a panic elsewhere.
        self.0.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends streams until the rest is within the limit. Those that were told already count as gone.
    fn shed(&self) {
        let mut book = self.book();
        let connections: Vec<(&Arc<Connection>, usize)> = book
            .connections
            .iter()
            .map(|(_, connection)| (connection, connection.stays()))
            .filter(|(_, held)| *held > 0)
            .collect();
        let held: usize = connections.iter().map(|(_, held)| held).sum();
        let told = self.held().saturating_sub(held);
        if held <= self.0.limit {
            self.0.told.store(told, Relaxed);
            return;
        }
        // Somewhat below the limit, or the next frame had us do all of this again.
        let over = held - self.0.limit + self.0.limit / 16;
        let average = held / connections.len();
        let now = self.now();
        let mut victims: Vec<_> = connections
            .iter()
            .flat_map(|(connection, held)| {
                let heavy = *held >= average;
                connection.victims(now).into_iter().map(move |victim| (Reverse(heavy), victim))
            })
            .collect();
        victims.sort_unstable_by_key(|(light, victim)| (*light, victim.since()));
        let (mut count, mut ended) = (0, 0);
        for (_, victim) in victims {
            if ended >= over {
                break;
            }
            ended += victim.end();
            count += 1;
        }
        // Where all the rest is at work for now, nobody is looked for before as much again has come or gone.
        self.0.told.store(told + ended.max(over), Relaxed);
        book.untold += count;
        let now = Instant::now();
        if book.complained.is_none_or(|last| now.duration_since(last) >= COMPLAIN_AGAIN) {
            book.complained = Some(now);
            let reset = std::mem::take(&mut book.untold);
            drop(book);
            tracing::warn!(
                reset,
                held,
                limit = self.0.limit,
                "bytes that nobody takes use up the memory for them; streams whose receiver stopped reading are reset"
            );
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Who may be ended.
enum Victim {
    Stream(Arc<Stream>, u64),
    Connection(Arc<Connection>, u64),
}

impl Victim {
    /// Since when nothing was taken.
    fn since(&self) -> u64 {
        match self {
            Self::Stream(_, since) | Self::Connection(_, since) => *since,
        }
    }

    /// Tells it; answers what that gives back.
    fn end(&self) -> usize {
        match self {
            Self::Stream(stream, _) => {
                stream.end.tell();
                stream.held.load(Relaxed)
            }
            Self::Connection(connection, _) => {
                let held = connection.stays();
                connection.end.tell();
                held
            }
        }
    }
}

/// Told to somebody who is to end.
#[derive(Debug, Default)]
struct Told {
    told: AtomicBool,
    waker: AtomicWaker,
}

impl Told {
    fn tell(&self) {
        self.told.store(true, Relaxed);
        self.waker.wake();
    }

    fn is_told(&self) -> bool {
        self.told.load(Relaxed)
    }

    fn poll(&self, waker: &Waker) -> Poll<()> {
        self.waker.register(waker);
        if self.is_told() { Poll::Ready(()) } else { Poll::Pending }
    }
}

/// What is known of one HTTP/2 connection.
#[derive(Debug, Default)]
struct Connection {
    /// Bytes that wait for its peer to take them.
    out: AtomicUsize,
    /// Bytes that are to leave until all are gone that waited when `stays_since` was cleared. A peer that takes a byte now and then does not work.
    due: AtomicUsize,
    /// Since when bytes stay here although its task has written what it could; 0 if it has not come to that.
    stays_since: AtomicU64,
    end: Told,
    /// Its streams whose own sockets do not take what came.
    streams: Mutex<Slab<Arc<Stream>>>,
}

/// What is known of one stream that holds bytes.
#[derive(Debug)]
struct Stream {
    held: AtomicUsize,
    /// When its socket last took something.
    since: AtomicU64,
    end: Told,
}

impl Connection {
    fn streams(&self) -> MutexGuard<'_, Slab<Arc<Stream>>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All that waited is gone but `rest`, which has come since.
    fn turn_over(&self, rest: usize) {
        self.due.store(rest, Relaxed);
        self.stays_since.store(0, Relaxed);
    }

    /// Bytes held by what was not told to end.
    fn stays(&self) -> usize {
        if self.end.is_told() {
            return 0;
        }
        let streams = self.streams();
        let streams = streams.iter().filter(|(_, stream)| !stream.end.is_told());
        streams.map(|(_, stream)| stream.held.load(Relaxed)).sum::<usize>() + self.out.load(Relaxed)
    }

    fn victims(self: &Arc<Self>, now: u64) -> Vec<Victim> {
        let streams = self.streams();
        let streams = streams.iter().filter(|(_, stream)| !stream.end.is_told());
        let mut victims: Vec<_> = streams
            .map(|(_, stream)| Victim::Stream(Arc::clone(stream), stream.since.load(Relaxed)))
            .collect();
        let since = self.stays_since.load(Relaxed);
        if since > 0 && self.out.load(Relaxed) > 0 && now.saturating_sub(since) >= micros(WORKS) {
            victims.push(Victim::Connection(Arc::clone(self), since));
        }
        victims
    }
}

/// The part of an account that is one connection's.
#[derive(Debug)]
pub(crate) struct Ledger {
    account: Account,
    connection: Arc<Connection>,
    slot: usize,
    /// There is room again: told to one who waits for it at a time.
    freed: Notify,
}

impl Ledger {
    pub(crate) fn new(account: &Account) -> Self {
        let connection = Arc::<Connection>::default();
        let slot = account.book().connections.insert(Arc::clone(&connection));
        Self { account: account.clone(), connection, slot, freed: Notify::new() }
    }

    /// Bytes that may be read for the peer now.
    pub(crate) fn room(&self) -> usize {
        // Who holds nothing may always begin.
        let most = self.account.share().max(1);
        match most.saturating_sub(self.connection.out.load(Relaxed)) {
            0 => 0,
            room => room.max(STEP),
        }
    }

    /// Returns when there may be room again. Who was told and leaves some of it is to call [`pass_on`](Self::pass_on).
    pub(crate) async fn freed(&self) {
        self.freed.notified().await;
    }

    /// Lets the next in line have what room there is.
    pub(crate) fn pass_on(&self) {
        if self.room() > 0 {
            self.freed.notify_one();
        }
    }

    /// Bytes begin to wait for the connection's peer.
    pub(crate) fn begin(&self, bytes: usize) {
        if self.connection.out.fetch_add(bytes, Relaxed) == 0 {
            self.connection.turn_over(bytes);
        }
        self.account.add(bytes);
    }

    /// They were written, or thrown away.
    pub(crate) fn end(&self, bytes: usize) {
        let rest = self.connection.out.fetch_sub(bytes, Relaxed) - bytes;
        // A connection's bytes come and go on one thread, so this needs no more than that.
        match self.connection.due.load(Relaxed).saturating_sub(bytes) {
            0 => self.connection.turn_over(rest),
            due => self.connection.due.store(due, Relaxed),
        }
        self.account.subtract(bytes);
        self.pass_on();
    }

    /// To be called by the connection's task each time it has done all it could. Only what still waits then has the clock read.
    pub(crate) fn rested(&self) {
        let connection = &*self.connection;
        if connection.out.load(Relaxed) > 0 && connection.stays_since.load(Relaxed) == 0 {
            connection.stays_since.store(self.account.now(), Relaxed);
        }
    }

    /// Ready when the connection is to end. To be polled by its task before it rests.
    pub(crate) fn poll_end(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.connection.end.poll(cx.waker())
    }

    /// Whether the connection was told to end.
    pub(crate) fn is_to_end(&self) -> bool {
        self.connection.end.is_told()
    }

    /// For a stream that begins to hold bytes.
    pub(crate) fn hold(&self) -> Hold {
        let since = AtomicU64::new(self.account.now());
        let stream = Arc::new(Stream { held: AtomicUsize::default(), since, end: Told::default() });
        let slot = self.connection.streams().insert(Arc::clone(&stream));
        Hold { account: self.account.clone(), connection: Arc::clone(&self.connection), stream, slot }
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        self.account.book().connections.remove(self.slot);
    }
}

/// What one stream holds for its socket. Dropped, it holds nothing.
#[derive(Debug)]
pub(crate) struct Hold {
    account: Account,
    connection: Arc<Connection>,
    stream: Arc<Stream>,
    slot: usize,
}

impl Hold {
    pub(crate) fn add(&self, bytes: usize) {
        self.stream.held.fetch_add(bytes, Relaxed);
        self.account.add(bytes);
    }

    /// The socket took some.
    pub(crate) fn subtract(&self, bytes: usize) {
        self.stream.held.fetch_sub(bytes, Relaxed);
        self.account.subtract(bytes);
        self.stream.since.store(self.account.now(), Relaxed);
    }

    /// Ready when the stream is to end.
    pub(crate) fn poll_end(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.stream.end.poll(cx.waker())
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.account.subtract(self.stream.held.load(Relaxed));
        let mut streams = self.connection.streams();
        streams.remove(self.slot);
        if streams.is_empty() {
            // A thousand streams that were stopped once need not be remembered.
            streams.shrink_to_fit();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_to_end(hold: &Hold) -> bool {
        hold.stream.end.is_told()
    }

    fn held(ledger: &Ledger, bytes: usize, since: u64) -> Hold {
        let hold = ledger.hold();
        hold.stream.since.store(since, Relaxed);
        hold.add(bytes);
        hold
    }

    #[test]
    fn over_the_limit_the_stream_that_was_stopped_for_longest_ends() {
        let account = Account::new(1000);
        let ledger = Ledger::new(&account);
        let streams = [held(&ledger, 400, 20), held(&ledger, 300, 10), held(&ledger, 300, 30)];
        assert!(!streams.iter().any(is_to_end));
        let last = held(&ledger, 1, 40);
        assert_eq!(streams.each_ref().map(is_to_end), [false, true, false]);
        assert!(!is_to_end(&last));
        last.add(200);
        assert_eq!(streams.each_ref().map(is_to_end), [false, true, false], "who was told counts as gone");
        drop((streams, last));
        assert_eq!(account.held(), 0);
    }

    #[test]
    fn those_that_were_told_are_not_looked_for_again_until_the_rest_is_over_the_limit() {
        let account = Account::new(1000);
        let ledger = Ledger::new(&account);
        let [first, second] = [held(&ledger, 500, 10), held(&ledger, 501, 20)];
        assert!(is_to_end(&first) && !is_to_end(&second));
        let third = held(&ledger, 499, 30);
        assert!(account.held() > account.limit() && !account.is_over());
        drop(first);
        assert!(!account.is_over());
        assert_eq!(account.0.told.load(Relaxed), 0, "it has gone");
        assert!(!is_to_end(&second) && !is_to_end(&third));
        third.add(1);
        assert!(is_to_end(&second));
        drop((second, third));
        assert_eq!((account.held(), account.0.told.load(Relaxed)), (0, 0));
    }

    #[test]
    fn where_all_are_at_work_nobody_is_looked_for_with_each_frame() {
        let account = Account::new(1600);
        let ledger = Ledger::new(&account);
        ledger.begin(1601);
        assert!(!ledger.is_to_end() && !account.is_over());
        ledger.begin(100);
        assert!(!account.is_over());
        ledger.end(101);
        assert_eq!(account.0.told.load(Relaxed), 0, "as much has gone");
    }

    #[test]
    fn nobody_pays_for_a_connection_that_holds_more() {
        let account = Account::new(1000);
        let (light, heavy) = (Ledger::new(&account), Ledger::new(&account));
        let old = held(&light, 100, 10);
        let new = [held(&heavy, 600, 20), held(&heavy, 600, 30)];
        assert!(!is_to_end(&old));
        assert_eq!(new.each_ref().map(is_to_end), [true, false]);
    }

    /// As if a connection had stayed as it is for a time.
    fn ages(ledger: &Ledger) {
        ledger.rested();
        let since = ledger.account.now().saturating_sub(micros(WORKS)).max(1);
        ledger.connection.stays_since.fetch_min(since, Relaxed);
    }

    /// An account that is older than what its connections may take their time for.
    fn old_account(limit: usize) -> Account {
        let mut account = Account::new(limit);
        let begun = Instant::now().checked_sub(10 * WORKS).unwrap();
        Arc::get_mut(&mut account.0).unwrap().begun = begun;
        account
    }

    #[test]
    fn a_connection_whose_peer_takes_nothing_ends_but_one_that_works_does_not() {
        let account = old_account(1000);
        let (stuck, works) = (Ledger::new(&account), Ledger::new(&account));
        let mut cx = Context::from_waker(Waker::noop());
        works.begin(500);
        stuck.begin(500);
        ages(&works);
        works.end(250);
        works.begin(250);
        works.end(250);
        works.rested();
        works.begin(251);
        assert!(!works.is_to_end() && !stuck.is_to_end(), "of neither it is known that it is stuck");
        ages(&stuck);
        assert!(stuck.poll_end(&mut cx).is_pending());
        works.begin(100);
        assert!(stuck.is_to_end() && !works.is_to_end());
        assert!(stuck.poll_end(&mut cx).is_ready());
        stuck.end(500);
        works.end(601);
        assert_eq!(account.held(), 0);
    }

    #[test]
    fn who_takes_a_byte_now_and_then_does_not_work() {
        let account = old_account(1000);
        let ledger = Ledger::new(&account);
        ledger.begin(1000);
        ages(&ledger);
        for _ in 0..2 {
            ledger.end(1);
            ledger.begin(1);
            ledger.rested();
        }
        ledger.begin(1);
        assert!(ledger.is_to_end());
    }

    #[test]
    fn a_connection_has_room_for_so_much_and_less_while_memory_is_short() {
        let account = Account::new(128 * ROOM);
        let (ledger, other) = (Ledger::new(&account), Ledger::new(&account));
        assert_eq!(ledger.room(), ROOM);
        ledger.begin(ROOM - 1);
        assert_eq!(ledger.room(), STEP, "no reading by single bytes");
        ledger.begin(STEP);
        assert_eq!(ledger.room(), 0);
        ledger.end(ROOM - 1);
        ledger.end(STEP);
        let hold = held(&other, 64 * ROOM, 1);
        assert_eq!(ledger.room(), ROOM, "half of the limit");
        hold.add(56 * ROOM);
        assert_eq!(ledger.room(), ROOM / 8, "a sixteenth is left");
        hold.add(8 * ROOM);
        assert_eq!(ledger.room(), STEP, "nothing is left");
        ledger.begin(STEP);
        assert_eq!(ledger.room(), 0);
        drop(hold);
        assert_eq!(ledger.room(), ROOM - STEP);
    }

    #[test]
    fn connections_that_fill_their_room_leave_some_for_others() {
        let account = Account::new(128 * ROOM);
        let ledgers = [(); 1000].map(|()| Ledger::new(&account));
        while ledgers.iter().any(|ledger| ledger.room() > 0) {
            for ledger in &ledgers {
                ledger.begin(ledger.room().min(4 * STEP));
            }
        }
        assert!(account.held() < account.limit(), "{} bytes are held", account.held());
        assert!(Ledger::new(&account).room() > STEP);
    }

    #[test]
    fn a_turn_that_is_not_used_is_the_next_ones() {
        let ledger = Ledger::new(&Account::new(100 * ROOM));
        let mut cx = Context::from_waker(Waker::noop());
        ledger.begin(ROOM);
        let [mut first, mut second, mut third] = std::array::from_fn(|_| Box::pin(ledger.freed()));
        for waiting in [&mut first, &mut second, &mut third] {
            assert!(waiting.as_mut().poll(&mut cx).is_pending());
        }
        ledger.end(ROOM);
        drop(first);
        assert!(third.as_mut().poll(&mut cx).is_pending(), "one at a time, in the order they came");
        assert!(second.as_mut().poll(&mut cx).is_ready());
        ledger.pass_on();
        assert!(third.as_mut().poll(&mut cx).is_ready());
    }

    #[test]
    fn what_is_over_leaves_the_book() {
        let account = Account::new(1000);
        let ledger = Ledger::new(&account);
        drop(held(&ledger, 10, 1));
        assert!(ledger.connection.streams().is_empty());
        drop(ledger);
        assert!(account.book().connections.is_empty());
    }
}
