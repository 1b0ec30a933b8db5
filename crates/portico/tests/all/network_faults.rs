//! `portico preflight` where the network has other faults than a firewall at one end. The faults: a router
//! that forbids or has no route, a narrow path, a black hole, one family of two, a clock that is off.

use portico_lab::{Authority, Host, Process};
use serde_json::Value;

use crate::common::PATIENCE;
use crate::preflight::Site;

/// The findings of one kind of check of one row.
fn of<'a>(findings: &'a [Value], row: &str, check: &str) -> Vec<&'a Value> {
    findings.iter().filter(|found| found["row"]["id"] == row && found["check"] == check).collect()
}

/// Has a host filter its packets by one rule, and no other.
fn filter(host: &Host, hook: &str, rule: &str) {
    let chain = format!("type filter hook {hook} priority 0\n{rule}");
    let table = format!("flush ruleset\ntable inet way {{\nchain {hook} {{\n{chain}\n}}\n}}\n");
    host.run_with_input(&["nft", "-f", "-"], &table).unwrap();
}

/// Two workers between which all packets go by a router.
struct Routed {
    site: Site,
    router: Host,
    one: Host,
    two: Host,
    _answering: Process,
}

impl Routed {
    fn new(name: &str) -> Self {
        let site = Site::new(name, &["--product", "kublr", "--cni", "Flannel", "--timeout", "2500ms"]);
        let [router, one, two] = ["router", "worker-1", "worker-2"].map(|name| site.lab.host(name).unwrap());
        router.run(&["sysctl", "-w", "net.ipv4.ip_forward=1", "net.ipv4.conf.all.send_redirects=0"]).unwrap();
        router.run(&["sysctl", "-w", "net.ipv4.conf.eth0.send_redirects=0"]).unwrap();
        let via = router.address().to_string();
        for (from, to) in [(&one, &two), (&two, &one)] {
            from.run(&["ip", "route", "add", &format!("{}/32", to.address()), "via", &via]).unwrap();
        }
        site.place(&[("worker", &[&one, &two])]);
        let answering = site.listen(&two, "worker");
        Self { site, router, one, two, _answering: answering }
    }

    fn filter(&self, rule: &str) {
        filter(&self.router, "forward", rule);
    }

    fn findings(&self, more: &[&str]) -> Vec<Value> {
        self.site.findings(&self.one, "worker", more)
    }
}

#[test]
fn a_router_that_forbids_is_named_and_so_is_one_that_has_no_route() {
    let way = Routed::new("preflight-router");
    way.filter("tcp dport 10250 reject with icmp type admin-prohibited");
    let findings = way.findings(&[]);
    let kubelet = of(&findings, "kublr-1.1", "tcp");
    let by = way.router.address().to_string();
    let forbidden = kubelet.iter().find(|found| found["status"] == "failed").unwrap();
    assert_eq!(forbidden["seen"]["by"], by.as_str(), "{forbidden}");
    assert!(forbidden["seen"]["why"].as_str().unwrap().contains("prohibited"), "{forbidden}");
    assert!(forbidden["remedy"]["who"].as_str().unwrap().contains(&by), "{forbidden}");
    let flannel = of(&findings, "kublr-1.10", "udp");
    assert!(flannel.iter().all(|found| found["status"] == "passed"), "{flannel:#?}");

    way.filter("");
    let two = format!("{}/32", way.two.address());
    way.router.run(&["ip", "route", "add", "unreachable", &two]).unwrap();
    let findings = way.findings(&[]);
    let kubelet = of(&findings, "kublr-1.1", "tcp");
    let lost = kubelet.iter().find(|found| found["status"] == "failed").unwrap();
    assert_eq!((&lost["seen"]["kind"], &lost["seen"]["by"]), (&"unreachable".into(), &by.into()), "{lost}");
}

#[test]
fn a_narrow_path_is_measured_whether_its_router_says_so_or_swallows_packets() {
    let way = Routed::new("preflight-mtu");
    let two = way.two.address().to_string();
    let narrow = ["ip", "route", "replace", &two, "dev", "eth0", "mtu", "lock", "1400"];
    way.router.run(&narrow).unwrap();
    let mtu = |more: &[&str]| {
        let findings = way.findings(more);
        let found = findings.iter().find(|found| found["check"] == "path-mtu");
        found.unwrap_or_else(|| panic!("no path-mtu in {findings:#?}")).clone()
    };
    let printed = mtu(&["--pod-mtu", "1400"]);
    assert_eq!((&printed["seen"]["mtu"], &printed["status"]), (&1400.into(), &"failed".into()), "{printed}");
    assert_eq!(printed["seen"]["by"], way.router.address().to_string(), "{printed}");
    let fits = mtu(&["--pod-mtu", "1350"]);
    assert_eq!(fits["status"], "passed", "{fits}");

    // A black hole: what is too large vanishes. The kernel of the sender must not remember the MTU it was
    // sent.
    way.router.run(&["ip", "route", "del", &two]).unwrap();
    way.one.run(&["ip", "route", "flush", "cache"]).unwrap();
    way.filter("ip length > 1400 drop");
    let swallowed = mtu(&[]);
    assert_eq!(
        (&swallowed["seen"]["mtu"], &swallowed["seen"]["by"]),
        (&1400.into(), &Value::Null),
        "{swallowed}"
    );
    assert_eq!(swallowed["status"], "failed", "{swallowed}");
    assert!(swallowed["remedy"]["what"].as_str().is_some_and(|what| !what.is_empty()), "{swallowed}");
}

#[test]
fn a_rule_that_is_missing_for_ipv6_only_is_reported_for_the_ipv6_addresses_only() {
    let site =
        Site::new("preflight-ipv6", &["--product", "kublr", "--cni", "Flannel", "--timeout", "2500ms"]);
    let (one, two) = (site.lab.host("worker-1").unwrap(), site.lab.host("worker-2").unwrap());
    let addresses = [(&one, "fd00:13::1"), (&two, "fd00:13::2")];
    for (host, address) in addresses {
        host.run(&["ip", "addr", "add", &format!("{address}/64"), "dev", "eth0", "nodad"]).unwrap();
    }
    let inventory = format!("worker: [{}, 'fd00:13::1', {}, 'fd00:13::2']\n", one.address(), two.address());
    std::fs::write(&site.inventory, inventory).unwrap();
    let _answering = site.listen(&two, "worker");
    let (rows, all) = site.rows_that_fail(&[(&one, "worker")]);
    assert!(rows.is_empty(), "nothing is in the way, and this fails:\n{all}");

    filter(&two, "input", "ip6 version 6 udp dport 8285 drop");
    let findings = site.findings(&one, "worker", &[]);
    let failed: Vec<&Value> = findings.iter().filter(|found| found["status"] == "failed").collect();
    let ends: Vec<_> = failed.iter().map(|found| (&found["row"]["id"], &found["to"])).collect();
    assert!(!ends.is_empty(), "{findings:#?}");
    assert!(ends.iter().all(|end| *end == (&"kublr-1.10".into(), &"fd00:13::2".into())), "{failed:#?}");
}

#[test]
fn a_clock_that_is_an_hour_off_is_reported_with_the_machine() {
    let site = Site::new("preflight-clock", &["--product", "kublr", "--set", "bring-your-own=true"]);
    let (kcp, master) = (site.lab.host("kcp").unwrap(), site.lab.host("master").unwrap());
    site.place(&[("kcp", &[&kcp]), ("managed-master", &[&master])]);
    let company = Authority::new("company CA").unwrap();
    let ca = site.lab.dir().join("ca.crt");
    std::fs::write(&ca, company.cert()).unwrap();
    let identity = company.server("store", &[master.address().to_string()]).unwrap();
    identity.write(&master.dir(), "store").unwrap();
    // A page of our own in place of s_server's, which does not say what time it is.
    let hour_ago = ["date", "-u", "-d", "1 hour ago", "+%a, %d %b %Y %H:%M:%S GMT"];
    let date = master.run(&hour_ago).unwrap();
    let page =
        format!("HTTP/1.1 200 OK\r\nDate: {}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", date.trim());
    std::fs::write(master.dir().join("page"), page).unwrap();
    let [cert, key, file] = ["store.crt", "store.key", "page"].map(|name| master.dir().join(name));
    let tls =
        format!("OPENSSL-LISTEN:11250,fork,reuseaddr,verify=0,cert={},key={}", cert.display(), key.display());
    // The request first: a server that answers and closes before it has come resets the connection.
    let script = format!("while read -r line && test ${{#line}} -gt 1; do :; done; cat {}\n", file.display());
    let program = master.dir().join("answer");
    std::fs::write(&program, script).unwrap();
    let answer = format!("SYSTEM:sh {}", program.display());
    let store = master.spawn("store", "socat", ["-d", "-d", &tls, &answer]).unwrap();
    store.wait_for_log("listening on", PATIENCE).unwrap();
    let findings = site.findings(&kcp, "kcp", &["--tls-ca", ca.to_str().unwrap()]);
    let clock = of(&findings, "kublr-5.3", "clock");
    assert_eq!(clock.len(), 1, "{findings:#?}");
    assert_eq!(clock[0]["status"], "failed", "{}", clock[0]);
    let behind = -clock[0]["seen"]["aheadMillis"].as_i64().unwrap();
    assert!((3_590_000..3_700_000).contains(&behind), "{behind}");
}
