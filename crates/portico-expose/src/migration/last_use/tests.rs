//! What two looks can tell, what they cannot, and that they never miss a use.

use portico_api::exposed_cluster::MigrationState;
use portico_api::migration::{BadMigrationSettings, MigrationSettings};
use portico_api::strategy::ExposeStrategy::{NodePort, Tunneling};
use proptest::prelude::*;

use super::*;
use crate::migration::{Facts, Second, step};

const TEN: Duration = Duration::from_secs(600);

fn time(seconds: i64) -> Timestamp {
    Timestamp::new(1_767_323_045 + seconds, 0).unwrap()
}

fn quieting() -> Now {
    let second = Second { strategy: NodePort, state: MigrationState::Quieting, since: time(0) };
    Now { first: Tunneling, second: Some(second) }
}

fn gateway(number: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, number])
}

fn client(number: u8) -> IpAddr {
    IpAddr::from([192, 0, 2, number])
}

fn counted(since: &str, used: u64, open: u64, clients: &[(u8, u64)]) -> Counted {
    let clients = clients.iter().map(|&(number, ago)| (client(number), Duration::from_secs(ago)));
    Counted { since: since.into(), used, open, clients: clients.collect() }
}

fn look(last_use: &mut LastUse, gateways: &[(u8, Counted)], clock: i64) -> Use {
    let answers = gateways.iter().map(|(number, counted)| (gateway(*number), counted.clone())).collect();
    last_use.update(&answers, TEN, time(clock))
}

fn unused(since: i64, by: Option<&str>) -> Use {
    Use::Unused { since: time(since), by: by.map(str::to_owned) }
}

#[test]
fn a_door_is_out_of_use_from_the_look_that_saw_the_last_of_it() {
    let mut last_use = LastUse::new(quieting(), time(0));
    let idle = || (1, counted("t", 7, 0, &[]));
    assert_eq!(look(&mut last_use, &[idle()], 10), unused(10, None), "nobody has looked before");
    assert_eq!(look(&mut last_use, &[idle()], 20), unused(10, None));
    let in_use = (1, counted("t", 7, 1, &[(7, 0)]));
    assert_eq!(look(&mut last_use, &[in_use], 30), Use::Used("used by 192.0.2.7".to_owned()));
    // It was used between two looks.
    let used = || (1, counted("t", 8, 0, &[(7, 3)]));
    assert_eq!(look(&mut last_use, &[used()], 40), unused(40, Some("used by 192.0.2.7")));
    assert_eq!(look(&mut last_use, &[used()], 50), unused(40, Some("used by 192.0.2.7")));
}

#[test]
fn a_gateway_that_is_new_gone_or_counts_anew_may_have_hidden_a_use() {
    let mut last_use = LastUse::new(quieting(), time(0));
    let (one, other) = (|| (1, counted("t", 7, 0, &[])), || (2, counted("u", 0, 0, &[])));
    for (gateways, clock, since) in [
        (vec![one()], 10, 10),
        (vec![one()], 20, 10),
        (vec![one(), other()], 30, 30),
        (vec![one(), other()], 40, 30),
        (vec![other()], 50, 50),
        (vec![(2, counted("v", 0, 0, &[]))], 60, 60),
        (vec![(2, counted("v", 0, 0, &[]))], 70, 60),
        // Meanwhile any number of them may have come and gone.
        (vec![(2, counted("v", 0, 0, &[]))], 131, 131),
        // A clock that was put back.
        (vec![(2, counted("v", 0, 0, &[]))], 0, 0),
    ] {
        assert_eq!(look(&mut last_use, &gateways, clock), unused(since, None), "{clock}");
    }
}

#[test]
fn a_few_of_the_clients_that_still_come_are_named_and_not_others_at_every_look() {
    let mut last_use = LastUse::new(quieting(), time(0));
    let many: Vec<(u8, u64)> = (1..=9).map(|number| (number, u64::from(number))).collect();
    // Seen by two gateways: the latest counts. A client of long ago no longer comes.
    let first = vec![(1, counted("t", 9, 1, &many)), (2, counted("u", 1, 0, &[(9, 0), (20, 600)]))];
    let named = "used by 192.0.2.1, 192.0.2.2, 192.0.2.3, 192.0.2.4, 192.0.2.9 and others";
    assert_eq!(look(&mut last_use, &first, 10), Use::Used(named.to_owned()));
    let others = [(1, counted("t", 9, 1, &[(30, 0)]))];
    assert_eq!(look(&mut last_use, &others, 60), Use::Used(named.to_owned()));
    assert_eq!(look(&mut last_use, &others, 70), Use::Used("used by 192.0.2.30".to_owned()));
    assert_eq!(look(&mut last_use, &[(1, counted("t", 9, 1, &[]))], 130), Use::Used("in use".to_owned()));
}

// === Whatever happens ===

/// What happens on the way.
#[derive(Debug, Clone)]
enum Event {
    /// A connection by this gateway begins, or the one that is open ends.
    Turn(usize),
    /// This gateway's process is replaced; its connections end.
    Restart(usize),
    /// The gateway goes, or comes back as another one. The operator is notified, and looks.
    Leave(usize),
    /// The operator looks.
    Look,
    /// Another operator takes over.
    TakeOver,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        2 => (0_usize..3).prop_map(Event::Turn),
        1 => (0_usize..3).prop_map(Event::Restart),
        1 => (0_usize..3).prop_map(Event::Leave),
        12 => Just(Event::Look),
        1 => Just(Event::TakeOver),
    ]
}

/// A gateway as it is, of which the operator sees what [`Counted`] has.
#[derive(Debug, Clone, Default)]
struct Gateway {
    present: bool,
    process: u32,
    used: u64,
    open: bool,
}

proptest! {
    #[test]
    fn a_door_that_is_used_is_never_closed_without_an_order(
        events in prop::collection::vec((event(), 1_i64..30), 1..150),
        quiet in prop::sample::select(&[30_u64, 60, 90][..]),
    ) {
        let settings = format!("quiet={quiet}s").parse();
        let (mut gateways, mut processes) = (vec![Gateway::default(); 3], 3);
        gateways[0].present = true;
        let (mut clock, mut last_use) = (0, 0);
        let mut seen = LastUse::new(quieting(), time(0));
        for (event, pause) in events {
            clock += pause;
            if gateways.iter().any(|gateway| gateway.open) {
                last_use = clock;
            }
            let looks = matches!(event, Event::Look | Event::Leave(_));
            match event {
                Event::Turn(index) if gateways[index].present => {
                    let gateway = &mut gateways[index];
                    gateway.used += u64::from(gateway.open);
                    gateway.open = !gateway.open;
                    last_use = clock;
                }
                Event::Turn(_) => {}
                Event::Restart(index) => {
                    processes += 1;
                    let present = gateways[index].present;
                    gateways[index] = Gateway { present, process: processes, ..Gateway::default() };
                }
                Event::Leave(index) => {
                    processes += 1;
                    let present = !gateways[index].present;
                    gateways[index] = Gateway { present, process: processes, ..Gateway::default() };
                }
                Event::TakeOver => seen = LastUse::new(quieting(), time(clock)),
                Event::Look => {}
            }
            if looks && closes(&mut seen, &gateways, &settings, clock) {
                prop_assert!(clock - last_use >= i64::try_from(quiet).unwrap());
                prop_assert!(gateways.iter().all(|gateway| !gateway.open));
            }
        }
        // Left alone it closes.
        gateways.iter_mut().for_each(|gateway| gateway.open = false);
        let mut looks = (1..20).map(|look| clock + 10 * look);
        prop_assert!(looks.any(|clock| closes(&mut seen, &gateways, &settings, clock)), "it never closes");
    }
}

/// Whether the door closes after a look at each gateway that is there.
fn closes(
    last_use: &mut LastUse,
    gateways: &[Gateway],
    settings: &Result<MigrationSettings, BadMigrationSettings>,
    clock: i64,
) -> bool {
    let present = gateways.iter().zip(0..).filter(|(gateway, _)| gateway.present);
    let counted = |(gateway, number): (&Gateway, u8)| {
        let (used, open) = (gateway.used, u64::from(gateway.open));
        (number, counted(&gateway.process.to_string(), used, open, &[]))
    };
    let answers: Vec<_> = present.map(counted).collect();
    let second_door = Some(look(last_use, &answers, clock));
    let facts = Facts { second_door, ..Facts::unknown(quieting()) };
    step(quieting(), Tunneling, settings, &facts, time(clock)).now != quieting()
}
