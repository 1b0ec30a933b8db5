//! A seed with two gateways, each behind an address of its own, and user clusters under Tunneling.
//!
//! The gateways are `deploy/gateway.yaml`, once each, by the kustomization that a user would write: a suffix
//! for the names, and the arguments about identity.

use std::collections::BTreeSet;
use std::fs;
use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use portico_lab::control_plane::Options;
use portico_lab::{Authority, Host, Kubectl, Lab, Seed, UserCluster, programs, wait};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::{DOMAIN, SOON};

/// The tunnel agent IP: what API servers under Tunneling give as their address.
pub(crate) const AGENT: Ipv4Addr = Ipv4Addr::new(100, 64, 30, 10);

/// Where gateways carry tunnels.
pub(crate) const TUNNEL_PORT: u16 = 8088;

/// Image imported, probes passed, seconds of `minReadySeconds`: half a minute on an idle machine.
const ROLLING_OUT: Duration = Duration::from_secs(240);

/// The Secret with the gateways' files, in namespace portico.
const SECRET: &str = "portico-tunnel";

/// One gateway: a Deployment with one pod, behind a load balancer.
pub(crate) struct Gateway {
    /// The name of its Deployment; `service` is that of its Service.
    deployment: String,
    service: String,
    /// Its name for agents.
    pub(crate) name: String,
    /// Where the load balancer is.
    pub(crate) address: Ipv4Addr,
}

/// Deploys two gateways, behind the names `gateway-1.DOMAIN` and `gateway-2.DOMAIN`.
pub(crate) fn deploy_gateways(
    seed: &Seed,
    lab: &Lab,
    issuer: &Authority,
    clients: &[&Authority],
) -> [Gateway; 2] {
    let kubectl = seed.kubectl();
    kubectl.run(&["create", "namespace", "portico"]).unwrap();
    let names = [1, 2].map(|number| format!("gateway-{number}.{DOMAIN}"));
    let identity = issuer.server("gateway", &names).unwrap();
    put_secret(
        kubectl,
        "portico",
        SECRET,
        &[("tls.crt", &identity.cert), ("tls.key", &identity.key), ("ca.crt", &certificates(clients))],
    );
    [1, 2].map(|number| {
        let dir = seed.host().dir().join(format!("kustomize-{number}"));
        fs::create_dir(&dir).unwrap();
        // This seed has no Clusters; its Services say what they allow.
        let gateway = fs::read_to_string(programs::checkout().join("deploy/gateway.yaml")).unwrap();
        let source = "--clusters-from=exposed-clusters";
        assert_eq!(gateway.matches(source).count(), 1, "deploy/gateway.yaml names another source now");
        let gateway = gateway.replace(source, "--clusters-from=services");
        fs::write(dir.join("gateway.yaml"), gateway).unwrap();
        fs::write(dir.join("kustomization.yaml"), kustomization(number).to_string()).unwrap();
        kubectl
            .run(&["apply", "--server-side", "--force-conflicts", "-k", &dir.display().to_string()])
            .unwrap();
        let name = format!("gateway-{number}.{DOMAIN}");
        let service = format!("portico-{number}");
        let address = seed.give_address("portico", &service).unwrap();
        lab.name_resolves(&name, address).unwrap();
        Gateway { deployment: format!("portico-gateway-{number}"), service, name, address }
    })
}

/// Tells the gateways which authorities' agents to believe, and waits until all of them know.
pub(crate) fn believe(seed: &Seed, gateways: &[Gateway], clients: &[&Authority]) {
    let bundle = certificates(clients);
    let patch = json!({"stringData": {"ca.crt": bundle}}).to_string();
    seed.kubectl().run(&["patch", "secret", "-n", "portico", SECRET, "--type=merge", "-p", &patch]).unwrap();
    for gateway in gateways {
        let pid = gateway.process(seed).unwrap();
        nudge(seed.kubectl(), "portico", gateway.pod(seed).unwrap()["metadata"]["name"].as_str().unwrap());
        let file = format!("/proc/{}/root/tls/ca.crt", pid.as_raw_nonzero());
        wait::until("the Secret to be mounted anew", SOON, || {
            ensure!(fs::read_to_string(&file)? == bundle, "{file} is as it was");
            Ok(())
        })
        .unwrap();
    }
}

/// Has the kubelet look at a pod now, and with it at the Secrets it mounts: by itself it looks every ten
/// seconds or more.
pub(crate) fn nudge(kubectl: &Kubectl, namespace: &str, pod: &str) {
    let now = format!("lab/nudge={}", std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos());
    kubectl.run(&["annotate", "pod", "-n", namespace, pod, "--overwrite", &now]).unwrap();
}

/// A Secret with these files, new or replaced.
pub(crate) fn put_secret(kubectl: &Kubectl, namespace: &str, name: &str, files: &[(&str, &str)]) {
    let data: serde_json::Map<String, Value> =
        files.iter().map(|&(file, text)| (file.to_owned(), json!(text))).collect();
    let metadata = json!({"name": name, "namespace": namespace});
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data});
    kubectl.run_with_input(&["apply", "-f", "-"], &secret.to_string()).unwrap();
}

fn certificates(authorities: &[&Authority]) -> String {
    authorities.iter().map(|authority| authority.cert()).collect()
}

/// What `deploy/gateway.yaml` leaves to its user.
fn kustomization(number: usize) -> Value {
    let mut patch = vec![json!({"op": "replace", "path": "/spec/replicas", "value": 1})];
    for argument in [
        "--tunnel-tls-cert=/tls/tls.crt",
        "--tunnel-tls-key=/tls/tls.key",
        "--tunnel-client-ca=/tls/ca.crt",
        "--tunnel-token-review",
        // Open tunnels are reviewed this often; the story does not want to wait a minute.
        "--tunnel-token-review-interval=5s",
    ] {
        patch
            .push(json!({"op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": argument}));
    }
    let name = "tunneling-listener";
    let port = json!({"name": name, "protocol": "TCP", "port": TUNNEL_PORT, "targetPort": TUNNEL_PORT});
    let port = json!([{"op": "add", "path": "/spec/ports/-", "value": port}]);
    json!({
        "resources": ["gateway.yaml"],
        "nameSuffix": format!("-{number}"),
        "labels": [{"pairs": {"portico.example.com/gateway": number.to_string()}, "includeSelectors": true}],
        "patches": [
            {"target": {"kind": "Deployment"}, "patch": Value::from(patch).to_string()},
            {"target": {"kind": "Service"}, "patch": port.to_string()},
        ],
    })
}

impl Gateway {
    /// Where agents go, as `--gateway` has it.
    pub(crate) fn target(&self) -> String {
        format!("{}:{TUNNEL_PORT}", self.name)
    }

    pub(crate) fn wait_rolled_out(&self, seed: &Seed) {
        seed.kubectl().wait_rolled_out("portico", &self.deployment, ROLLING_OUT).unwrap();
    }

    /// Starts it anew, as an update would: a new pod serves before the old one begins to drain.
    pub(crate) fn restart(&self, seed: &Seed) {
        let deployment = format!("deployment/{}", self.deployment);
        seed.kubectl().run(&["rollout", "restart", "-n", "portico", &deployment]).unwrap();
        self.wait_rolled_out(seed);
        crate::support::former_gateways_drain(seed, &self.deployment);
    }

    /// Waits until the load balancer has an endpoint.
    pub(crate) fn wait_open(&self) {
        wait::until(&format!("{} to accept", self.name), SOON, || self.knock()).unwrap();
    }

    /// Whether the load balancer has an endpoint now.
    pub(crate) fn knock(&self) -> Result<()> {
        let address = (self.address, TUNNEL_PORT).into();
        TcpStream::connect_timeout(&address, Duration::from_secs(1))?;
        Ok(())
    }

    /// Sends a signal to the program, as the kernel or an operator would.
    pub(crate) fn signal(&self, seed: &Seed, signal: Signal) {
        kill_process(self.process(seed).unwrap(), signal).unwrap();
    }

    /// Its program in its pod, the one that does not drain.
    pub(crate) fn process(&self, seed: &Seed) -> Result<Pid> {
        let pod = self.pod(seed)?;
        let uid = pod["metadata"]["uid"].as_str().context("a pod has a UID")?;
        let processes = seed.node().pod_processes(uid, "portico")?;
        processes.first().copied().with_context(|| format!("no portico in a pod of {}", self.deployment))
    }

    /// Ids of the streams that it carries for a worker.
    pub(crate) fn streams(&self, seed: &Seed, worker: &Host) -> BTreeSet<String> {
        let pod = self.pod(seed).unwrap();
        let url = format!("http://{}:8002/connections", pod["status"]["podIP"].as_str().unwrap());
        let rows = seed.host().run(&["curl", "-sS", "--max-time", "20", &url]).unwrap();
        let rows: Vec<Value> = serde_json::from_str(&rows).unwrap();
        let client = format!("{}:", worker.address());
        let of_worker = rows.iter().filter(|row| {
            row["listener"] == "tunnel"
                && row["client"].as_str().is_some_and(|from| from.starts_with(&client))
        });
        of_worker.map(|row| row["connection"].to_string()).collect()
    }

    fn pod(&self, seed: &Seed) -> Result<Value> {
        let label = format!("portico.example.com/gateway={}", self.service.trim_start_matches("portico-"));
        let pods = seed.kubectl().get(&["pods", "-n", "portico", "-l", &label])?;
        let mut current = pods["items"].as_array().into_iter().flatten();
        let pod = current.find(|pod| pod["metadata"]["deletionTimestamp"].is_null());
        pod.cloned().with_context(|| format!("{} has no pod", self.deployment))
    }
}

/// The authority by which tunnels reach the API server of a cluster.
pub(crate) fn authority(cluster: &str) -> String {
    format!("apiserver-external.cluster-{cluster}.svc.cluster.local:443")
}

/// A user cluster under Tunneling, as KKP makes it.
pub(crate) fn create_cluster(seed: &Seed, name: &str, controllers: bool) -> UserCluster {
    let options = Options {
        advertise_address: Some(AGENT),
        names: vec![
            format!("{name}.{DOMAIN}"),
            format!("apiserver-external.cluster-{name}.svc.cluster.local"),
        ],
        controllers,
        ..Options::new(name)
    };
    let cluster = UserCluster::create(seed, &options).unwrap();
    let annotations = json!({
        "nodeport-proxy.k8s.io/expose": "SNI,Tunneling",
        "nodeport-proxy.k8s.io/port-mapping": json!({"secure": format!("{name}.{DOMAIN}")}).to_string(),
        "portico.k8c.io/api-server-ca": cluster.authority().cert(),
    });
    let metadata =
        json!({"name": "apiserver-external", "namespace": cluster.namespace(), "annotations": annotations});
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "selector": {"app": "apiserver"},
            "ports": [{"name": "secure", "port": 443, "targetPort": cluster.port()}],
        },
    });
    seed.kubectl().apply_json(&service).unwrap();
    cluster
}

/// kubectl as a cluster's administrator from within the seed: what the story itself has to do must not depend
/// on what it breaks.
pub(crate) fn kubectl_inside(seed: &Seed, cluster: &UserCluster) -> Kubectl {
    let service = ["service", "-n", cluster.namespace(), "apiserver-external"];
    let service = seed.kubectl().get(&service).unwrap();
    let server = format!("https://{}:443", service["spec"]["clusterIP"].as_str().unwrap());
    cluster.access(seed, &server).with_server_name("kubernetes").kubectl(seed.host()).unwrap()
}

/// Kills a cluster's API server, and waits until its kubelet has started it again and it is ready.
pub(crate) fn kill_api_server(seed: &Seed, cluster: &UserCluster, inside: &Kubectl) {
    kill_process(api_server(seed, cluster), Signal::KILL).unwrap();
    wait::until("the API server to be ready again", SOON, || {
        inside.run(&["get", "--raw", "/readyz"]).map(drop)
    })
    .unwrap();
}

/// The program of a cluster's API server.
pub(crate) fn api_server(seed: &Seed, cluster: &UserCluster) -> Pid {
    let pod = api_server_pod(seed, cluster);
    let pids = seed.node().pod_processes(pod["metadata"]["uid"].as_str().unwrap(), "kube").unwrap();
    let api_server = pids.into_iter().find(|pid| {
        let line = fs::read_to_string(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
        line.split('\0').nth(1) == Some("kube-apiserver")
    });
    api_server.expect("an API server runs in its pod")
}

/// Where gateways reach it.
pub(crate) fn api_server_address(seed: &Seed, cluster: &UserCluster) -> Ipv4Addr {
    api_server_pod(seed, cluster)["status"]["podIP"].as_str().unwrap().parse().unwrap()
}

fn api_server_pod(seed: &Seed, cluster: &UserCluster) -> Value {
    let label = "-l=app=apiserver";
    let mut pods = seed.kubectl().get(&["pods", "-n", cluster.namespace(), label]).unwrap();
    pods["items"][0].take()
}
