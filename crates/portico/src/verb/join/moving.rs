//! `portico join move`: the kubelet of this machine reaches its API server by another address.
//!
//! The new address is tried first, with the kubelet's own credentials; nothing has changed until it answers.
//! Then files change, the kubelet is started anew, and has to prove that it renews its lease: or all is put
//! back. What becomes of the files, and that a second move goes on where one ended, is decided in
//! `portico_hosting::join::moving`.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::Duration;

use anyhow::{Context, anyhow, bail, ensure};
use clap::Args;
use jiff::Timestamp;
use portico_hosting::join::machine::{Paths, UNIT, settings};
use portico_hosting::join::moving::{Move, Present, health, plan};
use portico_hosting::join::options::Label;
use portico_join::checks::Findings;
use portico_join::cluster::{Server, dialer};
use portico_join::draining::Draining;
use portico_join::files::{self, Record, take};
use portico_join::{kubelet, kubelet_process};
use portico_kube::foreign::{Foreign, ForeignError, LONGEST_WATCH};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde_json::json;
use tokio::time::{sleep, timeout};

use crate::args::positive_duration;
use crate::daemon::{Daemon, Hangup};
use crate::outcome::{Outcome, print};

/// Between two looks at the kubelet and its lease.
const LOOK: Duration = Duration::from_millis(500);

/// In a pod, between an attempt that failed and the next.
const AGAIN: Duration = Duration::from_mins(10);

/// In a pod, how long a move goes on that is asked to stop: less than pods are given to end.
const REST: Duration = Duration::from_secs(20);

/// Before the API server is asked again that did not answer.
const UNREADABLE: Duration = Duration::from_secs(10);

/// `portico join move`.
#[derive(Debug, Args)]
pub(super) struct Flags {
    /// URL of the cluster's API server from now on
    #[arg(long, value_name = "URL")]
    server: Server,
    /// Time limit for the kubelet to restart, and to renew its lease by it; then all is put back
    #[arg(long, value_name = "TIME", default_value = "2m", value_parser = positive_duration)]
    wait: Duration,
    /// Folder below which the files are, as when the machine joined
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
    /// Empty the node before its kubelet restarts, as `kubectl drain --delete-emptydir-data
    /// --ignore-daemonsets` does, and open it again at the end; exit code 1, and the kubelet stays where it
    /// is, if that takes longer [default without TIME: 10m]
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "10m", value_parser = positive_duration)]
    drain: Option<Duration>,
    /// In a pod that sees the machine's processes and files: a kubelet of systemd is ended, which starts it
    /// again; and a machine that `portico join` did not make a node is left alone, exit code 0
    #[arg(long)]
    in_pod: bool,
    /// Begin once the Node has this label
    #[arg(long, value_name = "KEY=VALUE")]
    turn: Option<Label>,
}

/// A machine that is moved.
struct Machine<'a> {
    paths: &'a Paths,
    record: &'a Record,
    /// Where its kubelet tells how it is.
    health: Option<SocketAddr>,
    /// How long that may take to start anew, and then to be at work.
    limit: Duration,
    /// Whether this program is in a pod of it.
    in_pod: bool,
}

/// Moves the kubelet, or leaves everything as it is.
pub(super) async fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    let paths = Paths::below(&std::path::absolute(&flags.root)?);
    let record = match files::record(&paths)? {
        None if flags.in_pod => {
            print("`portico join` did not make this machine a node: it is moved by hand\n")?;
            return Ok(Outcome::Done);
        }
        record => record.ok_or_else(|| never(&paths))?,
    };
    ensure!(
        !record.systemd || flags.root == Path::new("/"),
        "systemd runs the kubelet of this machine, whose files are below /: --root goes with --kubelet"
    );
    // A pod does not see the kubelet's configuration. The lease proves enough.
    let health = if flags.in_pod { None } else { health_of(&paths)? };
    let (limit, in_pod) = (flags.wait, flags.in_pod);
    let machine = Machine { paths: &paths, record: &record, health, limit, in_pod };
    if let Some(turn) = &flags.turn {
        machine.waits_for_its_turn(turn, &flags.server.url).await?;
    }
    let outcome = machine.moves(&flags.server.url, flags.drain).await?;
    if in_pod && outcome == Outcome::No {
        // A kubelet is not to restart again and again for something that a person has to see to.
        let mut daemon = Daemon::start(Hangup::Stops)?;
        print(&format!("The next attempt begins in {AGAIN:?}\n"))?;
        tokio::select! {
            () = sleep(AGAIN) => {}
            _ = daemon.asked_to_stop() => {}
        }
    }
    Ok(outcome)
}

impl Machine<'_> {
    /// Waits until the Node has this label, or nothing is left to be done.
    async fn waits_for_its_turn(&self, turn: &Label, server: &str) -> anyhow::Result<()> {
        let node = &self.record.node;
        let path = format!("/api/v1/nodes/{node}");
        print(&format!("Node {node} waits for its turn: the label {turn}\n"))?;
        loop {
            let (kubeconfig, way) = way(self.paths, server)?;
            if way.is_none() {
                return Ok(());
            }
            let seen = async {
                let api = self.reach(&kubeconfig).await?;
                let object = api.get(&path).await?.context("the Node is not there")?;
                if turn.is_among(&object["metadata"]["labels"]) {
                    return anyhow::Ok(true);
                }
                let version = object["metadata"]["resourceVersion"].as_str().unwrap_or_default();
                let list = format!("/api/v1/nodes?fieldSelector=metadata.name%3D{node}");
                api.changed(&format!("{list}&resourceVersion={version}"), LONGEST_WATCH).await?;
                Ok(false)
            };
            match seen.await {
                Ok(true) => return Ok(()),
                // A watch may be cut as soon as it is there.
                Ok(false) => sleep(LOOK).await,
                Err(error) => {
                    tracing::warn!("cannot tell whether it is the turn of node {node}: {error:#}");
                    sleep(UNREADABLE).await;
                }
            }
        }
    }

    /// Moves the kubelet, after the node was emptied if that is asked for, or leaves everything as it is.
    async fn moves(&self, server: &str, drain: Option<Duration>) -> anyhow::Result<Outcome> {
        let _alone = alone(self.paths)?;
        let node = &self.record.node;
        let (_, way) = way(self.paths, server)?;
        let Some(way) = way else {
            self.opens(drain).await?;
            print(&format!(
                "Node {node} is at {server} already: nothing was changed, no kubelet restarted\n"
            ))?;
            return Ok(Outcome::Done);
        };
        let api = match self.tries(&way.kubeconfig).await {
            Ok(api) => api,
            Err(error) => {
                self.opens(drain).await?;
                return no(&format!("{server} is no way for node {node}: {error:#}. Nothing was changed"));
            }
        };
        // From here on a request to stop is a reason to put back, and not an end in between.
        let mut daemon = Daemon::start(Hangup::Stops)?;
        if let Some(limit) = drain
            && let Err(error) = self.empties(&api, limit, &mut daemon).await
        {
            self.opens(drain).await?;
            return no(&format!("node {node} is not empty: {error:#}. Its kubelet is where it was"));
        }
        let moved = self.changes(&api, &way, server, &mut daemon).await;
        self.opens(drain).await?;
        moved
    }

    /// Has the kubelet start anew with other files, or puts all back.
    async fn changes(
        &self,
        api: &Foreign,
        way: &Move,
        server: &str,
        daemon: &mut Daemon,
    ) -> anyhow::Result<Outcome> {
        // After a move that was not finished, it may be where it is to go back to.
        let (node, is_new) = (&self.record.node, way.from != server);
        let from = if is_new { format!(" from {}", way.from) } else { String::new() };
        let said = format!(
            "Node {node} goes{from} to {server}: its kubelet restarts. Containers run on, and the Node stays \
             Ready; open exec, logs -f and port-forward of this node end"
        );
        print(&format!("{said}\n"))?;
        self.announces(api, &said).await;
        take(&way.begin)?;
        let mut proof = pin!(self.proves(&way.kubeconfig, server));
        let proven = tokio::select! {
            proven = &mut proof => proven,
            signal = daemon.asked_to_stop() => {
                // Most are through within seconds, and the way back may be a door that is being closed.
                let rest = if self.in_pod { REST } else { Duration::ZERO };
                timeout(rest, proof).await.unwrap_or_else(|_| Err(anyhow!("{signal} asked to stop")))
            }
        };
        if let Err(error) = proven {
            return self.put_back(way, &error).await;
        }
        take(&way.finish)?;
        print(&format!("Node {node} is at {server}, where its kubelet renews its lease\n"))?;
        if is_new {
            print(&format!("Back again: portico join move --server {}\n", way.from))?;
        }
        Ok(Outcome::Done)
    }

    /// Tries the API server as the kubelet will reach it: TLS, whether it is ready, and whether it knows the
    /// kubelet. Returns the way there.
    async fn tries(&self, kubeconfig: &str) -> anyhow::Result<Foreign> {
        let server = self.reach(kubeconfig).await?;
        server.ready().await.map_err(explained)?;
        // There is none if somebody deleted the Node, which the kubelet makes anew.
        server.get(&self.lease()).await.map_err(explained)?;
        Ok(server)
    }

    /// Has pods leave the node, unless a signal asks to stop.
    async fn empties(&self, api: &Foreign, limit: Duration, daemon: &mut Daemon) -> anyhow::Result<()> {
        let node = &self.record.node;
        print(&format!("Node {node} is emptied before its kubelet restarts, within {limit:?}\n"))?;
        let draining = Draining { api, node };
        tokio::select! {
            drained = draining.drain(limit) => drained,
            signal = daemon.asked_to_stop() => Err(anyhow!("{signal} asked to stop")),
        }
    }

    /// Says on the Node what is about to happen. It happens also if that cannot be said.
    async fn announces(&self, api: &Foreign, said: &str) {
        let (node, now) = (&self.record.node, Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
        let event = json!({"apiVersion": "v1", "kind": "Event", "type": "Normal", "reason": "KubeletMoves",
            "metadata": {"generateName": format!("{node}."), "namespace": "default"}, "message": said,
            "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node},
            "source": {"component": "portico-join", "host": node}, "count": 1,
            "firstTimestamp": now, "lastTimestamp": now});
        if let Err(error) = api.create("/api/v1/namespaces/default/events", &event).await {
            tracing::warn!(%error, "no Event says that the kubelet of this node restarts");
        }
    }

    /// Lets pods onto the node again, by the address that it has now, if this program has closed it; also if
    /// an earlier one did that was ended before it could.
    async fn opens(&self, drain: Option<Duration>) -> anyhow::Result<()> {
        let node = &self.record.node;
        let opened = async {
            let kubeconfig = files::read(&self.paths.kubeconfig())?.unwrap_or_default();
            let api = self.reach(&kubeconfig).await?;
            Draining { api: &api, node }.open().await
        };
        match opened.await {
            Err(error) if drain.is_some() => print(&format!(
                "WARN node {node} may be closed for new pods still: {error:#}; kubectl uncordon {node}\n"
            )),
            // Nobody asked for a node to be closed.
            _ => Ok(()),
        }
    }

    /// Waits until the kubelet has been started anew, is well, and has renewed its lease.
    async fn proves(&self, kubeconfig: &str, server: &str) -> anyhow::Result<()> {
        let started = self.restarted(server).await?;
        let api = self.reach(kubeconfig).await?;
        let mut missing = anyhow!("nothing was seen of it");
        let proof = async {
            while let Err(error) = self.is_at_work(&api, started).await {
                missing = error;
                sleep(LOOK).await;
            }
        };
        let (limit, in_time) = (self.limit, timeout(self.limit, proof).await);
        in_time.map_err(|_| {
            let log = if self.record.systemd { " (journalctl -u kubelet.service)" } else { "" };
            anyhow!(
                "the kubelet was started with {server}, and not at work within {limit:?}, the time that \
                 --wait gives: {missing:#}. Its log says why{log}"
            )
        })
    }

    async fn is_at_work(&self, api: &Foreign, started: Timestamp) -> anyhow::Result<()> {
        if let Some(address) = self.health {
            kubelet::healthy(address).await.with_context(|| format!("http://{address}/healthz"))?;
        }
        let lease = api.get(&self.lease()).await?.context("the node has no lease")?;
        let renewed = lease["spec"]["renewTime"].as_str().unwrap_or_default();
        // By the clock of this machine, both.
        let is_new = renewed.parse::<Timestamp>().is_ok_and(|renewed| renewed > started);
        ensure!(is_new, "its lease was renewed at {renewed:?} and not since {started}");
        Ok(())
    }

    /// Has the kubelet started anew. Returns a moment since which it runs with this server.
    async fn restarted(&self, server: &str) -> anyhow::Result<Timestamp> {
        if self.record.systemd {
            // systemd is out of reach of a pod, and starts what ends.
            let restart = async {
                match self.in_pod {
                    true => {
                        let (kubeconfig, node) = (self.paths.kubeconfig(), &self.record.node);
                        kubelet::ended_and_started(&kubeconfig, node, self.limit).await
                    }
                    false => kubelet::restart().await,
                }
            };
            restart.await?;
            return Ok(Timestamp::now());
        }
        let noticed = async {
            loop {
                match kubelet_process::running(self.paths) {
                    Some(running) if running.server.as_deref() == Some(server) => return running.started,
                    _ => sleep(LOOK).await,
                }
            }
        };
        let limit = self.limit;
        timeout(limit, noticed).await.map_err(|_| {
            anyhow!(
                "no `portico join --kubelet` has started the kubelet with {server} within {limit:?}, the \
                 time that --wait gives: it has ended, or is of a version that does not notice another \
                 server. Start it again, as when the machine joined, and then move"
            )
        })
    }

    /// Undoes everything, and says why.
    async fn put_back(&self, way: &Move, why: &anyhow::Error) -> anyhow::Result<Outcome> {
        let back = async {
            take(&way.back)?;
            self.restarted(&way.from).await?;
            take(&way.undone)
        };
        match back.await {
            Ok(()) => no(&format!("{why:#}. Everything was put back: the node is at {} as before", way.from)),
            Err(error) => no(&format!(
                "{why:#}. And not everything could be put back: {error:#}. Once that is seen to, \
                 `portico join move --server {}` goes on",
                way.from
            )),
        }
    }

    async fn reach(&self, kubeconfig: &str) -> anyhow::Result<Foreign> {
        // A kubelet that systemd starts knows nothing of the proxy that this environment names.
        Ok(Foreign::new(kubeconfig, dialer(!self.record.systemd)?).await?)
    }

    fn lease(&self) -> String {
        format!("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{}", self.record.node)
    }
}

/// Says what keeps the machine where it is.
fn no(why: &str) -> anyhow::Result<Outcome> {
    let mut findings = Findings::default();
    findings.fail(why.to_owned());
    print(&findings.lines())?;
    Ok(Outcome::No)
}

/// The kubeconfig that is there, and what is to be done with the files.
fn way(paths: &Paths, server: &str) -> anyhow::Result<(String, Option<Move>)> {
    let kubeconfig = files::read(&paths.kubeconfig())?.with_context(|| {
        format!(
            "there is no {}: the kubelet of this machine has not got its certificate yet, and joins by the \
             address that `portico join --server` names",
            paths.kubeconfig().display()
        )
    })?;
    let (before, bootstrap) = (files::read(&paths.before_move())?, files::read(&paths.bootstrap())?);
    let record = files::read(&paths.record())?.unwrap_or_default();
    let present = Present {
        kubeconfig: &kubeconfig,
        before: before.as_deref(),
        bootstrap: bootstrap.as_deref(),
        record: &record,
    };
    let way = plan(&present, server, paths)?;
    Ok((kubeconfig, way))
}

fn health_of(paths: &Paths) -> anyhow::Result<Option<SocketAddr>> {
    let path = paths.config();
    let cannot = || format!("cannot use {}", path.display());
    let config = settings(&files::read(&path)?.unwrap_or_default());
    Ok(health(&config.map_err(|error| anyhow!(error)).with_context(cannot)?))
}

/// Holds off a second move of this machine, for as long as it is kept.
fn alone(paths: &Paths) -> anyhow::Result<Option<File>> {
    let record = paths.record();
    // Without it nothing was joined, which is said later.
    let Some(Ok(folder)) = record.parent().map(File::open) else { return Ok(None) };
    match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(folder)),
        Err(Errno::WOULDBLOCK) => bail!("another `portico join move` of this machine is under way"),
        Err(error) => Err(error).with_context(|| format!("cannot lock the folder of {}", record.display())),
    }
}

/// That this machine is nobody's, or another's.
fn never(paths: &Paths) -> anyhow::Error {
    let kubeconfig = paths.kubeconfig();
    if kubeconfig.exists() {
        return anyhow!(
            "`portico join` did not make this machine a node, and moves only what it wrote ({} is \
             missing). In {} the server is another's to change; then systemctl restart {UNIT}",
            paths.record().display(),
            kubeconfig.display()
        );
    }
    anyhow!(
        "this machine was never joined by `portico join`: there is no {}. `portico join token` prints the \
         command by which it joins, with the present address; --root is as it was then",
        paths.record().display()
    )
}

/// What to do about an API server that cannot be used.
fn explained(error: ForeignError) -> anyhow::Error {
    let remedy = match &error {
        ForeignError::Unreachable { .. } | ForeignError::NoAnswer(_) => {
            "the name has to resolve on this machine, firewalls have to let it through to that port \
             (`portico firewall` prints the rules), and the certificate there has to have this name, and be \
             signed by the authority in kubelet.conf. `portico status` says whether this way in is open"
        }
        ForeignError::Refused { code: 401 | 403, .. } => {
            "it does not accept the kubelet's certificate: another cluster is there, or the certificate has \
             ended, and the machine joins again by a new token (`portico join token`)"
        }
        _ => "the API server is not ready there: try again once `portico status` says that it is",
    };
    anyhow!("{error}; {remedy}")
}
