//! `portico demo --kubernetes`: a seed with the operator, and three user clusters with real API servers.
//!
//! `machine` says whether this machine can have it, [`Operated`] starts it as the story of the operator does,
//! and `guide` tells what can be tried. Names of clusters resolve on hosts of the lab only, so there is a
//! shell on one of them, in which everything printed works as it stands.

mod guide;
mod machine;

use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;

use self::machine::Machine;
use crate::control_plane::ADMINS;
use crate::image::Image;
use crate::kubectl::Kubectl;
use crate::lab::{self, Lab};
use crate::operated::{CLUSTERS, Operated, flatten};
use crate::seed::Seed;
use crate::steps::Steps;
use crate::user_cluster::UserCluster;
use crate::{programs, wait};

/// Held by the demo that runs; the process it names is that demo.
const TURN: &str = "/var/lib/portico-lab/demo.lock";

/// A pod of an image that is there: a second on an idle machine.
const SOON: Duration = Duration::from_secs(90);

/// A demo that runs. [`stop`](Demo::stop) takes it down.
pub struct Demo {
    operated: Operated,
    lab: Lab,
    text: String,
    // Others may start one from here on.
    _turn: File,
}

impl Demo {
    /// Starts it, or says why this machine cannot have it and what to do.
    pub fn start(with_workers: bool) -> Result<Demo> {
        let machine = Machine::look()?;
        machine.can_run_programs()?;
        let turn = take_turn(Path::new(TURN))?;
        machine.has_room(with_workers)?;
        let steps = Steps::new();
        steps.begin("a static portico, brought up to date with this checkout");
        programs::portico()?;
        let lab = Lab::start("demo")
            .context("making the network of the lab (a container that this runs in must be privileged)")?;
        match run(&lab, &steps, with_workers) {
            Ok((operated, text)) => Ok(Demo { operated, lab, text, _turn: turn }),
            Err(error) => {
                lab.keep_logs();
                Err(error)
            }
        }
    }

    /// What can be tried.
    pub fn guide(&self) -> &str {
        &self.text
    }

    /// Takes everything down. Fails if something is left.
    pub fn stop(self) -> Result<()> {
        let Demo { operated, lab, _turn, .. } = self;
        let number = lab.number();
        drop((operated, lab));
        let remains = lab::remains_of(number)?;
        let list = remains.join(", ");
        ensure!(remains.is_empty(), "these are left: {list}; `portico-lab down`, as root, tries again");
        Ok(())
    }
}

fn run(lab: &Lab, steps: &Steps, with_workers: bool) -> Result<(Operated, String)> {
    steps.begin(format_args!("lab {}: state and logs in {}", lab.number(), lab.dir().display()));
    steps.begin("the seed: etcd, API server, controllers, a node");
    let seed = Seed::start(lab)?;
    steps.begin("images of Kubernetes and of Portico for its node");
    UserCluster::prepare(&seed)?;
    seed.import(&Image::portico()?)?;
    let operated = Operated::start(seed, steps, with_workers)?;
    if with_workers {
        steps.begin("a pod in each cluster");
        run_pods(&operated)?;
    }
    let folder = give_files(lab, &operated)?;
    let text = guide::guide(&operated, &folder)?;
    steps.begin("ready");
    Ok((operated, text))
}

/// The right to be the demo of this machine: one is what its memory holds, and what a reader keeps apart.
fn take_turn(path: &Path) -> Result<File> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    }
    let mut options = File::options();
    let options = options.read(true).write(true).create(true).truncate(false);
    let mut file = options.open(path).with_context(|| format!("opening {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => {
            file.set_len(0)?;
            file.rewind()?;
            write!(file, "{}", std::process::id()).context("writing the process id")?;
            Ok(file)
        }
        Err(fs::TryLockError::WouldBlock) => {
            let mut process = String::new();
            file.read_to_string(&mut process)?;
            bail!("a demo runs on this machine already: Ctrl-C in its terminal ends it, or `kill {process}`")
        }
        Err(fs::TryLockError::Error(error)) => Err(error).context("locking the file of the demo"),
    }
}

/// A pod `web` in each cluster, which counts in its log.
fn run_pods(operated: &Operated) -> Result<()> {
    let script = "i=0; while true; do i=$((i+1)); echo tick $i; sleep 1; done";
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"}, "spec": {
        "containers": [{"name": "web", "image": "lab/busybox:1", "imagePullPolicy": "Never",
                        "command": ["/bin/sh", "-c", script]}],
        "terminationGracePeriodSeconds": 0}});
    let busybox = Image::busybox()?;
    let ways = operated.ways()?;
    for (worker, way) in operated.workers.iter().zip(&ways) {
        worker.import(&busybox)?;
        // Pods are refused until the controller manager has made the namespace's service account.
        wait::until("the pod to be accepted", SOON, || way.apply_json(&pod))?;
    }
    ways.iter().try_for_each(|way| way.wait_pod_ready("default", "web", SOON))?;
    // Answered once Konnectivity's agent has come: what is printed works from its first line on.
    let logs = |way: &Kubectl| wait::until("a log", SOON, || way.run(&["logs", "web"])).map(drop);
    ways.iter().try_for_each(logs)
}

/// A folder with kubeconfigs, programs and the shell. Returns its path.
fn give_files(lab: &Lab, operated: &Operated) -> Result<PathBuf> {
    let folder = lab.dir().join("demo");
    let programs = folder.join("bin");
    fs::create_dir_all(&programs).with_context(|| format!("making {}", programs.display()))?;
    symlink(programs::kube()?.join("kubectl"), programs.join("kubectl")).context("linking kubectl")?;
    symlink(programs::portico()?, programs.join("portico")).context("linking portico")?;
    let seed = &operated.seed;
    let mut users = vec![("seed", seed.access().kubeconfig("admin", Some(ADMINS))?)];
    for ((name, _), cluster) in CLUSTERS.iter().zip(&operated.hosted) {
        users.push((name, operated.access(cluster)?.kubeconfig("admin", Some(ADMINS))?));
    }
    for (name, kubeconfig) in users {
        flatten(seed, &kubeconfig, &folder.join(format!("{name}.kubeconfig")))?;
    }
    let shell = folder.join("shell");
    let path = format!("PATH={}:$PATH", programs.display());
    let seed = format!("KUBECONFIG={}", folder.join("seed.kubeconfig").display());
    fs::write(&shell, operated.client.shell(&folder, &[&path, &seed])?).context("writing the shell")?;
    fs::set_permissions(&shell, PermissionsExt::from_mode(0o755)).context("making it a program")?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_demo_is_refused_and_told_which_process_is_the_first() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("demo.lock");
        let first = take_turn(&path).unwrap();
        let error = take_turn(&path).unwrap_err().to_string();
        assert!(error.contains(&format!("kill {}`", std::process::id())), "{error}");
        drop(first);
        assert!(take_turn(&path).is_ok(), "the first has ended");
    }
}
