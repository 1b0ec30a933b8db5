//! The rules that `portico firewall` prints, on every machine of a KKP site, with everything else refused.
//! What `portico preflight` says of them, and whether what each strategy needs really flows, Konnectivity
//! beside it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use portico_lab::pki::{Certificate, Pki};
use portico_lab::{Host, Lab, Process, wait};

use crate::common::{PATIENCE, run, stderr, stdout};
use crate::isolation::on;
use crate::preflight::{BINARY, rows_that_fail};
use crate::proof::{authority, echo, hello, host, manifest};

/// The machines and what they are.
const MACHINES: [(&str, &str); 8] = [
    ("ingress", "master-ingress"),
    ("master", "master"),
    ("seed", "seed-api"),
    ("front", "front"),
    ("worker-1", "worker"),
    ("worker-2", "worker"),
    ("desk", "user"),
    ("names", "dns"),
];

/// The machines that ask. The others answer.
const ASKING: [&str; 3] = ["master", "worker-1", "desk"];

/// Where pods reach their API server.
const AGENT: Ipv4Addr = Ipv4Addr::new(100, 64, 30, 10);

/// The cluster's NodePorts: of its API server, and of its Konnectivity server.
const NODE_PORTS: (u16, u16) = (31_001, 31_002);

/// How long a packet that is dropped is waited for.
const DROPPED: Duration = Duration::from_secs(2);

struct Site {
    lab: Lab,
    machines: BTreeMap<&'static str, (Host, &'static str)>,
    strategy: &'static str,
}

impl Site {
    fn start(name: &str, strategy: &'static str) -> Self {
        let lab = Lab::start(name).unwrap();
        let machines: BTreeMap<_, _> =
            MACHINES.into_iter().map(|(name, role)| (name, (lab.host(name).unwrap(), role))).collect();
        let mut places: BTreeMap<&str, Vec<Ipv4Addr>> = BTreeMap::new();
        machines.values().for_each(|(host, role)| places.entry(*role).or_default().push(host.address()));
        let lines = places.iter().map(|(role, addresses)| format!("{role}: {addresses:?}\n"));
        fs::write(lab.dir().join("inventory.yaml"), lines.collect::<String>()).unwrap();
        Self { lab, machines, strategy }
    }

    fn host(&self, name: &str) -> &Host {
        &self.machines[name].0
    }

    fn inventory(&self) -> String {
        self.lab.dir().join("inventory.yaml").display().to_string()
    }

    /// What this machine is, and what is known of the site, as flags.
    fn known(&self, name: &str) -> Vec<String> {
        let role = self.machines[name].1;
        let inventory = self.inventory();
        let flags = ["--role", role, "--inventory", &inventory, "--strategy", self.strategy];
        let facts = ["--cni", "Cilium", "--set", "provider=fake"];
        flags.into_iter().chain(facts).map(str::to_owned).collect()
    }

    /// The rules of this machine, as they are printed.
    fn rules(&self, name: &str) -> String {
        let known = self.known(name);
        let own = ["firewall", "--for", "nftables", "--default-deny"];
        let output = run(&own.into_iter().chain(known.iter().map(String::as_str)).collect::<Vec<_>>());
        assert!(output.status.success(), "{name}: {}", stderr(&output));
        stdout(&output)
    }

    /// Loads all rules of all machines, but for one line. What the kernel remembers of flows goes: they would
    /// be let through.
    fn load(&self, rules: &BTreeMap<&str, String>, without: Option<(&str, &str)>) {
        for (name, text) in rules {
            let less = without.filter(|(on, _)| on == name).map(|(_, line)| text.replace(line, ""));
            let host = self.host(name);
            host.run_with_input(&["nft", "-f", "-"], less.as_ref().unwrap_or(text)).unwrap();
            host.run(&["conntrack", "-F"]).unwrap();
        }
    }

    fn all_rules(&self) -> BTreeMap<&'static str, String> {
        self.machines.keys().map(|name| (*name, self.rules(name))).collect()
    }

    /// Everything that preflight asks answers.
    fn answer(&self) -> Vec<Process> {
        let names = self.host("names");
        answer_names(names);
        let answers = |name: &&&str| !ASKING.contains(*name) && **name != "names";
        let listen = |name: &&str| {
            let arguments = ["preflight".to_owned(), "--listen".to_owned()];
            let arguments = arguments.into_iter().chain(self.known(name));
            let process = self.host(name).spawn("preflight", BINARY, arguments).unwrap();
            process.wait_for_log("answering preflight checks", PATIENCE).unwrap();
            process
        };
        self.machines.keys().filter(answers).map(listen).collect()
    }

    /// The rows that preflight calls failed or unproven, from every machine that asks.
    fn rows_that_fail(&self) -> (BTreeSet<String>, String) {
        let run = |name: &&str| {
            let more = ["--timeout", "2500ms"].map(str::to_owned);
            (self.host(name), self.known(name).into_iter().chain(more).collect::<Vec<_>>())
        };
        rows_that_fail(&ASKING.iter().map(run).collect::<Vec<_>>())
    }

    /// With all rules preflight is green; with one less, in turn, it names the row of that rule. Rules of the
    /// machine that accepts; with `PORTICO_PROVE=1` those of the machine that opens, too.
    fn preflight_names_each_rule_that_is_missing(&self) {
        let _answering = self.answer();
        let rules = self.all_rules();
        self.load(&rules, None);
        let (rows, all) = self.rows_that_fail();
        assert!(rows.is_empty(), "every rule is there, and this fails:\n{all}");
        let proves = std::env::var_os("PORTICO_PROVE").is_some();
        for (name, text) in &rules {
            for line in text.lines().filter(|line| line.contains(" comment \"")) {
                let expected = rows_of(line);
                let between_workers =
                    expected.iter().all(|row| row == "kkp-kubelet" || row.starts_with("kkp-cilium"));
                let opens = line.contains(" daddr ");
                if (opens && !proves) || (opens && *name == "worker-2" && !between_workers) {
                    continue;
                }
                self.load(&rules, Some((name, line)));
                let (rows, all) = self.rows_that_fail();
                assert_eq!(rows, expected, "{name} without {}:\n{all}", line.trim());
            }
        }
    }

    /// What the strategy needs flows under these rules; without the rule for workers theirs does not, and
    /// that of others does.
    fn what_the_strategy_needs_flows(&self) {
        let rules = self.all_rules();
        self.load(&rules, None);
        let cluster = Cluster::start(self);
        for from in ["worker-1", "desk", "master"] {
            reaches(self.host(from), cluster.api, hello("a"));
        }
        if self.strategy == "Tunneling" {
            let _agent = cluster.node_agent(self);
            reaches(self.host("worker-1"), (AGENT, 6443).into(), b"a pod".to_vec());
        }
        let agent = cluster.konnectivity_agent(self);
        let kubelet = SocketAddr::from((self.host("worker-2").address(), 10_250));
        on(self.host("worker-2"), move || echo(kubelet)).join().unwrap();
        wait::until("the API server to reach a kubelet", PATIENCE, || {
            agent.check()?;
            cluster.reaches_by_konnectivity(kubelet)
        })
        .unwrap();

        let of_workers = rules["front"].lines().find(|line| {
            rows_of(line).iter().any(|row| ["kkp-8", "kkp-9", "kkp-10"].contains(&row.as_str()))
        });
        self.load(&rules, Some(("front", of_workers.expect("the front has a rule for workers"))));
        assert!(!exchanges(self.host("worker-1"), cluster.api, hello("a"), DROPPED));
        reaches(self.host("desk"), cluster.api, hello("a"));
    }
}

/// The rows in the comment of a rule.
fn rows_of(line: &str) -> BTreeSet<String> {
    let ids = line.split(" comment \"").nth(1).and_then(|rest| rest.split('"').next());
    ids.unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

/// A name server that refuses every question (RFC 1035 section 4.1.1): it is there, and that is all.
fn answer_names(host: &Host) {
    fn refuse(question: &mut [u8]) {
        const RESPONSE: u8 = 0x80;
        const REFUSED: u8 = 5;
        question[2] |= RESPONSE;
        question[3] |= REFUSED;
    }
    let at = SocketAddr::from((host.address(), 53));
    on(host, move || {
        let (datagrams, streams) = (UdpSocket::bind(at).unwrap(), TcpListener::bind(at).unwrap());
        std::thread::spawn(move || {
            let mut bytes = [0; 512];
            while let Ok((length, from)) = datagrams.recv_from(&mut bytes) {
                refuse(&mut bytes[..length]);
                // A client that is gone needs none.
                let _ = datagrams.send_to(&bytes[..length], from);
            }
        });
        std::thread::spawn(move || {
            for mut stream in streams.incoming().flatten() {
                let mut bytes = [0; 512];
                // The length goes first (RFC 1035 section 4.2.2). One that leaves without a question was a
                // probe.
                if let Ok(length @ 14..) = stream.read(&mut bytes) {
                    refuse(&mut bytes[2..length]);
                    let _ = stream.write_all(&bytes[..length]);
                }
            }
        });
    })
    .join()
    .unwrap();
}

/// A cluster's control plane behind a gateway, all on the front.
struct Cluster {
    pki: Pki,
    /// Where the API server is reached under the strategy.
    api: SocketAddr,
    _gateway: Process,
    _server: Process,
}

impl Cluster {
    fn start(site: &Site) -> Self {
        let (front, pki) = (site.host("front"), Pki::new());
        let names = [host("a"), format!("konnectivity-server.{}", host("a"))];
        pki.issue("front", Certificate::server(&[&names[0], &names[1], &front.address().to_string()]));
        pki.issue("a", Certificate::cluster("a"));
        names.iter().for_each(|name| site.lab.name_resolves(name, front.address()).unwrap());
        let at = |port: u16| SocketAddr::from((front.address(), port));
        let api_server = at(7443);
        on(front, move || echo(api_server)).join().unwrap();

        let manifests = site.lab.dir().join("manifests");
        fs::create_dir(&manifests).unwrap();
        let api = manifest("a", Some(NODE_PORTS.0), api_server);
        let konnectivity = manifest("a", Some(NODE_PORTS.1), at(8132))
            .replace("apiserver-external", "konnectivity-server")
            .replace(&names[0], &names[1]);
        fs::write(manifests.join("a.yaml"), api + &konnectivity).unwrap();
        let [cert, key, ca] = ["front.crt", "front.key", "ca.crt"].map(|name| pki.path(name));
        let tls = ["--tunnel-tls-cert", &cert, "--tunnel-tls-key", &key, "--tunnel-client-ca", &ca];
        let from = ["gateway", "--admin-listen", "off", "--manifests", manifests.to_str().unwrap()];
        let gateway = front.spawn("gateway", BINARY, from.into_iter().chain(tls)).unwrap();

        let socket = format!("--uds-name={}", Self::socket(pki.folder()));
        let files = [("cert", &cert), ("key", &key), ("ca-cert", &ca)];
        let files = files.map(|(what, path)| format!("--cluster-{what}={path}"));
        let own = ["konnectivity", "server", "--mode=http-connect", "--server-port=0", "--agent-port=8132"];
        let own = own.map(str::to_owned).into_iter().chain([socket]).chain(files);
        let server = front.spawn("konnectivity", BINARY, own).unwrap();
        let api = if site.strategy == "Tunneling" { at(6443) } else { at(NODE_PORTS.0) };
        Self { pki, api, _gateway: gateway, _server: server }
    }

    fn socket(folder: &Path) -> String {
        folder.join("konnectivity.sock").display().to_string()
    }

    fn node_agent(&self, site: &Site) -> Process {
        let [cert, key, ca] = ["a.crt", "a.key", "ca.crt"].map(|name| self.pki.path(name));
        let (gateway, forward) = (format!("{}:8088", host("a")), format!("6443={}", authority("a")));
        let own = ["agent", "--gateway", &gateway, "--forward", &forward, "--proxy", "off"];
        let tls = ["--tls-ca", &ca, "--tls-cert", &cert, "--tls-key", &key];
        let agent = site.host("worker-1").spawn("agent", BINARY, own.into_iter().chain(tls)).unwrap();
        agent.wait_for_log("listening forward=", PATIENCE).unwrap();
        agent
    }

    fn konnectivity_agent(&self, site: &Site) -> Process {
        let [cert, key, ca] = ["a.crt", "a.key", "ca.crt"].map(|name| self.pki.path(name));
        let (name, port) = match site.strategy {
            "Tunneling" => (format!("konnectivity-server.{}", host("a")), 6443),
            _ => (host("a"), NODE_PORTS.1),
        };
        let flags = [
            format!("--proxy-server-host={name}"),
            format!("--proxy-server-port={port}"),
            format!("--ca-cert={ca}"),
            format!("--agent-cert={cert}"),
            format!("--agent-key={key}"),
        ];
        let own = ["konnectivity", "agent"].map(str::to_owned);
        site.host("worker-1").spawn("konnectivity", BINARY, own.into_iter().chain(flags)).unwrap()
    }

    /// Bytes go to a kubelet and back, as an API server sends them.
    fn reaches_by_konnectivity(&self, kubelet: SocketAddr) -> anyhow::Result<()> {
        let mut stream = UnixStream::connect(Self::socket(self.pki.folder()))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        write!(stream, "CONNECT {kubelet} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")?;
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            head.push(byte[0]);
        }
        anyhow::ensure!(head.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&head));
        stream.write_all(b"logs")?;
        let mut answer = [0; 4];
        stream.read_exact(&mut answer)?;
        anyhow::ensure!(&answer == b"logs", "{answer:?}");
        Ok(())
    }
}

/// Whether bytes that are sent from a host come back.
fn exchanges(from: &Host, to: SocketAddr, bytes: Vec<u8>, limit: Duration) -> bool {
    let exchange = move || {
        let mut stream = TcpStream::connect_timeout(&to, limit)?;
        stream.set_read_timeout(Some(limit))?;
        stream.write_all(&bytes)?;
        let mut answer = vec![0; bytes.len()];
        stream.read_exact(&mut answer)?;
        Ok::<_, std::io::Error>(answer == bytes)
    };
    on(from, exchange).join().unwrap().unwrap_or(false)
}

/// Waits until [`exchanges`] succeeds, because what has just been started may not serve yet.
fn reaches(from: &Host, to: SocketAddr, bytes: Vec<u8>) {
    wait::until(&format!("{} to reach {to}", from.name()), PATIENCE, || {
        anyhow::ensure!(exchanges(from, to, bytes.clone(), DROPPED), "no answer");
        Ok(())
    })
    .unwrap();
}

#[test]
fn preflight_names_each_rule_that_is_taken_out_of_what_firewall_prints() {
    Site::start("firewalled-rules", "Tunneling").preflight_names_each_rule_that_is_missing();
    if std::env::var_os("PORTICO_PROVE").is_some() {
        Site::start("firewalled-ports", "NodePort").preflight_names_each_rule_that_is_missing();
    }
}

#[test]
fn traffic_of_every_strategy_and_konnectivity_flow_under_the_rules_that_firewall_prints() {
    for (name, strategy) in
        [("flow-name", "Tunneling"), ("flow-port", "NodePort"), ("flow-balancer", "LoadBalancer")]
    {
        Site::start(name, strategy).what_the_strategy_needs_flows();
    }
}
