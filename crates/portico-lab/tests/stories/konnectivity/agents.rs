//! Agents as `deploy/konnectivity/agent.yaml` has them: two pods on the worker.

use std::fs;
use std::net::Ipv4Addr;

use anyhow::{Context, Result, ensure};
use portico_lab::firewall::{Direction, Firewall, Traffic, Verdict};
use portico_lab::kubectl::condition;
use portico_lab::{programs, say, wait};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::story::{AGENT_PORT, EXTERNAL_NAME, Story};
use crate::squid::SQUID_PORT;
use crate::support::SOON;
use crate::tunnel::seed::put_secret;

const NAMESPACE: &str = "kube-system";

/// How agents get to the server.
pub(crate) enum Road {
    /// Directly.
    NodePort,
    /// By the cluster's own load balancer at this address.
    LoadBalancer { address: Ipv4Addr },
    /// By the server name, through the gateway at this address.
    Gateway { address: Ipv4Addr },
    /// By the server name, through the proxy at this address, which looks the name up.
    Proxy { address: Ipv4Addr },
}

/// The Deployment.
pub(crate) struct Agents;

/// One agent.
pub(crate) struct Agent {
    pub(crate) process: Pid,
    uid: String,
    address: Ipv4Addr,
}

impl Agents {
    pub(crate) fn deploy(story: &Story, road: &Road) -> Self {
        put_secret(story.kubectl(), NAMESPACE, "proxy", &[("credentials", "agent:secret\n")]);
        Self.take(story, road);
        Self
    }

    /// Gives them this way to the server, by a rolling update.
    pub(crate) fn take(&self, story: &Story, road: &Road) {
        let dir = story.worker.host().dir().join("konnectivity-agent");
        fs::create_dir_all(&dir).unwrap();
        let shipped = programs::checkout().join("deploy/konnectivity/agent.yaml");
        fs::copy(shipped, dir.join("agent.yaml")).unwrap();
        let patch = change(road, story.seed.host().address());
        let patches = json!([{"target": {"kind": "Deployment"}, "patch": patch.to_string()}]);
        let kustomization = json!({"resources": ["agent.yaml"], "patches": patches});
        fs::write(dir.join("kustomization.yaml"), kustomization.to_string()).unwrap();
        let apply = ["apply", "--server-side", "-k", &dir.display().to_string()];
        story.kubectl().run(&apply).unwrap();
        story.kubectl().wait_rolled_out(NAMESPACE, "konnectivity-agent", SOON).unwrap();
        self.wait_ready(story);
    }

    /// New pods as they are.
    pub(crate) fn restart(&self, story: &Story) {
        let restart = ["rollout", "restart", "-n", NAMESPACE, "deployment/konnectivity-agent"];
        story.kubectl().run(&restart).unwrap();
        story.kubectl().wait_rolled_out(NAMESPACE, "konnectivity-agent", SOON).unwrap();
        self.wait_ready(story);
    }

    /// Both, once both are ready: that is, connected to a server.
    pub(crate) fn ready(&self, story: &Story) -> [Agent; 2] {
        wait::until("two agents to be ready", SOON, || {
            let ready: Vec<Agent> =
                pods(story, true)?.iter().map(|pod| Agent::of(story, pod)).collect::<Result<_>>()?;
            let count = ready.len();
            ready.try_into().map_err(|_| anyhow::anyhow!("{count} are ready"))
        })
        .unwrap()
    }

    pub(crate) fn wait_ready(&self, story: &Story) {
        self.ready(story);
    }

    /// Waits until so many have lost their server.
    pub(crate) fn wait_not_ready(&self, story: &Story, lost: usize) {
        wait::until("agents to have lost the server", SOON, || {
            let ready = pods(story, true)?.len();
            ensure!(ready == 2 - lost, "{ready} are ready");
            Ok(())
        })
        .unwrap();
        say(format_args!("{lost} of two agents noticed that the server is out of reach"));
    }
}

/// The pods of agents that stay, all or those that are ready.
fn pods(story: &Story, only_ready: bool) -> Result<Vec<Value>> {
    let label = "-l=app.kubernetes.io/name=konnectivity-agent";
    let mut list = story.kubectl().get(&["pods", "-n", NAMESPACE, label])?;
    let Value::Array(mut pods) = list["items"].take() else { return Ok(Vec::new()) };
    pods.retain(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    pods.retain(|pod| !only_ready || condition(pod, "Ready"));
    Ok(pods)
}

/// What `agent.yaml` leaves to its user.
fn change(road: &Road, server: Ipv4Addr) -> Value {
    let container = "/spec/template/spec/containers/0";
    let name = format!("konnectivity-server.{EXTERNAL_NAME}");
    let (host, port) = match road {
        Road::NodePort => (server.to_string(), AGENT_PORT),
        Road::LoadBalancer { .. } => (name.clone(), AGENT_PORT),
        _ => (name.clone(), 6443),
    };
    let argument = |index: usize| format!("{container}/args/{index}");
    let test = |index: usize, value: &str| json!({"op": "test", "path": argument(index), "value": value});
    let replace = |index, value: String| json!({"op": "replace", "path": argument(index), "value": value});
    let mut patch = vec![
        test(2, "--proxy-server-host=konnectivity-server.example.com"),
        test(3, "--proxy-server-port=6443"),
        replace(2, format!("--proxy-server-host={host}")),
        replace(3, format!("--proxy-server-port={port}")),
    ];
    match road {
        Road::NodePort => {}
        // No DNS runs in the lab.
        Road::LoadBalancer { address } | Road::Gateway { address } => patch.push(json!({
            "op": "add", "path": "/spec/template/spec/hostAliases",
            "value": [{"ip": address, "hostnames": [name]}],
        })),
        Road::Proxy { address } => {
            let arguments = [
                format!("--proxy=http://{address}:{SQUID_PORT}"),
                "--proxy-credentials=/etc/proxy/credentials".to_owned(),
            ];
            let path = format!("{container}/args/-");
            patch.extend(arguments.map(|argument| json!({"op": "add", "path": path, "value": argument})));
            patch.push(json!({"op": "add", "path": format!("{container}/volumeMounts/-"),
                              "value": {"name": "proxy", "mountPath": "/etc/proxy", "readOnly": true}}));
            patch.push(json!({"op": "add", "path": "/spec/template/spec/volumes/-",
                              "value": {"name": "proxy", "secret": {"secretName": "proxy"}}}));
        }
    }
    Value::from(patch)
}

impl Agent {
    fn of(story: &Story, pod: &Value) -> Result<Self> {
        let uid = pod["metadata"]["uid"].as_str().context("a pod has a UID")?.to_owned();
        let processes = story.worker.pod_processes(&uid, "portico")?;
        let process = *processes.first().context("no portico runs in the pod of an agent")?;
        let address = pod["status"]["podIP"].as_str().context("a pod that runs has an address")?;
        Ok(Self { process, uid, address: address.parse()? })
    }

    /// The pod is the same, whatever became of its process.
    pub(crate) fn is(&self, other: &Agent) -> bool {
        self.uid == other.uid
    }

    /// Puts a firewall between it and the server, until that is lifted.
    pub(crate) fn cut_off(&self, story: &Story) -> Firewall {
        let road = Traffic::all(Direction::Out).of_pod(self.address).to_port(AGENT_PORT);
        Firewall::stop(story.worker.host(), &road, Verdict::Drop).unwrap()
    }

    /// SIGKILL. It may have ended by itself.
    pub(crate) fn kill(&self) {
        let _ = kill_process(self.process, Signal::KILL);
    }

    /// How many connections to the kubelet it carries.
    pub(crate) fn connections(&self, story: &Story) -> Result<usize> {
        let namespace = format!("--net=/proc/{}/ns/net", self.process.as_raw_nonzero());
        let url = "http://127.0.0.1:8094/connections";
        let rows =
            story.worker.host().run(&["nsenter", &namespace, "curl", "-sS", "--max-time", "5", url])?;
        let rows: Vec<Value> = serde_json::from_str(&rows).context("its list is JSON")?;
        let kubelet = format!("{}:10250", story.worker.host().address());
        Ok(rows.iter().filter(|row| row["address"] == *kubelet).count())
    }
}
