//! Rules that `portico-ports` writes, loaded on hosts: what is needed passes, and nothing else. And read back
//! as the machine prints them: nothing is missing, nothing is needless.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use portico_lab::control_plane::Options;
use portico_lab::{ControlPlane, Etcd, Host, Lab, Process, cilium, wait};
use portico_ports::firewall::{Ruleset, Target, Writing, rules};
use portico_ports::in_force::{Comparison, InForce, compare};
use portico_ports::{Facts, Inventory, model};

const SOON: Duration = Duration::from_secs(20);

/// A front, two workers and a stranger, each with an IPv4 and an IPv6 address.
struct Site {
    hosts: BTreeMap<&'static str, Host>,
    inventory: String,
}

impl Site {
    fn start(lab: &Lab) -> Self {
        let mut hosts = BTreeMap::new();
        for (number, name) in ["front", "worker-1", "worker-2", "stranger"].into_iter().enumerate() {
            let host = lab.host(name).unwrap();
            let address = format!("fd00:13::{}/64", number + 1);
            host.run(&["ip", "addr", "add", &address, "dev", "eth0", "nodad"]).unwrap();
            hosts.insert(name, host);
        }
        let of = |name: &str| format!("{}, 'fd00:13::{}'", hosts[name].address(), place(name));
        let inventory = format!(
            "front: [{}]\nworker: [{}, {}]\nuser: [198.51.100.0/24]\nmaster: [198.51.101.0/24]\ndns: \
             [198.51.102.53]\n",
            of("front"),
            of("worker-1"),
            of("worker-2")
        );
        Self { hosts, inventory }
    }

    fn address(&self, name: &str, ipv6: bool) -> IpAddr {
        if ipv6 {
            format!("fd00:13::{}", place(name)).parse().unwrap()
        } else {
            self.hosts[name].address().into()
        }
    }

    fn rules(&self, product: &str, role: &str, facts: &[&str]) -> Ruleset {
        let product = model::product(product).unwrap();
        let mut known = Facts::default();
        facts.iter().for_each(|fact| known.assign(fact).unwrap());
        let inventory = Inventory::read(&self.inventory, &known).unwrap();
        rules(product, &[product.role(role).unwrap()], &known, &inventory).unwrap()
    }

    /// Listens on a host, both families, and answers `hello`.
    fn listen(&self, name: &str, kind: &str, port: u16) -> Process {
        let listen = format!("{kind}6-LISTEN:{port},ipv6only=0,reuseaddr,fork");
        let host = &self.hosts[name];
        let server = host
            .spawn(&format!("{kind}-{port}"), "socat", ["-U", listen.as_str(), "SYSTEM:echo hello"])
            .unwrap();
        wait::until("the server to listen", SOON, || {
            server.check()?;
            let own = if kind == "TCP" { "-tln" } else { "-uln" };
            let listening = host.run(&["ss", own])?;
            anyhow::ensure!(listening.contains(&format!(":{port} ")), "{listening}");
            Ok(())
        })
        .unwrap();
        server
    }

    /// Whether `from` gets `hello` from `to` at once. That it does not is measured with this.
    fn gets(&self, from: &str, to: &str, ipv6: bool, kind: &str, port: u16) -> bool {
        let address = match self.address(to, ipv6) {
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => format!("[{address}]"),
        };
        let output = if kind == "TCP" {
            let target = format!("TCP:{address}:{port},connect-timeout=2");
            self.hosts[from].output(&["socat", "-u", &target, "STDOUT"], "")
        } else {
            let target = format!("UDP:{address}:{port}");
            self.hosts[from].output(&["socat", "-t2", "STDIO", &target], "hi\n")
        };
        String::from_utf8_lossy(&output.unwrap().stdout).contains("hello")
    }

    /// Waits until `from` gets `hello` from `to`: a busy machine may lose a datagram, or take its time.
    fn reaches(&self, from: &str, to: &str, ipv6: bool, kind: &str, port: u16) {
        let what = format!("{from} to reach {to}, {kind} {port}, IPv6: {ipv6}");
        wait::until(&what, SOON, || {
            anyhow::ensure!(self.gets(from, to, ipv6, kind, port), "no answer");
            Ok(())
        })
        .unwrap();
    }
}

fn place(name: &str) -> usize {
    ["front", "worker-1", "worker-2", "stranger"].iter().position(|known| *known == name).unwrap() + 1
}

const DENY: Writing<'static> = Writing { default_deny: true, selector: &[], namespace: "portico" };

/// Loads rules twice, as a person may do.
fn load(host: &Host, target: Target, rules: &Ruleset, writing: &Writing<'_>) {
    let text = target.write(rules, writing).unwrap().text;
    let program: &[&str] = if target == Target::Nftables { &["nft", "-f", "-"] } else { &["sh", "-s"] };
    for _ in 0..2 {
        host.run_with_input(program, &text).unwrap();
    }
}

/// How the rules in force on a host, as it prints them, differ from those it needs.
fn read_back(host: &Host, target: Target, rules: &Ruleset) -> Comparison {
    let printed = match target {
        Target::Nftables => host.run(&["nft", "-j", "list", "ruleset"]).unwrap(),
        _ => host.run(&["sh", "-c", "iptables-save; ip6tables-save"]).unwrap(),
    };
    compare(rules, &InForce::read(&printed).unwrap())
}

/// The front under Tunneling, then under NodePort, which a second load must replace it by.
fn a_front_admits_what_the_strategy_needs(target: Target, name: &str) {
    let lab = Lab::start(name).unwrap();
    let site = Site::start(&lab);
    let front = &site.hosts["front"];
    let _servers = [6443, 8088, 8080, 29_999, 30_000, 32_767].map(|port| site.listen("front", "TCP", port));
    for (strategy, open, closed) in [
        ("strategy=Tunneling", [6443, 8088].as_slice(), [8080, 30_000].as_slice()),
        ("strategy=NodePort", &[30_000, 32_767], &[29_999, 6443]),
    ] {
        let rules = site.rules("kkp", "front", &[strategy]);
        load(front, target, &rules, &DENY);
        for ipv6 in [false, true] {
            for &port in open {
                site.reaches("worker-1", "front", ipv6, "TCP", port);
            }
            for &port in closed {
                assert!(!site.gets("worker-1", "front", ipv6, "TCP", port), "{strategy} {port} IPv6: {ipv6}");
            }
            assert!(!site.gets("stranger", "front", ipv6, "TCP", open[0]), "{strategy}: a stranger");
        }
        assert_eq!(read_back(front, target, &rules), Comparison::default(), "{strategy}");
    }
    // Without default deny the same rules refuse nothing.
    let rules = site.rules("kkp", "front", &["strategy=Tunneling"]);
    load(front, target, &rules, &Writing { default_deny: false, ..DENY });
    site.reaches("stranger", "front", false, "TCP", 8080);
}

/// Two workers: the network plugin's port and the kubelet's, both ways, and IP-in-IP.
fn workers_reach_each_other_and_only_as_needed(target: Target, name: &str) {
    let lab = Lab::start(name).unwrap();
    let site = Site::start(&lab);
    let _servers = [
        site.listen("worker-2", "TCP", 10_250),
        site.listen("worker-2", "UDP", 8472),
        site.listen("worker-2", "UDP", 8473),
        site.listen("front", "TCP", 6443),
        site.listen("front", "TCP", 8080),
    ];
    let kkp = site.rules("kkp", "worker", &["strategy=Tunneling"]);
    for worker in ["worker-1", "worker-2"] {
        load(&site.hosts[worker], target, &kkp, &DENY);
    }
    for ipv6 in [false, true] {
        site.reaches("worker-1", "worker-2", ipv6, "TCP", 10_250);
        site.reaches("worker-1", "worker-2", ipv6, "UDP", 8472);
        assert!(!site.gets("worker-1", "worker-2", ipv6, "UDP", 8473), "another port, IPv6: {ipv6}");
        assert!(!site.gets("stranger", "worker-2", ipv6, "UDP", 8472), "a stranger, IPv6: {ipv6}");
        site.reaches("worker-1", "front", ipv6, "TCP", 6443);
        assert!(!site.gets("worker-1", "front", ipv6, "TCP", 8080), "egress is narrowed, IPv6: {ipv6}");
    }
    assert_eq!(read_back(&site.hosts["worker-2"], target, &kkp), Comparison::default());
}

#[test]
fn nftables_of_a_front_admit_what_its_strategy_needs_and_nothing_else() {
    a_front_admits_what_the_strategy_needs(Target::Nftables, "nft-front");
}

#[test]
fn iptables_of_a_front_admit_what_its_strategy_needs_and_nothing_else() {
    a_front_admits_what_the_strategy_needs(Target::Iptables, "ipt-front");
}

#[test]
fn nftables_of_workers_let_them_reach_each_other_and_only_as_needed() {
    workers_reach_each_other_and_only_as_needed(Target::Nftables, "nft-workers");
}

#[test]
fn iptables_of_workers_let_them_reach_each_other_and_only_as_needed() {
    workers_reach_each_other_and_only_as_needed(Target::Iptables, "ipt-workers");
}

/// IP-in-IP has no ports: a packet of protocol 4 is sent and received as it is.
#[test]
fn ip_in_ip_passes_between_nodes_and_not_from_strangers() {
    for (target, name) in [(Target::Nftables, "nft-ipip"), (Target::Iptables, "ipt-ipip")] {
        let lab = Lab::start(name).unwrap();
        let mut site = Site::start(&lab);
        site.inventory.push_str("internet: [any]\n");
        let rules = site.rules("kublr", "worker", &["cni=Calico"]);
        let receiver = &site.hosts["worker-2"];
        load(receiver, target, &rules, &DENY);
        let server = receiver
            .spawn("ipip", "socat", ["-u", "IP4-RECVFROM:4,fork", "SYSTEM:tr -dc a-z; echo"])
            .unwrap();
        wait::until("raw packets to arrive", SOON, || {
            let address = format!("IP4-SENDTO:{}:4", receiver.address());
            site.hosts["stranger"].output(&["socat", "-u", "STDIO", &address], "stranger")?;
            site.hosts["worker-1"].output(&["socat", "-u", "STDIO", &address], "worker")?;
            let log = server.log();
            anyhow::ensure!(log.contains("worker"), "{log}");
            Ok(())
        })
        .unwrap();
        assert!(!server.log().contains("stranger"));
    }
}

/// What is written as a policy, of Kubernetes or of Cilium, is one to a real API server, which reads it
/// strictly and keeps nothing.
#[test]
fn network_policies_of_kubernetes_and_of_cilium_are_accepted_by_a_real_api_server() {
    let _turn = crate::turn();
    let lab = Lab::start("network-policies").unwrap();
    let host = lab.host("planes").unwrap();
    let etcd = Etcd::start(&host).unwrap();
    let control_plane = ControlPlane::start(&host, &etcd, &Options::new("policies")).unwrap();
    let kubectl = control_plane.access().kubectl(&host).unwrap();

    let inventory = "front: [203.0.113.9, '2001:db8::9']\nworker: [10.0.1.0/24, '2001:db8:1::/64']\nuser: \
                     [any]\nmaster: [10.0.2.0/24]\nseed: [10.0.3.0/24]\nseed-api: [10.0.3.7]\ndns: \
                     [10.0.0.53]\nprovider-api: [198.51.100.0/24]\n";
    let mut facts = Facts::default();
    ["strategy=NodePort", "provider=aws"].iter().for_each(|fact| facts.assign(fact).unwrap());
    let inventory = Inventory::read(inventory, &facts).unwrap();
    let product = model::product("kkp").unwrap();
    let selector = [("app.kubernetes.io/name".to_owned(), "portico-gateway".to_owned())];
    cilium::install(&kubectl).unwrap();
    let mut spoiled = Vec::new();
    for (target, default_deny) in [
        (Target::NetworkPolicy, false),
        (Target::NetworkPolicy, true),
        (Target::Cilium, false),
        (Target::Cilium, true),
    ] {
        let writing = Writing { default_deny, selector: &selector, namespace: "default" };
        for role in ["front", "worker", "seed", "master"] {
            let rules = rules(product, &[product.role(role).unwrap()], &facts, &inventory).unwrap();
            if (target, default_deny, role) == (Target::Cilium, true, "front") {
                assert!(target.write(&rules, &writing).is_err(), "it would cut off pods");
                continue;
            }
            let text = target.write(&rules, &writing).unwrap().text;
            let arguments = ["apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"];
            let answer = kubectl.run_with_input(&arguments, &text).unwrap();
            let kind = match (target, role) {
                (Target::NetworkPolicy, _) => "networkpolicy.networking.k8s.io",
                (_, "front") => "ciliumnetworkpolicy.cilium.io",
                _ => "ciliumclusterwidenetworkpolicy.cilium.io",
            };
            assert!(answer.contains(&format!("{kind}/portico-{role}")), "{answer}");
            let wrong = text.replace("endPort", "endport");
            if wrong != text {
                let answer = kubectl.run_with_input(&arguments, &wrong);
                assert!(answer.is_err(), "an unknown field is refused, or the answer above proves nothing");
                spoiled.push(target);
            }
        }
    }
    let kinds = [Target::NetworkPolicy, Target::Cilium];
    assert!(kinds.iter().all(|kind| spoiled.contains(kind)), "no range of ports: {spoiled:?}");
}
