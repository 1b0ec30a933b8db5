//! Supervised processes: logs in a file, ended with the test.
//!
//! A process starts in the lab's control group, in its host's namespaces, and with a parent-death signal, so
//! that it ends with the test however the test ends. The kernel sends that signal when the *thread* that
//! started the child ends. Tests start children from threads that come and go, so all of them are started by
//! one thread that stays (`spawn`).

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::ended::Ended;
use crate::lab::Lab;
use crate::wait;

/// For the threads of a process to stand still.
const STANDS_STILL: Duration = Duration::from_secs(30);

/// A running program of a lab. Killed when dropped; [`stop`](Process::stop) is the polite way.
pub struct Process {
    name: String,
    child: Mutex<Child>,
    log: PathBuf,
    // The lab outlives its processes: the log and the control group are the lab's.
    _lab: Lab,
}

impl Process {
    /// Starts `command` (made by [`Host::command`](crate::Host::command)); its output goes to `NAME.log`.
    pub(crate) fn start(lab: &Lab, name: &str, mut command: Command) -> Result<Process> {
        let log = lab.log_file(name);
        let file = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .with_context(|| format!("opening {}", log.display()))?;
        let copy = file.try_clone()?;
        command.stdin(Stdio::null()).stdout(file).stderr(copy);
        let child = spawn(command).with_context(|| format!("starting {name}"))?;
        Ok(Process { name: name.to_owned(), child: Mutex::new(child), log, _lab: lab.clone() })
    }

    /// The name it was started under, `HOST-PROGRAM`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The program's process id.
    pub fn pid(&self) -> u32 {
        self.child().id()
    }

    /// Everything it wrote so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Fails with [`Ended`] and the end of its log if it is not running any more.
    pub fn check(&self) -> Result<()> {
        match self.child().try_wait()? {
            None => Ok(()),
            Some(status) => {
                let (process, last_lines) = (self.name.clone(), tail(&self.log, 20));
                Err(Ended { process, status, last_lines }.into())
            }
        }
    }

    /// Waits until its log contains `text`; fails early if the process ends before.
    pub fn wait_for_log(&self, text: &str, limit: Duration) -> Result<()> {
        wait::until(&format!("{text:?} in the log of {}", self.name), limit, || {
            // In this order: what it logged just before it ended counts.
            let running = self.check();
            if self.log().contains(text) {
                return Ok(());
            }
            running?;
            bail!("the log ends with:\n{}", tail(&self.log, 10))
        })
    }

    /// Waits until it has ended by itself.
    pub fn wait(&self, limit: Duration) -> Result<ExitStatus> {
        wait::until(&format!("{} to end", self.name), limit, || {
            self.child()
                .try_wait()?
                .ok_or_else(|| anyhow!("it is running; its log ends with:\n{}", tail(&self.log, 10)))
        })
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill_process(Pid::from_child(&self.child()), signal)
            .with_context(|| format!("sending {signal:?} to {}", self.name))
    }

    /// Has it stand still, as [`freeze`] does.
    pub fn freeze(&self) -> Result<()> {
        let process = Pid::from_child(&self.child());
        freeze(process)
    }

    /// SIGTERM, then waits for it to end within `limit`.
    pub fn stop(&self, limit: Duration) -> Result<ExitStatus> {
        self.signal(Signal::TERM)?;
        self.wait(limit)
    }

    /// SIGKILL, and waits for it to be gone. Fine to call twice.
    pub fn kill(&self) {
        let mut child = self.child();
        // An error means that it has ended already.
        let _ = child.kill();
        let _ = child.wait();
    }

    fn child(&self) -> std::sync::MutexGuard<'_, Child> {
        // A panic elsewhere leaves the child as it was.
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Sends SIGSTOP, and waits until no thread runs. The signal finds one of them, which may not have its turn
/// for a while on a busy machine: the others answer meanwhile as if nothing had happened.
pub fn freeze(process: Pid) -> Result<()> {
    kill_process(process, Signal::STOP).with_context(|| format!("sending SIGSTOP to {process:?}"))?;
    let threads = format!("/proc/{}/task", process.as_raw_nonzero());
    wait::until(&format!("{process:?} to stand still"), STANDS_STILL, || {
        for thread in fs::read_dir(&threads).context("it has ended")? {
            let state = fs::read_to_string(thread?.path().join("stat")).unwrap_or_default();
            // The state comes after the name, which may have any letters. A thread that has ended has none.
            let state = state.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
            ensure!(state.is_none_or(|state| "TtZX".contains(state)), "a thread is in state {state:?}");
        }
        Ok(())
    })
}

/// The last lines of a log file.
pub fn tail(log: &Path, lines: usize) -> String {
    let text = String::from_utf8_lossy(&fs::read(log).unwrap_or_default()).into_owned();
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

type Job = (Command, mpsc::Sender<io::Result<Child>>);

/// Starts a child from the one thread that lives as long as this process (see the head of this file).
fn spawn(command: Command) -> io::Result<Child> {
    static STARTER: OnceLock<mpsc::Sender<Job>> = OnceLock::new();
    let starter = STARTER.get_or_init(|| {
        let (jobs, todo) = mpsc::channel::<Job>();
        std::thread::spawn(move || {
            for (mut command, answer) in todo {
                // The asker waits for the answer; it cannot be gone.
                let _ = answer.send(command.spawn());
            }
        });
        jobs
    });
    let (answer, child) = mpsc::channel();
    starter.send((command, answer)).map_err(io::Error::other)?;
    child.recv().map_err(io::Error::other)?
}
