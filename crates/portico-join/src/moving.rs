//! The kubelet of this machine reaches its API server by another address.
//!
//! The new address is tried first, with the kubelet's own credentials; nothing has changed until it answers.
//! Then files change, the kubelet is started anew, and has to prove that it renews its lease: or all is put
//! back. `portico_hosting::join::moving` decides on the files, and how a second move goes on where one ended.

use std::fs::File;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::pin;
use std::time::Duration;

use anyhow::{Context, Error, anyhow, bail, ensure};
use jiff::Timestamp;
use portico_hosting::join::machine::{Paths, UNIT, settings};
use portico_hosting::join::moving::{Move, Present, health, plan};
use portico_hosting::join::options::Label;
use portico_kube::untrusted_api::{LONGEST_WATCH, UntrustedApi, UntrustedApiError};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde_json::json;
use tokio::time::{sleep, timeout};

use crate::cluster::dialer;
use crate::draining::Draining;
use crate::files::{self, Record, take};
use crate::{kubelet, kubelet_process};

/// Between two looks at the kubelet and its lease.
const LOOK: Duration = Duration::from_millis(500);

/// In a pod, how long a move goes on that is asked to stop: less than pods are given to end.
const REST: Duration = Duration::from_secs(20);

/// Before the API server is asked again that did not answer.
const UNREADABLE: Duration = Duration::from_secs(10);

/// A machine that is moved.
pub struct Machine {
    paths: Paths,
    record: Record,
    /// Where its kubelet tells how it is.
    health: Option<SocketAddr>,
    /// How long that may take to start anew, and then to be at work.
    limit: Duration,
    /// Whether this program is in a pod of it.
    in_pod: bool,
}

/// Whether a kubelet can reach its API server by an address.
pub enum Tried {
    /// It does already, and nothing is left to be done.
    IsThere,
    /// It cannot: why not, and what to do.
    No(Error),
    /// It can.
    Yes(Box<Attempt>),
}

/// A move whose address was tried.
pub struct Attempt {
    api: UntrustedApi,
    files: Move,
    server: String,
}

/// What came of a move.
pub enum Moved {
    /// The kubelet is at work by the new address.
    Done,
    /// It is not, and everything is as it was.
    PutBack(Error),
    /// It is not, and what failed secondly is why not everything is as it was.
    HalfPutBack(Error, Error),
}

impl Attempt {
    /// Where it goes.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// Where it comes from.
    pub fn from_server(&self) -> &str {
        &self.files.from
    }

    /// What is about to happen to the Node `node`, in a sentence.
    pub fn announcement(&self, node: &str) -> String {
        let (server, is_new) = (&self.server, self.is_new());
        let from = if is_new { format!(" from {}", self.from_server()) } else { String::new() };
        format!(
            "Node {node} goes{from} to {server}: its kubelet restarts. Containers run on, and the Node stays \
             Ready; open exec, logs -f and port-forward of this node end"
        )
    }

    /// Whether it goes elsewhere. After a move that was not finished, it may already be where it is to go
    /// back to.
    pub fn is_new(&self) -> bool {
        self.files.from != self.server
    }
}

impl Machine {
    /// The machine whose files are below `root`. `None` if `portico join` did not make it a node and this
    /// program is in a pod of it. `limit` is for its kubelet to start anew, and then to be at work.
    ///
    /// # Errors
    /// It is no node of `portico join`, or cannot be moved by this program.
    pub fn find(root: &Path, in_pod: bool, limit: Duration) -> anyhow::Result<Option<Self>> {
        let paths = Paths::below(&std::path::absolute(root)?);
        let record = match files::record(&paths)? {
            None if in_pod => return Ok(None),
            record => record.ok_or_else(|| never(&paths))?,
        };
        ensure!(
            !record.systemd || root == Path::new("/"),
            "systemd runs the kubelet of this machine, whose files are below /: --root goes with --kubelet"
        );
        // A pod does not see the kubelet's configuration. The lease proves enough.
        let health = if in_pod { None } else { health_of(&paths)? };
        Ok(Some(Self { paths, record, health, limit, in_pod }))
    }

    /// The name of its Node.
    pub fn node(&self) -> &str {
        &self.record.node
    }

    /// Waits until the Node has this label, or nothing is left to be done.
    ///
    /// # Errors
    /// The files of this machine cannot be read, or do not belong together.
    pub async fn wait_for_turn(&self, turn: &Label, server: &str) -> anyhow::Result<()> {
        let node = &self.record.node;
        let path = format!("/api/v1/nodes/{node}");
        loop {
            let (kubeconfig, way) = self.way(server)?;
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

    /// Holds off a second move of this machine, until the file is dropped. `None` if there is no folder of
    /// its record: then nothing was joined.
    ///
    /// # Errors
    /// Another move is under way.
    pub fn lock(&self) -> anyhow::Result<Option<File>> {
        let record = self.paths.record();
        let Some(Ok(folder)) = record.parent().map(File::open) else { return Ok(None) };
        match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(folder)),
            Err(Errno::WOULDBLOCK) => bail!("another `portico join move` of this machine is under way"),
            Err(error) => {
                Err(error).with_context(|| format!("cannot lock the folder of {}", record.display()))
            }
        }
    }

    /// Tries the API server as the kubelet will reach it. Changes nothing.
    ///
    /// # Errors
    /// The files of this machine cannot be read, or do not belong together.
    pub async fn try_server(&self, server: &str) -> anyhow::Result<Tried> {
        let (_, Some(files)) = self.way(server)? else { return Ok(Tried::IsThere) };
        Ok(match self.reach_ready(&files.kubeconfig).await {
            Ok(api) => Tried::Yes(Box::new(Attempt { api, files, server: server.to_owned() })),
            Err(error) => Tried::No(error),
        })
    }

    /// TLS, whether it is ready, and whether it knows the kubelet. Returns the way there.
    async fn reach_ready(&self, kubeconfig: &str) -> anyhow::Result<UntrustedApi> {
        let server = self.reach(kubeconfig).await?;
        server.ready().await.map_err(explained)?;
        // There is none if somebody deleted the Node, which the kubelet makes anew.
        server.get(&self.lease()).await.map_err(explained)?;
        Ok(server)
    }

    /// Has pods leave the node, as `kubectl drain` does.
    ///
    /// # Errors
    /// They do not within `limit`.
    pub async fn drain(&self, attempt: &Attempt, limit: Duration) -> anyhow::Result<()> {
        Draining { api: &attempt.api, node: self.node() }.drain(limit).await
    }

    /// Lets pods onto the node again, if this program has closed it. An earlier process may have closed it
    /// and then been killed. The API server is asked by the address that the kubelet has now.
    ///
    /// # Errors
    /// The API server cannot be asked.
    pub async fn uncordon(&self) -> anyhow::Result<()> {
        let kubeconfig = files::read(&self.paths.kubeconfig())?.unwrap_or_default();
        let api = self.reach(&kubeconfig).await?;
        Draining { api: &api, node: self.node() }.open().await
    }

    /// Has the kubelet start anew with other files and waits for its proof. Puts all back if the proof fails,
    /// or if `asked_to_stop` comes first, with the name of a signal.
    ///
    /// # Errors
    /// A file cannot be written. The next move goes on.
    pub async fn restart_with(
        &self,
        attempt: &Attempt,
        asked_to_stop: impl Future<Output = &'static str>,
    ) -> anyhow::Result<Moved> {
        let files = &attempt.files;
        self.announce(&attempt.api, &attempt.announcement(self.node())).await;
        take(&files.begin)?;
        let mut proof = pin!(self.prove(&files.kubeconfig, &attempt.server));
        let proven = tokio::select! {
            proven = &mut proof => proven,
            signal = asked_to_stop => {
                // Most are through within seconds, and the way back may be a door that is being closed.
                let rest = if self.in_pod { REST } else { Duration::ZERO };
                timeout(rest, proof).await.unwrap_or_else(|_| Err(anyhow!("{signal} asked to stop")))
            }
        };
        if let Err(why) = proven {
            return Ok(self.put_back(files, why).await);
        }
        take(&files.finish)?;
        Ok(Moved::Done)
    }

    /// Writes on the Node what is about to happen. It happens also if that cannot be written.
    async fn announce(&self, api: &UntrustedApi, said: &str) {
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

    /// Waits until the kubelet has been started anew, is well, and has renewed its lease.
    async fn prove(&self, kubeconfig: &str, server: &str) -> anyhow::Result<()> {
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

    async fn is_at_work(&self, api: &UntrustedApi, started: Timestamp) -> anyhow::Result<()> {
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
                match kubelet_process::running(&self.paths) {
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

    /// Undoes everything.
    async fn put_back(&self, files: &Move, why: Error) -> Moved {
        let back = async {
            take(&files.back)?;
            self.restarted(&files.from).await?;
            take(&files.undone)
        };
        match back.await {
            Ok(()) => Moved::PutBack(why),
            Err(error) => Moved::HalfPutBack(why, error),
        }
    }

    async fn reach(&self, kubeconfig: &str) -> anyhow::Result<UntrustedApi> {
        // A kubelet that systemd starts knows nothing of the proxy that this environment names.
        Ok(UntrustedApi::new(kubeconfig, dialer(!self.record.systemd)?).await?)
    }

    fn lease(&self) -> String {
        format!("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{}", self.record.node)
    }

    /// The kubeconfig that is there, and what is to be done with the files.
    fn way(&self, server: &str) -> anyhow::Result<(String, Option<Move>)> {
        let paths = &self.paths;
        let kubeconfig = files::read(&paths.kubeconfig())?.with_context(|| {
            format!(
                "there is no {}: the kubelet of this machine has not got its certificate yet, and joins by \
                 the address that `portico join --server` names",
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
        let files = plan(&present, server, paths)?;
        Ok((kubeconfig, files))
    }
}

fn health_of(paths: &Paths) -> anyhow::Result<Option<SocketAddr>> {
    let path = paths.config();
    let cannot = || format!("cannot use {}", path.display());
    let config = settings(&files::read(&path)?.unwrap_or_default());
    Ok(health(&config.map_err(|error| anyhow!(error)).with_context(cannot)?))
}

/// The error that this machine is no node, or another program's.
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
fn explained(error: UntrustedApiError) -> anyhow::Error {
    let remedy = match &error {
        UntrustedApiError::Unreachable { .. } | UntrustedApiError::NoAnswer(_) => {
            "the name has to resolve on this machine, firewalls have to let it through to that port \
             (`portico firewall` prints the rules), and the certificate there has to have this name, and be \
             signed by the authority in kubelet.conf. `portico status` says whether this way in is open"
        }
        UntrustedApiError::Refused { code: 401 | 403, .. } => {
            "it does not accept the kubelet's certificate: another cluster is there, or the certificate has \
             ended, and the machine joins again by a new token (`portico join token`)"
        }
        _ => "the API server is not ready there: try again once `portico status` says that it is",
    };
    anyhow!("{error}; {remedy}")
}
