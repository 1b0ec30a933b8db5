//! The address on real hosts: network namespaces of a lab, the code under test on threads inside of them, `ip` and `nft` as
//! witnesses. Needs root, `ip` and `nft` (the lab says what to install).

#![allow(clippy::unwrap_used, reason = "a story that cannot go on ends here")]

use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use portico_agent::address::{
    AddressError, Collision, Held, Kind, Mac, Report, Settings, Status, Warning, check,
};
use portico_lab::{Host, Lab, wait};
use rustix::thread::{CapabilitySet, CapabilitySets, LinkNameSpaceType};
use tokio::sync::oneshot;

const SOON: Duration = Duration::from_secs(20);

/// Without questions on the link, which take a second: most stories are not about them.
fn quiet() -> Settings {
    Settings { arp: false, ..Settings::default() }
}

fn only(kind: Kind) -> Settings {
    Settings { kinds: [kind].into(), ..quiet() }
}

/// Runs a future on a thread inside of a host's network, with these rights.
fn on<T: Send + 'static>(
    host: &Host,
    rights: CapabilitySet,
    story: impl AsyncFnOnce() -> T + Send + 'static,
) -> JoinHandle<T> {
    let namespace = format!("/run/netns/{}", host.namespace());
    thread::spawn(move || {
        let namespace = File::open(namespace).unwrap();
        let network = Some(LinkNameSpaceType::Network);
        rustix::thread::move_into_link_name_space(namespace.as_fd(), network).unwrap();
        let sets =
            CapabilitySets { effective: rights, permitted: rights, inheritable: CapabilitySet::empty() };
        rustix::thread::set_capabilities(None, sets).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(story())
    })
}

/// A host whose state changes by nobody's hand: a link-local IPv6 address comes up by and by.
fn host(lab: &Lab, name: &str) -> Host {
    let host = lab.host(name).unwrap();
    ip(&host, "link set eth0 addrgenmode none");
    ip(&host, "-6 address flush dev eth0");
    host
}

/// What deploy/agent.yaml gives.
const RIGHTS: CapabilitySet = CapabilitySet::NET_ADMIN.union(CapabilitySet::NET_RAW);

fn check_on(host: &Host, settings: Settings) -> Report {
    on(host, RIGHTS, async move || check(&settings).await.unwrap()).join().unwrap()
}

fn refusal_on(host: &Host, rights: CapabilitySet, settings: Settings) -> AddressError {
    on(host, rights, async move || Held::take(settings).await.map(Held::leave).unwrap_err()).join().unwrap()
}

fn told(report: &Report) -> Vec<String> {
    report.collisions.iter().map(ToString::to_string).collect()
}

enum End {
    Release,
    Leave,
    /// As a process that is killed: nothing runs any more.
    Crash,
}

/// An agent as far as the address goes: takes and keeps it on a thread until told to end.
struct Agent {
    status: Status,
    end: Option<oneshot::Sender<End>>,
    /// Ends with the reason, if the address could not be kept.
    thread: JoinHandle<Option<AddressError>>,
}

impl Agent {
    fn start(host: &Host, settings: Settings) -> Result<Agent, AddressError> {
        let (end, mut ended) = oneshot::channel();
        let (report, reported) = std::sync::mpsc::channel();
        let thread = on(host, RIGHTS, async move || {
            let mut held = match Held::take(settings).await {
                Ok(held) => held,
                Err(error) => {
                    report.send(Err(error)).unwrap();
                    return None;
                }
            };
            report.send(Ok(held.status())).unwrap();
            let end = tokio::select! {
                error = held.keep() => return Some(error),
                end = &mut ended => end,
            };
            match end.unwrap_or(End::Crash) {
                End::Release => held.release().await,
                End::Leave => held.leave(),
                End::Crash => drop(held),
            }
            None
        });
        let status = reported.recv().unwrap()?;
        Ok(Agent { status, end: Some(end), thread })
    }

    fn end(mut self, end: End) {
        drop(self.end.take().unwrap().send(end));
        assert!(self.thread.join().unwrap().is_none(), "the address was not kept until the end");
    }

    /// Waits for the reason why the address is not kept any more.
    fn failure(self) -> AddressError {
        self.thread.join().unwrap().expect("keeping the address ends with a reason")
    }
}

/// Interfaces, addresses, routes and firewall of a host, as a person would compare them.
fn state(host: &Host) -> String {
    let commands: [&[&str]; 4] = [
        &["ip", "-d", "link"],
        &["ip", "address"],
        &["ip", "route", "show", "table", "all"],
        &["nft", "list", "ruleset"],
    ];
    commands.map(|command| host.run(command).unwrap()).join("\n")
}

fn ip(host: &Host, command: &str) -> String {
    let words: Vec<&str> = std::iter::once("ip").chain(command.split(' ')).collect();
    host.run(&words).unwrap()
}

fn has_address(host: &Host) -> Result<()> {
    // Through the kernel's own eyes: a local address, and no way out.
    let route = ip(host, "route get 100.64.30.10");
    ensure!(route.starts_with("local 100.64.30.10"), "{route}");
    Ok(())
}

fn guards(host: &Host) -> usize {
    host.run(&["nft", "list", "ruleset"]).unwrap().matches("arp daddr ip 100.64.30.10 drop").count()
}

fn mac(host: &Host, interface: &str) -> Mac {
    let line = ip(host, &format!("-o link show dev {interface}"));
    let text = line.split("link/ether ").nth(1).unwrap().split(' ').next().unwrap();
    let bytes: Vec<u8> = text.split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
    Mac(bytes.try_into().unwrap())
}

/// Whether this kernel can make interfaces of a kind at all, by what `ip` says.
fn kernel_has(host: &Host, kind: &str) -> bool {
    let made = host.run(&["ip", "link", "add", "try-it", "type", kind]).is_ok();
    if made {
        ip(host, "link del try-it");
    }
    made
}

#[test]
fn the_address_is_held_by_the_best_way_the_kernel_has_and_release_leaves_nothing() {
    let lab = Lab::start("address-way").unwrap();
    let host = host(&lab, "a");
    let expected = ["dummy", "veth"].into_iter().find(|kind| kernel_has(&host, kind)).unwrap_or("loopback");
    let before = state(&host);
    let agent = Agent::start(&host, Settings::default()).unwrap();
    let how = agent.status.how();
    assert_eq!(how.kind.to_string(), expected);
    assert_eq!(how.why.is_empty(), expected == "dummy", "{how:?}");
    assert_eq!((how.unguarded.as_deref(), how.adopted, agent.status.is_held()), (None, false, true));
    has_address(&host).unwrap();
    assert_eq!(guards(&host), 1);
    let address = ip(&host, "-o address show dev portico");
    assert!(address.contains("100.64.30.10/32 scope host portico"), "{address}");
    assert!(ip(&host, "link show dev portico").contains("alias portico agent"));
    agent.end(End::Release);
    assert_eq!(state(&host), before);
}

#[test]
fn where_there_are_no_interfaces_to_make_an_alias_of_lo_does() {
    let lab = Lab::start("address-lo").unwrap();
    let host = host(&lab, "a");
    let before = state(&host);
    let agent = Agent::start(&host, only(Kind::Loopback)).unwrap();
    has_address(&host).unwrap();
    assert!(ip(&host, "-o address show dev lo").contains("lo:portico"));
    // A restart adopts it, whatever else would work.
    agent.end(End::Crash);
    let agent = Agent::start(&host, quiet()).unwrap();
    let how = agent.status.how();
    assert_eq!((how.kind, &*how.interface, how.adopted), (Kind::Loopback, "lo", true));
    ip(&host, "address del 100.64.30.10/32 dev lo");
    wait::until("the address to be put back", SOON, || has_address(&host)).unwrap();
    agent.end(End::Release);
    assert_eq!(state(&host), before);
}

#[test]
fn when_no_way_works_each_is_told_with_its_reason() {
    let lab = Lab::start("address-none").unwrap();
    let host = host(&lab, "a");
    ip(&host, "link add portico-peer type bridge");
    let before = state(&host);
    let error = refusal_on(&host, RIGHTS, only(Kind::Veth)).to_string();
    assert!(error.contains("100.64.30.10") && error.contains("veth: "), "{error}");
    assert_eq!(state(&host), before, "what was begun is undone, the guard too");
}

#[test]
fn nodes_on_one_link_do_not_answer_each_other() {
    let lab = Lab::start("address-peers").unwrap();
    let (a, b, c) = (host(&lab, "a"), host(&lab, "b"), host(&lab, "c"));
    let first = Agent::start(&a, Settings::default()).unwrap();
    let second = Agent::start(&b, Settings::default()).unwrap();
    assert_eq!(check_on(&c, Settings::default()), Report::default());
    // Nor after a crash, which leaves the address.
    second.end(End::Crash);
    has_address(&b).unwrap();
    assert_eq!(check_on(&c, Settings::default()), Report::default());
    first.end(End::Release);
}

#[test]
fn a_machine_that_answers_is_refused_with_its_ethernet_address() {
    let lab = Lab::start("address-owner").unwrap();
    let (owner, agent_of_kkp, host) = (host(&lab, "a"), host(&lab, "b"), host(&lab, "c"));
    ip(&owner, "address add 100.64.30.10/32 dev eth0");
    // A node that answers for an address of another interface, as every Linux host does by default.
    ip(&agent_of_kkp, "address add 100.64.30.10/32 dev lo");
    let before = state(&host);
    let error = refusal_on(&host, RIGHTS, Settings::default());
    let AddressError::Collisions(collisions) = &error else { panic!("{error}") };
    let macs: Vec<Mac> = collisions
        .iter()
        .map(|collision| match collision {
            Collision::Answered { interface, mac, .. } if &**interface == "eth0" => *mac,
            other => panic!("{other}"),
        })
        .collect();
    assert_eq!(macs.len(), 2, "{error}");
    assert!(macs.contains(&mac(&owner, "eth0")) && macs.contains(&mac(&agent_of_kkp, "eth0")), "{error}");
    let text = error.to_string();
    assert!(text.contains("--no-arp-check") && text.contains("eth0"), "{text}");
    assert_eq!(state(&host), before, "a refusal changes nothing");

    // Not asked, nobody answers.
    Agent::start(&host, quiet()).unwrap().end(End::Release);
}

#[test]
fn an_answer_of_this_host_itself_is_no_collision() {
    let lab = Lab::start("address-self").unwrap();
    let host = host(&lab, "a");
    // A second interface on the same wire, which hears the question of the first and would answer for what a crashed agent has left
    // once its guard is gone, too.
    ip(&host, "link add link eth0 name second type macvlan mode bridge");
    ip(&host, &format!("address add 198.18.{}.99/24 dev second", lab.number()));
    ip(&host, "link set second up");
    Agent::start(&host, quiet()).unwrap().end(End::Crash);
    host.run(&["nft", "flush", "ruleset"]).unwrap();
    assert_eq!(check_on(&host, Settings::default()), Report::default());
}

#[test]
fn every_collision_is_told_not_only_the_first() {
    let lab = Lab::start("address-all").unwrap();
    let (owner, host) = (host(&lab, "a"), host(&lab, "b"));
    ip(&owner, "address add 100.64.30.10/32 dev eth0");
    ip(&host, "link add envoyagent type bridge");
    ip(&host, "address add 100.64.30.10/32 dev envoyagent");
    ip(&host, "link add portico type bridge");
    ip(&host, "address add 100.64.0.1/10 dev portico");
    ip(&host, "link set portico up");
    ip(&host, "route add blackhole 100.64.30.0/24");
    ip(&host, "route add unreachable 100.64.16.0/20 table 52");
    ip(&host, &format!("route add 100.64.30.8/29 via 198.18.{}.254", lab.number()));
    ip(&host, "route add local 100.64.30.10/31 dev lo");
    let told = told(&check_on(&host, Settings::default()));
    let expected = [
        "interface portico exists and was not made by Portico (a bridge with 100.64.0.1/10)",
        "on interface envoyagent of this host, made by KKP's Envoy agent",
        "network 100.64.0.0/10 of interface portico",
        "\"blackhole 100.64.30.0/24",
        "\"unreachable 100.64.16.0/20 table 52\"",
        &format!("\"100.64.30.8/29 via 198.18.{}.254 dev eth0\"", lab.number()),
        "\"local 100.64.30.10/31 dev lo table local\"",
        "answered for by",
    ];
    for part in expected {
        assert_eq!(told.iter().filter(|line| line.contains(part)).count(), 1, "{part}: {told:#?}");
    }
    assert_eq!(told.len(), expected.len(), "{told:#?}");
}

#[test]
fn default_routes_do_not_count_even_in_halves() {
    let lab = Lab::start("address-default").unwrap();
    let host = host(&lab, "a");
    let gateway = format!("198.18.{}.254", lab.number());
    ip(&host, &format!("route add 0.0.0.0/1 via {gateway}"));
    ip(&host, &format!("route add 128.0.0.0/1 via {gateway}"));
    ip(&host, &format!("route add default via {gateway} table 52"));
    assert_eq!(check_on(&host, quiet()), Report::default());
}

#[test]
fn what_someone_removes_is_put_back_at_once() {
    let lab = Lab::start("address-repair").unwrap();
    let host = host(&lab, "a");
    let before = state(&host);
    let agent = Agent::start(&host, quiet()).unwrap();
    let held = state(&host);
    let interference = [
        "ip address del 100.64.30.10/32 dev portico",
        "ip link set portico down",
        "ip link del portico",
        "ip link set portico alias mine",
        "nft flush ruleset",
        "ip address flush dev portico",
    ];
    for (number, command) in (1..).zip(interference) {
        host.run(&command.split(' ').collect::<Vec<_>>()).unwrap();
        wait::until(&format!("`{command}` to be repaired"), SOON, || {
            has_address(&host)?;
            ensure!(guards(&host) == 1, "no guard");
            let repairs = agent.status.repairs();
            ensure!(repairs == number && agent.status.is_held(), "{repairs} repairs");
            Ok(())
        })
        .unwrap();
    }
    assert_eq!(held.lines().count(), state(&host).lines().count());
    agent.end(End::Release);
    assert_eq!(state(&host), before);
}

#[test]
fn an_address_that_is_removed_again_and_again_is_there_in_the_end() {
    let lab = Lab::start("address-fight").unwrap();
    let host = host(&lab, "a");
    let agent = Agent::start(&host, quiet()).unwrap();
    let fight = "for i in 1 2 3 4 5 6 7 8 9 10; do ip link del portico 2>/dev/null; done; true";
    host.run(&["sh", "-c", fight]).unwrap();
    wait::until("the address to be back", SOON, || has_address(&host)).unwrap();
    assert!((1..=10).contains(&agent.status.repairs()));
    agent.end(End::Release);
}

#[test]
fn an_interface_of_someone_else_in_the_place_ends_the_keeping() {
    let lab = Lab::start("address-thief").unwrap();
    let host = host(&lab, "a");
    let agent = Agent::start(&host, quiet()).unwrap();
    let status = agent.status.clone();
    // Renamed away, so that there is no moment for a repair between.
    let steal = "link set dev portico down\nlink set dev portico name gone\nlink add portico type bridge\n";
    wait::until("a bridge to take the name before the agent does", SOON, || {
        host.run_with_input(&["ip", "-batch", "-"], steal)?;
        Ok(())
    })
    .unwrap();
    let error = agent.failure().to_string();
    assert!(error.contains("interface portico exists and was not made by Portico (a bridge"), "{error}");
    assert!(!status.is_held());
}

#[test]
fn a_crashed_agent_leaves_everything_and_the_next_adopts_it() {
    let lab = Lab::start("address-crash").unwrap();
    let host = host(&lab, "a");
    let before = state(&host);
    let first = Agent::start(&host, Settings::default()).unwrap();
    let held = state(&host);
    first.end(End::Crash);
    assert_eq!(state(&host), held);
    let second = Agent::start(&host, Settings::default()).unwrap();
    assert!(second.status.how().adopted);
    assert_eq!(state(&host), held, "the same interface, not another one");
    second.end(End::Release);
    assert_eq!(state(&host), before);
}

#[test]
fn a_successor_takes_over_without_a_moment_of_absence() {
    let lab = Lab::start("address-successor").unwrap();
    let host = host(&lab, "a");
    let before = state(&host);
    let old = Agent::start(&host, Settings::default()).unwrap();
    let held = state(&host);
    let new = Agent::start(&host, Settings::default()).unwrap();
    assert!(new.status.how().adopted && old.status.is_held());
    assert_eq!(old.status.repairs(), 0, "the successor takes nothing away");
    old.end(End::Leave);
    assert_eq!(state(&host), held);
    ip(&host, "link del portico");
    wait::until("the new agent to repair", SOON, || has_address(&host)).unwrap();
    new.end(End::Release);
    assert_eq!(state(&host), before);
}

#[test]
fn an_agent_with_another_address_takes_the_old_one_away() {
    let lab = Lab::start("address-moved").unwrap();
    let host = host(&lab, "a");
    let before = state(&host);
    let elsewhere = Settings { address: Ipv4Addr::new(100, 64, 30, 11).into(), ..quiet() };
    Agent::start(&host, elsewhere).unwrap().end(End::Crash);
    let agent = Agent::start(&host, quiet()).unwrap();
    let addresses = ip(&host, "-o address show dev portico");
    assert!(addresses.contains("100.64.30.10/32") && !addresses.contains("100.64.30.11"), "{addresses}");
    assert_eq!(guards(&host), 1);
    agent.end(End::Release);
    assert_eq!(state(&host), before);
}

#[test]
fn an_interface_of_that_name_that_is_not_ours_is_refused_and_left_alone() {
    let lab = Lab::start("address-foreign").unwrap();
    let host = host(&lab, "a");
    ip(&host, "link add portico type veth peer name other");
    let before = state(&host);
    let error = refusal_on(&host, RIGHTS, quiet()).to_string();
    assert!(error.contains("interface portico exists and was not made by Portico (a veth with no address)"));
    assert!(error.contains("--interface"), "{error}");
    assert_eq!(state(&host), before);
    let named = Settings { interface: "portico-2".into(), ..quiet() };
    Agent::start(&host, named).unwrap().end(End::Release);
    assert_eq!(state(&host), before);
}

#[test]
fn an_ipv6_address_is_held_too() {
    let lab = Lab::start("address-ipv6").unwrap();
    let host = host(&lab, "a");
    let before = state(&host);
    let settings = Settings { address: "fd00:64::10".parse().unwrap(), ..Settings::default() };
    let agent = Agent::start(&host, settings.clone()).unwrap();
    let there = || match ip(&host, "-6 route get fd00:64::10") {
        route if route.starts_with("local fd00:64::10") => Ok(()),
        route => bail!("{route}"),
    };
    // At once for who listens; the kernel adds the route by and by.
    let listen = async || std::net::TcpListener::bind(("fd00:64::10", 0)).map(drop);
    on(&host, RIGHTS, listen).join().unwrap().unwrap();
    wait::until("the route to the address", SOON, there).unwrap();
    ip(&host, "link del portico");
    wait::until("the address to be put back", SOON, there).unwrap();
    agent.end(End::Release);
    assert_eq!(state(&host), before);

    ip(&host, "-6 address add fd00:64::1/64 dev eth0");
    let told = told(&check_on(&host, settings));
    assert!(told[0].contains("network fd00:64::/64 of interface eth0"), "{told:?}");
    assert_eq!(told.len(), 1, "{told:?}");
}

#[test]
fn a_missing_right_is_named_with_what_it_is_for() {
    let lab = Lab::start("address-rights").unwrap();
    let host = host(&lab, "a");
    let before = state(&host);
    let take = |rights, settings| refusal_on(&host, rights, settings).to_string();
    let error = take(CapabilitySet::NET_ADMIN, Settings::default());
    assert!(error.contains("CAP_NET_RAW") && error.contains("on the link of eth0"), "{error}");
    assert!(error.contains("--no-arp-check"), "{error}");
    let error = take(CapabilitySet::NET_RAW, Settings::default());
    assert!(error.contains("CAP_NET_ADMIN") && error.contains("ARP"), "{error}");
    let v6 = Settings { address: "fd00:64::10".parse().unwrap(), ..quiet() };
    let error = take(CapabilitySet::empty(), v6);
    assert!(error.contains("CAP_NET_ADMIN") && error.contains("make interface portico"), "{error}");
    assert_eq!(state(&host), before);

    // Without any right, a look sees what can be seen, and tells what cannot.
    ip(&host, "route add blackhole 100.64.30.0/24");
    let settings = Settings::default();
    let report = on(&host, CapabilitySet::empty(), async move || check(&settings).await.unwrap());
    let report = report.join().unwrap();
    assert_eq!(report.collisions.len(), 1, "{report:?}");
    let [Warning::Unchecked { capability: Some("CAP_NET_RAW"), what, .. }] = &report.warnings[..] else {
        panic!("{report:?}")
    };
    assert!(what.contains("eth0"), "{what}");
}

#[test]
fn what_no_host_can_hold_is_refused_before_anything_is_touched() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let of = |address: &str| Settings { address: address.parse().unwrap(), ..Settings::default() };
    for address in ["127.0.0.2", "0.0.0.0", "0.1.2.3", "224.0.0.1", "255.255.255.255", "::", "::1", "fe80::1"]
    {
        let error = runtime.block_on(check(&of(address))).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{address} cannot be held")), "{error}");
    }
    let named = Settings { interface: "much-too-long-a-name".into(), ..Settings::default() };
    let error = runtime.block_on(check(&named)).unwrap_err().to_string();
    assert!(error.contains("--interface"), "{error}");
}
