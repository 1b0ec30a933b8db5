//! `exec` and `port-forward` to pods of one node, which carry bytes all the time.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use portico_lab::{Node, Process, say, wait};

use crate::support::{SOON, Way};

/// Between two lines to the pod, and between two pages of it.
const BETWEEN: Duration = Duration::from_millis(200);

/// Both sessions, each with a user of it.
pub(crate) struct Sessions {
    name: String,
    stop: Arc<AtomicBool>,
    counts: Arc<[AtomicUsize; 2]>,
    threads: Vec<JoinHandle<Result<()>>>,
    exec: Child,
    _forward: Process,
}

impl Sessions {
    /// Opens both to the pods that every node of a hosted cluster has, and sees bytes go through.
    pub(crate) fn open(way: &Way, node: &Node) -> Self {
        static PORTS: AtomicUsize = AtomicUsize::new(18_100);
        let on = node.host().name();
        let pod = format!("pod/web-{on}");
        // A kubelet that has just restarted knows no pod yet, and what forwards ends.
        let (port, forward) = wait::until("a port-forward", SOON, || {
            let port = PORTS.fetch_add(1, Ordering::Relaxed);
            let args = ["port-forward", &pod, &format!("{port}:8080")];
            let forward = way.kubectl.spawn(&format!("port-forward-{port}"), &args)?;
            let forwards = forward.wait_for_log("Forwarding from 127.0.0.1", SOON);
            forwards.map_err(|error| anyhow!("{error:#}"))?;
            Ok((port, forward))
        })
        .unwrap();
        let mut command = way.kubectl.command(&["exec", "-i", on, "--", "cat"]).unwrap();
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut exec = piped.spawn().unwrap();
        let (to, from) = (exec.stdin.take().unwrap(), BufReader::new(exec.stdout.take().unwrap()));

        let (stop, counts) = (Arc::new(AtomicBool::new(false)), Arc::new(<[AtomicUsize; 2]>::default()));
        let (stopped, counted) = (Arc::clone(&stop), Arc::clone(&counts));
        let lines = thread::spawn(move || says_and_hears(to, from, &stopped, &counted[0]));
        let (stopped, counted) = (Arc::clone(&stop), Arc::clone(&counts));
        let (host, page) = (way.host.clone(), format!("{on}\n"));
        let pages = thread::spawn(move || {
            let url = format!("http://127.0.0.1:{port}/");
            repeat(&stopped, &counted[1], || {
                let got = host.run(&["curl", "-sS", "--max-time", "20", &url]).context("port-forward")?;
                ensure!(got == page, "port-forward brought {got:?}");
                Ok(())
            })
        });
        let name = format!("exec and port-forward by {} to {on}", way.name);
        let sessions = Self { name, stop, counts, threads: vec![lines, pages], exec, _forward: forward };
        wait::until(&format!("bytes of {}", sessions.name), SOON, || {
            ensure!(sessions.carried().iter().all(|&count| count > 0), "{:?}", sessions.carried());
            Ok(())
        })
        .unwrap();
        sessions
    }

    /// Ends them. Neither has failed until then.
    pub(crate) fn were_held(mut self, meanwhile: &str) {
        let ended = self.end();
        let [lines, pages] = self.carried();
        say(format_args!("{}, {meanwhile}: {lines} lines and {pages} pages", self.name));
        for result in ended {
            result.with_context(|| format!("{}, {meanwhile}", self.name)).unwrap();
        }
    }

    fn carried(&self) -> [usize; 2] {
        [0, 1].map(|which: usize| self.counts[which].load(Ordering::Relaxed))
    }

    fn end(&mut self) -> Vec<Result<()>> {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.threads.drain(..).map(|thread| thread.join().unwrap_or_else(|_| bail!("panic")));
        let ended = ended.collect();
        // It may have ended, which is just as well.
        let _ = self.exec.kill();
        let _ = self.exec.wait();
        ended
    }
}

impl Drop for Sessions {
    fn drop(&mut self) {
        // One that hangs would be waited for: its other end goes first.
        let _ = self.exec.kill();
        drop(self.end());
    }
}

/// Each line that goes to the pod comes back.
fn says_and_hears(
    mut to: ChildStdin,
    mut from: BufReader<ChildStdout>,
    stop: &AtomicBool,
    count: &AtomicUsize,
) -> Result<()> {
    repeat(stop, count, || {
        let (said, mut echoed) = (format!("line {}\n", count.load(Ordering::Relaxed)), String::new());
        to.write_all(said.as_bytes()).and_then(|()| to.flush()).context("exec takes no line")?;
        from.read_line(&mut echoed).context("exec")?;
        ensure!(echoed == said, "exec gave back {echoed:?} for {said:?}");
        Ok(())
    })
}

/// Until it fails or is stopped.
fn repeat(stop: &AtomicBool, count: &AtomicUsize, mut work: impl FnMut() -> Result<()>) -> Result<()> {
    while !stop.load(Ordering::Relaxed) {
        work()?;
        count.fetch_add(1, Ordering::Relaxed);
        // A pace, not a wait for anything.
        thread::sleep(BETWEEN);
    }
    Ok(())
}
