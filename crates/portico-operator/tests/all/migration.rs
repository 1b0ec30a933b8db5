//! Migration between strategies beside real API servers and a real gateway: by bytes through each door, and
//! back from each state. Also with the record lost, and with operators that are killed at each write.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use kube::Client;
use portico_lab::control_plane::{ADMINS, Access, ControlPlane, Options};
use portico_lab::faulty_api::FaultyApi;
use portico_lab::{Etcd, Host, Kubectl, Lab, Process, long_form, programs};
use portico_pki::{Credential, Kubeconfig, Pair};
use serde_json::{Value, json};
use tokio::net::UdpSocket;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::exposure::{KUBERNETES, slice};
use crate::names::{Says, Zone, serve};
use crate::support::{Running, beside_kkp, cluster, give_address, insides, install, release, withheld_or};
use crate::until;

/// The name of the cluster by which users reach it.
const NAME: &str = "a.north.kkp.example";

const LABEL: &str = "unsafe-expose-strategy-migration";

/// A seed with everything installed and a gateway, and one user cluster whose API server runs elsewhere.
struct Stage {
    kubectl: Kubectl,
    client: Client,
    servers: Vec<SocketAddr>,
    names: JoinHandle<std::io::Result<()>>,
    gateway: Process,
    user: ControlPlane,
    // The last to go.
    seed: ControlPlane,
    _etcd: Etcd,
    door: Host,
    planes: Host,
}

impl Stage {
    async fn start(name: &str) -> Self {
        let lab = Lab::start(name).unwrap();
        let (planes, door) = (lab.host("planes").unwrap(), lab.host("door").unwrap());
        let etcd = Etcd::start(&planes).unwrap();
        let alone = |name: &str, port: u16, names: Vec<String>| Options {
            secure_port: port,
            controllers: false,
            api_server_flags: vec!["--endpoint-reconciler-type=none".into()],
            names,
            ..Options::new(name)
        };
        let seed = ControlPlane::start(&planes, &etcd, &alone("seed", 6_443, Vec::new())).unwrap();
        let of_user = vec![NAME.to_owned(), door.address().to_string(), "100.64.30.10".to_owned()];
        let user = ControlPlane::start(&planes, &etcd, &alone("user", 6_444, of_user)).unwrap();
        let kubectl = seed.access().kubectl(&planes).unwrap();
        let client = install(&kubectl, seed.access()).await;
        // No name server is asked for names under `invalid`: RFC 6761.
        let domain = r#"{"spec": {"ingress": {"domain": "kkp.example"}}}"#;
        let configuration = ["patch", "kubermaticconfiguration", "kkp", "-n", "portico", "--type=merge"];
        kubectl.run(&[&configuration[..], &["-p", domain]].concat()).unwrap();
        let pods = slice("portico", "portico", KUBERNETES, &[&door.address().to_string()]);
        kubectl.apply_json(&pods).unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let servers = vec![socket.local_addr().unwrap()];
        let address = door.address();
        let zone = watch::Sender::new(Arc::new(move |_: &str| Says::Address(address)) as Zone);
        let names = tokio::spawn(serve(socket, zone.subscribe()));
        let gateway = gateway(&door, seed.access());
        Self { kubectl, client, servers, names, gateway, user, seed, _etcd: etcd, door, planes }
    }

    fn operator(&self, identity: &str) -> Running {
        self.operator_by(&self.client, identity)
    }

    fn operator_by(&self, client: &Client, identity: &str) -> Running {
        let mut insides = insides(Some("registry.example.com/portico:1"));
        insides.name_servers.clone_from(&self.servers);
        Running::start_asking(client, identity, self.servers.clone(), |operator| {
            operator.with_user_clusters(insides)
        })
    }

    /// Makes the cluster, and waits until it is reached by NodePort.
    fn create(&self) {
        let mut object = cluster("a", "NodePort");
        object["spec"]["clusterNetwork"] = json!({"konnectivityEnabled": false});
        let elsewhere = format!("{}:6444", self.planes.address());
        object["metadata"]["annotations"] = json!({"portico.k8c.io/endpoints": elsewhere});
        self.kubectl.apply_json(&object).unwrap();
        until("the namespace", || self.kubectl.get(&["namespace", "cluster-a"]).map(drop));
        self.show_inside();
        // By which it issues kubeconfigs.
        let authority = self.user.access().authority().identity();
        let secret = json!({"apiVersion": "v1", "kind": "Secret",
            "metadata": {"name": "ca", "namespace": "cluster-a"},
            "stringData": {"ca.crt": authority.cert, "ca.key": authority.key}});
        self.kubectl.apply_json(&secret).unwrap();
        self.answers_by("NodePort");
    }

    /// Gives the operator a way into the cluster.
    fn show_inside(&self) {
        let admin = self.user.access().authority().client("controllers", Some(ADMINS)).unwrap();
        let kubeconfig = Kubeconfig {
            cluster: "user".into(),
            server: self.user.access().server().into(),
            authority: self.user.access().authority().cert(),
            credential: Credential::Certificate(Pair { certificate: admin.cert, key: admin.key }),
        };
        let secret = json!({"apiVersion": "v1", "kind": "Secret",
            "metadata": {"name": "internal-admin-kubeconfig", "namespace": "cluster-a"},
            "stringData": {"kubeconfig": kubeconfig.to_yaml()}});
        self.kubectl.apply_json(&secret).unwrap();
    }

    fn hide_inside(&self) {
        let secret = ["delete", "secret", "internal-admin-kubeconfig", "-n", "cluster-a"];
        self.kubectl.run(&secret).unwrap();
    }

    fn cluster(&self) -> Result<Value> {
        self.kubectl.get(&["cluster", "a"])
    }

    /// Asks for another strategy, with the label of this value.
    fn want(&self, strategy: &str, label: &str) {
        let agent = if strategy == "Tunneling" { json!({}) } else { json!({"tunnelingAgentIP": null}) };
        let change = json!({"metadata": {"labels": {LABEL: label}},
            "spec": {"exposeStrategy": strategy, "clusterNetwork": agent}});
        self.kubectl.run(&["patch", "cluster", "a", "--type=merge", "-p", &change.to_string()]).unwrap();
    }

    fn order(&self, settings: &str) {
        let annotation = format!("portico.k8c.io/migration={settings}");
        self.kubectl.run(&["annotate", "cluster", "a", "--overwrite", &annotation]).unwrap();
    }

    fn wait_no_order(&self) {
        until("the order to be gone", || {
            let settings = self.cluster()?["metadata"]["annotations"]["portico.k8c.io/migration"].take();
            ensure!(settings.is_null(), "{settings}");
            Ok(())
        });
    }

    /// Gives the cluster's own load balancer the gateway's address, as a cloud does.
    fn give_address(&self) {
        let front = ["service", "front-loadbalancer", "-n", "cluster-a"];
        until("the load balancer", || self.kubectl.get(&front).map(drop));
        give_address(&self.kubectl, "a", &self.door.address().to_string());
    }

    fn state(&self) -> Result<(String, String)> {
        let cluster = self.cluster()?;
        let condition = cluster.pointer("/status/conditions/PorticoMigration").context("no condition")?;
        let text = |key: &str| condition[key].as_str().unwrap_or_default().to_owned();
        Ok((text("reason"), text("message")))
    }

    /// Waits until a state waits for something that has `part` in its sentence.
    fn wait_state(&self, expected: &str, part: &str) {
        until(expected, || {
            let (state, message) = self.state()?;
            ensure!(state == expected && message.contains(part), "{state}: {message}");
            Ok(())
        });
    }

    /// Waits until no migration is under way, with this strategy in force.
    fn wait_settled(&self, strategy: &str) {
        self.wait_state("Settled", strategy);
        let exposed = self.exposed().unwrap();
        assert_eq!(exposed["spec"]["exposeStrategy"], strategy);
        assert!(exposed["spec"]["migration"].is_null(), "{exposed}");
    }

    fn exposed(&self) -> Result<Value> {
        self.kubectl.get(&["exposedcluster", "a"])
    }

    fn service(&self) -> Result<Value> {
        self.kubectl.get(&["service", "apiserver-external", "-n", "cluster-a"])
    }

    fn node_port(&self) -> Result<u64> {
        self.service()?.pointer("/spec/ports/0/nodePort").and_then(Value::as_u64).context("no NodePort")
    }

    /// Asks the API server for its version by a door.
    fn ask_by(&self, strategy: &str) -> Result<String> {
        self.kubectl_by(strategy)?.run(&["get", "--raw", "/version", "--request-timeout=5s"])
    }

    /// kubectl by a door, as a client from outside.
    fn kubectl_by(&self, strategy: &str) -> Result<Kubectl> {
        let address = self.door.address();
        let (server, name) = match strategy {
            "Tunneling" => (format!("https://{address}:6443"), NAME.to_owned()),
            "NodePort" => (format!("https://{address}:{}", self.node_port()?), NAME.to_owned()),
            _ => (format!("https://{address}:{}", self.node_port()?), address.to_string()),
        };
        let access = self.user.access().through(&server).with_server_name(&name);
        access.kubectl(&self.planes)
    }

    fn answers_by(&self, strategy: &str) {
        until(strategy, || self.ask_by(strategy).map(drop));
    }

    /// What is published: the URL in the status, the kubeconfig of administrators, and what is inside.
    fn published(&self) -> [String; 3] {
        let cluster = self.cluster().unwrap();
        let path = "-o=go-template={{.data.kubeconfig | base64decode}}";
        let kubeconfig = ["get", "secret", "admin-kubeconfig", "-n", "cluster-a", path];
        let kubeconfig = Kubeconfig::parse(&self.kubectl.run(&kubeconfig).unwrap()).unwrap();
        let inside = self.user.access().kubectl(&self.planes).unwrap();
        let endpoints = inside.get(&["endpointslice", "kubernetes", "-n", "default"]).unwrap();
        let published = [
            &cluster["status"]["address"]["url"],
            &json!(kubeconfig.server),
            &endpoints["endpoints"][0]["addresses"][0],
        ];
        published.map(|text| text.as_str().unwrap_or_default().to_owned())
    }
}

/// A gateway that follows the seed, with its admin listener where the operator asks.
fn gateway(door: &Host, seed: &Access) -> Process {
    let kubeconfig = seed.kubeconfig("system:serviceaccount:portico:portico-gateway", None).unwrap();
    let args = [
        "gateway".to_owned(),
        format!("--kubeconfig={}", kubeconfig.display()),
        "--clusters-from=exposed-clusters".to_owned(),
        "--expose-annotation=nodeport-proxy.k8s.io/expose".to_owned(),
        "--expose-annotation=nodeport-proxy.k8s.io/expose-namespaced".to_owned(),
        "--tunnel-listen=off".to_owned(),
        format!("--admin-listen={}:8002", door.address()),
    ];
    door.spawn("gateway", programs::portico().unwrap(), args).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_moves_between_doors_that_are_both_open_until_the_old_one_is_told_to_close() {
    let stage = Stage::start("migration").await;
    let operator = stage.operator("first");
    stage.create();
    let port = stage.node_port().unwrap();
    from_a_port_to_a_name(&stage, port);
    the_way_back_is_the_same_from_each_state(&stage);
    from_a_name_to_a_load_balancer_and_its_port(&stage);
    a_third_strategy_waits_for_the_second_door_to_close(&stage);
    between_doors_at_the_same_ports_only_an_order_closes(&stage);
    a_door_that_nobody_uses_closes_by_itself_and_not_before(&stage);
    operator.stop().await;
    stage.names.abort();
}

fn from_a_port_to_a_name(stage: &Stage, port: u64) {
    stage.want("Tunneling", "");
    // No node is there to be moved, and nobody has ordered that the old door may close.
    let who = format!("used by {}", stage.planes.address());
    stage.wait_state("Quieting", &who);
    for strategy in ["NodePort", "Tunneling"] {
        stage.answers_by(strategy);
    }
    assert_eq!(stage.node_port().unwrap(), port, "users have it");
    let by_name = format!("https://{NAME}:6443");
    assert_eq!(stage.published(), [by_name.clone(), by_name, "100.64.30.10".to_owned()]);
    let events = stage.kubectl.run(&["events", "--for=cluster/a"]).unwrap();
    for state in ["Opening", "Proving", "Moving", "MovingNodes", "Quieting"] {
        assert!(events.contains(&format!("Migration{state} ")), "{state}: {events}");
    }
    // An order that names another door closes nothing, and one that cannot be read neither.
    stage.order("close=LoadBalancer");
    stage.order("close=nodeport");
    stage.wait_state("Quieting", "cannot be read");
    going_back_from_a_door_that_is_being_closed_brings_its_port(stage, port);
    stage.order("close=NodePort");
    stage.wait_settled("Tunneling");
    assert_eq!(stage.service().unwrap()["spec"]["type"], "ClusterIP");
    assert!(stage.ask_by("NodePort").is_err());
    let label = &stage.cluster().unwrap()["metadata"]["labels"][LABEL];
    assert_eq!(label, "", "somebody else set it");
    stage.wait_no_order();
}

/// An order of before closes nothing that was opened again, either.
fn going_back_from_a_door_that_is_being_closed_brings_its_port(stage: &Stage, port: u64) {
    let inside = stage.user.access().kubectl(&stage.planes).unwrap();
    let labels = json!({"app": "theirs"});
    let theirs = json!({"apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": {"name": "portico-migration", "namespace": "kube-system"},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels},
            "spec": {"containers": [{"name": "x", "image": "x"}]}}}});
    // In Quieting it is left alone, so it does not come back.
    let portico_migration = ["daemonset", "portico-migration", "-n", "kube-system"];
    inside.run(&[&["delete"], &portico_migration[..]].concat()).unwrap();
    inside.apply_json(&theirs).unwrap();
    stage.order("close=NodePort");
    stage.wait_state("Closing", "portico-migration");
    assert!(stage.node_port().is_err());
    stage.want("NodePort", "");
    stage.wait_state("Proving", "portico-migration");
    assert_eq!(stage.node_port().unwrap(), port, "users have it");
    stage.wait_no_order();
    inside.run(&[&["delete"], &portico_migration[..]].concat()).unwrap();
    stage.wait_state("Quieting", "NodePort is in force");
    stage.want("Tunneling", "");
    stage.wait_state("Quieting", "Tunneling is in force");
}

fn the_way_back_is_the_same_from_each_state(stage: &Stage) {
    // Before the flip the new door was not published: the load balancer has no address.
    stage.want("LoadBalancer", "");
    stage.wait_state("Opening", "front-loadbalancer");
    stage.want("Tunneling", "");
    stage.wait_state("Quieting", "Tunneling is in force");
    stage.order("close=LoadBalancer");
    stage.wait_settled("Tunneling");
    assert!(stage.kubectl.is_gone(&["service", "front-loadbalancer", "-n", "cluster-a"]));
    // After it everybody was: the other way round.
    stage.want("NodePort", "");
    stage.wait_state("Quieting", "NodePort is in force");
    stage.answers_by("NodePort");
    let port = stage.node_port().unwrap();
    stage.want("Tunneling", "");
    stage.wait_state("Quieting", "Tunneling is in force");
    assert_eq!(stage.node_port().unwrap(), port, "it never closed");
    stage.order("close=NodePort");
    stage.wait_settled("Tunneling");
    stage.wait_no_order();
}

/// As `portico migrate` begins it: what that has written goes at the end.
fn from_a_name_to_a_load_balancer_and_its_port(stage: &Stage) {
    stage.want("LoadBalancer", "portico");
    stage.give_address();
    stage.wait_state("Quieting", "LoadBalancer is in force");
    for strategy in ["Tunneling", "LoadBalancer"] {
        stage.answers_by(strategy);
    }
    stage.order("quiet=1h,close=Tunneling");
    stage.wait_settled("LoadBalancer");
    assert!(stage.ask_by("Tunneling").is_err());
    until("what the command wrote to be gone", || {
        let metadata = stage.cluster()?["metadata"].take();
        ensure!(metadata["labels"][LABEL].is_null(), "{metadata}");
        ensure!(metadata["annotations"]["portico.k8c.io/migration"] == "quiet=1h", "{metadata}");
        Ok(())
    });
}

fn a_third_strategy_waits_for_the_second_door_to_close(stage: &Stage) {
    let port = stage.node_port().unwrap();
    stage.want("Tunneling", "");
    stage.wait_state("Quieting", "Tunneling is in force");
    stage.want("NodePort", "");
    stage.wait_state("Quieting", "NodePort waits until LoadBalancer is closed");
    stage.answers_by("LoadBalancer");
    // A cloud that takes its time.
    let front = ["patch", "service", "front-loadbalancer", "-n", "cluster-a", "--type=merge", "-p"];
    let held_by = |finalizers: Value| {
        let patch = json!({"metadata": {"finalizers": finalizers}}).to_string();
        stage.kubectl.run(&[&front[..], &[&patch]].concat()).unwrap();
    };
    held_by(json!(["example.com/cloud"]));
    stage.order("close=LoadBalancer");
    stage.wait_state("Closing", "front-loadbalancer is being deleted");
    held_by(json!(null));
    stage.wait_state("Quieting", "NodePort is in force");
    assert_ne!(stage.node_port().unwrap(), 0);
    stage.answers_by("NodePort");
    stage.order("close=Tunneling");
    stage.wait_settled("NodePort");
    assert!(port > 0);
}

fn between_doors_at_the_same_ports_only_an_order_closes(stage: &Stage) {
    stage.order("quiet=0");
    stage.want("LoadBalancer", "");
    stage.give_address();
    stage.wait_state("Quieting", "cannot tell their clients apart; portico migrate a --finish closes it");
    stage.order("close=NodePort");
    stage.wait_settled("LoadBalancer");
    stage.wait_no_order();
}

fn a_door_that_nobody_uses_closes_by_itself_and_not_before(stage: &Stage) {
    let by_port = stage.kubectl_by("LoadBalancer").unwrap();
    let watch = by_port.spawn("watch", &["get", "namespaces", "--watch"]).unwrap();
    stage.want("Tunneling", "");
    // The operator has tried this door itself, not long ago.
    let who = stage.planes.address().to_string();
    stage.wait_state("Quieting", &who);
    // Both are read by a pass, so the second is what the next one goes by.
    stage.order("quiet=never");
    stage.wait_state("Quieting", "cannot be read");
    stage.order("quiet=0");
    stage.wait_state("Quieting", &who);
    watch.check().unwrap();
    // The gateway's knowledge of the watch is lost with it, and silence is no proof.
    stage.gateway.kill();
    stage.wait_state("Quieting", "is unknown while the gateway");
    let gateway = gateway(&stage.door, stage.seed.access());
    stage.wait_settled("Tunneling");
    stage.answers_by("Tunneling");
    drop(gateway);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_record_closes_no_door_that_is_in_force() {
    let stage = Stage::start("migration-lost").await;
    let operator = stage.operator("first");
    stage.create();
    let port = stage.node_port().unwrap();
    stage.want("Tunneling", "");
    stage.wait_state("Quieting", "Tunneling is in force");
    stage.kubectl.run(&["delete", "exposedcluster", "a"]).unwrap();
    stage.wait_state("Quieting", "Tunneling is in force");
    assert_eq!(stage.node_port().unwrap(), port, "it is open still");
    for strategy in ["NodePort", "Tunneling"] {
        stage.answers_by(strategy);
    }
    beside_kkp_the_record_is_kept(&stage, &operator);
    // A Service that somebody deletes comes back with the port that users have.
    stage.kubectl.run(&["delete", "service", "apiserver-external", "-n", "cluster-a"]).unwrap();
    until("the Service", || stage.service().map(drop));
    assert_eq!(stage.node_port().unwrap(), port);
    // A record of a newer version is left alone, and nothing closes.
    let newer = r#"{"spec": {"migration": {"second": {"exposeStrategy": "Teleport"}}}}"#;
    let patched = stage.kubectl.run(&["patch", "exposedcluster", "a", "--type=merge", "-p", newer]);
    assert!(patched.is_err(), "the definition refuses it");
    // What another manager has of the record is taken back with it.
    let theirs = r#"{"spec": {"migration": {"since": "2026-01-02T03:04:05Z"}}}"#;
    let by_hand = ["patch", "exposedcluster", "a", "--type=merge", "--field-manager=hand", "-p", theirs];
    stage.kubectl.run(&by_hand).unwrap();
    stage.order("close=NodePort");
    stage.wait_settled("Tunneling");
    operator.stop().await;
    stage.names.abort();
}

fn beside_kkp_the_record_is_kept(stage: &Stage, operator: &Running) {
    let migration = || -> Result<Value> { Ok(stage.exposed()?["spec"]["migration"].take()) };
    until("the record to be as before", || {
        ensure!(migration()?["state"] == "Quieting");
        Ok(())
    });
    let recorded = migration().unwrap();
    let observing = || operator.clusters().observing;
    beside_kkp(&stage.kubectl, observing, || {
        stage.kubectl.run(&["label", "cluster", "a", "project-id=another", "--overwrite"]).unwrap();
        until("what gateways must know", || {
            let exposed = stage.exposed()?;
            ensure!(exposed["metadata"]["labels"]["project-id"] == "another", "{exposed}");
            Ok(())
        });
        assert_eq!(migration().unwrap(), recorded);
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_nobody_can_look_inside_an_order_leaves_each_state_and_users_keep_their_door() {
    let stage = Stage::start("migration-blind").await;
    let operator = stage.operator("first");
    stage.create();
    stage.hide_inside();
    stage.want("Tunneling", "");
    stage.wait_state("Opening", "a certificate with its names: there is no Secret");
    stage.want("NodePort", "");
    stage.wait_state("Moving", "there is no Secret");
    // The door that users know does not close, not even by order.
    stage.order("close=NodePort");
    stage.wait_state("Moving", "there is no Secret");
    stage.answers_by("NodePort");
    stage.order("close=Tunneling");
    stage.wait_settled("NodePort");
    stage.answers_by("NodePort");
    stage.wait_no_order();

    // Access is lost after the new door is published.
    stage.show_inside();
    stage.want("Tunneling", "");
    stage.wait_state("Quieting", "Tunneling is in force");
    stage.hide_inside();
    stage.want("NodePort", "");
    stage.wait_state("Opening", "there is no Secret");
    stage.want("Tunneling", "");
    stage.wait_state("Moving", "there is no Secret");
    stage.order("close=NodePort");
    stage.wait_settled("Tunneling");
    stage.answers_by("Tunneling");
    operator.stop().await;
    stage.names.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_that_is_killed_at_any_write_of_a_migration_leaves_both_doors_open() {
    let stage = Stage::start("migration-kill").await;
    let operator = stage.operator("first");
    stage.create();
    operator.stop().await;
    let mut ends = ["Tunneling", "NodePort"].into_iter().cycle();
    let mut from = "NodePort";
    // Every third write in the short form.
    for writes in (0..).step_by(long_form(3, 1)) {
        let to = ends.next().unwrap();
        let faulty = FaultyApi::default();
        faulty.rules(|rules| rules.writes_left = Some(writes));
        stage.want(to, "");
        stage.order(&format!("close={from}"));
        let killed = stage.operator_by(&faulty.client(&stage.client), &format!("killed-{writes}"));
        let settled = || {
            let of = |exposed: &Value| exposed["spec"]["exposeStrategy"] == to;
            let settled = stage.state().is_ok_and(|(state, _)| state == "Settled");
            settled && stage.exposed().is_ok_and(|exposed| of(&exposed))
        };
        let complete = withheld_or(&faulty, settled);
        killed.kill().await;
        // Whatever was done: the published address leads to the API server.
        let cluster = stage.cluster().unwrap();
        let url = cluster["status"]["address"]["url"].as_str().unwrap();
        let strategy = if url.ends_with(":6443") { "Tunneling" } else { "NodePort" };
        stage.answers_by(strategy);
        release(&stage.kubectl);
        let next = stage.operator(&format!("next-{writes}"));
        stage.wait_settled(to);
        stage.answers_by(to);
        next.stop().await;
        from = to;
        if complete {
            assert!(writes > 10, "only {writes} writes were withheld");
            break;
        }
    }
    stage.names.abort();
}
