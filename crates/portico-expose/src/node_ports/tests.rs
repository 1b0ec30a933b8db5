//! Allocation, release, restart: single steps, then random sequences of them.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

fn key(name: &str) -> PortKey {
    PortKey::new("cluster-a", name, "secure")
}

/// The allocator after a restart.
fn again(allocator: &NodePortAllocator) -> NodePortAllocator {
    NodePortAllocator::restored(allocator.all().map(|(key, port)| (key.clone(), port))).unwrap()
}

fn keys(count: usize) -> Vec<PortKey> {
    (0..count).map(|index| key(&format!("s{index}"))).collect()
}

#[test]
fn a_range_that_is_used_up_says_range_used_and_needed() {
    let mut allocator = NodePortAllocator::default();
    let mut random = Random::new(1);
    let range = PortRange::new(30_000, 30_002).unwrap();
    allocator.allocate(&keys(2), range, &mut random).unwrap();
    let error = allocator.allocate(&keys(4), range, &mut random).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the NodePort range 30000-30002 is used up: 2 of 3 ports are in use, 2 more are needed"
    );
    assert_eq!(allocator.get(&key("s2")), None, "all or none");
}

#[test]
fn a_port_that_a_service_fixes_itself_is_not_allocated_until_the_service_is_deleted() {
    let mut allocator = NodePortAllocator::default();
    let range = PortRange::new(30_000, 30_001).unwrap();
    allocator.fix(&key("mine"), 30_000).unwrap();
    allocator.allocate(&keys(1), range, &mut Random::new(7)).unwrap();
    assert_eq!(allocator.get(&key("s0")), Some(30_001));
    allocator.unfix(30_000);
    allocator.allocate(&keys(2), range, &mut Random::new(7)).unwrap();
    assert_eq!(allocator.get(&key("s1")), Some(30_000));
}

#[test]
fn a_port_that_was_given_cannot_be_fixed_by_another() {
    let mut allocator = NodePortAllocator::default();
    allocator.allocate(&keys(1), PortRange::new(30_000, 30_000).unwrap(), &mut Random::new(7)).unwrap();
    assert_eq!(
        allocator.fix(&key("mine"), 30_000).unwrap_err().to_string(),
        "NodePort 30000 belongs to cluster-a/s0/secure"
    );
    allocator.fix(&key("s0"), 30_000).expect("its owner may name it");
}

#[test]
fn an_owner_that_returns_gets_its_port_back_also_after_a_restart() {
    let (mut allocator, mut random) = (NodePortAllocator::default(), Random::new(1));
    allocator.allocate(&keys(2), PortRange::NODE_PORTS, &mut random).unwrap();
    let had = allocator.get(&key("s0"));
    allocator.release(&key("s0"));
    assert_eq!(allocator.get(&key("s0")), None);
    let mut allocator = again(&allocator);
    allocator.retain(|key, _| *key == self::key("s1"));
    allocator.allocate(&keys(400), PortRange::NODE_PORTS, &mut random).unwrap();
    assert_eq!(allocator.get(&key("s0")), had);
}

#[test]
fn a_port_that_is_remembered_goes_to_others_only_when_no_other_is_left() {
    let (mut allocator, mut random) = (NodePortAllocator::default(), Random::new(1));
    let range = PortRange::new(30_000, 30_002).unwrap();
    allocator.allocate(&[key("old")], range, &mut random).unwrap();
    let had = allocator.get(&key("old")).unwrap();
    allocator.release(&key("old"));
    allocator.allocate(&keys(2), range, &mut random).unwrap();
    assert!(keys(2).iter().all(|key| allocator.get(key) != Some(had)));
    allocator.allocate(&keys(3), range, &mut random).unwrap();
    assert_eq!(allocator.get(&key("s2")), Some(had));
    allocator.release(&key("s0"));
    let free = range.size() - allocator.used.count(range);
    allocator.allocate(&[key("old")], range, &mut random).unwrap();
    assert_eq!((free, allocator.get(&key("s0"))), (1, None), "it had to be drawn anew");
}

#[test]
fn a_service_may_fix_a_port_whose_owner_is_gone() {
    let mut allocator = NodePortAllocator::default();
    let range = PortRange::new(30_000, 30_000).unwrap();
    allocator.allocate(&keys(1), range, &mut Random::new(7)).unwrap();
    allocator.release(&key("s0"));
    allocator.fix(&key("mine"), 30_000).unwrap();
    let error = allocator.allocate(&keys(1), range, &mut Random::new(7)).unwrap_err();
    assert_eq!((error.used, error.needed), (1, 1));
}

#[test]
fn ports_are_spread_over_the_whole_range() {
    let mut allocator = NodePortAllocator::default();
    allocator.allocate(&keys(400), PortRange::NODE_PORTS, &mut Random::new(3)).unwrap();
    let quarter = PortRange::NODE_PORTS.size() / 4;
    for part in 0..4 {
        let first = 30_000 + u16::try_from(part * quarter).unwrap();
        let range = PortRange::new(first, first + u16::try_from(quarter).unwrap() - 1).unwrap();
        assert!(allocator.used.count(range) > 60, "{range}: {}", allocator.used.count(range));
    }
}

#[derive(Debug, Clone)]
enum Step {
    Allocate(u8),
    Release(u8),
    Fix(u8, u16),
    Unfix(usize),
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..60_u8).prop_map(Step::Allocate),
        2 => (0..60_u8).prop_map(Step::Release),
        1 => (0..60_u8, 30_000..30_040_u16).prop_map(|(key, port)| Step::Fix(key, port)),
        1 => (0..8_usize).prop_map(Step::Unfix),
        1 => Just(Step::Restart),
    ]
}

proptest! {
    #[test]
    fn a_port_is_never_given_twice_and_never_moves_until_released(
        steps in prop::collection::vec(step(), 1..200),
        seed: u64,
    ) {
        let range = PortRange::new(30_000, 30_031).unwrap();
        let mut random = Random::new(seed);
        let mut allocator = NodePortAllocator::default();
        let mut model: BTreeMap<u8, u16> = BTreeMap::new();
        let mut fixed: Vec<(u8, u16)> = Vec::new();
        for step in steps {
            match step {
                Step::Allocate(owner) => {
                    let key = key(&owner.to_string());
                    match allocator.allocate(std::slice::from_ref(&key), range, &mut random) {
                        Ok(()) => {
                            let port = allocator.get(&key).unwrap();
                            prop_assert!(range.contains(port));
                            if let Some(before) = model.insert(owner, port) {
                                prop_assert_eq!(before, port);
                            } else {
                                let by_other = fixed.iter().any(|&(by, held)| by != owner && held == port);
                                prop_assert!(!by_other, "{port} is another's");
                            }
                        }
                        Err(error) => {
                            prop_assert_eq!(error.used, range.size());
                            prop_assert!(!model.contains_key(&owner));
                        }
                    }
                }
                Step::Release(owner) => {
                    model.remove(&owner);
                    allocator.release(&key(&owner.to_string()));
                }
                Step::Fix(owner, port) => {
                    let held = model.iter().any(|(&other, &held)| other != owner && held == port);
                    let result = allocator.fix(&key(&owner.to_string()), port);
                    prop_assert_eq!(result.is_err(), held);
                    if result.is_ok() {
                        fixed.push((owner, port));
                    }
                }
                Step::Unfix(index) => if index < fixed.len() {
                    allocator.unfix(fixed.swap_remove(index).1);
                },
                Step::Restart => {
                    allocator = again(&allocator);
                    for &(_, port) in &fixed {
                        // The Service fixes it again, in the name of the present owner if there is one.
                        let by = allocator.owners.get(&port).cloned().unwrap_or_else(|| key("x"));
                        allocator.fix(&by, port).unwrap();
                    }
                    allocator.retain(|key, port| model.iter().any(|(owner, held)| {
                        *held == port && *key == self::key(&owner.to_string())
                    }));
                }
            }
            let ports: BTreeSet<u16> = model.values().copied().collect();
            prop_assert_eq!(ports.len(), model.len());
            prop_assert_eq!(allocator.of_namespace("cluster-a").count(), model.len());
            let all = ports.iter().copied().chain(fixed.iter().map(|&(_, port)| port));
            let used: BTreeSet<u16> = all.filter(|&port| range.contains(port)).collect();
            prop_assert_eq!(allocator.used.count(range) as usize, used.len());
        }
    }
}
