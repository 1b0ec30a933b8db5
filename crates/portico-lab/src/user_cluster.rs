//! A user cluster: a real control plane hosted as pods in the seed, as KKP does it.
//!
//! Namespace `cluster-NAME` holds a Secret with its files and a Deployment `apiserver` whose pod
//! runs API server, controller manager and scheduler. Services are the story's business: how the
//! cluster is exposed is what Portico's tests are about.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::control_plane::{
    Access, Options, api_server_args, controller_manager_args, scheduler_args, write_files,
};
use crate::host::Host;
use crate::image::Image;
use crate::node::Node;
use crate::pki::Authority;
use crate::seed::Seed;
use crate::wait;

/// How long its pod may take to be ready: about 15 s alone, more when three start at once.
const STARTING: Duration = Duration::from_secs(240);

/// Where the files are mounted in its containers.
const FILES: &str = "/pki";

/// Addresses of its nodes' pods, as in KKP: the third byte is the node's number.
const POD_CIDRS: &str = "172.25";

/// A hosted control plane.
pub struct UserCluster {
    name: String,
    namespace: String,
    port: u16,
    authority: Arc<Authority>,
}

impl UserCluster {
    /// Starts a user cluster in the seed and waits until its API server is ready. The seed must
    /// know the image of the Kubernetes programs ([`UserCluster::prepare`]).
    pub fn start(seed: &Seed, options: &Options) -> Result<UserCluster> {
        let cluster = UserCluster::create(seed, options)?;
        cluster.wait_ready(seed)?;
        Ok(cluster)
    }

    /// Imports the image that user clusters run from into the seed: once, before the first.
    pub fn prepare(seed: &Seed) -> Result<()> {
        seed.import(&Image::kube()?)
    }

    /// As [`start`](UserCluster::start), without waiting: several start side by side.
    pub fn create(seed: &Seed, options: &Options) -> Result<UserCluster> {
        let name = options.name.clone();
        let namespace = format!("cluster-{name}");
        let authority = Arc::new(Authority::new(&format!("{name} authority"))?);
        let files = files(seed, &name);
        write_files(&files, options, &authority, seed.host().address())?;
        let kubectl = seed.kubectl();
        let advertise = options.advertise_address.unwrap_or(seed.host().address());
        // An operator may have made it.
        if kubectl.run(&["get", "namespace", &namespace]).is_err() {
            kubectl.run(&["create", "namespace", &namespace])?;
        }
        let from = format!("--from-file={}", files.display());
        kubectl.run(&["create", "secret", "generic", "control-plane", "-n", &namespace, &from])?;
        kubectl.apply_json(&deployment(options, &namespace, seed.etcd().url(), advertise))?;
        Ok(UserCluster { name, namespace, port: options.secure_port, authority })
    }

    /// Waits until its API server is ready, and the one before it gone: after an update a Service leads to it
    /// for a moment longer, where nothing listens any more.
    pub fn wait_ready(&self, seed: &Seed) -> Result<()> {
        let kubectl = seed.kubectl();
        kubectl.wait_rolled_out(&self.namespace, "apiserver", STARTING)?;
        wait::until(&format!("the API server of {} to be the only one", self.name), STARTING, || {
            let pods = kubectl.get(&["pods", "-n", &self.namespace, "-l=app=apiserver"])?;
            let count = pods["items"].as_array().map_or(0, Vec::len);
            ensure!(count == 1, "there are {count} pods");
            Ok(())
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its namespace in the seed.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The port its API server listens on in the pod.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Its authority.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// A file of its control plane, such as `ca.key`.
    pub fn file(&self, seed: &Seed, file: &str) -> PathBuf {
        files(seed, &self.name).join(file)
    }

    /// The way in at `server` (`https://HOST:PORT`): by whatever exposes it.
    pub fn access(&self, seed: &Seed, server: &str) -> Access {
        Access::new(server, &self.authority, &seed.host().dir().join(format!("{}-users", self.name)))
    }

    /// A worker node on a new host, which reaches the API server by `access`.
    pub fn join_worker(&self, seed: &Seed, name: &str, access: &Access) -> Result<Node> {
        UserCluster::join_worker_on(&seed.host().lab().host(name)?, access)
    }

    /// A worker node on a host that is there already, behind a firewall perhaps.
    pub fn join_worker_on(host: &Host, access: &Access) -> Result<Node> {
        let pods = format!("{POD_CIDRS}.{}.0/24", host.address().octets()[3]);
        Node::join(host, access, &pods)
    }
}

/// The folder that its Secret is made from.
fn files(seed: &Seed, name: &str) -> PathBuf {
    seed.host().dir().join(format!("{name}-files"))
}

fn deployment(options: &Options, namespace: &str, etcd: &str, advertise: Ipv4Addr) -> Value {
    let container = |name: &str, program: &str, mut args: Vec<String>| {
        args.insert(0, program.to_owned());
        json!({
            "name": name,
            "image": "lab/kube:1",
            "imagePullPolicy": "Never",
            "args": args,
            "volumeMounts": [{"name": "files", "mountPath": FILES, "readOnly": true}],
        })
    };
    let api_server_args = api_server_args(options, FILES, etcd, advertise);
    let mut api_server = container("apiserver", "kube-apiserver", api_server_args);
    api_server["ports"] = json!([{"name": "https", "containerPort": options.secure_port}]);
    api_server["readinessProbe"] = json!({
        "httpGet": {"scheme": "HTTPS", "path": "/readyz", "port": options.secure_port},
        "periodSeconds": 1,
        "timeoutSeconds": 5,
    });
    let mut containers = vec![api_server];
    if options.controllers {
        let args = controller_manager_args(options, FILES);
        containers.push(container("controller-manager", "kube-controller-manager", args));
        containers.push(container("scheduler", "kube-scheduler", scheduler_args(FILES)));
    }
    let labels = json!({"app": "apiserver", "cluster": options.name});
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "apiserver", "namespace": namespace},
        "spec": {
            "replicas": 1,
            "paused": options.paused,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "containers": containers,
                    "volumes": [{"name": "files", "secret": {"secretName": "control-plane"}}],
                    "automountServiceAccountToken": false,
                    "enableServiceLinks": false,
                    // An API server ends watches slowly; tests that stop one do not want to wait.
                    "terminationGracePeriodSeconds": 5,
                },
            },
        },
    })
}
