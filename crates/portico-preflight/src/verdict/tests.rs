use std::net::SocketAddr;
use std::sync::Arc;

use super::*;
use crate::check::tcp::Responder;
use crate::observation::TlsSession;
use crate::probe::Banner;

const PEER: &str = "10.0.1.2";

fn row() -> &'static Row {
    let product = portico_ports::model::product("kublr").unwrap();
    product.rows.iter().find(|row| row.id == "kublr-1.6").unwrap()
}

fn planned(direction: Direction, transport: Transport) -> Planned {
    let peer: IpAddr = PEER.parse().unwrap();
    let what = match (direction, transport) {
        (Direction::In, _) => What::Back { via: Arc::new([]), transport },
        (_, Transport::Tcp(port)) => What::Tcp { to: SocketAddr::new(peer, port), tls: None },
        _ => What::Datagram { to: peer, transport },
    };
    let (from, to) = if direction == Direction::In { (PEER, "10.0.1.1") } else { ("10.0.1.1", PEER) };
    let (from, to, transport) = (from.into(), to.into(), Some(transport));
    Planned { row: row(), direction, from, to, peer: Some(peer), transport, what }
}

/// A check that shows a responder at the peer, which cannot answer `silent`.
fn responder(silent: &[Transport]) -> (Planned, Outcome) {
    let banner = Banner { unix_millis: 0, silent: silent.iter().copied().collect() };
    let responder = Some(Responder { banner, ahead_millis: 0 });
    let outcome = Outcome { seen: Observation::Answered { micros: 1 }, responder, ahead_millis: None };
    (planned(Direction::Out, Transport::Tcp(10250)), outcome)
}

/// The verdict on one check, beside what others of the run have shown.
fn verdict(planned: Planned, seen: Observation, others: &[(Planned, Outcome)]) -> Finding {
    let (mut checks, mut outcomes) = (vec![planned], vec![Outcome::of(seen)]);
    for (planned, outcome) in others {
        checks.push(planned.clone());
        outcomes.push(outcome.clone());
    }
    judge(&checks, &outcomes, &Expectations::default()).remove(0)
}

const TIMED_OUT: Observation = Observation::TimedOut { millis: 3500 };

#[test]
fn a_silent_datagram_is_a_firewall_only_where_something_would_have_returned_it() {
    let udp = || planned(Direction::Out, Transport::Udp(8472));
    let alone = verdict(udp(), TIMED_OUT, &[]);
    assert_eq!(alone.status, Status::Inconclusive);
    assert!(alone.remedy.unwrap().what.contains("--listen"));
    let beside = verdict(udp(), TIMED_OUT, &[responder(&[])]);
    assert_eq!(beside.status, Status::Failed);
    let what = beside.remedy.unwrap().what;
    assert_eq!(what, "allow UDP 8472 from 10.0.1.1 to 10.0.1.2 (kublr-1.6: Calico VXLAN/Flannel)");
    let expected = Expectations { peers_listen: true, ..Expectations::default() };
    let finding = judge(&[udp()], &[Outcome::of(TIMED_OUT)], &expected).remove(0);
    assert_eq!(finding.status, Status::Failed);
    let silent = verdict(udp(), TIMED_OUT, &[responder(&[Transport::Udp(8472)])]);
    assert_eq!(silent.status, Status::Inconclusive);
    assert!(silent.remedy.unwrap().what.contains("NET_RAW"));
}

#[test]
fn a_refusal_is_an_idle_port_unless_a_responder_has_it_or_another_machine_sent_it() {
    let tcp = || planned(Direction::Out, Transport::Tcp(179));
    assert_eq!(verdict(tcp(), Observation::Refused { by: None }, &[]).status, Status::Inconclusive);
    assert_eq!(verdict(tcp(), Observation::Refused { by: None }, &[responder(&[])]).status, Status::Failed);
    let by = |address: &str| Observation::Refused { by: address.parse().ok() };
    assert_eq!(verdict(tcp(), by(PEER), &[]).status, Status::Inconclusive);
    let rejected = verdict(tcp(), by("10.0.9.1"), &[]);
    assert_eq!(rejected.status, Status::Failed);
    assert_eq!(rejected.remedy.unwrap().who, "the firewall on 10.0.9.1, which rejects");
}

#[test]
fn a_connection_that_times_out_is_dropped_by_somebody_whoever_listens() {
    let finding = verdict(planned(Direction::Out, Transport::Tcp(179)), TIMED_OUT, &[]);
    assert_eq!(finding.status, Status::Failed);
    let back = verdict(planned(Direction::In, Transport::Udp(8472)), TIMED_OUT, &[]);
    assert_eq!(back.status, Status::Failed, "our own responder would have answered");
    let what = back.remedy.unwrap().what;
    assert!(what.starts_with("allow UDP 8472 from 10.0.1.2 to 10.0.1.1"), "{what}");
}

#[test]
fn interception_names_the_issuer_and_the_team() {
    let session = Box::new(TlsSession { issuer: "CN=proxy CA".into(), ..TlsSession::default() });
    let finding =
        verdict(planned(Direction::Out, Transport::Tcp(443)), Observation::Intercepted { session }, &[]);
    assert_eq!(finding.status, Status::Failed);
    assert!(finding.remedy.unwrap().who.contains("CN=proxy CA"));
}

#[test]
fn packets_that_vanish_are_a_failure_unless_pods_send_smaller_ones() {
    let transport = Transport::Udp(8472);
    let what = What::PathMtu { to: PEER.parse().unwrap(), transport };
    let sized = Planned { what, ..planned(Direction::Out, transport) };
    let judged = |mtu, by: Option<&str>, pod_mtu| {
        let by = by.map(|text| text.parse().unwrap());
        let outcome = Outcome::of(Observation::PathMtu { mtu, interface: 1500, by });
        let expected = Expectations { pod_mtu, ..Expectations::default() };
        judge(std::slice::from_ref(&sized), &[outcome], &expected).remove(0)
    };
    assert_eq!(judged(1500, None, None).status, Status::Passed);
    assert_eq!(judged(1400, Some("10.0.9.1"), None).status, Status::Passed, "senders are told");
    let hole = judged(1400, None, None);
    assert_eq!(hole.status, Status::Failed);
    assert!(hole.remedy.unwrap().what.contains("set the MTU of pods to 1350"));
    assert_eq!(judged(1400, None, Some(1350)).status, Status::Passed);
    assert_eq!(judged(1500, None, Some(1500)).status, Status::Failed);
}

#[test]
fn a_taken_port_fails_only_a_machine_on_which_nothing_is_installed() {
    let transport = Transport::Tcp(10250);
    let what = What::LocalPort { address: PEER.parse().unwrap(), transport };
    let local = Planned { what, peer: None, ..planned(Direction::Out, transport) };
    let judged = |by: &str, is_new_machine| {
        let outcome = Outcome::of(Observation::Taken { by: by.into() });
        let expected = Expectations { is_new_machine, ..Expectations::default() };
        judge(std::slice::from_ref(&local), &[outcome], &expected).remove(0)
    };
    assert_eq!(judged("kubelet (process 812)", false).status, Status::Note);
    assert_eq!(judged("portico (process 813)", true).status, Status::Note, "a responder");
    let failed = judged("kubelet (process 812)", true);
    assert_eq!(failed.status, Status::Failed);
    assert!(failed.remedy.unwrap().what.starts_with("stop kubelet (process 812)"));
}

#[test]
fn a_clock_is_judged_once_a_machine_by_its_largest_difference() {
    let checks: Vec<_> = [22, 179].map(|port| planned(Direction::Out, Transport::Tcp(port))).into();
    let outcome =
        |ahead| Outcome { ahead_millis: Some(ahead), ..Outcome::of(Observation::Answered { micros: 1 }) };
    let judged = |one, two| {
        let findings = judge(&checks, &[outcome(one), outcome(two)], &Expectations::default());
        findings.into_iter().filter(|finding| finding.check == "clock").collect::<Vec<_>>()
    };
    let fine = judged(-3, 900);
    assert_eq!((fine.len(), fine[0].status), (1, Status::Passed));
    let off = judged(100, -60_000);
    assert_eq!(off[0].status, Status::Failed);
    assert_eq!(off[0].seen.to_string(), "clock 60.000 s behind ours");
}

#[test]
fn what_this_machine_cannot_answer_is_no_finding_about_the_way_back() {
    let back = planned(Direction::In, Transport::Udp(8472));
    let silent_here = BTreeSet::from([Transport::Udp(8472)]);
    let expected = Expectations { silent_here, ..Expectations::default() };
    let finding = judge(&[back], &[Outcome::of(TIMED_OUT)], &expected).remove(0);
    assert_eq!(finding.status, Status::Inconclusive);
    assert_eq!(finding.remedy.unwrap().who, "the owner of this machine");
}

#[test]
fn a_way_back_that_nobody_could_be_asked_for_follows_from_the_flow_that_fails() {
    let back = || planned(Direction::In, Transport::Udp(8472));
    let not_tried = || Observation::not_tried("no responder answers there");
    assert_eq!(verdict(back(), not_tried(), &[]).status, Status::Inconclusive);
    let fails = (planned(Direction::Out, Transport::Tcp(10250)), Outcome::of(TIMED_OUT));
    assert_eq!(verdict(back(), not_tried(), &[fails]).status, Status::Skipped);
}
