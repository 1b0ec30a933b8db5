//! The address on real hosts: network namespaces of a lab, the code under test on threads inside of them,
//! `ip` as the witness. Needs root and `ip` (the lab says what to install).

use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use portico_agent::address::{AddressError, AssignedAddress, Kind, Report, Settings, Status, check};
use portico_lab::{Host, Lab, wait};
use rustix::thread::{CapabilitySet, CapabilitySets, LinkNameSpaceType};
use tempfile::TempDir;
use tokio::sync::oneshot;

const SOON: Duration = Duration::from_secs(20);

fn only(kind: Kind) -> Settings {
    Settings { kinds: [kind].into(), ..Settings::default() }
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

/// A host whose state changes by itself: a link-local IPv6 address comes up by and by.
fn host(lab: &Lab, name: &str) -> Host {
    let host = lab.host(name).unwrap();
    ip(&host, "link set eth0 addrgenmode none");
    ip(&host, "-6 address flush dev eth0");
    host
}

/// What deploy/agent.yaml gives.
const RIGHTS: CapabilitySet = CapabilitySet::NET_ADMIN;

fn check_on(host: &Host, settings: Settings) -> Report {
    on(host, RIGHTS, async move || check(&settings).await.unwrap()).join().unwrap()
}

fn refusal_on(host: &Host, rights: CapabilitySet, settings: Settings) -> AddressError {
    on(host, rights, async move || AssignedAddress::take(settings).await.map(drop).unwrap_err())
        .join()
        .unwrap()
}

fn sentences(report: &Report) -> Vec<String> {
    report.collisions.iter().map(ToString::to_string).collect()
}

enum End {
    Release,
    /// As a process that is killed: nothing runs any more.
    Crash,
    /// The same, after it has removed the addresses of others.
    RemoveOthers,
    GiveUp,
}

/// An agent as far as the address goes: holds it on a thread until the test ends it.
struct Agent {
    status: Status,
    end: oneshot::Sender<End>,
    thread: JoinHandle<()>,
}

impl Agent {
    fn start(host: &Host, settings: Settings) -> Result<Agent, AddressError> {
        let (end, ended) = oneshot::channel();
        let (report, reported) = std::sync::mpsc::channel();
        let thread = on(host, RIGHTS, async move || {
            let held = match AssignedAddress::take(settings).await {
                Ok(held) => held,
                Err(error) => return report.send(Err(error)).unwrap(),
            };
            report.send(Ok(held.status())).unwrap();
            match ended.await.unwrap_or(End::Crash) {
                End::Release => held.release().await,
                End::Crash => drop(held),
                End::RemoveOthers => held.remove_others().await,
                End::GiveUp => held.give_up().await,
            }
        });
        let status = reported.recv().unwrap()?;
        // The kernel notes by and by that both ends of a pair are up.
        wait::until("the interfaces to have a carrier", SOON, || {
            let links = host.run(&["ip", "-o", "link"])?;
            ensure!(!links.contains("NO-CARRIER"), "{links}");
            Ok(())
        })
        .unwrap();
        Ok(Agent { status, end, thread })
    }

    fn end(self, end: End) {
        assert_eq!(self.status.problem(), None, "the address was held until the end");
        drop(self.end.send(end));
        self.thread.join().unwrap();
    }
}

/// Interfaces, addresses and routes of a host, as a person would compare them.
fn state(host: &Host) -> String {
    let commands: [&[&str]; 3] =
        [&["ip", "-d", "link"], &["ip", "address"], &["ip", "route", "show", "table", "all"]];
    commands.map(|command| host.run(command).unwrap()).join("\n")
}

fn ip(host: &Host, command: &str) -> String {
    let words: Vec<&str> = std::iter::once("ip").chain(command.split(' ')).collect();
    host.run(&words).unwrap()
}

fn has_address(host: &Host) -> Result<()> {
    // Through the kernel's own eyes: a local address, and no way out. While there is no route at all, the
    // command itself fails.
    let route = host.run(&["ip", "route", "get", "100.64.30.10"])?;
    ensure!(route.starts_with("local 100.64.30.10"), "{route}");
    Ok(())
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
    let expected = ["dummy", "veth"].into_iter().find(|kind| kernel_has(&host, kind)).unwrap();
    let before = state(&host);
    let agent = Agent::start(&host, Settings::default()).unwrap();
    let placement = agent.status.placement();
    assert_eq!(placement.kind.to_string(), expected);
    assert_eq!(placement.why.is_empty(), expected == "dummy", "{placement:?}");
    assert!(!placement.adopted && agent.status.is_held());
    has_address(&host).unwrap();
    let address = ip(&host, "-o address show dev portico");
    assert!(address.contains("100.64.30.10/32 scope host portico"), "{address}");
    assert!(ip(&host, "link show dev portico").contains("alias portico agent"));
    agent.end(End::Release);
    assert_eq!(state(&host), before);
}

#[test]
fn when_no_way_works_each_is_reported_with_its_reason() {
    let lab = Lab::start("address-none").unwrap();
    let host = host(&lab, "a");
    ip(&host, "link add portico-peer type bridge");
    let before = state(&host);
    let error = refusal_on(&host, RIGHTS, only(Kind::Veth)).to_string();
    assert!(error.contains("100.64.30.10") && error.contains("veth: "), "{error}");
    assert_eq!(state(&host), before, "what was begun is undone");
}

#[test]
fn every_collision_is_reported_not_only_the_first() {
    let lab = Lab::start("address-all").unwrap();
    let host = host(&lab, "a");
    ip(&host, "link add envoyagent type bridge");
    ip(&host, "address add 100.64.30.10/32 dev envoyagent");
    ip(&host, "link add portico type bridge");
    ip(&host, "address add 100.64.0.1/10 dev portico");
    ip(&host, "link set portico up");
    ip(&host, "route add blackhole 100.64.30.0/24");
    ip(&host, "route add unreachable 100.64.16.0/20 table 52");
    ip(&host, &format!("route add 100.64.30.8/29 via 198.18.{}.254", lab.number()));
    ip(&host, "route add local 100.64.30.10/31 dev lo");
    let sentences = sentences(&check_on(&host, Settings::default()));
    let expected = [
        "interface portico exists and was not made by Portico (a bridge with 100.64.0.1/10)",
        "on interface envoyagent of this host, made by KKP's Envoy agent",
        "network 100.64.0.0/10 of interface portico",
        "\"blackhole 100.64.30.0/24",
        "\"unreachable 100.64.16.0/20 table 52\"",
        &format!("\"100.64.30.8/29 via 198.18.{}.254 dev eth0\"", lab.number()),
        "\"local 100.64.30.10/31 dev lo table local\"",
    ];
    for part in expected {
        assert_eq!(sentences.iter().filter(|line| line.contains(part)).count(), 1, "{part}: {sentences:#?}");
    }
    assert_eq!(sentences.len(), expected.len(), "{sentences:#?}");
}

#[test]
fn default_routes_do_not_count_even_in_halves() {
    let lab = Lab::start("address-default").unwrap();
    let host = host(&lab, "a");
    let gateway = format!("198.18.{}.254", lab.number());
    ip(&host, &format!("route add 0.0.0.0/1 via {gateway}"));
    ip(&host, &format!("route add 128.0.0.0/1 via {gateway}"));
    ip(&host, &format!("route add default via {gateway} table 52"));
    assert_eq!(check_on(&host, Settings::default()).collisions, []);
}

#[test]
fn what_someone_removes_is_put_back_at_once() {
    let lab = Lab::start("address-repair").unwrap();
    let host = host(&lab, "a");
    let before = state(&host);
    let agent = Agent::start(&host, Settings::default()).unwrap();
    let held = state(&host);
    let interference = [
        "ip address del 100.64.30.10/32 dev portico",
        "ip link set portico down",
        "ip link del portico",
        "ip link set portico alias mine",
        "ip address flush dev portico",
    ];
    for (number, command) in (1..).zip(interference) {
        host.run(&command.split(' ').collect::<Vec<_>>()).unwrap();
        wait::until(&format!("`{command}` to be repaired"), SOON, || {
            has_address(&host)?;
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
    let lab = Lab::start("address-removed").unwrap();
    let host = host(&lab, "a");
    let agent = Agent::start(&host, Settings::default()).unwrap();
    let removals = "for i in 1 2 3 4 5 6 7 8 9 10; do ip link del portico 2>/dev/null; done; true";
    host.run(&["sh", "-c", removals]).unwrap();
    wait::until("the address to be back", SOON, || has_address(&host)).unwrap();
    assert!((1..=10).contains(&agent.status.repairs()));
    agent.end(End::Release);
}

#[test]
fn an_interface_of_that_name_that_is_not_ours_is_reported_and_the_address_is_back_once_it_is_gone() {
    let lab = Lab::start("address-thief").unwrap();
    let host = host(&lab, "a");
    let agent = Agent::start(&host, Settings::default()).unwrap();
    let status = agent.status.clone();
    // Renamed away, so that there is no moment for a repair between.
    let steal = "link set dev portico down\nlink set dev portico name gone\nlink add portico type bridge\n";
    wait::until("a bridge to take the name before the agent does", SOON, || {
        host.run_with_input(&["ip", "-batch", "-"], steal)?;
        Ok(())
    })
    .unwrap();
    let taken = "interface portico exists and was not made by Portico (a bridge";
    wait::until("the agent to say why it cannot hold the address", SOON, || {
        let problem = status.problem().unwrap_or_default();
        ensure!(problem.contains(taken), "{problem:?}");
        Ok(())
    })
    .unwrap();
    assert!(!status.is_held());
    // With the name free again the address is back, without anybody's help.
    ip(&host, "link del gone");
    ip(&host, "link del portico");
    wait::until("the address to be put back", SOON, || has_address(&host)).unwrap();
    wait::until("the agent to know", SOON, || {
        ensure!(status.is_held() && status.problem().is_none(), "{status:?}");
        Ok(())
    })
    .unwrap();
    agent.end(End::Release);
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
    assert!(second.status.placement().adopted);
    assert_eq!(state(&host), held, "the same interface, not another one");
    second.end(End::Release);
    assert_eq!(state(&host), before);
}

/// What several agents of one node have.
fn shared(folder: &TempDir) -> Settings {
    Settings { users: Some(folder.path().join("take-over.sock.lock")), ..Settings::default() }
}

#[test]
fn a_successor_takes_over_without_a_moment_of_absence() {
    let lab = Lab::start("address-successor").unwrap();
    let (host, folder) = (host(&lab, "a"), tempfile::tempdir().unwrap());
    let before = state(&host);
    let old = Agent::start(&host, shared(&folder)).unwrap();
    let held = state(&host);
    let new = Agent::start(&host, shared(&folder)).unwrap();
    assert!(new.status.placement().adopted && old.status.is_held());
    assert_eq!(old.status.repairs(), 0, "the successor takes nothing away");
    old.end(End::Release);
    assert_eq!(state(&host), held);
    ip(&host, "link del portico");
    wait::until("the new agent to repair", SOON, || has_address(&host)).unwrap();
    new.end(End::Release);
    assert_eq!(state(&host), before);
}

#[test]
fn the_address_stays_until_the_last_agent_ends_whose_connections_need_it() {
    let lab = Lab::start("address-last").unwrap();
    let (host, folder) = (host(&lab, "a"), tempfile::tempdir().unwrap());
    let before = state(&host);
    let drains = Agent::start(&host, shared(&folder)).unwrap();
    let held = state(&host);
    for end in [End::Release, End::GiveUp, End::Crash, End::RemoveOthers] {
        Agent::start(&host, shared(&folder)).unwrap().end(end);
        assert_eq!(state(&host), held);
    }
    drains.end(End::Release);
    assert_eq!(state(&host), before);
    Agent::start(&host, shared(&folder)).unwrap().end(End::Crash);
    Agent::start(&host, shared(&folder)).unwrap().end(End::GiveUp);
    assert_eq!(state(&host), before, "pods would find nothing there");
}

#[test]
fn an_agent_with_another_address_takes_the_old_one_away_once_it_is_alone() {
    let lab = Lab::start("address-moved").unwrap();
    let (host, folder) = (host(&lab, "a"), tempfile::tempdir().unwrap());
    let before = state(&host);
    let elsewhere = Settings { address: Ipv4Addr::new(100, 64, 30, 11).into(), ..shared(&folder) };
    let old = Agent::start(&host, elsewhere.clone()).unwrap();
    let held = state(&host);
    Agent::start(&host, elsewhere).unwrap().end(End::GiveUp);
    assert_eq!(state(&host), held, "what another agent has made stays");
    Agent::start(&host, shared(&folder)).unwrap().end(End::GiveUp);
    assert_eq!(state(&host), held, "what is its own goes");
    let new = Agent::start(&host, shared(&folder)).unwrap();
    let addresses = || ip(&host, "-o address show dev portico");
    let has = |last: u8| addresses().contains(&format!(" 100.64.30.{last}/32 "));
    assert!(has(10) && has(11), "the one that serves keeps its own: {}", addresses());
    Agent::start(&host, shared(&folder)).unwrap().end(End::RemoveOthers);
    assert!(has(11), "an agent with it still runs: {}", addresses());
    ip(&host, "link del portico");
    wait::until("both to be put back", SOON, || {
        let is_fine = |agent: &Agent| agent.status.is_held() && agent.status.problem().is_none();
        ensure!(has(10) && has(11) && is_fine(&old) && is_fine(&new), "{}", addresses());
        Ok(())
    })
    .unwrap();
    ip(&host, "-6 address add fd00::10/128 dev portico");
    old.end(End::Crash);
    new.end(End::RemoveOthers);
    // A test beside this one that starts a program has the lock of the crashed agent for a moment more.
    wait::until("what the crashed agent has left to be gone", SOON, || {
        if has(11) {
            Agent::start(&host, shared(&folder))?.end(End::RemoveOthers);
        }
        ensure!(has(10) && !has(11) && !addresses().contains("fd00::10"), "{}", addresses());
        Ok(())
    })
    .unwrap();
    Agent::start(&host, shared(&folder)).unwrap().end(End::Release);
    assert_eq!(state(&host), before);
}

#[test]
fn the_last_agent_of_an_address_takes_it_away_although_one_of_another_address_runs() {
    let lab = Lab::start("address-two").unwrap();
    let (host, folder) = (host(&lab, "a"), tempfile::tempdir().unwrap());
    let before = state(&host);
    let elsewhere = Settings { address: Ipv4Addr::new(100, 64, 30, 11).into(), ..shared(&folder) };
    let new = Agent::start(&host, elsewhere).unwrap();
    let held = state(&host);
    for end in [|| End::Release, || End::GiveUp] {
        let [one, two] = [(), ()].map(|()| Agent::start(&host, shared(&folder)).unwrap());
        let both = state(&host);
        two.end(end());
        assert_eq!(state(&host), both, "another agent of this address runs");
        assert_eq!(one.status.repairs(), 0);
        one.end(end());
        assert_eq!(state(&host), held);
        assert_eq!(new.status.repairs(), 0);
    }
    // One that adopted the address from another, which ended first.
    let one = Agent::start(&host, shared(&folder)).unwrap();
    let two = Agent::start(&host, shared(&folder)).unwrap();
    one.end(End::Release);
    two.end(End::GiveUp);
    assert_eq!(state(&host), held);
    new.end(End::Release);
    assert_eq!(state(&host), before);
}

#[test]
fn what_a_killed_agent_has_half_made_is_completed_by_the_next() {
    let lab = Lab::start("address-half").unwrap();
    let host = host(&lab, "a");
    let before = state(&host);
    let ways = [("dummy", "dummy", Kind::Dummy), ("veth", "veth peer name portico-peer", Kind::Veth)];
    for (kind, way, expected) in ways {
        if !kernel_has(&host, kind) {
            continue;
        }
        ip(&host, &format!("link add portico type {way}"));
        assert_eq!(sentences(&check_on(&host, Settings::default())), Vec::<String>::new());
        let agent = Agent::start(&host, Settings::default()).unwrap();
        assert_eq!(agent.status.placement().kind, expected);
        has_address(&host).unwrap();
        agent.end(End::GiveUp);
        assert_eq!(state(&host), before);
        // Of use to somebody.
        ip(&host, &format!("link add portico up type {way}"));
        assert!(sentences(&check_on(&host, Settings::default()))[0].contains("was not made by Portico"));
        ip(&host, "link del portico");
    }
}

#[test]
fn an_interface_of_that_name_that_is_not_ours_is_refused_and_left_alone() {
    let lab = Lab::start("address-foreign").unwrap();
    let host = host(&lab, "a");
    ip(&host, "link add portico type veth peer name other");
    let before = state(&host);
    let error = refusal_on(&host, RIGHTS, Settings::default()).to_string();
    assert!(error.contains("interface portico exists and was not made by Portico (a veth with no address)"));
    assert!(error.contains("--interface"), "{error}");
    assert_eq!(state(&host), before);
    let named = Settings { interface: "portico-2".into(), ..Settings::default() };
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
    // While there is no route, the command itself fails.
    let there = || match host.run(&["ip", "-6", "route", "get", "fd00:64::10"])? {
        route if route.starts_with("local fd00:64::10") => Ok(()),
        route => bail!("{route}"),
    };
    // At once for a listener; the kernel adds the route by and by.
    let listen = async || std::net::TcpListener::bind(("fd00:64::10", 0)).map(drop);
    on(&host, RIGHTS, listen).join().unwrap().unwrap();
    wait::until("the route to the address", SOON, there).unwrap();
    ip(&host, "link del portico");
    wait::until("the address to be put back", SOON, there).unwrap();
    agent.end(End::Release);
    assert_eq!(state(&host), before);

    ip(&host, "-6 address add fd00:64::1/64 dev eth0");
    let sentences = sentences(&check_on(&host, settings));
    assert!(sentences[0].contains("network fd00:64::/64 of interface eth0"), "{sentences:?}");
    assert_eq!(sentences.len(), 1, "{sentences:?}");
}

#[test]
fn a_missing_right_is_named_with_what_it_is_for() {
    let lab = Lab::start("address-rights").unwrap();
    let host = host(&lab, "a");
    let before = state(&host);
    for address in ["100.64.30.10", "fd00:64::10"] {
        let settings = Settings { address: address.parse().unwrap(), ..Settings::default() };
        let error = refusal_on(&host, CapabilitySet::NET_RAW, settings).to_string();
        assert!(error.contains("CAP_NET_ADMIN") && error.contains("make interface portico"), "{error}");
    }
    assert_eq!(state(&host), before);

    // A look needs no right at all.
    ip(&host, "route add blackhole 100.64.30.0/24");
    let settings = Settings::default();
    let report = on(&host, CapabilitySet::empty(), async move || check(&settings).await.unwrap());
    let report = report.join().unwrap();
    assert_eq!(report.collisions.len(), 1, "{report:?}");
}

#[test]
fn a_check_names_what_it_looked_at() {
    let lab = Lab::start("address-looked").unwrap();
    let host = host(&lab, "a");
    ip(&host, "route add blackhole 192.0.2.0/24 table 52");
    let report = check_on(&host, Settings::default());
    assert_eq!(report.collisions, []);
    assert_eq!(report.interfaces, ["lo".into(), "eth0".into()]);
    let eth0 = ip(&host, "-4 -o address show dev eth0");
    let eth0 = eth0.split_whitespace().nth(3).unwrap();
    assert!(report.addresses.contains(&(eth0.into(), "eth0".into())), "{report:?}");
    for table in ["52", "main", "local"] {
        let shown = ip(&host, &format!("-4 route show table {table}")).lines().count();
        assert!(report.routes.contains(&(table.into(), shown)), "{table} {shown}: {report:?}");
    }
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
