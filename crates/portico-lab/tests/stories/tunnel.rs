//! Pods on real workers talk to their API server through the tunnel. There are a seed with two gateways, two
//! user clusters that advertise an address which exists on their nodes only, and workers whose only ways out
//! are the gateways. Everything on the way is then killed, frozen, cut off, renewed and revoked in turn.
//!
//! One test, since all of it needs the same seed. Its steps are functions, named as what they promise. What a
//! step says about times is printed and never asserted: this machine does much else.

pub(crate) mod client;
pub(crate) mod seed;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::time::{Duration, Instant};

use self::client::{Client, Knocking, Watches, grant, image, new_connections_work};
use self::seed::{
    AGENT, Gateway, TUNNEL_PORT, api_server, api_server_address, authority, believe, create_cluster,
    deploy_gateways, kill_api_server, kubectl_inside, nudge, put_secret,
};
use anyhow::{Context, Result, ensure};
use portico_lab::control_plane::ADMINS;
use portico_lab::firewall::{Direction, Firewall, Traffic, Verdict};
use portico_lab::kubectl::condition;
use portico_lab::process::freeze;
use portico_lab::{Authority, Host, Image, Kubectl, Node, Process, Seed, UserCluster, programs, say, wait};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// How long anything may take that takes a second or two on an idle machine.
pub(crate) const SOON: Duration = Duration::from_secs(90);

/// The domain below which user clusters have their names, and the gateways theirs.
pub(crate) const DOMAIN: &str = "kubermatic.kkp.example.com";

/// Watches in each pod beside its own: with two gateways some of them go by either.
const WATCHES: usize = 4;

/// Where `deploy/agent.yaml` puts the agent, and what it calls its service account.
const NAMESPACE: &str = "kube-system";
const ACCOUNT: &str = "portico-agent-token";

/// The agents of the first worker, which show a certificate, and of the second, which show a token.
const AGENTS: [&str; 2] = ["portico-agent-certificate", "portico-agent-token"];

/// The Secrets with what they show.
const CERTIFICATE: &str = "portico-agent-certificate";
const TOKEN: &str = "portico-agent-shown-token";

/// The organisation that names a cluster in a certificate.
fn organisation(cluster: &str) -> String {
    format!("portico:cluster:{cluster}")
}

#[test]
fn pods_reach_their_api_server_whatever_happens_on_the_way() {
    let (_turn, lab, seed) = crate::seeded("tunnel-story");
    let issuer = Authority::new("gateways").unwrap();
    let [agents, successors] = ["agents", "successors"].map(|name| Authority::new(name).unwrap());
    let [north, south] =
        [("north", true), ("south", false)].map(|(name, all)| create_cluster(&seed, name, all));
    let gateways = deploy_gateways(&seed, &lab, &issuer, &[&agents]);
    [&north, &south].iter().for_each(|cluster| cluster.wait_ready(&seed).unwrap());
    gateways.iter().for_each(|gateway| gateway.wait_rolled_out(&seed));
    for cluster in [&north, &south] {
        lab.name_resolves(&format!("{}.{DOMAIN}", cluster.name()), gateways[0].address).unwrap();
    }
    let inside = kubectl_inside(&seed, &north);
    the_cluster_advertises_the_agents_address(&inside);

    let [(first, first_wall), (second, second_wall)] =
        ["worker-1", "worker-2"].map(|name| join_by_the_gateways_only(&seed, &north, &gateways, name));
    let (workers, _walls) = ([first, second], [first_wall, second_wall]);
    say("both workers have joined by SNI; agents by DaemonSet");
    let story = Story { seed, north, south, inside, gateways, workers, issuer, agents, successors };
    story.deploy_agents();
    let clients = story.start_clients();
    story.a_pod_with_its_service_account_talks_to_the_api_server_and_watches(&clients);
    story.an_identity_opens_the_authorities_of_its_own_cluster_only();
    let mut watches = Watches::begin(&clients, WATCHES, &story.inside);
    let before = story.descriptors();

    story.a_killed_gateway_cuts_its_own_streams_only(&clients, &mut watches);
    story.a_frozen_gateway_is_left_for_the_other(&clients, &mut watches);
    story.a_gateway_that_cannot_be_reached_is_left_for_the_other(&clients, &mut watches);
    story.both_gateways_killed_come_back(&clients, &mut watches);
    story.a_rolling_update_of_a_gateway_is_not_felt(&clients, &watches);
    story.a_killed_agent_comes_back(&clients, &mut watches);
    story.a_frozen_agent_goes_on(&clients, &watches);
    story.half_a_minute_without_network_ends(&clients, &watches);
    story.a_killed_api_server_comes_back(&clients, &mut watches);
    story.a_frozen_api_server_goes_on(&clients, &watches);
    story.an_api_server_that_cannot_be_reached_is_reached_again(&clients, &watches);
    story.a_rolling_update_of_the_agents_is_not_felt(&clients, &watches);
    story.nothing_has_leaked(&before);
    story.identities_are_renewed_under_load(&clients, &watches);
    story.revoked_agents_are_cut(&clients, &mut watches);
    drop(watches);
    story.agents_leave_nothing_behind();
}

struct Story {
    // Dropped in this order: workers before what they talk to.
    workers: [Node; 2],
    inside: Kubectl,
    gateways: [Gateway; 2],
    north: UserCluster,
    south: UserCluster,
    seed: Seed,
    issuer: Authority,
    agents: Authority,
    successors: Authority,
}

/// What the API server tells pods: an address that is on their own node.
fn the_cluster_advertises_the_agents_address(inside: &Kubectl) {
    let slice = wait::until("the endpoint of Service kubernetes", SOON, || {
        let slice = inside.get(&["endpointslice", "-n", "default", "kubernetes"])?;
        ensure!(slice["endpoints"].is_array(), "it is {slice}");
        Ok(slice)
    })
    .unwrap();
    assert_eq!(slice["endpoints"][0]["addresses"], json!([AGENT]));
    assert_eq!(slice["ports"][0]["port"], 6443);
}

/// A worker whose kubelet and kube-proxy know the cluster by its name. Whatever else it tries is dropped.
fn join_by_the_gateways_only(
    seed: &Seed,
    north: &UserCluster,
    gateways: &[Gateway],
    name: &str,
) -> (Node, Firewall) {
    let host = seed.host().lab().host(name).unwrap();
    let ways: Vec<_> = gateways
        .iter()
        .flat_map(|gateway| [(gateway.address, 6443), (gateway.address, TUNNEL_PORT)])
        .collect();
    // The way from the API server to kubelets is not this story's: what comes in is answered.
    let wall = Firewall::allow_out_only_to(&host, &ways).unwrap();
    let access = north.access(seed, &format!("https://north.{DOMAIN}:6443"));
    let worker = UserCluster::join_worker_on(&host, &access).unwrap();
    worker.import(&Image::portico().unwrap()).unwrap();
    worker.import(&image()).unwrap();
    (worker, wall)
}

/// What `deploy/agent.yaml` leaves to its user; `credential` patches how the agent authenticates.
fn agents_of_north(
    name: &str,
    worker: &Node,
    ca: &str,
    gateways: &[Gateway],
    credential: Vec<Value>,
) -> Value {
    let args = "/spec/template/spec/containers/0/args";
    let targets: Vec<String> = gateways.iter().map(Gateway::target).collect();
    let replace = |index: usize, value: String| {
        let path = format!("{args}/{index}");
        json!({"op": "replace", "path": path, "value": value})
    };
    let mut patch = vec![
        json!({"op": "test", "path": format!("{args}/1"), "value": "--gateway=gateway.example.com:8088"}),
        replace(1, format!("--gateway={}", targets.join(","))),
        replace(4, format!("--forward=6443={}", authority("north"))),
        json!({"op": "add", "path": "/spec/template/spec/nodeSelector",
               "value": {"kubernetes.io/hostname": worker.host().name()}}),
    ];
    patch.extend(credential);
    let ca = json!([{"op": "replace", "path": "/data/ca.crt", "value": ca}]);
    json!({
        "resources": ["agent.yaml"],
        "nameSuffix": format!("-{name}"),
        "labels": [{"pairs": {"portico.example.com/credential": name}, "includeSelectors": true}],
        "patches": [
            {"target": {"kind": "DaemonSet"}, "patch": Value::from(patch).to_string()},
            {"target": {"kind": "ConfigMap"}, "patch": ca.to_string()},
        ],
    })
}

/// Shows a certificate from a Secret in place of the token.
fn by_certificate() -> Vec<Value> {
    let spec = "/spec/template/spec";
    let mount = json!({"name": "certificate", "mountPath": "/etc/portico-certificate", "readOnly": true});
    vec![
        json!({"op": "replace", "path": format!("{spec}/containers/0/args/3"),
               "value": "--tls-cert=/etc/portico-certificate/tls.crt"}),
        json!({"op": "add", "path": format!("{spec}/containers/0/args/-"),
               "value": "--tls-key=/etc/portico-certificate/tls.key"}),
        json!({"op": "add", "path": format!("{spec}/containers/0/volumeMounts/-"), "value": mount}),
        json!({"op": "add", "path": format!("{spec}/volumes/-"),
               "value": {"name": "certificate", "secret": {"secretName": CERTIFICATE}}}),
    ]
}

/// Shows a token that the story can renew and revoke, in place of one that the kubelet renews within the
/// hour.
fn by_token() -> Vec<Value> {
    vec![
        json!({"op": "test", "path": "/spec/template/spec/volumes/1/name", "value": "token"}),
        json!({"op": "replace", "path": "/spec/template/spec/volumes/1",
               "value": {"name": "token", "secret": {"secretName": TOKEN}}}),
    ]
}

impl Story {
    /// The DaemonSet twice, for one worker each: the first by certificate, the second by token. The first
    /// begins as the manifest is, with a token of the kubelet's, and so is replaced once.
    fn deploy_agents(&self) {
        self.give_certificate(&self.agents);
        self.deploy_agent(0, "certificate", Vec::new());
        let shipped = self.wait_agent_but(0, None);
        self.deploy_agent(1, "token", by_token());
        self.give_token("first");
        self.wait_agent_but(1, None);
        self.deploy_agent(0, "certificate", by_certificate());
        self.wait_agent_but(0, Some(shipped));
    }

    /// One worker's agent, new or changed.
    fn deploy_agent(&self, worker: usize, name: &str, credential: Vec<Value>) {
        let worker = &self.workers[worker];
        let dir = worker.host().dir().join("kustomize");
        fs::create_dir_all(&dir).unwrap();
        fs::copy(programs::checkout().join("deploy/agent.yaml"), dir.join("agent.yaml")).unwrap();
        let kustomization = agents_of_north(name, worker, &self.issuer.cert(), &self.gateways, credential);
        fs::write(dir.join("kustomization.yaml"), kustomization.to_string()).unwrap();
        self.inside.run(&["apply", "--server-side", "-k", &dir.display().to_string()]).unwrap();
    }

    /// Waits until a worker has an agent that is ready and is not this one: a gateway has accepted it.
    fn wait_agent_but(&self, worker: usize, old: Option<Pid>) -> Pid {
        wait::until("the agent to be ready", SOON, || {
            let ready = self.ready_agents(worker)?.into_iter().find(|&agent| Some(agent) != old);
            ready.with_context(|| format!("{}", self.agent_pods(worker).unwrap_or_default()))
        })
        .unwrap()
    }

    /// A certificate for the first worker's agent, in the Secret that it mounts.
    fn give_certificate(&self, authority: &Authority) {
        let identity = authority.client("worker-1", Some(&organisation("north"))).unwrap();
        put_secret(
            &self.inside,
            NAMESPACE,
            CERTIFICATE,
            &[("tls.crt", &identity.cert), ("tls.key", &identity.key)],
        );
    }

    /// A token for the second worker's agent, in the Secret that it mounts. It is valid as long as the Secret
    /// of this name is there.
    fn give_token(&self, bound_to: &str) {
        put_secret(&self.inside, NAMESPACE, bound_to, &[]);
        let token = self
            .inside
            .run(&[
                "create",
                "token",
                "-n",
                NAMESPACE,
                ACCOUNT,
                "--bound-object-kind=Secret",
                "--bound-object-name",
                bound_to,
            ])
            .unwrap();
        put_secret(&self.inside, NAMESPACE, TOKEN, &[("token", token.trim())]);
    }

    /// The pods of the agents on a worker.
    fn agent_pods(&self, worker: usize) -> Result<Value> {
        let node = self.workers[worker].host().name();
        let selector = format!("--field-selector=spec.nodeName={node}");
        let label = "-l=app.kubernetes.io/name=portico-agent";
        self.inside.get(&["pods", "-n", NAMESPACE, &selector, label]).map(|mut list| list["items"].take())
    }

    /// The agents on a worker, those that drain included.
    fn agents_on(&self, worker: usize) -> Result<Vec<Pid>> {
        self.processes_of(worker, |_| true)
    }

    /// The processes of agents whose pods are ready and not to be deleted.
    fn ready_agents(&self, worker: usize) -> Result<Vec<Pid>> {
        let stays = |pod: &Value| condition(pod, "Ready") && pod["metadata"]["deletionTimestamp"].is_null();
        self.processes_of(worker, stays)
    }

    fn processes_of(&self, worker: usize, which: impl Fn(&Value) -> bool) -> Result<Vec<Pid>> {
        let pods = self.agent_pods(worker)?;
        let uids = pods
            .as_array()
            .into_iter()
            .flatten()
            .filter(|pod| which(pod))
            .filter_map(|pod| pod["metadata"]["uid"].as_str());
        let mut processes = Vec::new();
        for uid in uids {
            processes.extend(self.workers[worker].pod_processes(uid, "portico")?);
        }
        // Probes run the same program.
        processes.retain(|pid| {
            let line =
                fs::read_to_string(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
            !line.is_empty() && line.split('\0').nth(2) != Some("ready")
        });
        Ok(processes)
    }

    /// The agent that serves on a worker, once its kubelet reports it ready.
    fn agent(&self, worker: usize) -> Pid {
        wait::until("one agent to be ready", SOON, || {
            let agents = self.ready_agents(worker)?;
            ensure!(agents.len() == 1, "there are {agents:?}");
            Ok(agents[0])
        })
        .unwrap()
    }

    fn start_clients(&self) -> Vec<Client> {
        grant(&self.inside);
        self.workers.iter().map(|worker| Client::start(&self.inside, worker)).collect()
    }

    fn a_pod_with_its_service_account_talks_to_the_api_server_and_watches(&self, clients: &[Client]) {
        clients.iter().for_each(|client| client.ask().unwrap());
        for worker in &self.workers {
            let carried: usize =
                self.gateways.iter().map(|gateway| gateway.streams(&self.seed, worker.host()).len()).sum();
            assert!(carried > 0, "the watch of the pod on {} goes by no gateway", worker.host().name());
        }
    }

    /// What only the other gateway carries lives on, and new connections go there.
    fn a_killed_gateway_cuts_its_own_streams_only(&self, clients: &[Client], watches: &mut Watches) {
        let [victim, other] = &self.gateways;
        let safe = self.streams_of(other);
        victim.signal(&self.seed, Signal::KILL);
        new_connections_work(clients, "a gateway was killed");
        self.still_carries(other, &safe);
        for (worker, streams) in &safe {
            // One of them may be the pod's own.
            assert!(
                watches.alive(*worker) + 1 >= streams.len(),
                "watches by the gateway that lives were cut"
            );
            watches.beat_of(*worker);
        }
        victim.wait_open();
        new_connections_work(clients, "it is back");
        watches.complete();
        watches.beat();
    }

    /// It neither answers nor closes. What it carries waits and goes on afterwards.
    fn a_frozen_gateway_is_left_for_the_other(&self, clients: &[Client], watches: &mut Watches) {
        let [other, victim] = &self.gateways;
        let safe = self.streams_of(other);
        freeze(victim.process(&self.seed).unwrap()).unwrap();
        new_connections_work(clients, "a gateway was frozen");
        self.still_carries(other, &safe);
        victim.signal(&self.seed, Signal::CONT);
        new_connections_work(clients, "it goes on");
        // None was cut, not even those it carried.
        watches.beat();
    }

    /// Packets to and from it vanish, for one of the workers.
    fn a_gateway_that_cannot_be_reached_is_left_for_the_other(
        &self,
        clients: &[Client],
        watches: &mut Watches,
    ) {
        let [victim, other] = &self.gateways;
        let worker = self.workers[0].host();
        let safe = [self.streams_of(other), BTreeMap::from([self.streams_for(victim, 1)])];
        let walls = [Direction::In, Direction::Out].map(|direction| {
            Firewall::stop(worker, &Traffic::all(direction).with(victim.address), Verdict::Drop).unwrap()
        });
        new_connections_work(clients, "a gateway cannot be reached");
        self.still_carries(other, &safe[0]);
        self.still_carries(victim, &safe[1]);
        walls.into_iter().for_each(|wall| wall.lift().unwrap());
        new_connections_work(clients, "it can be reached again");
        watches.complete();
        watches.beat();
    }

    /// Nothing works, and then all of it does.
    fn both_gateways_killed_come_back(&self, clients: &[Client], watches: &mut Watches) {
        self.gateways.iter().for_each(|gateway| gateway.signal(&self.seed, Signal::KILL));
        // The first to be reached again is enough for both workers.
        wait::until("a gateway to accept again", SOON, || {
            ensure!(self.gateways.iter().any(|gateway| gateway.knock().is_ok()), "none does");
            Ok(())
        })
        .unwrap();
        new_connections_work(clients, "one of two killed gateways is back");
        self.gateways.iter().for_each(Gateway::wait_open);
        watches.complete();
        watches.beat();
        watches.beat_in_pods();
    }

    /// GOAWAY: new streams go by the other gateway or the new pod, and what the old pod carries goes on.
    fn a_rolling_update_of_a_gateway_is_not_felt(&self, clients: &[Client], watches: &Watches) {
        let knocking = Knocking::start(clients);
        self.gateways[0].restart(&self.seed);
        watches.beat();
        knocking.all_were_answered("a rolling update of a gateway");
    }

    /// Its connections end with it; those of the other worker do not.
    fn a_killed_agent_comes_back(&self, clients: &[Client], watches: &mut Watches) {
        let killed = self.agent(0);
        kill_process(killed, Signal::KILL).unwrap();
        wait::until("the agent to be started again", SOON, || {
            ensure!(self.agents_on(0)?.iter().any(|&agent| agent != killed), "it is not");
            Ok(())
        })
        .unwrap();
        new_connections_work(clients, "a killed agent runs again");
        assert_eq!(watches.alive(1), WATCHES, "watches from the worker whose agent was left alone");
        watches.complete();
        watches.beat();
    }

    /// What it carries waits and goes on, unless a gateway has given it up meanwhile.
    fn a_frozen_agent_goes_on(&self, clients: &[Client], watches: &Watches) {
        let agent = self.agent(0);
        freeze(agent).unwrap();
        watches.beat_of(1);
        kill_process(agent, Signal::CONT).unwrap();
        new_connections_work(clients, "a frozen agent goes on");
        watches.beat();
    }

    /// It costs no stream.
    fn half_a_minute_without_network_ends(&self, clients: &[Client], watches: &Watches) {
        const OUTAGE: Duration = Duration::from_secs(30);
        let start = Instant::now();
        let worker = self.workers[0].host();
        worker.unplug().unwrap();
        wait::until("half a minute to pass", OUTAGE + SOON, || {
            ensure!(start.elapsed() >= OUTAGE, "it has not");
            Ok(())
        })
        .unwrap();
        watches.beat_of(1);
        worker.plug().unwrap();
        new_connections_work(clients, "30 s without network are over");
        // TCP tries again within half a minute more; neither side has given the other up by then.
        watches.beat();
    }

    /// Another cluster's watches by the same gateways know nothing of it.
    fn a_killed_api_server_comes_back(&self, clients: &[Client], watches: &mut Watches) {
        let south = kubectl_inside(&self.seed, &self.south);
        let others = self.watch_south(&south, "before-the-other");
        kill_api_server(&self.seed, &self.north, &self.inside);
        new_connections_work(clients, "a killed API server is ready again");
        south.run(&["create", "configmap", "after-the-other"]).unwrap();
        others.iter().for_each(|watch| watch.wait_for_log("after-the-other", SOON).unwrap());
        watches.complete();
        watches.beat();
    }

    /// It neither answers nor closes. What waits for it goes on, and the other cluster does not wait.
    fn a_frozen_api_server_goes_on(&self, clients: &[Client], watches: &Watches) {
        let south = kubectl_inside(&self.seed, &self.south);
        let others = self.watch_south(&south, "before-the-freeze");
        let api_server = api_server(&self.seed, &self.north);
        freeze(api_server).unwrap();
        south.run(&["create", "configmap", "during-the-freeze"]).unwrap();
        others.iter().for_each(|watch| watch.wait_for_log("during-the-freeze", SOON).unwrap());
        kill_process(api_server, Signal::CONT).unwrap();
        new_connections_work(clients, "a frozen API server goes on");
        watches.beat();
    }

    /// Packets from the gateways to it vanish: new connections fail in order, those that are open outlive it.
    fn an_api_server_that_cannot_be_reached_is_reached_again(&self, clients: &[Client], watches: &Watches) {
        let address = api_server_address(&self.seed, &self.north);
        let traffic = Traffic::all(Direction::Through).with(address);
        let wall = Firewall::stop(self.seed.host(), &traffic, Verdict::Drop).unwrap();
        for client in clients {
            assert!(client.ask().is_err(), "packets to the API server vanish, and it answers");
        }
        wall.lift().unwrap();
        new_connections_work(clients, "an API server can be reached again");
        watches.beat();
    }

    /// Watches of the second cluster, by each of the gateways, with an identity of that cluster. `first` is
    /// what they see first.
    fn watch_south(&self, south: &Kubectl, first: &str) -> Vec<Process> {
        let url = format!(
            "https://{}/api/v1/namespaces/default/configmaps?watch=true&resourceVersion=0",
            authority("south")
        );
        let watch = |gateway: &Gateway| {
            let mut command = self.workers[0].host().command("curl").unwrap();
            command
                .args(self.through(gateway, &self.south, &Credential::Certificate("south")))
                .args(["--no-buffer", &url]);
            let process = self.workers[0].host().spawn_command(&format!("south-{}", gateway.name), command);
            let process = process.unwrap();
            process.wait_for_log(first, SOON).unwrap();
            process
        };
        south.run(&["create", "configmap", first]).unwrap();
        self.gateways.iter().map(watch).collect()
    }

    /// The credential of one cluster does not open the authority of another. A client without a credential
    /// opens none.
    fn an_identity_opens_the_authorities_of_its_own_cluster_only(&self) {
        for gateway in &self.gateways {
            let asked = |of: &UserCluster, credential: Credential| self.ask_livez(gateway, of, &credential);
            assert_eq!(asked(&self.north, Credential::Certificate("north")), "200");
            assert_eq!(asked(&self.south, Credential::Certificate("south")), "200");
            assert_eq!(asked(&self.north, Credential::Token(&self.north)), "200");
            // The client is authenticated, but it may not open what it asked for.
            assert_eq!(asked(&self.south, Credential::Certificate("north")), "403");
            assert_eq!(asked(&self.north, Credential::Certificate("south")), "403");
            // Only the cluster itself knows whose a token is, and the other one does not know it.
            assert_eq!(asked(&self.south, Credential::Token(&self.north)), "401");
            assert_eq!(asked(&self.north, Credential::Nothing), "401");
        }
    }

    /// New pods take address and listeners over; old ones end when what they carry has ended.
    fn a_rolling_update_of_the_agents_is_not_felt(&self, clients: &[Client], watches: &Watches) {
        let old = [self.agent(0), self.agent(1)];
        let knocking = Knocking::start(clients);
        for name in AGENTS {
            self.inside.run(&["rollout", "restart", "-n", NAMESPACE, &format!("daemonset/{name}")]).unwrap();
        }
        for (worker, old) in old.into_iter().enumerate() {
            self.wait_agent_but(worker, Some(old));
        }
        watches.beat();
        knocking.all_were_answered("a rolling update of the agents");
        watches.beat();
    }

    /// A certificate of a new authority, a new token: what is open goes on, what is new goes by the new ones.
    fn identities_are_renewed_under_load(&self, clients: &[Client], watches: &Watches) {
        let knocking = Knocking::start(clients);
        believe(&self.seed, &self.gateways, &[&self.agents, &self.successors]);
        let given = Instant::now();
        self.give_certificate(&self.successors);
        self.give_token("second");
        for worker in 0..self.workers.len() {
            for pod in self.agent_pods(worker).unwrap().as_array().unwrap() {
                nudge(&self.inside, NAMESPACE, pod["metadata"]["name"].as_str().unwrap());
            }
        }
        self.wait_renewed(given);
        watches.beat();
        knocking.all_were_answered("a change of authority, certificate and token");
    }

    /// Waits until both agents have only tunnels by what they were given last. A token is shown on tunnels
    /// that are there. Those of an old certificate are replaced one after the other, and carry new streams
    /// until then: new ones are younger than the certificate, which was `given` then.
    fn wait_renewed(&self, given: Instant) {
        for (worker, (file, secret, key)) in [
            ("etc/portico-certificate/tls.crt", CERTIFICATE, "tls.crt"),
            ("var/run/secrets/portico/token", TOKEN, "token"),
        ]
        .into_iter()
        .enumerate()
        {
            let secret = self.inside.run(&[
                "get",
                "secret",
                "-n",
                NAMESPACE,
                secret,
                &format!("--output=go-template={{{{index .data \"{key}\" | base64decode}}}}"),
            ]);
            let wanted = secret.unwrap();
            let path = format!("/proc/{}/root/{file}", self.agent(worker).as_raw_nonzero());
            wait::until("the kubelet to bring what is new", SOON, || {
                ensure!(fs::read_to_string(&path)? == wanted, "{path} is as it was");
                Ok(())
            })
            .unwrap();
        }
        wait::until("tunnels by the old certificate to be replaced", SOON, || {
            let ask = ["curl", "-sS", "--max-time", "20", "http://127.0.0.1:8004/tunnels"];
            let rows = self.workers[0].host().run(&ask)?;
            let rows: Vec<Value> = serde_json::from_str(&rows)?;
            let live: Vec<&Value> = rows.iter().filter(|row| row["state"] == "live").collect();
            let is_new = |row: &&Value| {
                row["duration_ms"].as_u64().is_some_and(|age| Duration::from_millis(age) < given.elapsed())
            };
            ensure!(!live.is_empty() && live.iter().all(is_new), "{live:?}");
            Ok(())
        })
        .unwrap();
    }

    /// The old authority leaves the gateways' file, and the old token's Secret is deleted: agents that still
    /// use one of them are cut, agents with a new one are not. Then the new ones go as well, and no agent
    /// gets through.
    fn revoked_agents_are_cut(&self, clients: &[Client], watches: &mut Watches) {
        let knocking = Knocking::start(clients);
        believe(&self.seed, &self.gateways, &[&self.successors]);
        self.inside.run(&["delete", "secret", "-n", NAMESPACE, "first"]).unwrap();
        // None of the watches was begun with the new certificate.
        wait::until("watches by the old certificate to end", SOON, || {
            ensure!(watches.alive(0) == 0, "{} go on", watches.alive(0));
            Ok(())
        })
        .unwrap();
        // A token is renewed for tunnels that are there, and their streams live on by the new one.
        watches.beat_of(1);
        knocking.all_were_answered("the old identities were revoked");
        assert_eq!(watches.alive(1), WATCHES, "watches whose tunnels have a new token");
        watches.complete();
        watches.beat();

        believe(&self.seed, &self.gateways, &[&self.agents]);
        self.inside.run(&["delete", "secret", "-n", NAMESPACE, "second"]).unwrap();
        wait::until("the watches of revoked agents to end", SOON, || {
            let alive = [0, 1].map(|worker| watches.alive(worker));
            ensure!(alive == [0, 0], "{alive:?} go on");
            Ok(())
        })
        .unwrap();
        // Each gateway looks at its files by itself, within a second.
        for client in clients {
            wait::until("nobody to get through", SOON, || {
                ensure!(client.ask().is_err(), "its agent was revoked, and is served");
                Ok(())
            })
            .unwrap();
        }
    }

    /// Interface and address go with the agents.
    fn agents_leave_nothing_behind(&self) {
        for name in AGENTS {
            self.inside.run(&["delete", "daemonset", "-n", NAMESPACE, name, "--wait=false"]).unwrap();
        }
        for worker in &self.workers {
            wait::until("the address to be gone", SOON, || {
                let held = held_addresses(worker.host());
                let links = worker.host().run(&["ip", "-oneline", "link"])?;
                ensure!(held.is_empty() && !links.contains(": portico"), "{held:?}, {links}");
                Ok(())
            })
            .unwrap();
        }
    }

    /// What a CONNECT to a cluster's API server was answered; an accepted one must lead there.
    fn ask_livez(&self, gateway: &Gateway, cluster: &UserCluster, credential: &Credential<'_>) -> String {
        let worker = self.workers[0].host();
        let mut words = vec!["curl".to_owned(), "--max-time".to_owned(), "20".to_owned()];
        words.extend(self.through(gateway, cluster, credential));
        words.extend(["--write-out", "%{http_connect}"].map(str::to_owned));
        words.push(format!("https://{}/livez", authority(cluster.name())));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let output = worker.output(&words, "").unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(!said.ends_with("200") || said.starts_with("ok"), "/livez of {}: {said}", cluster.name());
        said.trim_start_matches("ok").to_owned()
    }

    /// curl's arguments to go through a gateway to a cluster's API server, whose administrator it is.
    fn through(&self, gateway: &Gateway, cluster: &UserCluster, credential: &Credential<'_>) -> Vec<String> {
        let dir = self.workers[0].host().dir().join("through");
        fs::create_dir_all(&dir).unwrap();
        let access = cluster.access(&self.seed, &format!("https://{}", authority(cluster.name())));
        let admin = access.kubeconfig("admin", Some(ADMINS)).unwrap();
        let file = |name: &str| admin.with_file_name(name).display().to_string();
        let gateway_ca = dir.join("gateways.crt");
        fs::write(&gateway_ca, self.issuer.cert()).unwrap();
        let mut words = ["-sS", "--proxytunnel", "--proxy", &format!("https://{}", gateway.target())]
            .map(str::to_owned)
            .to_vec();
        let mut add = |flag: &str, value: String| words.extend([flag.to_owned(), value]);
        add("--proxy-cacert", gateway_ca.display().to_string());
        add("--cacert", file("ca.crt"));
        add("--cert", file("admin.crt"));
        add("--key", file("admin.key"));
        match credential {
            Credential::Certificate(of) => {
                self.agents.client("agent", Some(&organisation(of))).unwrap().write(&dir, of).unwrap();
                add("--proxy-cert", dir.join(format!("{of}.crt")).display().to_string());
                add("--proxy-key", dir.join(format!("{of}.key")).display().to_string());
            }
            Credential::Token(of) => {
                let token = kubectl_inside(&self.seed, of)
                    .run(&["create", "token", "-n", "kube-system", ACCOUNT])
                    .unwrap();
                add("--proxy-header", format!("Authorization: Bearer {}", token.trim()));
            }
            Credential::Nothing => {}
        }
        words
    }

    /// What a gateway carries for each worker.
    fn streams_of(&self, gateway: &Gateway) -> BTreeMap<usize, BTreeSet<String>> {
        (0..self.workers.len()).map(|worker| self.streams_for(gateway, worker)).collect()
    }

    fn streams_for(&self, gateway: &Gateway, worker: usize) -> (usize, BTreeSet<String>) {
        (worker, gateway.streams(&self.seed, self.workers[worker].host()))
    }

    /// None of those has been cut.
    fn still_carries(&self, gateway: &Gateway, safe: &BTreeMap<usize, BTreeSet<String>>) {
        for (&worker, streams) in safe {
            let (_, now) = self.streams_for(gateway, worker);
            assert!(
                streams.is_subset(&now),
                "{} has lost some of {streams:?} of worker {worker}, it has {now:?}",
                gateway.name
            );
        }
    }

    /// What the programs on the way hold open: the gateways together, for streams move between them, and each
    /// agent.
    fn descriptors(&self) -> BTreeMap<String, usize> {
        let count = |pid: Pid| fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero())).unwrap().count();
        let gateways = self.gateways.iter().map(|gateway| count(gateway.process(&self.seed).unwrap())).sum();
        let agents =
            [0, 1].map(|worker| (self.workers[worker].host().name().to_owned(), count(self.agent(worker))));
        agents.into_iter().chain([("gateways".to_owned(), gateways)]).collect()
    }

    /// As many watches as before, and what they take; the address once, on one interface.
    fn nothing_has_leaked(&self, before: &BTreeMap<String, usize>) {
        /// A tunnel or two may be between one gateway and the next.
        const MORE: usize = 6;
        wait::until("no more descriptors to be open than before", SOON, || {
            let now = self.descriptors();
            let grown = now.iter().any(|(name, &open)| open > before[name] + MORE);
            ensure!(!grown, "there are {now:?}, and were {before:?}");
            Ok(())
        })
        .unwrap();
        for worker in &self.workers {
            let held = held_addresses(worker.host());
            assert_eq!(held.len(), 1, "{held:?} on {}", worker.host().name());
        }
    }
}

/// Lines of `ip` about the tunnel agent's address.
fn held_addresses(host: &Host) -> Vec<String> {
    let all = host.run(&["ip", "-oneline", "address"]).unwrap();
    let held = all.lines().filter(|line| line.contains(&format!(" {AGENT}/")));
    held.map(str::to_owned).collect()
}

/// The credential that a client shows.
enum Credential<'a> {
    Certificate(&'a str),
    /// A token of the agents' service account in that cluster.
    Token(&'a UserCluster),
    Nothing,
}
