//! The controller that keeps the inside of clusters: what is there after one pass, nothing at rest, another
//! strategy, kubeconfigs, and user clusters that are away or hostile.

use std::net::TcpListener;

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use kube::Client;
use portico_lab::control_plane::{ADMINS, ControlPlane, Options};
use portico_lab::faulty_api::{Answer, FaultyApi};
use portico_lab::hostile_api::{ENDLESS, HostileApi};
use portico_lab::{Access, Authority, Etcd, Host, Kubectl, Lab};
use portico_operator::{PartsStatus, USER_CLUSTERS, WorkStatus};
use portico_pki::{Credential, Kubeconfig, Pair};
use serde_json::{Value, json};

use crate::support::{Running, cluster, give_address, insides, install, kkp_deployment};
use crate::until;

mod answers;
mod hosted;
mod hostile_tenant;
mod killed;
mod migrating;

/// A seed with everything installed, and one user cluster, both real.
struct Stage {
    kubectl: Kubectl,
    client: Client,
    inside: Kubectl,
    user: ControlPlane,
    // The last to go.
    seed: ControlPlane,
    _etcd: Etcd,
    host: Host,
}

impl Stage {
    async fn start(name: &str) -> Self {
        let host = Lab::start(name).unwrap().host("seed").unwrap();
        let etcd = Etcd::start(&host).unwrap();
        let alone = |name: &str, port: u16| Options {
            secure_port: port,
            controllers: false,
            // As in KKP: the operator writes the endpoints of Service kubernetes.
            api_server_flags: vec!["--endpoint-reconciler-type=none".into()],
            ..Options::new(name)
        };
        let seed = ControlPlane::start(&host, &etcd, &alone("seed", 6_443)).unwrap();
        let user = ControlPlane::start(&host, &etcd, &alone("user", 6_444)).unwrap();
        let kubectl = seed.access().kubectl(&host).unwrap();
        let inside = user.access().kubectl(&host).unwrap();
        let client = install(&kubectl, seed.access()).await;
        Self { kubectl, client, inside, user, seed, _etcd: etcd, host }
    }

    fn operator(&self, identity: &str) -> Running {
        self.operator_with_image(identity, "registry.example.com/portico:1")
    }

    fn operator_with_image(&self, identity: &str, image: &str) -> Running {
        Running::start_with(&self.client, identity, |operator| {
            operator.with_user_clusters(insides(Some(image)))
        })
    }

    fn kubeconfig(&self) -> Kubeconfig {
        administrators(self.user.access())
    }

    fn applies(&self) -> u64 {
        let metrics = self.inside.run(&["get", "--raw", "/metrics"]).unwrap();
        let lines = metrics
            .lines()
            .filter(|line| line.starts_with("apiserver_request_total{") && line.contains("verb=\"APPLY\""));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
    }
}

/// The way into a user cluster, as an administrator.
fn administrators(access: &Access) -> Kubeconfig {
    let admin = access.authority().client("kubermatic-controllers", Some(ADMINS)).unwrap();
    Kubeconfig {
        cluster: "user".into(),
        server: access.server().into(),
        authority: access.authority().cert(),
        credential: Credential::Certificate(Pair { certificate: admin.cert, key: admin.key }),
    }
}

/// Puts text into a Secret of a cluster.
fn put_secret(kubectl: &Kubectl, cluster: &str, name: &str, data: &Value) {
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "stringData": data,
        "metadata": {"name": name, "namespace": format!("cluster-{cluster}")}});
    kubectl.apply_json(&secret).unwrap();
}

fn put_kubeconfig(kubectl: &Kubectl, cluster: &str, kubeconfig: &str) {
    put_secret(kubectl, cluster, "internal-admin-kubeconfig", &json!({"kubeconfig": kubeconfig}));
}

fn wait_namespace(kubectl: &Kubectl, cluster: &str) {
    until("the namespace", || kubectl.get(&["namespace", &format!("cluster-{cluster}")]).map(drop));
}

fn reason(kubectl: &Kubectl, name: &str) -> Result<(String, String)> {
    let cluster = kubectl.get(&["cluster", name])?;
    let condition = cluster.pointer("/status/conditions/PorticoUserClusterReady").context("no condition")?;
    let text = |key: &str| condition[key].as_str().unwrap_or_default().to_owned();
    Ok((text("reason"), text("message")))
}

/// Waits for the reason of the condition, and returns its message.
fn wait_reason(kubectl: &Kubectl, name: &str, expected: &str) -> String {
    let mut said = String::new();
    until(expected, || {
        let (found, message) = reason(kubectl, name)?;
        ensure!(found == expected, "{name} is {found}: {message}");
        said = message;
        Ok(())
    });
    said
}

fn user_clusters(operator: &Running) -> PartsStatus {
    operator.status.get().parts.remove(&USER_CLUSTERS).unwrap_or_default()
}

fn work(operator: &Running) -> WorkStatus {
    operator.work("portico-user-cluster")
}

/// Lets another pass begin, and waits for its end.
fn touch(stage: &Stage, operator: &Running, cluster: &str) {
    let before = work(operator).passes;
    let namespace = format!("cluster-{cluster}");
    let stamp = format!("touched={}", Timestamp::now().as_microsecond());
    let secret = ["label", "secret", "internal-admin-kubeconfig", "-n", &namespace, "--overwrite", &stamp];
    stage.kubectl.run(&secret).unwrap();
    until("another pass", || {
        ensure!(work(operator).passes > before);
        Ok(())
    });
}

fn admin_kubeconfig(stage: &Stage, cluster: &str) -> Result<Kubeconfig> {
    let namespace = format!("cluster-{cluster}");
    let path = "-o=go-template={{.data.kubeconfig | base64decode}}";
    let text = stage.kubectl.run(&["get", "secret", "admin-kubeconfig", "-n", &namespace, path])?;
    Ok(Kubeconfig::parse(&text)?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_inside_of_a_cluster_follows_its_strategy_and_hostile_ones_hold_nobody_up() {
    let stage = Stage::start("user-cluster").await;
    let operator = stage.operator("first");
    hostile_ones_are_told_apart(&stage, &operator);
    one_pass_makes_everything(&stage, &operator);
    operator.stop().await;
    let operator = stage.operator("second");
    nothing_is_written_at_rest(&stage, &operator);
    operator.stop().await;
    another_image_is_written_to_the_agents_alone(&stage).await;
    what_the_seed_refuses_keeps_nothing_inside_from_being_made(&stage).await;
    let operator = stage.operator("fourth");
    what_somebody_breaks_heals_and_what_somebody_made_stays(&stage, &operator);
    another_strategy_removes_the_agents(&stage, &operator);
    beside_kkp_the_inside_is_left_alone(&stage, &operator);
    operator.stop().await;
}

/// They come first, and hang while the good one gets everything.
fn hostile_ones_are_told_apart(stage: &Stage, operator: &Running) {
    let kubectl = &stage.kubectl;
    let mute = TcpListener::bind("127.0.0.1:0").unwrap();
    let mute_url = format!("https://{}", mute.local_addr().unwrap());
    let flood = HostileApi::start("HTTP/1.1 200 OK\r\n\r\n{", true).unwrap();
    let broken = HostileApi::start("HTTP/1.1 500 No\r\ncontent-length: 2\r\n\r\n{}", false).unwrap();
    let other = Authority::new("somebody else").unwrap();
    let good = stage.kubeconfig();
    let at = |server: String, authority: &Authority| {
        Kubeconfig { server, authority: authority.cert(), ..good.clone() }.to_yaml()
    };
    let exec = good.to_yaml().replace("client-key-data", "exec: {command: /bin/touch}\n    client-key-data");
    let token = Kubeconfig { credential: Credential::Token("a\nb".to_owned()), ..good.clone() };
    let no_anchor =
        Kubeconfig { authority: stage.user.access().authority().cert()[..300].into(), ..good.clone() };
    let hostile = [
        ("mute", at(mute_url, &other), "Unreachable"),
        ("flood", at(flood.url("127.0.0.1"), flood.authority()), "AnswerTooLong"),
        ("broken", at(broken.url("127.0.0.1"), broken.authority()), "Refused"),
        ("wrong", at(good.server.clone(), &other), "Unreachable"),
        ("exec", exec, "BadKubeconfig"),
        ("token", token.to_yaml(), "BadKubeconfig"),
        ("no-anchor", no_anchor.to_yaml(), "BadKubeconfig"),
    ];
    for (name, kubeconfig, _) in &hostile {
        kubectl.apply_json(&cluster(name, "Tunneling")).unwrap();
        wait_namespace(kubectl, name);
        put_kubeconfig(kubectl, name, kubeconfig);
    }
    kubectl.apply_json(&cluster("a", "Tunneling")).unwrap();
    wait_reason(kubectl, "a", "NoKubeconfig");
    put_kubeconfig(kubectl, "a", &good.to_yaml());
    wait_reason(kubectl, "a", "Ready");
    for (name, _, expected) in &hostile {
        wait_reason(kubectl, name, expected);
    }
    assert!(flood.sent() < ENDLESS / 10, "{} bytes were taken", flood.sent());
    let (_, message) = reason(kubectl, "wrong").unwrap();
    assert!(message.contains("certificate") && message.contains(&good.server), "{message}");
    // Pauses grow, one cluster at a time.
    until("a second attempt", || {
        let reports = user_clusters(operator).reports;
        ensure!(reports["mute"].failures >= 2 && reports["a"].failures == 0, "{reports:?}");
        Ok(())
    });
    let events = kubectl.run(&["events", "--for=cluster/flood"]).unwrap();
    assert!(events.contains("AnswerTooLong"), "{events}");
    // One that heals is as it should be without anybody's help.
    put_kubeconfig(kubectl, "exec", "healed: no\n");
    let message = wait_reason(kubectl, "exec", "BadKubeconfig");
    assert!(!message.contains("touch"), "{message}");
    let names = hostile.each_ref().map(|(name, ..)| *name);
    for kind in ["clusters", "exposedclusters"] {
        kubectl.run(&[&["delete", kind], &names[..]].concat()).unwrap();
    }
}

fn one_pass_makes_everything(stage: &Stage, operator: &Running) {
    let (kubectl, inside) = (&stage.kubectl, &stage.inside);
    let agent = inside.get(&["daemonset", "portico-agent", "-n", "kube-system"]).unwrap();
    let args = agent.pointer("/spec/template/spec/containers/0/args").unwrap().to_string();
    for arg in [
        "--forward=6443=apiserver-external.cluster-a.svc.cluster.local:443",
        "--gateway=a.north.kkp.invalid:8088",
        "--address=100.64.30.10",
    ] {
        assert!(args.contains(arg), "{args}");
    }
    assert!(!args.contains("--tls-ca"), "the seed has no CA of its own: {args}");
    let slice = inside.get(&["endpointslice", "kubernetes"]).unwrap();
    assert_eq!(slice["endpoints"][0]["addresses"], json!(["100.64.30.10"]));
    let konnectivity = inside.get(&["deployment", "konnectivity-agent", "-n", "kube-system"]).unwrap();
    let args = konnectivity.pointer("/spec/template/spec/containers/0/args").unwrap().to_string();
    assert!(args.contains("--proxy-server-host=konnectivity-server.a.north.kkp.invalid"), "{args}");
    // By it the gateway reviews the agents' tokens.
    let ca = stage.user.access().authority().cert();
    until("the authority on what gateways read", || {
        let exposed = kubectl.get(&["exposedcluster", "a"])?;
        ensure!(exposed["spec"]["apiServerCA"] == json!(ca), "{exposed}");
        Ok(())
    });
    // Read without any credentials, as a machine that joins does.
    let info = ["get", "--raw", "/api/v1/namespaces/kube-public/configmaps/cluster-info"];
    let nobody = [&info[..], &["--as=system:anonymous"]].concat();
    let info = inside.run(&nobody).unwrap();
    assert!(info.contains("https://a.north.kkp.invalid:6443"), "{info}");
    assert_eq!(user_clusters(operator).reports["a"].reason, "Ready");

    // With the authority on the seed there is a kubeconfig for people.
    let ca = stage.user.access().authority().identity();
    put_secret(kubectl, "a", "ca", &json!({"ca.crt": ca.cert, "ca.key": ca.key}));
    touch(stage, operator, "a");
    let issued = admin_kubeconfig(stage, "a").unwrap();
    assert_eq!((&*issued.cluster, &*issued.server), ("a", "https://a.north.kkp.invalid:6443"));
    let direct = Kubeconfig { server: stage.user.access().server().into(), ..issued };
    let path = stage.host.dir().join("issued.kubeconfig");
    std::fs::write(&path, direct.to_yaml()).unwrap();
    let who = Kubectl::new(&stage.host, &path).unwrap().run(&["auth", "whoami"]).unwrap();
    assert!(who.contains("admin") && who.contains("system:masters"), "{who}");
}

fn nothing_is_written_at_rest(stage: &Stage, operator: &Running) {
    until("a pass", || {
        let clusters = user_clusters(operator);
        ensure!(clusters.reports.get("a").is_some_and(|report| report.ready), "{clusters:?}");
        Ok(())
    });
    let before = stage.applies();
    touch(stage, operator, "a");
    assert_eq!(work(operator).writes, [].into());
    assert_eq!(stage.applies(), before, "not even requests that change nothing");
}

/// As the next version of the operator comes, and as it is taken back.
async fn another_image_is_written_to_the_agents_alone(stage: &Stage) {
    for (identity, image) in
        [("next", "registry.example.com/portico:2"), ("back", "registry.example.com/portico:1")]
    {
        let operator = stage.operator_with_image(identity, image);
        until("the agents", || {
            ensure!(user_clusters(&operator).reports.get("a").is_some_and(|report| report.ready));
            Ok(())
        });
        assert_eq!(work(&operator).writes, [("DaemonSet", 1), ("Deployment", 1)].into());
        operator.stop().await;
    }
}

/// As by an admission webhook about Clusters, and by a Secret that must not be changed.
async fn what_the_seed_refuses_keeps_nothing_inside_from_being_made(stage: &Stage) {
    let (kubectl, inside) = (&stage.kubectl, &stage.inside);
    let faulty = FaultyApi::default();
    let operator = Running::start_with(&faulty.client(&stage.client), "refused", |operator| {
        operator.with_user_clusters(insides(Some("registry.example.com/portico:1")))
    });
    let refused = |reason: &str| {
        let inner = ["configmap", "cluster-info", "-n", "kube-public"];
        inside.run(&[&["delete"][..], &inner].concat()).unwrap();
        touch(stage, &operator, "a");
        let message = wait_reason(kubectl, "a", reason);
        until("what is missing inside", || inside.get(&inner).map(drop));
        message
    };
    faulty.rules(|rules| rules.answers = vec![("/clusters/a?", Answer::Status(403), usize::MAX)]);
    kubectl.run(&["annotate", "cluster", "a", "portico.k8c.io/api-server-ca-"]).unwrap();
    let message = refused("SeedUnavailable");
    assert!(message.starts_with("annotation of the Cluster"), "{message}");
    faulty.rules(|rules| rules.answers.clear());

    let secret = ["secret", "admin-kubeconfig", "-n", "cluster-a"];
    let immutable = ["--type=merge", "-p", r#"{"immutable": true}"#];
    kubectl.run(&[&["patch"], &secret[..], &immutable].concat()).unwrap();
    let authority = |authority: &Authority| {
        let ca = authority.identity();
        put_secret(kubectl, "a", "ca", &json!({"ca.crt": ca.cert, "ca.key": ca.key}));
    };
    authority(&Authority::new("another").unwrap());
    let message = refused("NoAdminKubeconfig");
    assert!(message.contains("immutable"), "{message}");
    authority(stage.user.access().authority());
    kubectl.run(&[&["delete"][..], &secret].concat()).unwrap();
    touch(stage, &operator, "a");
    wait_reason(kubectl, "a", "Ready");
    operator.stop().await;
}

fn what_somebody_breaks_heals_and_what_somebody_made_stays(stage: &Stage, operator: &Running) {
    let inside = &stage.inside;
    inside.run(&["delete", "configmap", "cluster-info", "-n", "kube-public"]).unwrap();
    let image = r#"{"spec": {"template": {"spec": {"containers": [{"name": "agent", "image": "evil"}]}}}}"#;
    inside.run(&["patch", "daemonset", "portico-agent", "-n", "kube-system", "-p", image]).unwrap();
    let konnectivity = ["deployment", "konnectivity-agent", "-n", "kube-system"];
    inside.run(&[&["delete"][..], &konnectivity].concat()).unwrap();
    inside.run(&[&["create"][..], &konnectivity, &["--image=own"]].concat()).unwrap();
    touch(stage, operator, "a");
    let message = wait_reason(&stage.kubectl, "a", "ForeignObject");
    assert!(message.contains("Deployment kube-system/konnectivity-agent"), "{message}");
    let own = inside.get(&konnectivity).unwrap();
    assert_eq!(own["spec"]["template"]["spec"]["containers"][0]["image"], "own");
    inside.get(&["configmap", "cluster-info", "-n", "kube-public"]).unwrap();
    let agent = inside.get(&["daemonset", "portico-agent", "-n", "kube-system"]).unwrap();
    let image = &agent["spec"]["template"]["spec"]["containers"][0]["image"];
    assert_eq!(image, "registry.example.com/portico:1", "it was applied before");
    inside.run(&[&["delete"][..], &konnectivity].concat()).unwrap();
    touch(stage, operator, "a");
    wait_reason(&stage.kubectl, "a", "Ready");
    // KKP's agent keeps ours away.
    let envoy = agent.to_string().replace("\"portico-agent\"", "\"envoy-agent\"");
    let mut envoy: Value = serde_json::from_str(&envoy).unwrap();
    envoy["metadata"] = json!({"name": "envoy-agent", "namespace": "kube-system"});
    inside.apply_json(&envoy).unwrap();
    touch(stage, operator, "a");
    wait_reason(&stage.kubectl, "a", "EnvoyAgent");
    inside.run(&["delete", "daemonset", "envoy-agent", "-n", "kube-system"]).unwrap();
}

fn another_strategy_removes_the_agents(stage: &Stage, operator: &Running) {
    let (kubectl, inside) = (&stage.kubectl, &stage.inside);
    let before = admin_kubeconfig(stage, "a").unwrap();
    kubectl.run(&["label", "cluster", "a", "unsafe-expose-strategy-migration="]).unwrap();
    let other =
        r#"{"spec": {"exposeStrategy": "LoadBalancer", "clusterNetwork": {"tunnelingAgentIP": null}}}"#;
    kubectl.run(&["patch", "cluster", "a", "--type=merge", "-p", other]).unwrap();
    until("the load balancer", || {
        kubectl.get(&["service", "front-loadbalancer", "-n", "cluster-a"]).map(drop)
    });
    give_address(kubectl, "a", "203.0.113.9");
    until("the agents to go", || {
        let left = inside.run(&["get", "daemonset,configmap,serviceaccount", "-n", "kube-system"])?;
        ensure!(!left.contains("portico-agent"), "{left}");
        ensure!(inside.is_gone(&["clusterrole", "portico-agent"]));
        let slice = inside.get(&["endpointslice", "kubernetes"])?;
        ensure!(slice["endpoints"][0]["addresses"] == json!(["203.0.113.9"]), "{slice}");
        Ok(())
    });
    wait_reason(kubectl, "a", "Ready");
    let after = admin_kubeconfig(stage, "a").unwrap();
    assert!(after.server.starts_with("https://203.0.113.9:"), "{}", after.server);
    assert!(after.credential == before.credential, "copies of the former one work on");
    // Somebody else's is left alone.
    kubectl.run(&["delete", "secret", "admin-kubeconfig", "-n", "cluster-a"]).unwrap();
    put_secret(kubectl, "a", "admin-kubeconfig", &json!({"kubeconfig": "mine"}));
    touch(stage, operator, "a");
    let text = "-o=go-template={{.data.kubeconfig | base64decode}}";
    let mine = kubectl.run(&["get", "secret", "admin-kubeconfig", "-n", "cluster-a", text]).unwrap();
    assert_eq!(mine, "mine");
}

fn beside_kkp_the_inside_is_left_alone(stage: &Stage, operator: &Running) {
    let kkp = ["deployment", "kubermatic-seed-controller-manager", "-n", "portico"];
    stage.kubectl.apply_json(&kkp_deployment("portico")).unwrap();
    until("nothing to be kept", || {
        let reports = user_clusters(operator).reports;
        ensure!(reports.is_empty(), "{reports:?}");
        Ok(())
    });
    let info = ["configmap", "cluster-info", "-n", "kube-public"];
    stage.inside.run(&[&["delete"][..], &info].concat()).unwrap();
    let passes = work(operator).passes;
    stage.kubectl.run(&[&["delete"][..], &kkp].concat()).unwrap();
    until("the inside to be kept again", || stage.inside.get(&info).map(drop));
    // It is counted once it is over, a moment after its last write.
    until("a pass since KKP was gone", || {
        ensure!(work(operator).passes > passes);
        Ok(())
    });
}
