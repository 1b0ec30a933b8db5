//! Load on a cluster by one address: watches that are held, requests by kept and by new connections, writes
//! that a webhook in the cluster judges. It goes on until it is asked how that went: not one request may have
//! failed, and no watch may have ended.
//!
//! Clients are threads of the test, on the machine that is on every lab's network.

mod connection;
mod sessions;

use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use portico_lab::{say, wait};
use serde_json::json;

use crate::support::{SOON, Way};
use connection::{Connection, Door};

pub(super) use sessions::Sessions;

/// Watches, with a connection each.
const WATCHES: usize = 50;

/// Clients that keep their connection.
const KEEPING: usize = 4;

/// Between two requests of a client that reads. With one more that connects anew each time: fifty a second.
const BETWEEN_READS: Duration = Duration::from_millis(100);

/// Between two writes.
const BETWEEN_WRITES: Duration = Duration::from_millis(500);

/// After so many failures of a client more of them say nothing more.
const ENOUGH: usize = 10;

/// What the watches see: objects with this label.
const LABEL: &str = "load=watched";

const CONFIG_MAPS: &str = "/api/v1/namespaces/default/configmaps";

/// One object's name in all clusters, and by all addresses.
static WRITTEN: AtomicUsize = AtomicUsize::new(0);

/// Everything that is under way by one address.
pub(super) struct Load {
    way: &'static str,
    shared: Arc<Shared>,
    watches: Vec<Arc<Seen>>,
    threads: Vec<JoinHandle<()>>,
    start: Instant,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    reads_kept: AtomicUsize,
    reads_new: AtomicUsize,
    writes: AtomicUsize,
    failures: Mutex<Vec<String>>,
}

/// A watch: the number of the last object that it saw, and how it is ended.
struct Seen {
    last: AtomicUsize,
    socket: TcpStream,
}

impl Shared {
    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn failed(&self, who: &str, start: Instant, error: &anyhow::Error) {
        let failure = format!("{who} after {:.1} s: {error:#}", start.elapsed().as_secs_f64());
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).push(failure);
    }

    fn failures(&self) -> Vec<String> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Load {
    /// Begins, and waits until each watch has seen a write.
    pub(super) fn start(way: &Way) -> Self {
        let door = Arc::new(Door::of(way).unwrap());
        let mut load = Self {
            way: way.name,
            shared: Arc::default(),
            watches: Vec::new(),
            threads: Vec::new(),
            start: Instant::now(),
        };
        for number in 0..WATCHES {
            load.watch(&door, number).unwrap();
        }
        load.client("writes", BETWEEN_WRITES, writing(&door));
        for number in 0..KEEPING {
            load.client(&format!("keeps {number}"), BETWEEN_READS, reading(&door));
        }
        let opening = move |shared: &Shared| {
            let mut connection = Connection::open(&door)?;
            connection.ask("GET", &a_map(), "")?;
            shared.reads_new.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        load.client("connects", BETWEEN_READS, opening);
        load.watches_see_what_is_written();
        load
    }

    /// How it went so far, which has to be well; and it goes on.
    pub(super) fn is_served(&self, meanwhile: &str) {
        self.watches_see_what_is_written();
        let (shared, failures) = (&self.shared, self.shared.failures());
        let count = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
        let (kept, new, writes) =
            (count(&shared.reads_kept), count(&shared.reads_new), count(&shared.writes));
        let seconds = self.start.elapsed().as_secs_f64();
        let rate = (kept + new + writes) as f64 / seconds;
        say(format_args!(
            "{}, {meanwhile}: {WATCHES} watches held, {} requests failed, {kept} by kept and {new} by new \
             connections and {writes} writes served in {seconds:.1} s, {rate:.0} a second",
            self.way,
            failures.len()
        ));
        self.is_unbroken(meanwhile);
        assert!(kept > 0 && new > 0 && writes > 0, "{}, {meanwhile}: a client does nothing", self.way);
    }

    /// Ends it. All of it must have been served.
    pub(super) fn ends_well(mut self, meanwhile: &str) {
        self.is_served(meanwhile);
        self.end();
        self.is_unbroken(meanwhile);
    }

    /// Nothing has failed so far.
    pub(super) fn is_unbroken(&self, meanwhile: &str) {
        let failures = self.shared.failures();
        assert!(failures.is_empty(), "{}, {meanwhile}: {failures:#?}", self.way);
    }

    /// Whatever is written from now on is seen by each watch that was begun at first.
    fn watches_see_what_is_written(&self) {
        let next = WRITTEN.load(Ordering::Relaxed) + 1;
        wait::until(&format!("each watch by {} to see a write", self.way), SOON, || {
            let failures = self.shared.failures();
            // They tell more than a write that does not come.
            if failures.is_empty() {
                let behind =
                    self.watches.iter().filter(|watch| watch.last.load(Ordering::Relaxed) < next).count();
                ensure!(behind == 0, "{behind} of {WATCHES} have not seen it");
            }
            Ok(())
        })
        .unwrap();
    }

    fn watch(&mut self, door: &Door, number: usize) -> Result<()> {
        let mut connection = Connection::open(door)?;
        let path = format!("{CONFIG_MAPS}?watch=true&labelSelector={LABEL}&timeoutSeconds=7200");
        connection.begin(&path)?;
        let seen = Arc::new(Seen { last: AtomicUsize::new(0), socket: connection.socket()? });
        self.watches.push(Arc::clone(&seen));
        let (shared, start) = (Arc::clone(&self.shared), self.start);
        self.threads.push(thread::spawn(move || {
            let ended = connection.for_each_line(|line| {
                if let Some(number) = number_in(line) {
                    seen.last.fetch_max(number, Ordering::Relaxed);
                }
            });
            if !shared.stopped() {
                shared.failed(&format!("watch {number}"), start, &ended);
            }
        }));
        Ok(())
    }

    /// Does this again and again.
    fn client(
        &mut self,
        name: &str,
        pace: Duration,
        mut work: impl FnMut(&Shared) -> Result<()> + Send + 'static,
    ) {
        let (shared, start, name) = (Arc::clone(&self.shared), self.start, name.to_owned());
        self.threads.push(thread::spawn(move || {
            let (mut next, mut failed) = (Instant::now(), 0);
            while !shared.stopped() && failed < ENOUGH {
                if let Err(error) = work(&shared) {
                    shared.failed(&name, start, &error);
                    failed += 1;
                }
                next += pace;
                // A pace, not a wait for anything. A thread that was held up does not catch up for ever.
                next = next.max(Instant::now() - 10 * pace);
                thread::sleep(next.saturating_duration_since(Instant::now()));
            }
        }));
    }

    fn end(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for watch in &self.watches {
            // It may have ended, which has been reported.
            let _ = watch.socket.shutdown(Shutdown::Both);
        }
        for thread in self.threads.drain(..) {
            // A thread that panicked has printed why.
            let _ = thread.join();
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.end();
    }
}

/// A client that keeps its connection as long as it is served by it.
fn reading(door: &Arc<Door>) -> impl FnMut(&Shared) -> Result<()> + Send + 'static {
    let (door, mut kept) = (Arc::clone(door), None);
    move |shared| {
        let mut connection = match kept.take() {
            Some(connection) => connection,
            None => Connection::open(&door)?,
        };
        connection.ask("GET", &a_map(), "")?;
        kept = Some(connection);
        shared.reads_kept.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// A client that makes objects and takes them away again.
fn writing(door: &Arc<Door>) -> impl FnMut(&Shared) -> Result<()> + Send + 'static {
    let (door, mut kept) = (Arc::clone(door), None);
    move |shared| {
        let mut connection = match kept.take() {
            Some(connection) => connection,
            None => Connection::open(&door)?,
        };
        let name = format!("load-{}", WRITTEN.fetch_add(1, Ordering::Relaxed) + 1);
        let object = json!({"apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": name, "labels": {"load": "watched"}}});
        connection.ask("POST", CONFIG_MAPS, &object.to_string()).context("making it")?;
        connection.ask("DELETE", &format!("{CONFIG_MAPS}/{name}"), "").context("taking it away")?;
        kept = Some(connection);
        shared.writes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// What is in every namespace.
fn a_map() -> String {
    format!("{CONFIG_MAPS}/kube-root-ca.crt")
}

/// The number of the object that this line of a watch is about.
fn number_in(line: &str) -> Option<usize> {
    let (_, rest) = line.split_once("\"name\":\"load-")?;
    rest.split_once('"')?.0.parse().ok()
}
