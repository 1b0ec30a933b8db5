//! `portico preflight` between hosts in namespaces, each with a firewall that lets in what the model asks for
//! and nothing else. All rules: everything passes. One rule less: exactly its row fails, by name. The rules
//! that `portico firewall` prints are in `firewalled`, networks with other faults in `network_faults`.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::Output;

use portico_lab::pki::Identity;
use portico_lab::{Authority, Host, Lab, Process};
use rustix::process::Signal;
use serde_json::Value;

use crate::common::{PATIENCE, stderr, stdout};

pub(crate) const BINARY: &str = env!("CARGO_BIN_EXE_portico");

/// What firewalls let in: the rows it serves, the hosts it stands on, from which hosts, and what.
struct Rule<'a> {
    rows: &'a [&'a str],
    on: &'a [&'a Host],
    from: &'a [&'a Host],
    matching: &'a str,
}

/// Puts the firewalls of all hosts up, with these rules. What the kernel remembers of flows goes: they would
/// be let through.
fn put_up(hosts: &[&Host], rules: &[&Rule<'_>]) {
    for host in hosts {
        let own = rules.iter().filter(|rule| rule.on.iter().any(|on| on.name() == host.name()));
        let lines: Vec<String> = own
            .map(|rule| {
                let from: Vec<String> = rule.from.iter().map(|host| host.address().to_string()).collect();
                format!("ip saddr {{ {} }} {} accept", from.join(", "), rule.matching)
            })
            .collect();
        let table = format!(
            "table inet site
delete table inet site
table inet site {{
  chain input {{
    type filter hook input priority 0; policy drop;
    iif lo accept; ct state established,related accept
    {}
  }}
}}
",
            lines.join("\n    ")
        );
        host.run_with_input(&["nft", "-f", "-"], &table).unwrap();
        host.run(&["conntrack", "-F"]).unwrap();
    }
}

/// The rows that fail or stay unproven when each host checks with these flags, at once; and their findings.
pub(crate) fn rows_that_fail(runs: &[(&Host, Vec<String>)]) -> (BTreeSet<String>, String) {
    let (mut rows, mut all) = (BTreeSet::new(), String::new());
    let outputs: Vec<Output> = std::thread::scope(|scope| {
        let check = |(host, flags): &(&Host, Vec<String>)| {
            let own = [BINARY, "preflight", "-o", "json"];
            host.output(&own.into_iter().chain(flags.iter().map(String::as_str)).collect::<Vec<_>>(), "")
        };
        let runs: Vec<_> = runs.iter().map(|run| scope.spawn(move || check(run).unwrap())).collect();
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    });
    for output in outputs {
        let findings: Vec<Value> = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", stderr(&output)));
        for finding in findings {
            if ["failed", "unproven"].contains(&finding["status"].as_str().unwrap()) {
                rows.insert(finding["row"]["id"].as_str().unwrap().to_owned());
                all.push_str(&format!("{finding}\n"));
            }
        }
        assert!(matches!(output.status.code(), Some(0 | 1)), "{}", stderr(&output));
    }
    (rows, all)
}

/// Hosts, an inventory of them, and what is known of the installation.
pub(crate) struct Site {
    pub(crate) lab: Lab,
    pub(crate) inventory: PathBuf,
    facts: &'static [&'static str],
}

impl Site {
    pub(crate) fn new(name: &str, facts: &'static [&'static str]) -> Self {
        let lab = Lab::start(name).unwrap();
        let inventory = lab.dir().join("inventory.yaml");
        Self { lab, inventory, facts }
    }

    pub(crate) fn place(&self, roles: &[(&str, &[&Host])]) {
        let line = |(role, hosts): &(&str, &[&Host])| {
            let addresses: Vec<Ipv4Addr> = hosts.iter().map(|host| host.address()).collect();
            format!("{role}: {addresses:?}\n")
        };
        std::fs::write(&self.inventory, roles.iter().map(line).collect::<String>()).unwrap();
    }

    fn arguments(&self, role: &str) -> Vec<String> {
        let own = ["preflight", "--role", role, "--inventory", self.inventory.to_str().unwrap()];
        own.iter().chain(self.facts).map(|text| (*text).to_owned()).collect()
    }

    /// Has the host answer in its roles.
    pub(crate) fn listen(&self, host: &Host, role: &str) -> Process {
        let arguments = self.arguments(role).into_iter().chain(["--listen".to_owned()]);
        let process = host.spawn("preflight", BINARY, arguments).unwrap();
        process.wait_for_log("answering preflight checks", PATIENCE).unwrap();
        process
    }

    fn check(&self, host: &Host, role: &str, more: &[&str]) -> Output {
        let arguments = self.arguments(role);
        let all: Vec<&str> = [BINARY]
            .into_iter()
            .chain(arguments.iter().map(String::as_str))
            .chain(more.iter().copied())
            .collect();
        host.output(&all, "").unwrap()
    }

    /// Checks from each host, and returns the rows that fail or stay unproven, and their findings.
    pub(crate) fn rows_that_fail(&self, from: &[(&Host, &str)]) -> (BTreeSet<String>, String) {
        let arguments = |role: &str| self.arguments(role).into_iter().skip(1).collect();
        rows_that_fail(&from.iter().map(|(host, role)| (*host, arguments(role))).collect::<Vec<_>>())
    }

    /// The findings from one host.
    pub(crate) fn findings(&self, host: &Host, role: &str, more: &[&str]) -> Vec<Value> {
        let output = self.check(host, role, &[&["-o", "json"], more].concat());
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", stderr(&output)))
    }

    /// All rules: green. One rule less, in turn: its rows, and no other.
    fn proves(&self, hosts: &[&Host], rules: &[Rule<'_>], from: &[(&Host, &str)]) {
        put_up(hosts, &rules.iter().collect::<Vec<_>>());
        let (rows, all) = self.rows_that_fail(from);
        assert!(rows.is_empty(), "every rule is there, and this fails:\n{all}");
        for (index, removed) in rules.iter().enumerate() {
            let others: Vec<_> = rules.iter().enumerate().filter(|(other, _)| *other != index).collect();
            put_up(hosts, &others.into_iter().map(|(_, rule)| rule).collect::<Vec<_>>());
            let (rows, all) = self.rows_that_fail(from);
            let expected: BTreeSet<String> = removed.rows.iter().map(|row| (*row).to_owned()).collect();
            assert_eq!(rows, expected, "without {}:\n{all}", removed.matching);
        }
    }
}

#[test]
fn a_rule_that_is_missing_between_calico_nodes_is_named_by_its_row_ip_in_ip_too() {
    let site =
        Site::new("preflight-kublr", &["--product", "kublr", "--cni", "Calico", "--timeout", "2500ms"]);
    let host = |name| site.lab.host(name).unwrap();
    let (master, one, two) = (host("master"), host("worker-1"), host("worker-2"));
    let (nodes, workers) = ([&master, &one, &two], [&one, &two]);
    site.place(&[("master", &[&master]), ("worker", &workers)]);
    let _answering = [site.listen(&master, "master"), site.listen(&two, "worker")];
    // Each on all of them: what one side opens without ports, a firewall that keeps state lets back in.
    let rules = [
        Rule { rows: &["kublr-1.1"], on: &nodes, from: &nodes, matching: "tcp dport 10250" },
        Rule { rows: &["kublr-1.4"], on: &nodes, from: &nodes, matching: "ip protocol 4" },
        Rule { rows: &["kublr-1.5"], on: &nodes, from: &nodes, matching: "tcp dport 179" },
        Rule { rows: &["kublr-1.6"], on: &nodes, from: &nodes, matching: "udp dport 8472" },
        Rule { rows: &["kublr-1.7"], on: &nodes, from: &nodes, matching: "tcp dport 5473" },
        Rule { rows: &["kublr-2.1"], on: &[&master], from: &workers, matching: "tcp dport 443" },
    ];
    site.proves(&nodes, &rules, &[(&one, "worker")]);
}

#[test]
fn a_table_names_row_address_and_remedy_and_junit_has_a_suite_a_row() {
    let site = Site::new("preflight-table", &["--product", "kublr", "--cni", "Flannel", "--timeout", "1s"]);
    let (one, two) = (site.lab.host("worker-1").unwrap(), site.lab.host("worker-2").unwrap());
    site.place(&[("worker", &[&one, &two])]);
    let _answering = site.listen(&two, "worker");
    let rules = [Rule { rows: &[], on: &[&two], from: &[&one], matching: "tcp dport 10250" }];
    put_up(&[&two], &rules.iter().collect::<Vec<_>>());
    let output = site.check(&one, "worker", &[]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let (text, two) = (stdout(&output), two.address());
    for part in [
        "failed",
        "udp/8285  timed out after 1.0 s",
        &format!("allow UDP 8285 from {} to {two} (kublr-1.10: Flannel)", one.address()),
        "no address for the role internet",
        "0 unproven",
    ] {
        assert!(text.contains(part), "{part:?} in\n{text}");
    }
    assert!(stderr(&output).contains("preflight: 6 of"), "progress: {}", stderr(&output));
    let junit = stdout(&site.check(&one, "worker", &["-o", "junit"]));
    assert!(junit.contains("<testsuite name=\"kublr-1.10\""), "{junit}");
    assert!(junit.contains("<failure type=\"failed\" message=\"timed out"), "{junit}");
}

#[test]
fn what_cannot_be_planned_ends_with_2_and_says_what_to_do() {
    let folder = crate::common::directory(&[
        ("inventory.yaml", "worker: [192.0.2.1]\n"),
        ("broken.yaml", "worker: [192.0.2.300]\nfront: [192.0.2.0/33]\n"),
    ]);
    let inventory = folder.path().join("inventory.yaml").display().to_string();
    let broken = folder.path().join("broken.yaml").display().to_string();
    let known = ["--strategy", "Tunneling", "--cni", "Canal"];
    for (role, inventory, known, hint) in [
        ("worker", &inventory, &known[..], "no address of this machine"),
        ("workr", &inventory, &known[..], "did you mean worker?"),
        ("worker", &broken, &known[..], "broken.yaml:2: "),
        ("worker", &inventory, &[][..], "no address of this machine"),
        ("worker", &inventory, &["--cni", "Celium"][..], "did you mean Cilium?"),
    ] {
        let all = [&["preflight", "--role", role, "--inventory", inventory], known].concat();
        let output = crate::common::run(&all);
        assert_eq!(output.status.code(), Some(2), "{all:?}");
        assert!(stderr(&output).contains(hint), "{hint:?} in {}", stderr(&output));
    }
}

#[test]
fn a_responder_stops_when_told_and_says_what_it_has_answered() {
    let site = Site::new("preflight-stop", &["--product", "kublr", "--cni", "Flannel"]);
    let host = site.lab.host("worker").unwrap();
    site.place(&[("worker", &[&host])]);
    let answering = site.listen(&host, "worker");
    answering.signal(Signal::TERM).unwrap();
    assert!(answering.wait(PATIENCE).unwrap().success());
    assert!(answering.log().contains("answered=0"), "{}", answering.log());
}

/// Time and packets of one machine's run between many; fifty of them with `PORTICO_PROVE=1`.
#[test]
fn a_run_between_many_machines_is_complete_and_tells_what_it_cost() {
    let count = if std::env::var_os("PORTICO_PROVE").is_some() { 50 } else { 6 };
    let site = Site::new("preflight-many", &["--product", "kublr", "--cni", "Calico"]);
    let hosts: Vec<Host> =
        (1..=count).map(|number| site.lab.host(&format!("worker-{number}")).unwrap()).collect();
    site.place(&[("worker", &hosts.iter().collect::<Vec<_>>())]);
    let _answering: Vec<Process> = hosts[1..].iter().map(|host| site.listen(host, "worker")).collect();
    let packets = || -> u64 {
        let table = hosts[0].run(&["cat", "/proc/net/dev"]).unwrap();
        let line = table.lines().find_map(|line| line.trim().strip_prefix("eth0:")).unwrap();
        let numbers: Vec<u64> = line.split_whitespace().map(|number| number.parse().unwrap()).collect();
        // Received and sent (proc(5)).
        numbers[1] + numbers[9]
    };
    let (before, start) = (packets(), std::time::Instant::now());
    let output = site.check(&hosts[0], "worker", &["-o", "json"]);
    let (took, sent) = (start.elapsed(), packets() - before);
    assert_eq!(output.status.code(), Some(0), "{}\n{}", stdout(&output), stderr(&output));
    let findings: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let passed = findings.iter().filter(|finding| finding["status"] == "passed").count();
    println!("{count} machines: {passed} checks from one of them in {took:.1?}, {sent} packets in and out");
    // Five flows from here, four back, and the path MTU.
    assert!(passed >= (count - 1) * 10, "{passed}");
}

/// A host that speaks TLS on a port, with this certificate. `name` is its own: a log that two share would say
/// for the second that it listens before it does.
fn speaks_tls(host: &Host, name: &str, identity: &Identity, port: &str) -> Process {
    identity.write(&host.dir(), name).unwrap();
    let file = |suffix: &str| host.dir().join(format!("{name}.{suffix}")).display().to_string();
    let (cert, key) = (file("crt"), file("key"));
    let arguments = ["s_server", "-accept", port, "-cert", &cert, "-key", &key, "-www"];
    let process = host.spawn(name, "openssl", arguments).unwrap();
    process.wait_for_log("ACCEPT", PATIENCE).unwrap();
    process
}

/// A corporate proxy: squid, which alone knows where `name` is, and lets everybody through to port 443.
fn proxy(host: &Host, name: &str, to: &Host) -> Process {
    /// The user that squid runs as: it refuses to be root.
    const NOBODY: u32 = 65534;
    let dir = host.dir();
    std::os::unix::fs::chown(&dir, Some(NOBODY), Some(NOBODY)).unwrap();
    let at = |name: &str| dir.join(name).display().to_string();
    std::fs::write(at("names"), format!("{} {name}\n", to.address())).unwrap();
    let configuration = format!(
        "http_port 3128\nhosts_file {}\nacl tls port 443\nhttp_access allow CONNECT tls\nhttp_access deny \
         all\ncache deny all\npid_filename {}\ncache_log {}\naccess_log none\nshutdown_lifetime 0 \
         seconds\n",
        at("names"),
        at("squid.pid"),
        at("cache.log")
    );
    std::fs::write(at("squid.conf"), configuration).unwrap();
    let nobody = ["--reuid", "65534", "--regid", "65534", "--clear-groups", "/usr/sbin/squid"];
    // Under a name of its own: all squids of one name share memory.
    let own = ["-N", "-d", "1", "-n", &format!("preflight{}", std::process::id()), "-f", &at("squid.conf")];
    let process = host.spawn("squid", "setpriv", nobody.into_iter().chain(own)).unwrap();
    process.wait_for_log("Accepting HTTP", PATIENCE).unwrap();
    process
}

#[test]
fn apis_of_providers_and_secret_stores_are_tried_with_tls_through_the_proxy_that_leads_there() {
    let site = Site::new("preflight-tls", &["--product", "kublr", "--set", "bring-your-own=true"]);
    let host = |name| site.lab.host(name).unwrap();
    let (kcp, middle, cloud, master) = (host("kcp"), host("proxy"), host("cloud"), host("master"));
    site.place(&[("kcp", &[&kcp]), ("managed-master", &[&master])]);
    let mut inventory = std::fs::read_to_string(&site.inventory).unwrap();
    inventory.push_str("infra-api: [api.cloud.example.com]\n");
    std::fs::write(&site.inventory, inventory).unwrap();
    let (company, inspector) = (Authority::new("company CA").unwrap(), Authority::new("inspector").unwrap());
    let ca = site.lab.dir().join("ca.crt");
    std::fs::write(&ca, company.cert()).unwrap();
    let names = [master.address().to_string()];
    let _store = speaks_tls(&master, "store", &company.server("store", &names).unwrap(), "11250");
    let name = "api.cloud.example.com";
    let api = speaks_tls(&cloud, "api", &company.server("api", &[name]).unwrap(), "443");
    let squid = proxy(&middle, name, &cloud);
    let url = format!("http://{}:3128", middle.address());
    let check = || {
        let arguments = ["--tls-ca", ca.to_str().unwrap(), "--proxy", &url];
        let findings = site.findings(&kcp, "kcp", &arguments);
        move |row: &str| {
            let found = findings.iter().find(|found| found["row"]["id"] == row && found["check"] == "tls");
            found.unwrap_or_else(|| panic!("no {row} in {findings:#?}")).clone()
        }
    };
    let of = check();
    let store = of("kublr-5.3");
    assert_eq!(
        (&store["status"], &store["seen"]["issuer"]),
        (&"passed".into(), &"CN=company CA".into()),
        "{store}"
    );
    let cloud_api = of("kublr-5.2");
    assert_eq!(cloud_api["status"], "passed", "{cloud_api}");
    assert_eq!(cloud_api["seen"]["proxy"], url.as_str(), "only the proxy knows the name: {cloud_api}");

    drop(api);
    let _inspected = speaks_tls(&cloud, "inspected", &inspector.server("api", &[name]).unwrap(), "443");
    let inspected = check()("kublr-5.2");
    assert_eq!(inspected["seen"]["kind"], "intercepted", "{inspected}");
    let who = inspected["remedy"]["who"].as_str().unwrap();
    assert!(who.contains("CN=inspector"), "{who}");
    // Asked, not killed, it removes its shared memory.
    squid.stop(PATIENCE).unwrap();
}
