//! The real kubectl, as one user of one cluster, from one host.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::host::Host;
use crate::process::Process;
use crate::{programs, wait};

/// kubectl with a kubeconfig, run on a host.
#[derive(Clone)]
pub struct Kubectl {
    host: Host,
    program: PathBuf,
    kubeconfig: PathBuf,
}

impl Kubectl {
    /// kubectl on `host` with this kubeconfig.
    pub fn new(host: &Host, kubeconfig: &Path) -> Result<Kubectl> {
        let program = programs::kube()?.join("kubectl");
        Ok(Kubectl { host: host.clone(), program, kubeconfig: kubeconfig.to_path_buf() })
    }

    /// The kubeconfig it uses.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Runs it to its end and returns what it prints.
    pub fn run(&self, args: &[&str]) -> Result<String> {
        self.run_with_input(args, "")
    }

    /// As [`run`](Kubectl::run), with standard input.
    pub fn run_with_input(&self, args: &[&str], input: &str) -> Result<String> {
        let all = self.words();
        let mut words: Vec<&str> = all.iter().map(String::as_str).collect();
        words.extend(args);
        self.host.run_with_input(&words, input)
    }

    /// Applies objects on the server's side, as JSON or YAML.
    pub fn apply(&self, objects: &str) -> Result<String> {
        self.run_with_input(&["apply", "--server-side", "-f", "-"], objects)
    }

    /// Applies an object made with `json!`.
    pub fn apply_json(&self, object: &Value) -> Result<String> {
        self.apply(&object.to_string())
    }

    /// Patches an object (`KIND/NAME`); `how` is `json`, `merge` or `strategic`.
    pub fn patch(&self, namespace: &str, object: &str, how: &str, change: &Value) -> Result<()> {
        let how = format!("--type={how}");
        self.run(&["patch", object, "-n", namespace, &how, "-p", &change.to_string()]).map(drop)
    }

    /// Waits until a kind is served, by the name of its definition.
    pub fn wait_served(&self, definition: &str) -> Result<()> {
        let crd = format!("crd/{definition}");
        self.run(&["wait", "--for=condition=Established", "--timeout=60s", &crd]).map(drop)
    }

    /// `kubectl get ARGS -o json`.
    pub fn get(&self, args: &[&str]) -> Result<Value> {
        let mut words = vec!["get"];
        words.extend(args);
        words.extend(["-o", "json"]);
        serde_json::from_str(&self.run(&words)?)
            .with_context(|| format!("the output of {words:?} is not JSON"))
    }

    /// Whether the API server says that there is no such object. An answer that fails to come says nothing.
    pub fn is_gone(&self, args: &[&str]) -> bool {
        self.get(args).is_err_and(|error| format!("{error:#}").contains("(NotFound)"))
    }

    /// What `kubectl auth can-i ARGS` answers. An answer that fails to come is no "no".
    pub fn can_i(&self, args: &[&str]) -> Result<bool> {
        // It ends with an error where the answer is no.
        let output = self.command(&[&["auth", "can-i"], args].concat())?.output()?;
        match String::from_utf8_lossy(&output.stdout).trim() {
            "yes" => Ok(true),
            "no" => Ok(false),
            _ => bail!("neither yes nor no: {output:?}"),
        }
    }

    /// A command line that stays (`--watch`, `logs -f`, `port-forward`).
    pub fn spawn(&self, name: &str, args: &[&str]) -> Result<Process> {
        self.host.spawn_command(name, self.command(args)?)
    }

    /// The command itself, for what needs its own pipes.
    pub fn command(&self, args: &[&str]) -> Result<Command> {
        let words = self.words();
        let mut command = self.host.command(&words[0])?;
        command.args(&words[1..]).args(args);
        Ok(command)
    }

    /// Waits until a pod is Ready.
    pub fn wait_pod_ready(&self, namespace: &str, pod: &str, limit: Duration) -> Result<()> {
        wait::until(&format!("pod {namespace}/{pod} to be Ready"), limit, || {
            let pod = self.get(&["pod", "-n", namespace, pod])?;
            if condition(&pod, "Ready") { Ok(()) } else { bail!("{}", pod["status"]) }
        })
    }

    /// Waits until a Deployment runs what it should: the newest version, all replicas available,
    /// nothing older left.
    pub fn wait_rolled_out(&self, namespace: &str, deployment: &str, limit: Duration) -> Result<()> {
        wait::until(&format!("deployment {namespace}/{deployment} to be rolled out"), limit, || {
            let object = self.get(&["deployment", "-n", namespace, deployment])?;
            let (wanted, status) = (object["spec"]["replicas"].as_u64().unwrap_or(1), &object["status"]);
            let count = |field: &str| status[field].as_u64().unwrap_or(0);
            let seen = status["observedGeneration"].as_u64() >= object["metadata"]["generation"].as_u64();
            let done = count("updatedReplicas") == wanted
                && count("availableReplicas") == wanted
                && count("replicas") == wanted;
            if seen && done { Ok(()) } else { bail!("{}", self.pods_in_short(namespace)) }
        })
    }

    /// Waits until a node is Ready.
    pub fn wait_node_ready(&self, node: &str, limit: Duration) -> Result<()> {
        wait::until(&format!("node {node} to be Ready"), limit, || {
            let object = self.get(&["node", node])?;
            let tainted = object["spec"]["taints"].as_array().is_some_and(|taints| !taints.is_empty());
            // Until the taint is gone as well nothing is scheduled there.
            if condition(&object, "Ready") && !tainted {
                Ok(())
            } else {
                bail!("{} {}", object["status"]["conditions"], object["spec"]["taints"])
            }
        })
    }

    /// One line a pod, and the latest events: what a person would look at first.
    fn pods_in_short(&self, namespace: &str) -> String {
        let pods =
            self.run(&["get", "pods", "-n", namespace, "-o", "wide", "--no-headers"]).unwrap_or_default();
        let events = self.run(&["get", "events", "-n", namespace, "--no-headers"]).unwrap_or_default();
        let latest: Vec<&str> = events.lines().rev().take(5).collect();
        format!("{pods}{}", latest.join("\n"))
    }

    fn words(&self) -> Vec<String> {
        let cache = self.host.dir().join("kubectl-cache");
        vec![
            self.program.display().to_string(),
            format!("--kubeconfig={}", self.kubeconfig.display()),
            // The default is in the home directory, which is not the lab's.
            format!("--cache-dir={}", cache.display()),
        ]
    }
}

/// Whether a condition of an object's status is `True`.
pub fn condition(object: &Value, name: &str) -> bool {
    let conditions = object["status"]["conditions"].as_array();
    conditions.is_some_and(|all| all.iter().any(|c| c["type"] == name && c["status"] == "True"))
}
