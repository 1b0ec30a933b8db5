//! The one way to run a verb: its runtime. A verb that stays also gets its signals, its admin listener and
//! its end here.
//!
//! A verb calls [`run`] with a future. The future of a verb that stays owns a [`Daemon`] and an [`Admin`]. It
//! starts the services of the verb, waits for [`Daemon::asked_to_stop`], and drains. Threads that move bytes
//! belong to the data planes. Everything else runs on the one thread that called [`run`].

use std::io::{self, IsTerminal};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use portico_admin::server::{self, Name, Pages};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::runtime::Builder;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;

use crate::args::Listen;

/// Descriptors asked for where the hard limit is "unlimited": the kernel allows `fs.nr_open`, a million by
/// default.
const UNLIMITED: u64 = 1 << 20;

/// Runs `work` on a runtime of this thread until it ends: everything that is not a byte of a client.
pub(crate) fn run<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = Builder::new_current_thread().enable_all().build();
    runtime.context("cannot start the control thread")?.block_on(work)
}

/// What SIGHUP means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hangup {
    /// The terminal is gone, and with it the person that started this: a request to stop.
    Stops,
    /// Service managers and log rotation send SIGHUP by habit, to have programs read files again. Nothing is
    /// to be done, and least of all to stop.
    IsIgnored,
}

impl Hangup {
    /// Stops a process that was started at a terminal, and no other.
    pub(crate) fn of_terminal() -> Self {
        if io::stdin().is_terminal() || io::stderr().is_terminal() { Self::Stops } else { Self::IsIgnored }
    }
}

/// A process that stays until it is asked to stop.
#[derive(Debug)]
pub(crate) struct Daemon {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    hangup_means: Hangup,
}

impl Daemon {
    /// Catches signals from now on, and raises the limit of file descriptors as far as the system allows.
    pub(crate) fn start(hangup_means: Hangup) -> anyhow::Result<Self> {
        raise_descriptor_limit();
        let on = |kind| signal(kind).context("cannot receive signals");
        Ok(Self {
            terminate: on(SignalKind::terminate())?,
            interrupt: on(SignalKind::interrupt())?,
            hangup: on(SignalKind::hangup())?,
            hangup_means,
        })
    }

    /// Returns the name of the next signal that asks for an end.
    pub(crate) async fn asked_to_stop(&mut self) -> &'static str {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return "SIGTERM",
                _ = self.interrupt.recv() => return "SIGINT",
                _ = self.hangup.recv() => match self.hangup_means {
                    Hangup::Stops => return "SIGHUP",
                    Hangup::IsIgnored => tracing::info!(
                        "SIGHUP: nothing to do; changed files are read again by themselves, SIGTERM stops"
                    ),
                },
            }
        }
    }

    /// Waits for `work`, which stops by itself; a signal that comes meanwhile is logged and ends the process.
    ///
    /// Returns `None` after such a signal.
    pub(crate) async fn unless_stopped<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            done = work => Some(done),
            signal = self.asked_to_stop() => {
                tracing::info!(%signal, "told to stop before anything was served");
                None
            }
        }
    }

    /// Lets `open` connections finish for `limit`. `drain` does it and returns how many were cut; so many
    /// `further` signals end it.
    pub(crate) async fn drain(
        &mut self,
        open: usize,
        limit: Duration,
        further: u32,
        drain: impl Future<Output = usize>,
    ) {
        tracing::info!(open, ?limit, "draining; a second signal ends it");
        self.drain_until(further, async { tracing::info!(cut = drain.await, "drained") }).await;
    }

    /// Drains by `drain`, until so many `further` signals have come. A process with a successor gets one as a
    /// matter of course, and that is no reason to cut connections. Returns how many came.
    pub(crate) async fn drain_until(&mut self, further: u32, drain: impl Future<Output = ()>) -> u32 {
        let mut signals = 0;
        let last = async {
            loop {
                let signal = self.asked_to_stop().await;
                signals += 1;
                if signals == further {
                    return signal;
                }
                tracing::info!(%signal, "draining already; the next signal ends it");
            }
        };
        tokio::select! {
            () = drain => {}
            signal = last => tracing::warn!(%signal, "told to stop again; ending at once"),
        }
        signals
    }
}

/// The admin listener of a process; closed when dropped.
#[derive(Debug)]
pub(crate) struct Admin(JoinHandle<()>);

impl Admin {
    /// Serves `pages` from now on. With `waits`, an address in use is taken to be a predecessor's, which lets
    /// go of it.
    pub(crate) async fn serve(listen: Listen, pages: Arc<impl Pages>, waits: bool) -> anyhow::Result<Self> {
        Ok(Self(server::start(Name::ADMIN, listen.0, pages, waits).await?))
    }

    /// Like [`Self::serve`], for a listener with a name and a flag of its own.
    pub(crate) async fn serve_at(
        name: Name,
        address: Option<SocketAddr>,
        pages: Arc<impl Pages>,
    ) -> anyhow::Result<Self> {
        Ok(Self(server::start(name, address, pages, false).await?))
    }

    /// Lets go of the address. A successor needs it before this process ends.
    pub(crate) fn close(&self) {
        self.0.abort();
    }
}

impl Drop for Admin {
    fn drop(&mut self) {
        self.close();
    }
}

/// Two descriptors a connection are soon more than the usual soft limit of 1,024, which is there for programs
/// that use select(2).
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.unwrap_or(UNLIMITED);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum: limit.maximum }) {
        let current = limit.current;
        tracing::warn!(%error, ?current, "cannot raise the limit of file descriptors; it stays");
    }
}
