//! Operators that are killed, or stopped for a moment, in a state of a migration.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;

use anyhow::Result;
use portico_lab::{Seed, say};
use rustix::process::{Signal, kill_process};

use super::cluster::STARTING;

/// All states of a migration.
pub(super) const STATES: [&str; 6] = ["Opening", "Proving", "Moving", "MovingNodes", "Quieting", "Closing"];

/// Kills, and remembers where.
pub(super) struct Killing<'a> {
    seed: &'a Seed,
    hit: Mutex<BTreeSet<String>>,
}

impl<'a> Killing<'a> {
    pub(super) fn of(seed: &'a Seed) -> Self {
        Self { seed, hit: Mutex::default() }
    }

    /// While `work` is done, all operators are killed as soon as the record of this cluster names a state in
    /// which they have not been yet.
    pub(super) fn during<T>(&self, cluster: &str, work: impl FnOnce() -> T) -> T {
        let (watch, states) = self.watch(cluster);
        thread::scope(|scope| {
            scope.spawn(move || {
                for state in states {
                    if !self.states().contains(&state) {
                        self.kill(cluster).unwrap();
                    }
                }
            });
            // Dropped also if the work fails: dropping it ends the thread.
            let _watch = watch;
            work()
        })
    }

    /// After `begin` all operators stand still as soon as the record names this state, until `meanwhile` is
    /// done.
    pub(super) fn stopped_in<T>(
        &self,
        cluster: &str,
        state: &str,
        begin: impl FnOnce() -> T,
        meanwhile: impl FnOnce(),
    ) {
        let (watch, mut states) = self.watch(cluster);
        let (stopped, stopping) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(move || {
                if states.any(|found| found == state) {
                    // Nobody listens after a failure, and then the lab ends.
                    let _ = stopped.send(self.signal(Signal::STOP));
                }
            });
            let _watch = watch;
            let _begun = begin();
            let number = stopping.recv_timeout(STARTING).unwrap().unwrap();
            let found = self.state(cluster);
            if matches!(&found, Ok(found) if found == state) {
                meanwhile();
            }
            self.signal(Signal::CONT).unwrap();
            assert!(number > 0, "no operator runs");
            assert_eq!(found.unwrap(), state, "operators were stopped too late");
        });
    }

    /// Where they were killed.
    pub(super) fn states(&self) -> BTreeSet<String> {
        self.hit.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The states that the record of a cluster has, as they come, until the first is dropped.
    fn watch(&self, cluster: &str) -> (Watching, impl Iterator<Item = String> + Send + use<>) {
        let columns = r#"-o=jsonpath={.spec.migration.state}{"\n"}"#;
        let watch = ["get", "exposedcluster", cluster, "--watch", columns];
        let mut command = self.seed.kubectl().command(&watch).unwrap();
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        (Watching(child), lines.map_while(Result::ok).filter(|state| !state.is_empty()))
    }

    fn state(&self, cluster: &str) -> Result<String> {
        let state = "-o=jsonpath={.spec.migration.state}";
        self.seed.kubectl().run(&["get", "exposedcluster", cluster, state])
    }

    /// For all operators. Returns how many there are.
    fn signal(&self, signal: Signal) -> Result<usize> {
        let operators = self.seed.node().processes("/portico operator")?;
        for &process in &operators {
            // It may be gone.
            let _ = kill_process(process, signal);
        }
        Ok(operators.len())
    }

    /// By a signal, which takes no time, and by kubectl: others come at once. No record is written until one
    /// of those leads, so it names the state that they were killed in.
    fn kill(&self, cluster: &str) -> Result<()> {
        let killed = self.signal(Signal::KILL)?;
        let pods = ["-n", "portico", "-l", "app.kubernetes.io/name=portico-operator"];
        let delete = ["delete", "pods", "--force", "--grace-period=0"];
        self.seed.kubectl().run(&[&delete[..], &pods].concat())?;
        let state = self.state(cluster)?;
        if killed > 0 && STATES.contains(&&*state) {
            say(format_args!("{cluster}: {killed} operators are killed in {state}"));
            self.hit.lock().unwrap_or_else(PoisonError::into_inner).insert(state);
        }
        Ok(())
    }
}

/// A `kubectl get --watch`, which ends with this.
struct Watching(Child);

impl Drop for Watching {
    fn drop(&mut self) {
        // It may have ended, which is just as well.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
