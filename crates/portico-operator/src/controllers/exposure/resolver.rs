//! Names of clusters → addresses, without waiting: one that hangs delays no other cluster.
//!
//! A lookup runs beside the controller, so many at a time, and its end triggers the cluster. The addresses
//! found count until the next answer. An error leaves the addresses of before.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use portico_dial::{Dialer, Target};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::Instant;

/// Lookups at a time.
const CONCURRENCY: usize = 64;

/// How long an answer counts.
const FOUND: Duration = Duration::from_secs(300);

/// How long a failure counts: DNS records are what people repair now.
const FAILED: Duration = Duration::from_secs(30);

/// A first lookup that takes longer counts as failed until it ends.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// Clusters that wait for a name; each has one lookup under way at most for each of its names.
const QUEUE: usize = 1_024;

/// What is known of one name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Answer {
    /// Its addresses, as last found.
    pub(super) addresses: Vec<IpAddr>,
    /// Why the last lookup failed.
    pub(super) error: Option<String>,
}

impl Answer {
    /// The first lookup is still under way.
    pub(super) fn is_pending(&self) -> bool {
        self.addresses.is_empty() && self.error.is_none()
    }
}

/// Looks names up, and remembers what was found.
pub(super) struct Resolver {
    names: Arc<Names>,
    dialer: Arc<Dialer>,
    permits: Arc<Semaphore>,
    /// Clusters whose name has another answer than before.
    changed: mpsc::Sender<String>,
}

/// The names of each cluster: one, or while it has two doors, two.
type Names = Mutex<HashMap<String, Vec<Entry>>>;

#[derive(Debug)]
struct Entry {
    name: String,
    answer: Answer,
    /// When the answer is to be asked for again; `None` while a lookup is under way.
    due: Option<Instant>,
    /// When it was asked for first.
    since: Instant,
}

impl Resolver {
    /// A resolver that knows nothing, and a channel of the clusters whose names have a new answer. It asks
    /// these `servers`, or without any those of the machine.
    pub(super) fn new(servers: &[SocketAddr]) -> (Self, mpsc::Receiver<String>) {
        let (changed, changes) = mpsc::channel(QUEUE);
        let permits = Arc::new(Semaphore::new(CONCURRENCY));
        let dialer = Arc::new(Dialer::direct().with_name_servers(servers));
        (Self { names: Arc::default(), dialer, permits, changed }, changes)
    }

    /// The known answer for `name`, one of the names of `cluster`. Starts a lookup if that is too old.
    pub(super) fn answer(&self, cluster: &str, name: &str, now: Instant) -> Answer {
        let mut names = lock(&self.names);
        let entries = names.entry(cluster.to_owned()).or_default();
        let index = entries.iter().position(|entry| entry.name == name).unwrap_or_else(|| {
            let answer = Answer::default();
            entries.push(Entry { name: name.to_owned(), answer, due: Some(now), since: now });
            entries.len() - 1
        });
        let entry = &mut entries[index];
        if entry.due.is_some_and(|due| due <= now) {
            entry.due = None;
            self.look_up(cluster.to_owned(), name.to_owned());
        }
        if entry.answer.is_pending() && entry.since + PATIENCE <= now {
            let error = Some(format!("no answer from DNS within {PATIENCE:?}"));
            return Answer { error, ..Answer::default() };
        }
        entry.answer.clone()
    }

    /// Forgets the names that `cluster` has no longer.
    pub(super) fn retain_names(&self, cluster: &str, is_kept: impl Fn(&str) -> bool) {
        if let Some(entries) = lock(&self.names).get_mut(cluster) {
            entries.retain(|entry| is_kept(&entry.name));
        }
    }

    /// How long the answers about the names of `cluster` count. For a running lookup this is `PATIENCE`,
    /// because an unchanged answer triggers no pass.
    pub(super) fn fresh_for(&self, cluster: &str, now: Instant) -> Option<Duration> {
        let names = lock(&self.names);
        let due = names.get(cluster)?.iter().map(|entry| entry.due);
        due.map(|due| due.map_or(PATIENCE, |due| due.saturating_duration_since(now))).min()
    }

    /// Forgets the clusters that are gone.
    pub(super) fn retain(&self, exists: impl Fn(&str) -> bool) {
        lock(&self.names).retain(|cluster, _| exists(cluster));
    }

    fn look_up(&self, cluster: String, name: String) {
        let (names, dialer) = (Arc::clone(&self.names), Arc::clone(&self.dialer));
        let (permits, changed) = (Arc::clone(&self.permits), self.changed.clone());
        tokio::spawn(async move {
            let Ok(_permit) = permits.acquire_owned().await else { return };
            // The port is of no importance to a resolver.
            let target = Target { host: name.as_str().into(), port: 443 };
            let found = dialer.resolve(&target).await;
            let found = found.map(|found| found.addresses.iter().map(SocketAddr::ip).collect());
            let found = found.map_err(|error| error.to_string());
            if record(&names, &cluster, &name, found, Instant::now()) {
                // No receiver: the controller is gone.
                let _ = changed.send(cluster).await;
            }
        });
    }
}

/// Records what a lookup found. Returns whether that is news.
fn record(
    names: &Names,
    cluster: &str,
    name: &str,
    found: Result<Vec<IpAddr>, String>,
    now: Instant,
) -> bool {
    let mut names = lock(names);
    let entries = names.get_mut(cluster).into_iter().flatten();
    let Some(entry) = entries.into_iter().find(|entry| entry.name == name) else { return false };
    let before = entry.answer.clone();
    match found {
        Ok(mut addresses) => {
            addresses.sort_unstable();
            addresses.dedup();
            entry.answer = Answer { addresses, error: None };
            entry.due = Some(now + FOUND);
        }
        Err(error) => {
            entry.answer.error = Some(error);
            entry.due = Some(now + FAILED);
        }
    }
    entry.answer != before
}

fn lock(names: &Names) -> MutexGuard<'_, HashMap<String, Vec<Entry>>> {
    names.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "a.example.com";

    #[test]
    fn a_failure_leaves_what_was_found_and_is_asked_again_sooner() {
        let now = Instant::now();
        let entry = Entry { name: NAME.into(), answer: Answer::default(), due: None, since: now };
        let names = Names::new(HashMap::from([("a".to_owned(), vec![entry])]));
        let ip: IpAddr = "192.0.2.1".parse().unwrap();
        assert!(record(&names, "a", NAME, Ok(vec![ip, ip]), now));
        assert!(!record(&names, "a", NAME, Ok(vec![ip]), now), "no news");
        assert!(record(&names, "a", NAME, Err("away".into()), now));
        assert!(!record(&names, "a", "of-before.example.com", Ok(Vec::new()), now));
        let names = names.into_inner().unwrap();
        let entry = &names["a"][0];
        assert_eq!(entry.answer, Answer { addresses: vec![ip], error: Some("away".into()) });
        assert_eq!(entry.due, Some(now + FAILED));
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_whose_first_lookup_hangs_counts_as_failed_after_a_while() {
        let (resolver, _changes) = Resolver::new(&[]);
        let now = Instant::now();
        let entry = Entry { name: NAME.into(), answer: Answer::default(), due: None, since: now };
        lock(&resolver.names).insert("a".into(), vec![entry]);
        assert!(resolver.answer("a", NAME, now).is_pending());
        assert!(resolver.answer("a", NAME, now + PATIENCE).error.is_some());
        assert_eq!(resolver.fresh_for("a", now), Some(PATIENCE), "or nobody would look again");
    }

    #[tokio::test]
    async fn a_lookup_ends_with_the_cluster_named() {
        let (resolver, mut changes) = Resolver::new(&[]);
        let now = Instant::now();
        assert_eq!(resolver.answer("a", "localhost", now), Answer::default());
        assert_eq!(changes.recv().await.as_deref(), Some("a"));
        assert!(resolver.answer("a", "localhost", now).addresses.iter().any(IpAddr::is_loopback));
        assert_eq!(resolver.answer("a", "localhost.", now), Answer::default(), "another name");
        resolver.retain_names("a", |name| name == "localhost");
        assert!(resolver.answer("a", "localhost", now).error.is_none());
        assert!(!resolver.answer("a", "localhost", now).addresses.is_empty(), "the other name was dropped");
        resolver.retain(|cluster| cluster != "a");
        assert_eq!(resolver.fresh_for("a", now), None);
    }
}
