//! Clusters whose writes or names hang, as many as there are slots but one: the others do not notice. And
//! the status of clusters whose names hang, lead elsewhere, or are there at last.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use anyhow::{Result, ensure};
use portico_lab::faulty_api::FaultyApi;
use portico_lab::{ApiServer, Kubectl};
use serde_json::{Value, json};
use tokio::net::UdpSocket;
use tokio::sync::watch;

use crate::exposure::{KUBERNETES, slice};
use crate::names::{Says, Zone, serve};
use crate::support::{Running, cluster, install};
use crate::until;

/// One less than there are slots for clusters.
const HANGING_WRITES: usize = 31;

/// One less than there are slots for lookups.
const HANGING_NAMES: usize = 63;

/// The address of the load balancer in front of the gateway, and another one.
const FRONT: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 7);
const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 8);

/// Every name is there.
fn all(name: &str) -> Says {
    Says::Address(if name.starts_with("elsewhere") { ELSEWHERE } else { FRONT })
}

/// Some hang, and one is not there.
fn faulty(name: &str) -> Says {
    match name {
        _ if name.starts_with("hang") => Says::Nothing,
        _ if name.starts_with("late") => Says::Unknown,
        _ => all(name),
    }
}

fn hanging() -> impl Iterator<Item = String> {
    (0..HANGING_NAMES).map(|number| format!("hang{number}"))
}

fn create(kubectl: &Kubectl, names: impl Iterator<Item = String>) {
    let items: Vec<Value> = names.map(|name| cluster(&name, "Tunneling")).collect();
    kubectl.apply_json(&json!({"apiVersion": "v1", "kind": "List", "items": items})).unwrap();
}

fn reason(operator: &Running, name: &str) -> Option<&'static str> {
    operator.clusters().reports.get(name).map(|report| report.reason)
}

fn wait_reason(operator: &Running, name: &str, expected: &str) {
    until(expected, || {
        let found = reason(operator, name);
        ensure!(found == Some(expected), "{name}: {found:?}");
        Ok(())
    });
}

/// By the condition and an Event too; returns the message.
fn is_reported(kubectl: &Kubectl, operator: &Running, name: &str, expected: &str) -> String {
    wait_reason(operator, name, expected);
    let mut message = String::new();
    until("condition and Event", || {
        let condition = kubectl.get(&["cluster", name])?["status"]["conditions"]["PorticoExposed"].take();
        ensure!(condition["reason"] == expected, "{condition}");
        message = condition["message"].as_str().unwrap_or_default().to_owned();
        let events = kubectl.run(&["events", &format!("--for=cluster/{name}")])?;
        ensure!(events.contains(expected), "{events}");
        Ok(())
    });
    message
}

/// The clusters that hang and have been given up.
fn given_up(operator: &Running) -> Vec<String> {
    hanging().filter(|name| reason(operator, name).is_some()).collect()
}

fn address(kubectl: &Kubectl, name: &str) -> Result<Value> {
    Ok(kubectl.get(&["cluster", name])?["status"]["address"]["ip"].take())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn neither_writes_nor_names_that_hang_hold_another_cluster_up() {
    let api = ApiServer::start("hanging").unwrap();
    let kubectl = api.kubectl();
    let direct = install(kubectl, api.access()).await;
    // No name server is asked for names under `invalid`: RFC 6761.
    let domain = r#"{"spec": {"ingress": {"domain": "kkp.example"}}}"#;
    let configuration = ["patch", "kubermaticconfiguration", "kkp", "-n", "portico", "--type=merge", "-p"];
    kubectl.run(&[&configuration[..], &[domain]].concat()).unwrap();
    let status = json!({"status": {"loadBalancer": {"ingress": [{"ip": FRONT}]}}}).to_string();
    let front =
        ["patch", "service", "portico", "-n", "portico", "--subresource=status", "--type=merge", "-p"];
    kubectl.run(&[&front[..], &[&status]].concat()).unwrap();
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let servers = vec![socket.local_addr().unwrap()];
    let zone = watch::Sender::new(Arc::new(all) as Zone);
    let names = tokio::spawn(serve(socket, zone.subscribe()));

    writes_that_hang(kubectl, &direct, &servers).await;

    // Every cluster gets what it needs, so that only names are left to hang.
    let operator = Running::start_asking(&direct, "names", servers.clone(), |operator| operator);
    create(kubectl, hanging().chain(["elsewhere".into(), "late".into()]));
    for name in ["good", "elsewhere"] {
        until(name, || kubectl.get(&["namespace", &format!("cluster-{name}")]).map(drop));
        let pods = slice(&format!("cluster-{name}"), "apiserver-external", KUBERNETES, &["10.2.0.9"]);
        kubectl.apply_json(&pods).unwrap();
    }
    is_reported(kubectl, &operator, "good", "Exposed");
    let message = is_reported(kubectl, &operator, "elsewhere", "NameLeadsElsewhere");
    assert!(message.contains("203.0.113.8") && message.contains("203.0.113.7"), "{message}");
    for name in hanging() {
        wait_reason(&operator, &name, "NoEndpoints");
    }
    operator.stop().await;

    zone.send_replace(Arc::new(faulty));
    let operator = Running::start_asking(&direct, "hanging", servers, |operator| operator);
    let mut hang_no_more = Vec::new();
    until("the one whose name does not hang", || {
        ensure!(reason(&operator, "good") == Some("Exposed"));
        hang_no_more = given_up(&operator);
        Ok(())
    });
    assert_eq!(hang_no_more, [""; 0], "they hang still");
    let message = is_reported(kubectl, &operator, "hang0", "NameNotResolved");
    assert!(message.contains("hang0.north.kkp.example: ") && message.contains("203.0.113.7"), "{message}");
    assert_eq!(address(kubectl, "hang0").unwrap(), "203.0.113.7", "users have it");
    is_reported(kubectl, &operator, "late", "NameNotResolved");
    zone.send_replace(Arc::new(all));
    // By themselves, at the next lookup.
    for name in ["late", "hang0"] {
        is_reported(kubectl, &operator, name, "NoEndpoints");
    }
    operator.stop().await;
    names.abort();
}

/// As where an admission webhook never answers for some.
async fn writes_that_hang(kubectl: &Kubectl, direct: &kube::Client, servers: &[SocketAddr]) {
    let faulty = FaultyApi::default();
    faulty.rules(|rules| rules.mute_to = Some("/clusters/hang"));
    let operator =
        Running::start_asking(&faulty.client(direct), "writes", servers.to_vec(), |operator| operator);
    create(kubectl, hanging().take(HANGING_WRITES));
    until("every other slot to be taken", || {
        let hanging = faulty.rules(|rules| rules.unanswered);
        ensure!(hanging >= HANGING_WRITES, "{hanging}");
        Ok(())
    });
    kubectl.apply_json(&cluster("good", "Tunneling")).unwrap();
    wait_reason(&operator, "good", "NoEndpoints");
    assert_eq!(given_up(&operator), [""; 0], "they hang still");
    operator.stop().await;
}
