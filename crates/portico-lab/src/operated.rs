//! A seed on which the operator is installed as the README says, and everything else by it. That is the
//! gateway and its certificate, three user clusters, one for each strategy, their addresses, and what belongs
//! inside them. Control planes are the lab's own, as where people bring one.
//!
//! The story `operated` goes on from here, and so does `portico demo --kubernetes`.

use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::{Value, json};

use crate::control_plane::{ADMINS, Access, Options};
use crate::host::Host;
use crate::image::Image;
use crate::kubectl::Kubectl;
use crate::node::Node;
use crate::seed::Seed;
use crate::steps::Steps;
use crate::user_cluster::UserCluster;
use crate::{konnectivity, programs, wait};

/// The clusters, each with its strategy.
pub const CLUSTERS: [(&str, &str); 3] =
    [("by-port", "NodePort"), ("by-balancer", "LoadBalancer"), ("by-name", "Tunneling")];

/// Clusters that are not there yet: stories have them hosted. The operator gets their names beforehand.
pub const HOSTED: [(&str, &str); 3] =
    [("hosted", "Tunneling"), ("hosted-port", "NodePort"), ("hosted-balancer", "LoadBalancer")];

/// The Seed.
pub const SEED: &str = "north";

/// Clusters that are reached by the front Service.
const BEHIND_THE_FRONT: [&str; 4] = ["by-port", "by-name", HOSTED[0].0, HOSTED[1].0];

/// The domain of all Seeds: names of clusters are below `SEED.DOMAIN`.
const DOMAIN: &str = "clusters.example.com";

/// How long anything may take that takes a second or two on an idle machine.
const SOON: Duration = Duration::from_secs(90);

/// Images imported, probes passed, seconds of `minReadySeconds`: half a minute on an idle machine.
const ROLLING_OUT: Duration = Duration::from_secs(240);

/// The seed with all that runs in and beside it.
pub struct Operated {
    // Dropped in this order: workers before what they talk to.
    /// One for each cluster, or none at all.
    pub workers: Vec<Node>,
    /// In the order of [`CLUSTERS`].
    pub hosted: Vec<UserCluster>,
    /// A host outside, where the names of the clusters resolve.
    pub client: Host,
    /// The seed.
    pub seed: Seed,
}

impl Operated {
    /// Installs the operator on a seed that knows Portico's image and that of user clusters. Waits until each
    /// cluster is reached from outside and, `with_workers`, everything inside it is made.
    pub fn start(seed: Seed, steps: &Steps, with_workers: bool) -> Result<Operated> {
        let lab = seed.host().lab().clone();
        let client = lab.host("client")?;
        let front = lab.free_address()?;
        for name in BEHIND_THE_FRONT {
            for prefix in ["", "konnectivity-server."] {
                lab.name_resolves(&format!("{prefix}{}", external_name(name)), front)?;
            }
        }
        steps.begin("the operator, as deploy/operator.yaml has it, one Seed, three Clusters");
        install(&seed, front)?;
        let version = programs::kube_version()?;
        let items = CLUSTERS.map(|cluster| cluster_object(cluster, version.trim_start_matches('v')));
        let objects = json!({"apiVersion": "v1", "kind": "List", "items": items});
        seed.kubectl().apply_json(&objects)?;
        wait::until("the front Service", SOON, || seed.give_this_address("portico", "portico", front))?;
        let own = lab.free_address()?;
        wait::until("the load balancer of its own", SOON, || {
            seed.give_this_address("cluster-by-balancer", "front-loadbalancer", own)
        })?;

        steps.begin("three control planes, for which the operator has made Services and addresses");
        let hosted = CLUSTERS.iter().map(|(name, _)| host(&seed, name)).collect::<Result<Vec<_>>>()?;
        hosted.iter().try_for_each(|cluster| cluster.wait_ready(&seed))?;
        seed.kubectl().wait_rolled_out("portico", "portico-operator", ROLLING_OUT)?;
        seed.kubectl().wait_rolled_out("portico", "portico-gateway", ROLLING_OUT)?;
        steps.begin("the way from outside, through the gateway and its load balancers");
        let mut operated = Operated { workers: Vec::new(), hosted, client, seed };
        let ways = operated.ways()?;
        for ((name, _), kubectl) in CLUSTERS.iter().zip(&ways) {
            wait::until(&format!("an answer of {name}"), SOON, || kubectl.run(&["get", "--raw", "/livez"]))?;
            konnectivity::grant(kubectl)?;
        }
        operated.hosted.iter().try_for_each(|cluster| give_kubeconfig(&operated.seed, cluster))?;
        if with_workers {
            steps.begin("three workers, which join by the same way");
            operated.workers = operated.join_workers()?;
        }
        steps.begin("what the operator makes inside the clusters: agents, endpoints, cluster-info");
        for (name, _) in CLUSTERS {
            wait_condition(&operated.seed, name, "PorticoUserClusterReady")?;
        }
        if with_workers {
            for ((name, _), way) in CLUSTERS.iter().zip(&ways) {
                tell_agents(way, "konnectivity-agent", name, front)?;
            }
            let rolled_out =
                |way: &Kubectl| way.wait_rolled_out("kube-system", "konnectivity-agent", ROLLING_OUT);
            ways.iter().try_for_each(rolled_out)?;
        }
        Ok(operated)
    }

    /// The way into a cluster that its status names.
    pub fn access(&self, cluster: &UserCluster) -> Result<Access> {
        let address = address(&self.seed, cluster.name())?;
        Ok(cluster.access(&self.seed, address["url"].as_str().context("a URL is text")?))
    }

    /// kubectl for each cluster, from outside.
    pub fn ways(&self) -> Result<Vec<Kubectl>> {
        self.hosted.iter().map(|cluster| self.access(cluster)?.kubectl(&self.client)).collect()
    }

    /// A worker for each cluster, side by side.
    fn join_workers(&self) -> Result<Vec<Node>> {
        let portico = Image::portico()?;
        let join = |cluster: &UserCluster| {
            let host = self.seed.host().lab().host(&format!("worker-{}", cluster.name()))?;
            let worker = UserCluster::join_worker_on(&host, &self.access(cluster)?)?;
            worker.import(&portico)?;
            anyhow::Ok(worker)
        };
        thread::scope(|scope| {
            let joining: Vec<_> =
                self.hosted.iter().map(|cluster| scope.spawn(move || join(cluster))).collect();
            joining.into_iter().map(|one| one.join().map_err(|_| anyhow!("it panicked"))?).collect()
        })
    }
}

/// The name in DNS of a cluster.
pub fn external_name(cluster: &str) -> String {
    format!("{cluster}.{SEED}.{DOMAIN}")
}

/// What the README says, and the two objects that are above clusters. Clients reach the seed at `front`.
pub fn install(seed: &Seed, front: Ipv4Addr) -> Result<()> {
    let kubectl = seed.kubectl();
    let deploy = programs::checkout().join("deploy");
    for file in ["crds-kubermatic.yaml", "crds.yaml"] {
        let path = deploy.join(file).display().to_string();
        kubectl.run(&["apply", "--server-side", "-f", &path])?;
    }
    let operator = fs::read_to_string(deploy.join("operator.yaml")).context("reading operator.yaml")?;
    // The seed has no name server: the operator is configured with what public DNS would answer.
    let before = "      serviceAccountName: portico-operator\n";
    ensure!(operator.matches(before).count() == 1, "operator.yaml: one pod has {before:?}");
    let names = BEHIND_THE_FRONT.map(external_name);
    let aliases = json!([{"ip": front, "hostnames": names}]);
    kubectl.apply(&operator.replace(before, &format!("{before}      hostAliases: {aliases}\n")))?;
    for kind in ["clusters", "seeds", "kubermaticconfigurations"] {
        kubectl.wait_served(&format!("{kind}.kubermatic.k8c.io"))?;
    }
    let above = json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "kubermatic.k8c.io/v1", "kind": "KubermaticConfiguration",
            "metadata": {"name": "kkp", "namespace": "portico"}, "spec": {"ingress": {"domain": DOMAIN}}},
        {"apiVersion": "kubermatic.k8c.io/v1", "kind": "Seed",
            "metadata": {"name": SEED, "namespace": "portico"},
            "spec": {"datacenters": {"lab-1": {"spec": {"bringyourown": {}}}}}}]});
    kubectl.apply_json(&above).map(drop)
}

/// A Cluster that somebody else hosts.
pub fn cluster_object((name, strategy): (&str, &str), version: &str) -> Value {
    json!({"apiVersion": "kubermatic.k8c.io/v1", "kind": "Cluster", "metadata": {"name": name},
        "spec": {"humanReadableName": name, "version": version, "exposeStrategy": strategy,
            "cloud": {"dc": "lab-1", "bringyourown": {}}}})
}

/// User clusters have no name server either. A Deployment of Konnectivity's agents keeps what others add to
/// it.
pub fn tell_agents(inside: &Kubectl, deployment: &str, name: &str, front: Ipv4Addr) -> Result<()> {
    let name = external_name(name);
    let names = [format!("konnectivity-server.{name}"), name];
    let aliases =
        json!({"spec": {"template": {"spec": {"hostAliases": [{"ip": front, "hostnames": names}]}}}});
    // A control plane of one pod may be away for a moment while the machines of all clusters join.
    wait::until("the names of its servers to be given to Konnectivity's agents", SOON, || {
        inside.patch("kube-system", &format!("deployment/{deployment}"), "strategic", &aliases)
    })
}

/// A Service in the namespace of a cluster.
pub fn service(seed: &Seed, name: &str, service: &str) -> Result<Value> {
    seed.kubectl().get(&["service", service, "-n", &format!("cluster-{name}")])
}

/// `status.address` of a Cluster that has a name.
fn address(seed: &Seed, name: &str) -> Result<Value> {
    let cluster = seed.kubectl().get(&["cluster", name])?;
    let address = cluster["status"]["address"].clone();
    ensure!(address["externalName"].as_str().is_some_and(|name| !name.is_empty()), "{address}");
    Ok(address)
}

/// A control plane in the namespace that the operator made, with the Konnectivity server beside it.
fn host(seed: &Seed, name: &str) -> Result<UserCluster> {
    let address = wait::until("the address", SOON, || address(seed, name))?;
    let external_name = address["externalName"].as_str().context("a name is text")?;
    let exposed = service(seed, name, "apiserver-external")?;
    let cluster_ip = exposed["spec"]["clusterIP"].as_str().context("the Service has no clusterIP")?;
    // As in KKP: under strategies with ports the API server listens on the number of its NodePort.
    let secure_port = match exposed["spec"]["ports"][0]["nodePort"].as_u64() {
        Some(port) => u16::try_from(port)?,
        None => 6443,
    };
    let options = Options {
        secure_port,
        names: vec![
            external_name.to_owned(),
            cluster_ip.to_owned(),
            format!("apiserver-external.cluster-{name}.svc.cluster.local"),
        ],
        // Where clients go is the operator's to say.
        api_server_flags: vec!["--endpoint-reconciler-type=none".to_owned()],
        paused: true,
        ..Options::new(name)
    };
    let cluster = UserCluster::create(seed, &options)?;
    // What signs the kubeconfig that the operator issues.
    let [cert, key] = ["crt", "key"]
        .map(|end| format!("--from-file=ca.{end}={}", cluster.file(seed, &format!("ca.{end}")).display()));
    seed.kubectl().run(&["create", "secret", "generic", "ca", "-n", cluster.namespace(), &cert, &key])?;
    // The Service is the operator's.
    konnectivity::beside(seed, &cluster, external_name, |object| !object.contains("\nkind: Service\n"))?;
    seed.kubectl().run(&["rollout", "resume", "deployment/apiserver", "-n", cluster.namespace()])?;
    Ok(cluster)
}

/// The way in for the operator, which no strategy changes.
fn give_kubeconfig(seed: &Seed, cluster: &UserCluster) -> Result<()> {
    let exposed = service(seed, cluster.name(), "apiserver-external")?;
    let cluster_ip = exposed["spec"]["clusterIP"].as_str().context("the Service has no clusterIP")?;
    let access = cluster.access(seed, &format!("https://{cluster_ip}:443"));
    let path = seed.host().dir().join(format!("internal-{}", cluster.name()));
    flatten(seed, &access.kubeconfig("operator", Some(ADMINS))?, &path)?;
    let from = format!("--from-file=kubeconfig={}", path.display());
    let secret =
        ["create", "secret", "generic", "internal-admin-kubeconfig", "-n", cluster.namespace(), &from];
    seed.kubectl().run(&secret).map(drop)
}

/// Writes a kubeconfig that needs no file beside it.
pub fn flatten(seed: &Seed, kubeconfig: &Path, to: &Path) -> Result<()> {
    let file = kubeconfig.display().to_string();
    let flattened =
        seed.kubectl().run(&["config", "view", "--kubeconfig", &file, "--flatten", "--minify", "--raw"])?;
    fs::write(to, flattened).with_context(|| format!("writing {}", to.display()))
}

/// Waits until a condition of a Cluster is true.
pub fn wait_condition(seed: &Seed, name: &str, condition: &str) -> Result<()> {
    wait::until(&format!("{name}: {condition}"), ROLLING_OUT, || {
        let cluster = seed.kubectl().get(&["cluster", name])?;
        let found = &cluster["status"]["conditions"][condition];
        ensure!(found["status"] == "True", "{found}");
        Ok(())
    })
}
