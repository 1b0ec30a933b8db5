//! `portico preflight` and the rules of `portico firewall` between hosts with addresses of IPv6: every kind
//! of check, a narrow path, one rule less. And beside IPv4, with IP-in-IP, which IPv6 does not carry.

use std::collections::BTreeSet;
use std::fs;

use portico_lab::{Authority, Host, Process};
use serde_json::Value;

use crate::common::{PATIENCE, run, stderr, stdout};
use crate::preflight::Site;

/// What is known of the site: all kinds of flows between its machines.
const FACTS: [&str; 6] = ["--product", "kublr", "--cni", "Calico", "--timeout", "2500ms"];

/// Gives a host its address.
fn address(host: &Host, number: u8) -> String {
    let address = format!("fd00:13::{number}");
    host.run(&["ip", "addr", "add", &format!("{address}/64"), "dev", "eth0", "nodad"]).unwrap();
    address
}

/// Speaks TLS on port 443 of an address, with a certificate of `authority`.
fn speaks_tls(host: &Host, authority: &Authority, address: &str) -> Process {
    authority.server("api", &[address]).unwrap().write(&host.dir(), "api").unwrap();
    let [cert, key] = ["api.crt", "api.key"].map(|name| host.dir().join(name).display().to_string());
    let accept = format!("[{address}]:443");
    let arguments = ["s_server", "-accept", &accept, "-cert", &cert, "-key", &key, "-www"];
    let process = host.spawn("api", "openssl", arguments).unwrap();
    process.wait_for_log("ACCEPT", PATIENCE).unwrap();
    process
}

/// Loads the rules that are printed for a machine of this role, but for the line with this row.
fn load(site: &Site, host: &Host, role: &str, without: Option<&str>) {
    let inventory = site.inventory.display().to_string();
    let own = ["firewall", "--for", "nftables", "--default-deny", "--role", role, "--inventory", &inventory];
    let output = run(&[&own[..], &FACTS[..4]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    let comment = without.map(|row| format!("comment \"{row}\""));
    let is_left = |line: &&str| comment.as_ref().is_none_or(|comment| !line.contains(comment.as_str()));
    let rules: Vec<String> =
        stdout(&output).lines().filter(is_left).map(|line| format!("{line}\n")).collect();
    host.run_with_input(&["nft", "-f", "-"], &rules.concat()).unwrap();
    host.run(&["conntrack", "-F"]).unwrap();
}

fn passed<'a>(findings: &'a [Value], check: &str) -> Vec<&'a Value> {
    findings.iter().filter(|found| found["check"] == check && found["status"] == "passed").collect()
}

#[test]
fn every_kind_of_check_works_under_printed_rules_between_addresses_of_ipv6_alone() {
    let site = Site::new("ipv6-only", &FACTS);
    let [master, one, two] = ["master", "worker-1", "worker-2"].map(|name| site.lab.host(name).unwrap());
    let [of_master, of_one, of_two] =
        [(&master, 1), (&one, 2), (&two, 3)].map(|(host, number)| address(host, number));
    let inventory = format!("master: ['{of_master}']\nworker: ['{of_one}', '{of_two}']\ninternet: [any]\n");
    fs::write(&site.inventory, inventory).unwrap();
    let company = Authority::new("company CA").unwrap();
    let ca = site.lab.dir().join("ca.crt");
    fs::write(&ca, company.cert()).unwrap();
    let _api = speaks_tls(&master, &company, &of_master);
    let _answering = [site.listen(&master, "master"), site.listen(&two, "worker")];
    let load_all = |without| {
        load(&site, &master, "master", None);
        load(&site, &one, "worker", None);
        load(&site, &two, "worker", without);
    };
    let findings = || site.findings(&one, "worker", &["--tls-ca", ca.to_str().unwrap()]);
    let not_passed = |findings: &[Value]| -> BTreeSet<String> {
        let wrong = |found: &&Value| ["failed", "unproven"].contains(&found["status"].as_str().unwrap());
        let all = findings.iter().filter(wrong);
        all.map(|found| found["row"]["id"].as_str().unwrap().to_owned()).collect()
    };

    load_all(None);
    let all = findings();
    assert_eq!(not_passed(&all), BTreeSet::new(), "{all:#?}");
    for check in ["tcp", "tls", "udp", "path-mtu", "back", "local-port", "clock"] {
        assert!(!passed(&all, check).is_empty(), "nothing of {check}: {all:#?}");
    }
    assert!(passed(&all, "tls").iter().all(|found| found["seen"]["issuer"] == "CN=company CA"));
    let ip_in_ip: Vec<_> = all.iter().filter(|found| found["row"]["id"] == "kublr-1.4").collect();
    assert!(
        !ip_in_ip.is_empty() && ip_in_ip.iter().all(|found| found["status"] == "skipped"),
        "{ip_in_ip:?}"
    );

    load_all(Some("kublr-1.6"));
    assert_eq!(not_passed(&findings()), BTreeSet::from(["kublr-1.6".to_owned()]));

    // A black hole for what is large.
    load_all(None);
    let narrow = "table inet way {\nchain input {\ntype filter hook input priority -10\n\
                  meta nfproto ipv6 udp dport 8472 meta length > 1400 drop\n}\n}\n";
    two.run_with_input(&["nft", "-f", "-"], narrow).unwrap();
    let all = findings();
    let mtu =
        all.iter().find(|found| found["check"] == "path-mtu" && found["to"] == of_two.as_str()).unwrap();
    assert_eq!((&mtu["seen"]["mtu"], &mtu["status"]), (&1400.into(), &"failed".into()), "{mtu}");
}

#[test]
fn beside_ipv6_ip_in_ip_is_asked_of_ipv4_and_a_rule_that_is_missing_is_still_named() {
    let site = Site::new("ipv6-beside", &FACTS);
    let [one, two] = ["worker-1", "worker-2"].map(|name| site.lab.host(name).unwrap());
    let [six_one, six_two] = [(&one, 1), (&two, 2)].map(|(host, number)| address(host, number));
    let inventory = format!("worker: [{}, '{six_one}', {}, '{six_two}']\n", one.address(), two.address());
    fs::write(&site.inventory, inventory).unwrap();
    let _answering = site.listen(&two, "worker");
    let (rows, all) = site.rows_that_fail(&[(&one, "worker")]);
    assert!(rows.is_empty(), "nothing is in the way, and this fails:\n{all}");
    let drop =
        "table inet way {\nchain input {\ntype filter hook input priority 0\nmeta l4proto 4 drop\n}\n}\n";
    two.run_with_input(&["nft", "-f", "-"], drop).unwrap();
    let findings = site.findings(&one, "worker", &[]);
    let failed: Vec<_> = findings.iter().filter(|found| found["status"] == "failed").collect();
    assert!(!failed.is_empty(), "{findings:#?}");
    let to = two.address().to_string();
    assert!(failed.iter().all(|found| found["row"]["id"] == "kublr-1.4" && found["to"] == to.as_str()));
}
