//! One thread that moves bytes: a single-threaded runtime and listeners of its own.
//!
//! A connection stays on the thread that accepted it from its first byte to its last. Workers meet only in
//! what they [share](crate::shared).

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use slab::Slab;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use crate::record::Record;
use crate::shared::Shared;

/// Period of the search for connections older than a second. It also saves system calls: a timer earlier than
/// all others wakes tokio's event loop. While this tick is pending, only timers below 500 ms can be earliest.
const TICK: Duration = Duration::from_millis(500);

/// Ticks after which a connection counts as lasting: one to one and a half seconds.
const LASTING: usize = 2;

/// One thread's share.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) shared: Arc<Shared>,
    /// Locked by other threads only to list open connections.
    connections: Mutex<Connections>,
}

#[derive(Debug, Default)]
struct Connections {
    /// Every open connection of this thread.
    open: Slab<Arc<Record>>,
    /// Slots by age: `[0]` taken since the last tick, `[1]` in the tick before, and so on. A connection in a
    /// slot that is reused meanwhile is told too early. That costs it no more than system calls.
    young: [Vec<usize>; LASTING + 1],
}

impl Worker {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, connections: Mutex::default() }
    }

    /// Starts the thread. It ends when `stop` turns true, and with it every task.
    pub(crate) fn start(
        self: &Arc<Self>,
        index: usize,
        mut stop: watch::Receiver<bool>,
    ) -> io::Result<(Handle, JoinHandle<()>)> {
        let runtime = runtime()?;
        let handle = runtime.handle().clone();
        handle.spawn(Arc::clone(self).tick());
        let run = move || {
            // An error says that the gateway was dropped: time to stop, too.
            let _ = runtime.block_on(stop.wait_for(|stop| *stop));
        };
        let thread = std::thread::Builder::new().name(format!("worker-{index}")).spawn(run)?;
        Ok((handle, thread))
    }

    /// Adds an open connection to the list; returns its slot.
    pub(crate) fn list(&self, record: Arc<Record>) -> usize {
        let mut connections = self.lock();
        let slot = connections.open.insert(record);
        connections.young[0].push(slot);
        slot
    }

    pub(crate) fn unlist(&self, slot: usize) {
        self.lock().open.try_remove(slot);
    }

    /// Every open connection of this thread.
    pub(crate) fn connections(&self) -> Vec<Arc<Record>> {
        self.lock().open.iter().map(|(_, record)| Arc::clone(record)).collect()
    }

    async fn tick(self: Arc<Self>) {
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            self.note_lasting();
        }
    }

    /// Tells connections that have outlived their first second.
    fn note_lasting(&self) {
        let mut connections = self.lock();
        connections.young.rotate_right(1);
        // A burst must not leave its room behind.
        let oldest = std::mem::take(&mut connections.young[0]);
        for slot in oldest {
            if let Some(record) = connections.open.get(slot) {
                record.set_lasting();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Connections> {
        // Nothing in here can be left half done by a panic elsewhere.
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What one thread runs its tasks on.
fn runtime() -> io::Result<Runtime> {
    // Wake-ups from other threads come first: they end connections that were evicted. By default one task in
    // 31 is of these, and in a flood each accepted connection is a new task before them.
    Builder::new_current_thread().enable_all().global_queue_interval(1).build()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use tokio::sync::Notify;

    use super::*;

    /// As in a flood, in which each connection accepted is a task more.
    #[test]
    fn tasks_that_another_thread_wakes_do_not_wait_behind_new_ones() {
        const WAITING: usize = 32;
        const NEW: usize = 1_000;
        let (started, woken) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
        let wait = Arc::new(AtomicUsize::new(0));
        runtime().unwrap().block_on(async {
            let waiting: Vec<_> = (0..WAITING)
                .map(|_| {
                    let (started, woken) = (Arc::clone(&started), Arc::clone(&woken));
                    let wait = Arc::clone(&wait);
                    tokio::spawn(async move {
                        wait.fetch_add(1, Relaxed);
                        woken.notified().await;
                        started.load(Relaxed)
                    })
                })
                .collect();
            while wait.load(Relaxed) < WAITING {
                tokio::task::yield_now().await;
            }
            for _ in 0..NEW {
                let started = Arc::clone(&started);
                tokio::spawn(async move { started.fetch_add(1, Relaxed) });
            }
            std::thread::spawn(move || woken.notify_waiters()).join().unwrap();
            for task in waiting {
                assert_eq!(task.await.unwrap(), 0, "new tasks ran first");
            }
        });
    }
}
