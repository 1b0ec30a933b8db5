//! A worker whose only way out is a corporate proxy: a real squid that asks for a password and allows one
//! port of one host. A gateway that serves names and tunnels on that one port, a real kubelet that joins by
//! the cluster's name, and an agent beside it.
//!
//! The operator of this network is asked for a single rule, and the proxy's log shows a single destination.

use std::collections::BTreeSet;
use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::chown;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use portico_lab::control_plane::{ADMINS, Options};
use portico_lab::firewall::Firewall;
use portico_lab::{
    Access, Authority, ControlPlane, Etcd, Host, Kubectl, Lab, Process, UserCluster, programs, wait,
};
use serde_json::json;

/// How long anything may take that takes a second or two on an idle machine.
const SOON: Duration = Duration::from_secs(90);

/// What API servers under Tunneling give as their address.
const AGENT: Ipv4Addr = Ipv4Addr::new(100, 64, 30, 10);

/// The one place on the allow list: the cluster's own name, and the port of everything else on the Internet.
const NAME: &str = "north.kubermatic.kkp.example.com";
const PORT: u16 = 443;

/// The authority of that cluster's API server.
const AUTHORITY: &str = "apiserver-external.cluster-north.svc.cluster.local:443";

pub(crate) const SQUID_PORT: u16 = 3128;

/// The user that squid runs as: it refuses to be root.
const NOBODY: u32 = 65534;

#[test]
fn a_worker_behind_a_proxy_that_allows_one_port_of_one_host_joins_and_its_pods_have_their_api_server() {
    let portico = programs::portico().unwrap();
    let _turn = crate::turn();
    let lab = Lab::start("squid-story").unwrap();
    let [planes, door, middle, worker] =
        ["planes", "door", "proxy", "worker-1"].map(|name| lab.host(name).unwrap());
    lab.name_resolves(NAME, door.address()).unwrap();
    let etcd = Etcd::start(&planes).unwrap();
    let plane = control_plane(&planes, &etcd);
    let issuer = Authority::new("gateways").unwrap();
    let agents = Authority::new("agents").unwrap();
    let _gateway = gateway(&door, &planes, &issuer, &agents);
    let squid = Squid::start(&middle, NAME, PORT);

    let _wall = Firewall::allow_out_only_to(&worker, &[(middle.address(), SQUID_PORT)]).unwrap();
    nobody_else_is_reached(&worker, &door, &planes);
    let by_name = plane.access().through(&format!("https://{NAME}:{PORT}"));
    squid.refuses_what_it_does_not_know(&worker, &by_name);
    let by_proxy = by_name.by_proxy(&format!("http://agent:secret@{}:{SQUID_PORT}", middle.address()));
    let node = UserCluster::join_worker_on(&worker, &by_proxy).unwrap();

    a_gateway_beyond_the_proxy_watches_its_seed(&portico, &worker, &by_proxy, &by_name);
    let agent = start_agent(&portico, &worker, &middle, &issuer, &agents);
    let inside = plane.access().kubectl(&planes).unwrap();
    let pods = Pods {
        worker: &worker,
        token: token(&inside.run(&["create", "token", "default"]).unwrap()),
        plane: &plane,
    };
    wait::until("the API server to answer by the agent", SOON, || {
        agent.check()?;
        pods.ask()
    })
    .unwrap();
    let watch = pods.watch(&inside);
    for round in 0..3 {
        let name = format!("beat-{round}");
        inside.run(&["create", "configmap", &name]).unwrap();
        watch.wait_for_log(&format!("\"name\":\"{name}\""), SOON).unwrap();
    }
    // The proxy has other users as well, and its operator restarts it now and then.
    squid.process.kill();
    let squid = Squid::start(&middle, NAME, PORT);
    wait::until("the API server to answer by the new proxy", SOON, || pods.ask()).unwrap();
    let kubectl = by_proxy.kubectl(&worker).unwrap();
    kubectl.wait_node_ready("worker-1", SOON).unwrap();

    assert_eq!(squid.destinations(), BTreeSet::from([format!("{NAME}:{PORT}")]));
    drop(node);
}

fn control_plane(host: &Host, etcd: &Etcd) -> ControlPlane {
    let options =
        Options { advertise_address: Some(AGENT), names: vec![NAME.to_owned()], ..Options::new("north") };
    ControlPlane::start(host, etcd, &options).unwrap()
}

/// Names and tunnels by one port; a tunnel says so in its hello.
fn gateway(door: &Host, planes: &Host, issuer: &Authority, agents: &Authority) -> Process {
    let manifests = door.dir().join("manifests");
    fs::create_dir(&manifests).unwrap();
    let metadata = json!({
        "name": "apiserver-external",
        "namespace": "cluster-north",
        "annotations": {
            "nodeport-proxy.k8s.io/expose": "SNI,Tunneling",
            "nodeport-proxy.k8s.io/port-mapping": json!({"secure": NAME}).to_string(),
        },
    });
    let ports = json!([{"name": "secure", "port": 443, "protocol": "TCP"}]);
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"type": "ClusterIP", "ports": ports},
    });
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "apiserver-external-1",
            "namespace": "cluster-north",
            "labels": {"kubernetes.io/service-name": "apiserver-external"},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [planes.address()], "conditions": {"ready": true}}],
        "ports": [{"name": "secure", "port": 6443, "protocol": "TCP"}],
    });
    fs::write(manifests.join("north.yaml"), format!("---\n{service}\n---\n{slice}\n")).unwrap();
    // The name is the cluster's: workers need to reach no other, and tunnels are known by their protocol.
    let dir = door.dir();
    issuer.server("gateway", &[NAME.to_owned()]).unwrap().write(&dir, "gateway").unwrap();
    fs::write(dir.join("agents.crt"), agents.cert()).unwrap();
    let file = |name: &str| dir.join(name).display().to_string();
    let listen = format!("0.0.0.0:{PORT}");
    let args = [
        ["--manifests", &manifests.display().to_string()],
        ["--sni-listen", &listen],
        ["--tunnel-listen", &listen],
        ["--tunnel-tls-cert", &file("gateway.crt")],
        ["--tunnel-tls-key", &file("gateway.key")],
        ["--tunnel-client-ca", &file("agents.crt")],
    ];
    let mut words = vec!["gateway".to_owned()];
    words.extend(args.as_flattened().iter().map(|word| (*word).to_owned()));
    let gateway = door.spawn("gateway", programs::portico().unwrap(), words).unwrap();
    gateway.wait_for_log("listener=", SOON).unwrap();
    gateway
}

/// What the firewall is for: without the proxy there is nothing.
fn nobody_else_is_reached(worker: &Host, door: &Host, planes: &Host) {
    for url in [format!("https://{}:{PORT}/", door.address()), format!("https://{}:6443/", planes.address())]
    {
        let error = worker.run(&["curl", "-sSk", "--connect-timeout", "1", &url]).unwrap_err();
        assert!(error.to_string().contains("exit status: 28"), "{url}: {error:#}");
    }
}

/// A process with a kubeconfig reaches its API server by the same code as an agent its gateway.
fn a_gateway_beyond_the_proxy_watches_its_seed(
    portico: &PathBuf,
    worker: &Host,
    by_proxy: &Access,
    by_name: &Access,
) {
    let gateway = |name: &str, access: &Access| {
        let kubeconfig = access.kubeconfig(name, Some(ADMINS)).unwrap();
        let kubeconfig = kubeconfig.display().to_string();
        let words = [
            "gateway",
            "--kubeconfig",
            &kubeconfig,
            "--sni-listen",
            "off",
            "--admin-listen",
            "127.0.0.1:18002",
        ];
        worker.spawn(name, portico, words).unwrap()
    };
    let watches = gateway("proxied", by_proxy);
    wait::until("everything to be listed through the proxy", SOON, || {
        watches.check()?;
        worker.run(&["curl", "-sS", "--fail-with-body", "--noproxy", "*", "http://127.0.0.1:18002/readyz"])
    })
    .unwrap();
    watches.kill();
    // And what the proxy says is what a person reads.
    let forgetful = by_name.by_proxy(&by_proxy.proxy().unwrap().replace("secret", "forgotten"));
    let refused = gateway("forgetful", &forgetful);
    refused.wait_for_log("asks for credentials", SOON).unwrap();
    refused.kill();
}

/// The agent with the proxy's password in a file, as an init system would start it.
fn start_agent(
    portico: &PathBuf,
    worker: &Host,
    middle: &Host,
    issuer: &Authority,
    agents: &Authority,
) -> Process {
    let dir = worker.dir();
    fs::write(dir.join("gateways.crt"), issuer.cert()).unwrap();
    fs::write(dir.join("password"), "agent:secret\n").unwrap();
    agents.client("worker-1", Some("portico:cluster:north")).unwrap().write(&dir, "agent").unwrap();
    let file = |name: &str| dir.join(name).display().to_string();
    let args = [
        ["--gateway", &format!("{NAME}:{PORT}")],
        ["--forward", &format!("6443={AUTHORITY}")],
        ["--tls-ca", &file("gateways.crt")],
        ["--tls-cert", &file("agent.crt")],
        ["--tls-key", &file("agent.key")],
        ["--proxy", &format!("http://{}:{SQUID_PORT}", middle.address())],
        ["--proxy-credentials", &file("password")],
    ];
    let mut words = vec!["agent".to_owned()];
    words.extend(args.as_flattened().iter().map(|word| (*word).to_owned()));
    worker.spawn("agent", portico, words).unwrap()
}

/// squid, and what it has seen.
pub(crate) struct Squid {
    process: Process,
    address: Ipv4Addr,
    log: PathBuf,
}

impl Squid {
    /// Lets `agent` with the password `secret` go to one port of one name.
    pub(crate) fn start(host: &Host, name: &str, port: u16) -> Squid {
        let dir = host.dir().join("squid");
        fs::create_dir_all(&dir).unwrap();
        chown(&dir, Some(NOBODY), Some(NOBODY)).unwrap();
        // What `openssl passwd -apr1 secret` says.
        fs::write(dir.join("passwd"), "agent:$apr1$portico.$AK0AtmneGEd9U/GperX3M0\n").unwrap();
        let at = |name: &str| dir.join(name).display().to_string();
        let configuration = [
            format!("http_port {SQUID_PORT}"),
            format!("auth_param basic program /usr/lib/squid/basic_ncsa_auth {}", at("passwd")),
            "auth_param basic children 1".to_owned(),
            "auth_param basic realm corporation, inc.".to_owned(),
            "acl CONNECT method CONNECT".to_owned(),
            format!("acl north dstdomain {name}"),
            format!("acl tls port {port}"),
            "acl known proxy_auth REQUIRED".to_owned(),
            "http_access allow CONNECT north tls known".to_owned(),
            "http_access deny all".to_owned(),
            "cache deny all".to_owned(),
            "memory_cache_shared off".to_owned(),
            "pinger_enable off".to_owned(),
            format!("access_log stdio:{}", at("access.log")),
            format!("cache_log {}", at("cache.log")),
            format!("pid_filename {}", at("squid.pid")),
            format!("coredump_dir {}", dir.display()),
            "visible_hostname proxy.test".to_owned(),
            "shutdown_lifetime 0 seconds".to_owned(),
        ];
        fs::write(dir.join("squid.conf"), configuration.join("\n") + "\n").unwrap();
        let mut command = host.command("setpriv").unwrap();
        command.args([&format!("--reuid={NOBODY}"), &format!("--regid={NOBODY}"), "--clear-groups", "--"]);
        command.arg(programs::find("squid").unwrap());
        // Under a name of its own: all squids of one name share memory.
        let name = format!("lab{}", host.lab().number());
        command.args(["-N", "-d", "1", "-n", &name, "-f", &at("squid.conf")]);
        let process = host.spawn_command("squid", command).unwrap();
        let squid = Squid { process, address: host.address(), log: dir.join("access.log") };
        wait::until("squid to listen", SOON, || {
            squid.process.check()?;
            std::net::TcpStream::connect((squid.address, SQUID_PORT)).map(drop)?;
            Ok(())
        })
        .unwrap();
        squid
    }

    /// No password, and another destination: neither gets through.
    fn refuses_what_it_does_not_know(&self, worker: &Host, access: &Access) {
        let nobody = format!("http://{}:{SQUID_PORT}", self.address);
        let agent = format!("http://agent:secret@{}:{SQUID_PORT}", self.address);
        for (proxy, url, code) in [
            (&nobody, access.server().to_owned(), "407"),
            (&agent, format!("https://{NAME}:6443"), "403"),
            (&agent, "https://www.example.com".to_owned(), "403"),
        ] {
            let words = ["curl", "-sSk", "--max-time", "20", "--proxy", proxy, "-w", "%{http_connect}", &url];
            let answer = worker.output(&words, "").unwrap();
            assert_eq!(String::from_utf8_lossy(&answer.stdout), code, "{url} by {proxy}");
        }
    }

    /// Where it let anybody go.
    pub(crate) fn destinations(&self) -> BTreeSet<String> {
        let log = fs::read_to_string(&self.log).unwrap();
        let lines = log.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let passed = lines.filter(|words| words.get(3).is_some_and(|result| result.ends_with("/200")));
        passed.filter_map(|words| words.get(6).map(|&to| to.to_owned())).collect()
    }
}

/// What a pod's service account has to show.
fn token(printed: &str) -> String {
    format!("Authorization: Bearer {}", printed.trim())
}

/// In-cluster clients on the worker: they know the Service's address, the cluster's authority and a token.
struct Pods<'a> {
    worker: &'a Host,
    token: String,
    plane: &'a ControlPlane,
}

impl Pods<'_> {
    fn words(&self, path: &str) -> Vec<String> {
        let ca = self.worker.dir().join("cluster.crt");
        fs::write(&ca, self.plane.access().authority().cert()).unwrap();
        let url = format!("https://kubernetes.default.svc{path}");
        let words = [
            "curl",
            "-sS",
            "--no-buffer",
            "--noproxy",
            "*",
            "--resolve",
            "kubernetes.default.svc:443:10.240.16.1",
            "--cacert",
            &ca.display().to_string(),
            "-H",
            &self.token,
            &url,
        ];
        words.map(str::to_owned).to_vec()
    }

    /// One new connection: any identity may ask this.
    fn ask(&self) -> Result<()> {
        let words = self.words("/api");
        let mut words: Vec<&str> = words.iter().map(String::as_str).collect();
        words.extend(["--max-time", "5"]);
        let answer = self.worker.run(&words)?;
        ensure!(answer.contains("APIVersions"), "the API server answered {answer}");
        Ok(())
    }

    fn watch(&self, inside: &Kubectl) -> Process {
        inside
            .run(&["create", "rolebinding", "pods", "--clusterrole=view", "--serviceaccount=default:default"])
            .unwrap();
        let words = self.words("/api/v1/namespaces/default/configmaps?watch=true&resourceVersion=0");
        let watch = self.worker.spawn("watch", &words[0], &words[1..]).unwrap();
        watch.wait_for_log("kube-root-ca.crt", SOON).unwrap();
        watch
    }
}
