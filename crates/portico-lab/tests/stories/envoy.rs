//! Either end of the tunnel with Envoy at the other, each configured as KKP does it. An agent of KKP's keeps
//! working when its seed changes to Portico's gateway, and Portico's agent works before the seed changes.
//!
//! No Kubernetes here: what is behind the gateway sends back what it receives, and ends when its client has.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::Ipv4Addr;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use portico_lab::{Host, Lab, Process, programs, wait};
use rustix::process::Signal;
use serde_json::{Value, json};

/// How long anything may take that takes a second or two on an idle machine.
const SOON: Duration = Duration::from_secs(60);

/// The tunnel agent IP, by KKP's default.
const AGENT: Ipv4Addr = Ipv4Addr::new(100, 64, 30, 10);

/// The authority of the API server of cluster `north`.
const AUTHORITY: &str = "apiserver-external.cluster-north.svc.cluster.local:443";

/// How KKP's agent asks for signs of life. It ends a tunnel whose gateway does not answer.
const KEEPALIVE: [Duration; 2] = [Duration::from_secs(30), Duration::from_secs(5)];

/// A transfer that takes many turns of every window and buffer on the way.
const BULK: usize = 8_000_000;

#[test]
fn an_envoy_agent_as_kkp_configures_it_works_with_our_gateway() {
    let site = Site::start("envoy-agent");
    let first = site.portico_gateway("first");
    // KKP's own program for it makes a dummy interface, which not every kernel has.
    site.worker.run(&["ip", "address", "add", &format!("{AGENT}/32"), "dev", "lo"]).unwrap();
    let agent = site.envoy(&site.worker, "agent", &agent_of_kkp(site.door.address()));
    site.wait_open(&agent);

    let mut held = Held::open(&site.worker);
    let opened = Instant::now();
    site.carries_much_and_many();

    // GOAWAY: Envoy opens what is new elsewhere, and what it holds goes on.
    let second = site.portico_gateway("second");
    first.wait_for_log("a successor has taken the listeners over", SOON).unwrap();
    held.beat();
    site.carries_much_and_many();
    held.beat();
    first.check().expect("what the held connection came by");

    // One that answers no PING has been given up by now.
    wait::until("Envoy's time for a sign of life to pass", SOON + KEEPALIVE[0], || {
        let [interval, patience] = KEEPALIVE;
        ensure!(opened.elapsed() > interval + patience, "it has not yet");
        Ok(())
    })
    .unwrap();
    held.beat();
    assert_eq!(site.envoy_counts("http2.keepalive_timeout"), 0, "tunnels Envoy has given up");
    drop(held);
    wait::until("the first gateway to end, its last stream gone", SOON, || {
        ensure!(first.check().is_err(), "it runs");
        Ok(())
    })
    .unwrap();

    second.kill();
    site.ask().expect_err("nobody carries it");
    let _third = site.portico_gateway("third");
    site.wait_open(&agent);
}

#[test]
fn our_agent_works_with_an_envoy_gateway_as_kkp_configures_it() {
    let site = Site::start("envoy-gateway");
    let gateway = || site.envoy(&site.door, "gateway", &gateway_of_kkp(site.planes.address()));
    let first = gateway();
    let address = format!("h2c://{}:8088", site.door.address());
    let forward = format!("6443={AUTHORITY}");
    let args = ["agent", "--gateway", &address, "--forward", &forward, "--admin-listen", "127.0.0.1:8003"];
    let agent = site.worker.spawn("agent", programs::portico().unwrap(), args).unwrap();
    site.wait_open(&agent);

    let mut held = Held::open(&site.worker);
    site.carries_much_and_many();
    held.beat();
    // It takes a moment: Envoy never says what it thinks of an identity.
    wait::until("the agent to be ready", SOON, || {
        let ready =
            site.worker.run(&["curl", "-sS", "--max-time", "20", "http://127.0.0.1:8003/readyz?verbose"])?;
        ensure!(ready.trim().ends_with("\nready"), "{ready}");
        Ok(())
    })
    .unwrap();

    // It stands still and says nothing, then it goes on: a client that waits that long loses nothing.
    first.freeze().unwrap();
    site.ask().expect_err("nobody carries it");
    first.signal(Signal::CONT).unwrap();
    site.wait_open(&agent);
    held.beat();

    first.kill();
    site.ask().expect_err("nobody carries it");
    let _second = gateway();
    site.wait_open(&agent);
    site.carries_much_and_many();
    agent.stop(SOON).unwrap();
}

/// A host behind the gateway, one for the gateway, one for the agent.
struct Site {
    planes: Host,
    door: Host,
    worker: Host,
    _backend: Process,
}

impl Site {
    fn start(name: &str) -> Site {
        let lab = Lab::start(name).unwrap();
        let [planes, door, worker] = ["planes", "door", "worker"].map(|name| lab.host(name).unwrap());
        let backend = planes
            .spawn("backend", "socat", ["TCP-LISTEN:6443,fork,reuseaddr,backlog=128", "EXEC:cat"])
            .unwrap();
        let manifests = door.dir().join("manifests");
        fs::create_dir(&manifests).unwrap();
        let objects = [exposed_service(), endpoint(planes.address())];
        let text: String = objects.iter().map(|object| format!("---\n{object}\n")).collect();
        fs::write(manifests.join("north.yaml"), text).unwrap();
        Site { planes, door, worker, _backend: backend }
    }

    /// Our gateway, which takes over from the one before.
    fn portico_gateway(&self, name: &str) -> Process {
        let [socket, manifests] =
            ["take-over.sock", "manifests"].map(|name| self.door.dir().join(name).display().to_string());
        let args = ["gateway", "--manifests", &manifests, "--take-over", &socket, "--tunnel-plaintext"];
        let process = self.door.spawn(name, programs::portico().unwrap(), args).unwrap();
        process.wait_for_log("listener=tunnel", SOON).unwrap();
        process
    }

    /// Envoy with these static resources; its administration is where KKP has it.
    fn envoy(&self, host: &Host, name: &str, resources: &Value) -> Process {
        let file = host.dir().join(format!("{name}.json"));
        let admin = json!({"address": address(Ipv4Addr::LOCALHOST, 9902)});
        fs::write(&file, json!({"admin": admin, "static_resources": resources}).to_string()).unwrap();
        let file = file.display().to_string();
        let args = ["--config-path", &file, "--use-dynamic-base-id", "--log-level", "warning"];
        host.spawn(name, programs::envoy().unwrap(), args).unwrap()
    }

    /// A counter of the Envoy agent about its tunnels.
    fn envoy_counts(&self, counter: &str) -> u64 {
        let name = format!("cluster.proxy_cluster.{counter}");
        let url = format!("http://127.0.0.1:9902/stats?filter=^{name}$");
        let answer = self.worker.run(&["curl", "-sS", "--max-time", "20", &url]).unwrap();
        let value = answer.trim().strip_prefix(&format!("{name}: "));
        value.unwrap_or_else(|| panic!("Envoy counts {answer:?}")).parse().unwrap()
    }

    /// One new connection by the agent's address: what goes there comes back.
    fn ask(&self) -> Result<()> {
        says_back(&self.worker, "hello\n")
    }

    fn wait_open(&self, agent: &Process) {
        wait::until("an answer through the tunnel", SOON, || {
            agent.check()?;
            self.ask()
        })
        .unwrap();
    }

    /// A large transfer in both directions at once, whose end is the client's half-close; and many
    /// connections side by side.
    fn carries_much_and_many(&self) {
        let line = "abcdefghijklmnopqrstuvwxyz0123456789\n";
        says_back(&self.worker, &line.repeat(BULK / line.len())).unwrap();
        std::thread::scope(|scope| {
            let many: Vec<_> = (0..16).map(|n| scope.spawn(move || (n, self.ask()))).collect();
            for one in many {
                let (n, answer) = one.join().unwrap();
                answer.unwrap_or_else(|error| panic!("connection {n} of 16: {error:#}"));
            }
        });
    }
}

/// Sends `text` to the agent's address, says that this is all, and checks that the same comes back, and its
/// end.
fn says_back(from: &Host, text: &str) -> Result<()> {
    // A client waits for the end of the other direction for as long; longer than that, something hangs.
    let to = format!("TCP:{AGENT}:6443,connect-timeout=5");
    let back = from.run_with_input(&["timeout", "15", "socat", "-t", "15", "-", &to], text)?;
    ensure!(back == text, "{} of {} bytes came back, or others", back.len(), text.len());
    Ok(())
}

/// A connection that stays, and moves a line each way now and then.
struct Held {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Held {
    fn open(worker: &Host) -> Held {
        let mut command = worker.command("socat").unwrap();
        command.args(["-", &format!("TCP:{AGENT}:6443")]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (to, from) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut held = Held { child, to, from };
        held.beat();
        held
    }

    fn beat(&mut self) {
        self.to.write_all(b"beat\n").unwrap();
        let mut back = String::new();
        self.from.read_line(&mut back).unwrap();
        assert_eq!(back, "beat\n", "the connection that was held has ended");
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // It may have ended, which is just as well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn exposed_service() -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": "apiserver-external",
            "namespace": "cluster-north",
            "annotations": {"nodeport-proxy.k8s.io/expose": "Tunneling"},
        },
        "spec": {"type": "ClusterIP", "ports": [{"name": "secure", "port": 443, "protocol": "TCP"}]},
    })
}

fn endpoint(planes: Ipv4Addr) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "apiserver-external-1",
            "namespace": "cluster-north",
            "labels": {"kubernetes.io/service-name": "apiserver-external"},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [planes], "conditions": {"ready": true}}],
        "ports": [{"name": "secure", "port": 6443, "protocol": "TCP"}],
    })
}

/// The configuration of KKP's DaemonSet `envoy-agent`, without its listener for statistics.
fn agent_of_kkp(gateway: Ipv4Addr) -> Value {
    let [interval, timeout] = KEEPALIVE.map(|time| format!("{}s", time.as_secs()));
    let options = json!({
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {
                "http2_protocol_options": {
                    "connection_keepalive": {"interval": interval, "timeout": timeout},
                },
            },
        },
    });
    json!({
        "clusters": [{
            "name": "proxy_cluster",
            "type": "LOGICAL_DNS",
            "connect_timeout": "5s",
            "typed_extension_protocol_options": options,
            "load_assignment": assignment("proxy_cluster", gateway, 8088),
        }],
        "listeners": [{
            "name": "listener_0",
            "address": address(AGENT, 6443),
            "filter_chains": [{
                "filters": [{
                    "name": "envoy.filters.network.tcp_proxy",
                    "typed_config": {
                        "@type": "type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy",
                        "stat_prefix": "listener_0",
                        "cluster": "proxy_cluster",
                        "tunneling_config": {"hostname": AUTHORITY},
                    },
                }],
            }],
        }],
    })
}

/// The tunneling listener of KKP's nodeport-proxy, with the one route its control plane would send.
fn gateway_of_kkp(planes: Ipv4Addr) -> Value {
    let name = "cluster-north/apiserver-external-secure";
    let host = json!({
        "name": name,
        "domains": [AUTHORITY],
        "routes": [{
            "match": {"connect_matcher": {}},
            "route": {
                "cluster": name,
                "upgrade_configs": [{"upgrade_type": "CONNECT", "connect_config": {}}],
            },
        }],
    });
    let manager = json!({
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "ingress_http",
        "codec_type": "AUTO",
        "http2_protocol_options": {"allow_connect": true},
        "upgrade_configs": [{"upgrade_type": "CONNECT"}],
        "route_config": {"name": "tunnels", "virtual_hosts": [host]},
        "http_filters": [{
            "name": "envoy.filters.http.router",
            "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
        }],
    });
    json!({
        "clusters": [{
            "name": name,
            "type": "STATIC",
            "connect_timeout": "1s",
            "load_assignment": assignment(name, planes, 6443),
        }],
        "listeners": [{
            "name": "tunneling_listener",
            "address": address(Ipv4Addr::UNSPECIFIED, 8088),
            "filter_chains": [{
                "filters": [{
                    "name": "envoy.filters.network.http_connection_manager",
                    "typed_config": manager,
                }],
            }],
        }],
    })
}

fn assignment(cluster: &str, host: Ipv4Addr, port: u16) -> Value {
    let endpoint = json!({"endpoint": {"address": address(host, port)}});
    json!({"cluster_name": cluster, "endpoints": [{"lb_endpoints": [endpoint]}]})
}

fn address(host: Ipv4Addr, port: u16) -> Value {
    json!({"socket_address": {"address": host, "port_value": port}})
}
