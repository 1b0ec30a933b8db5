//! A real node: containerd with runc, kubelet and kube-proxy on a host.
//!
//! Settings that look odd are explained where they stand. Most of them are what it takes to run several nodes
//! beside each other on a machine that itself is a container or a small VM.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::Pid;
use serde_json::{Value, json};

use crate::cgroup::Cgroup;
use crate::control_plane::Access;
use crate::host::Host;
use crate::image::Image;
use crate::kubectl::Kubectl;
use crate::pki::write;
use crate::process::Process;
use crate::{programs, wait};

/// How long a node may take to be Ready: about 10 s on an idle machine.
const STARTING: Duration = Duration::from_secs(180);

/// Longer than any import on a loaded machine: 135 MB take about two seconds.
const IMPORTING: Duration = Duration::from_secs(120);

/// A node that joined a cluster. Dropping it ends its pods and its programs at once.
pub struct Node {
    host: Host,
    socket: PathBuf,
    // An Option, so that Drop can end it before the pods.
    kubelet: Option<Process>,
    // None where the cluster is to bring its own.
    _kube_proxy: Option<Process>,
    _containerd: Process,
}

/// A containerd that serves, with a network for pods.
struct Runtime {
    dir: PathBuf,
    socket: PathBuf,
    containerd: Process,
}

impl Runtime {
    fn start(host: &Host, pod_cidr: &str) -> Result<Runtime> {
        programs::check_node_tools()?;
        let dir = host.dir().join("node");
        for part in ["cni", "kubelet", "pki", "pods", "volume-plugins"] {
            fs::create_dir_all(dir.join(part)).with_context(|| format!("making {part} of a node"))?;
        }
        pods_cgroup(host).make()?;
        host.run(&["sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward"])?;

        let socket = dir.join("containerd.sock");
        write(&dir.join("containerd.toml"), &containerd_config(&dir, &socket))?;
        write(&dir.join("cni/10-lab.conflist"), &cni_config(&dir, pod_cidr).to_string())?;
        let containerd = host.spawn(
            "containerd",
            programs::find("containerd")?,
            [format!("--config={}", dir.join("containerd.toml").display())],
        )?;
        wait::until("containerd to serve", STARTING, || {
            containerd.check()?;
            ctr(host, &socket, &["version"]).map(drop)
        })?;
        import(host, &socket, &Image::pause()?)?;
        Ok(Runtime { dir, socket, containerd })
    }
}

impl Node {
    /// Makes `host` a node of the cluster and waits until it is Ready. The node is named after the
    /// host, pods get addresses of `pod_cidr`, and `access` is the way its kubelet and kube-proxy
    /// take to the API server.
    pub fn join(host: &Host, access: &Access, pod_cidr: &str) -> Result<Node> {
        Node::join_with_names(host, access, pod_cidr, None)
    }

    /// Like [`Self::join`], and pods ask this name server.
    pub fn join_with_names(
        host: &Host,
        access: &Access,
        pod_cidr: &str,
        name_server: Option<Ipv4Addr>,
    ) -> Result<Node> {
        let kube = programs::kube()?;
        let Runtime { dir, socket, containerd } = Runtime::start(host, pod_cidr)?;
        let name = host.name();
        access
            .authority()
            .server(&format!("system:node:{name}"), &[host.address().to_string()])?
            .write(&dir.join("pki"), "kubelet")?;
        write(&dir.join("pki/ca.crt"), &access.authority().cert())?;
        let mut config = kubelet_config(host, &dir, &socket);
        if let Some(name_server) = name_server {
            config["clusterDNS"] = json!([name_server]);
            config["clusterDomain"] = json!("cluster.local");
        }
        write(&dir.join("kubelet.yaml"), &config.to_string())?;
        let kubeconfig = access.kubeconfig(&format!("system:node:{name}"), Some("system:nodes"))?;
        let kubelet = host.spawn(
            "kubelet",
            kube.join("kubelet"),
            [
                format!("--config={}", dir.join("kubelet.yaml").display()),
                format!("--kubeconfig={}", kubeconfig.display()),
                format!("--hostname-override={name}"),
                format!("--node-ip={}", host.address()),
                format!("--root-dir={}", dir.join("kubelet").display()),
                format!("--cert-dir={}", dir.join("pki").display()),
            ],
        )?;
        let kubeconfig = access.kubeconfig("system:kube-proxy", None)?;
        write(&dir.join("kube-proxy.yaml"), &kube_proxy_config(name, &kubeconfig).to_string())?;
        let kube_proxy = host.spawn(
            "kube-proxy",
            kube.join("kube-proxy"),
            [format!("--config={}", dir.join("kube-proxy.yaml").display())],
        )?;
        let (host, kubelet, kube_proxy) = (host.clone(), Some(kubelet), Some(kube_proxy));
        let kubectl = access.kubectl(&host)?;
        let node = Node { host, socket, kubelet, _kube_proxy: kube_proxy, _containerd: containerd };
        node.wait_ready(&kubectl)?;
        Ok(node)
    }

    /// Makes `host` a node by the command that `portico join token` printed, as an administrator of the
    /// machine would, and waits until it is Ready. Its files are where every machine has them: one such node
    /// a host. `kubectl` is the administrator's of the cluster.
    pub fn join_by(host: &Host, command: &[&str], kubectl: &Kubectl, pod_cidr: &str) -> Result<Node> {
        let Runtime { dir, socket, containerd } = Runtime::start(host, pod_cidr)?;
        let (own, resolver) = (dir.join("own.yaml"), dir.join("resolv.conf"));
        let mut config = machine_config(host, &dir, &socket);
        config["resolvConf"] = json!(resolver);
        write(&own, &config.to_string())?;
        // No name server is there. Without one, that of the cluster would ask itself.
        write(&resolver, "nameserver 192.0.2.53\n")?;
        let further = [
            format!("--kubelet={}", programs::kube()?.join("kubelet").display()),
            format!("--kubelet-config={}", own.display()),
            format!("--node-name={}", host.name()),
            format!("--node-ip={}", host.address()),
        ];
        let words = command.iter().map(|&word| word.to_owned()).chain(further);
        let kubelet = host.spawn("kubelet", programs::portico()?, words)?;
        let (host, kubelet) = (host.clone(), Some(kubelet));
        let node = Node { host, socket, kubelet, _kube_proxy: None, _containerd: containerd };
        node.wait_ready(kubectl)?;
        Ok(node)
    }

    /// Ends the kubelet, and undoes what [`join_by`](Self::join_by) had written. Returns what
    /// `portico join` printed.
    pub fn leave(&mut self) -> Result<String> {
        if let Some(kubelet) = self.kubelet.take() {
            kubelet.stop(STARTING)?;
        }
        self.portico_join(&["remove"])
    }

    /// Leads the kubelet to the API server at this URL from now on, where [`join_by`](Self::join_by) started
    /// it. Returns what `portico join` printed.
    pub fn move_to(&self, server: &str) -> Result<String> {
        self.portico_join(&["move", "--server", server])
    }

    fn portico_join(&self, words: &[&str]) -> Result<String> {
        let portico = programs::portico()?.display().to_string();
        self.host.run(&[&[&*portico, "join"], words].concat())
    }

    /// The host it runs on.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// Makes an image known to this node under its name.
    pub fn import(&self, image: &Image) -> Result<()> {
        import(&self.host, &self.socket, image)
    }

    /// The kubelet's process.
    pub fn kubelet(&self) -> Option<&Process> {
        self.kubelet.as_ref()
    }

    /// The processes of the pod with this UID whose program has this name, such as `portico` (at most 15
    /// bytes of it). For stories that kill or freeze what runs in a pod.
    pub fn pod_processes(&self, uid: &str, program: &str) -> Result<Vec<Pid>> {
        let mut pids = self.pids_of_pod(uid)?;
        pids.retain(|&pid| of_pid(pid, "comm").trim_end() == program);
        Ok(pids.into_iter().filter_map(Pid::from_raw).collect())
    }

    /// The processes of all pods here whose command line has these words, such as `/portico operator`.
    pub fn processes(&self, words: &str) -> Result<Vec<Pid>> {
        let mut pids = pods_cgroup(&self.host).pids()?;
        pids.retain(|&pid| of_pid(pid, "cmdline").replace('\0', " ").contains(words));
        Ok(pids.into_iter().filter_map(Pid::from_raw).collect())
    }

    /// The memory in bytes that each process of the pod with this UID has written, beside the name of its
    /// program. Pages of the programs themselves are shared by all pods that run them.
    pub fn private_memory(&self, uid: &str) -> Result<Vec<(String, u64)>> {
        let written = |pid: i32| -> u64 {
            let rollup = of_pid(pid, "smaps_rollup");
            let line = rollup.lines().find_map(|line| line.strip_prefix("Private_Dirty:"));
            let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
            kib.unwrap_or_default() * 1_024
        };
        let name = |pid: i32| of_pid(pid, "comm").trim_end().to_owned();
        Ok(self.pids_of_pod(uid)?.into_iter().map(|pid| (name(pid), written(pid))).collect())
    }

    fn pids_of_pod(&self, uid: &str) -> Result<Vec<i32>> {
        let group = format!("/pod{uid}/");
        let mut pids = pods_cgroup(&self.host).pids()?;
        pids.retain(|&pid| of_pid(pid, "cgroup").contains(&group));
        Ok(pids)
    }

    fn wait_ready(&self, kubectl: &Kubectl) -> Result<()> {
        // Fails early with the kubelet's last words instead of late with "not found".
        let ready = || kubectl.wait_node_ready(self.host.name(), Duration::ZERO);
        wait::until(&format!("node {} to join", self.host.name()), STARTING, || {
            if let Some(kubelet) = &self.kubelet {
                kubelet.check()?;
            }
            ready()
        })
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // The kubelet first, or it would start again what is ended; then pods. Their shims see
        // them end, and go with the lab at the latest.
        self.kubelet = None;
        // What could not be killed is reported when the lab is taken down.
        let _ = pods_cgroup(&self.host).kill();
    }
}

/// A file of a process in `/proc`; empty for one that ended meanwhile, which nobody means.
fn of_pid(pid: i32, file: &str) -> String {
    fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default()
}

/// Imports an image into a node's containerd.
fn import(host: &Host, socket: &Path, image: &Image) -> Result<()> {
    let archive = image.pack(&host.dir())?;
    wait::until(&format!("image {} to be imported", image.name()), IMPORTING, || {
        ctr(host, socket, &["-n", "k8s.io", "images", "import", &archive.display().to_string()])
    })?;
    fs::remove_file(&archive).with_context(|| format!("removing {}", archive.display()))
}

fn ctr(host: &Host, socket: &Path, args: &[&str]) -> Result<String> {
    let socket = socket.display().to_string();
    let mut words = vec!["ctr", "-a", &socket];
    words.extend(args);
    host.run(&words)
}

/// Where the kubelet puts pods.
fn pods_cgroup(host: &Host) -> Cgroup {
    host.cgroup().child("pods")
}

fn containerd_config(dir: &Path, socket: &Path) -> String {
    let (dir, socket) = (dir.display(), socket.display());
    format!(
        r#"version = 2
root = "{dir}/containerd-root"
state = "{dir}/containerd-state"
disabled_plugins = ["io.containerd.internal.v1.opt"]

[grpc]
  address = "{socket}"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "lab/pause:1"
  # Without CAP_SYS_RESOURCE a process may not lower its score, and every pod would fail to start.
  restrict_oom_score_adj = true
  disable_apparmor = true
  netns_mounts_under_state_dir = true

[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "overlayfs"
  default_runtime_name = "runc"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "{plugins}"
  conf_dir = "{dir}/cni"
"#,
        plugins = programs::CNI_PLUGINS
    )
}

/// A point-to-point link for each pod and no bridge: two pods of one node then always talk through
/// the host's routing, where Service addresses are translated in both directions. On a bridge the
/// answers would take the short cut past that, unless the machine has `br_netfilter`.
fn cni_config(dir: &Path, pod_cidr: &str) -> Value {
    json!({
        "cniVersion": "0.4.0",
        "name": "lab",
        "plugins": [{
            "type": "ptp",
            "ipMasq": true,
            "ipam": {
                "type": "host-local",
                "dataDir": dir.join("cni-addresses"),
                "ranges": [[{"subnet": pod_cidr}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }, {"type": "portmap", "capabilities": {"portMappings": true}}],
    })
}

fn kubelet_config(host: &Host, dir: &Path, socket: &Path) -> Value {
    let mut config = machine_config(host, dir, socket);
    config["authentication"] = json!({
        "anonymous": {"enabled": false},
        "webhook": {"enabled": true},
        "x509": {"clientCAFile": dir.join("pki/ca.crt")},
    });
    config["authorization"] = json!({"mode": "Webhook"});
    config["tlsCertFile"] = json!(dir.join("pki/kubelet.crt"));
    config["tlsPrivateKeyFile"] = json!(dir.join("pki/kubelet.key"));
    config
}

/// What follows from the machine, whatever the cluster.
fn machine_config(host: &Host, dir: &Path, socket: &Path) -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": host.address(),
        "containerRuntimeEndpoint": format!("unix://{}", socket.display()),
        "podLogsDir": dir.join("pods"),
        "volumePluginDir": dir.join("volume-plugins"),
        // Several kubelets on one machine: each has its own tree, and none may limit the machine's.
        "cgroupRoot": pods_cgroup(host).path(),
        "cgroupDriver": "cgroupfs",
        // Without this a pod's processes would go to a group that all labs of the machine share.
        "cgroupsPerQOS": true,
        "enforceNodeAllocatable": [],
        "failCgroupV1": false,
        "failSwapOn": false,
        // A developer's disk is allowed to be nearly full.
        "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageMinimumGCAge": "24h",
        // Tests wait for what the kubelet does: look often.
        "syncFrequency": "10s",
        "nodeStatusUpdateFrequency": "4s",
        "shutdownGracePeriod": "0s",
    })
}

fn kube_proxy_config(name: &str, kubeconfig: &Path) -> Value {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "hostnameOverride": name,
        "clientConnection": {"kubeconfig": kubeconfig},
        // The machine's limit cannot be changed from within a namespace.
        "conntrack": {"maxPerCore": 0},
    })
}
