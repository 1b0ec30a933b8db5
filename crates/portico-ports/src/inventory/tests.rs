use super::*;

fn read(text: &str) -> Result<Inventory, Vec<InventoryProblem>> {
    Inventory::read(text, &Facts::default())
}

/// The one problem of a text.
fn problem(text: &str) -> InventoryProblem {
    let mut problems = read(text).unwrap_err();
    assert_eq!(problems.len(), 1, "{text:?}: {problems:?}");
    problems.remove(0)
}

#[test]
fn roles_have_addresses_networks_and_names_of_both_families() {
    let text = "worker: [10.0.1.0/24, '2001:db8:1::/64']\nfront: 203.0.113.9\nuser: [any]\n\
                Seed cluster Kubernetes API: [api.Seed.example.com, 10.9.0.1]\n";
    let inventory = read(text).unwrap();
    let worker = inventory.role("worker").unwrap();
    assert!(worker.has_family(true) && worker.has_family(false));
    assert_eq!(inventory.role("front").unwrap().hosts().count(), 1);
    assert_eq!(inventory.role("user").unwrap().networks.len(), 2);
    assert_eq!(inventory.role("seed-api").unwrap().names, ["api.seed.example.com".into()]);
    assert_eq!(inventory.role("seed"), None);
}

#[test]
fn an_unknown_role_is_reported_with_the_nearest() {
    let problem = problem("# site\nwroker: [10.0.0.1]\n");
    assert_eq!(problem.line, 2);
    assert!(problem.message.ends_with("did you mean worker?"), "{problem}");
}

#[test]
fn roles_below_a_key_are_said_to_stand_at_the_top() {
    let problem = problem("# site\nroles:\n  worker: [10.0.0.1]\n  seed: [10.0.0.2]\n");
    assert_eq!(problem.line, 2);
    assert!(problem.message.contains("\"roles\" is no role, and has keys of its own"), "{problem}");
    assert!(problem.remedy.contains("roles stand at the top"), "{problem}");
}

#[test]
fn an_empty_role_is_reported() {
    for text in ["worker: []\n", "worker:\n", "\n\nworker: null\n"] {
        assert!(problem(text).message.contains("worker has no address"), "{text:?}");
    }
    assert_eq!(problem("a: &x [1]\n".replace("a: &x [1]", "seed: 10.0.0.1\nworker: []").as_str()).line, 2);
}

#[test]
fn what_is_no_address_is_reported_with_its_line_and_what_to_write() {
    for (text, remedy) in [
        ("10.0.0.0/33", "0 to 32"),
        ("'2001:db8::/129'", "0 to 128"),
        ("10.0.0.5/24", "10.0.0.0/24"),
        ("10.0.0.256", "host name or any"),
        ("10.0.0.1-10.0.0.9", "CIDR"),
        ("10.0.0.1:6443", "leave it out"),
        ("'::ffff:10.0.0.1'", "IPv4 address"),
        ("'::ffff:10.0.0.0/120'", "IPv4 network"),
        ("'fe80::1%eth0'", "zones"),
        ("0.0.0.0", "any"),
        ("224.0.0.1", "unicast"),
        ("127.0.0.1", "other machines"),
        ("169.254.7.7", "other machines"),
        ("'fe80::1'", "other machines"),
        ("'::1'", "other machines"),
        ("0.0.0.0/0", "name the networks"),
        ("any", "name the networks"),
        ("12", "as text"),
        ("[10.0.0.1]", "as text"),
        ("localhost", "host name or any"),
    ] {
        let problem = problem(&format!("seed: 10.9.9.9\nworker:\n  - {text}\n"));
        assert_eq!(problem.line, 3, "{text}: {problem}");
        assert!(problem.remedy.contains(remedy), "{text}: {problem}");
    }
}

#[test]
fn overlapping_roles_are_reported_once_a_pair_with_both_lines() {
    let text = "worker: [10.0.0.0/16]\nseed: [10.0.3.0/24, 10.0.4.0/24]\n";
    let problem = problem(text);
    assert_eq!(problem.line, 2);
    assert!(problem.message.contains("10.0.0.0/16 (worker, line 1)"), "{problem}");
}

#[test]
fn an_address_that_stands_twice_in_a_role_is_reported() {
    assert!(problem("worker:\n- 10.0.0.0/24\n- 10.0.0.7\n").message.contains("of line 2"));
    assert!(problem("worker:\n- 10.0.0.7\n- 10.0.0.7\n").message.contains("of line 2"));
}

#[test]
fn networks_of_people_and_load_balancers_on_the_seed_may_overlap_machines() {
    let text =
        "user: [any]\nseed: [10.0.0.0/24]\nfront: [10.0.0.9]\nseed-api: [10.0.0.9]\nworker: [10.1.0.0/24]\n";
    read(text).unwrap();
}

#[test]
fn master_and_seed_may_be_the_same_machines_if_that_is_said() {
    let text = "master: [10.0.0.0/24]\nseed: [10.0.0.0/24]\n";
    assert!(problem(text).message.contains("overlap"));
    let mut facts = Facts::default();
    facts.set("seed-is-master", "true").unwrap();
    Inventory::read(text, &facts).unwrap();
}

#[test]
fn what_is_no_inventory_at_all_is_reported() {
    for text in
        ["", "- 10.0.0.1\n", "worker\n", "worker: [10.0.0.1\n", "worker: 10.0.0.1\n---\nseed: 10.0.0.2\n"]
    {
        assert!(!problem(text).remedy.is_empty(), "{text:?}");
    }
    assert!(problem("worker: 10.0.0.1\nworker: 10.0.0.2\n").message.contains("stands twice"));
}

#[test]
fn a_role_that_includes_others_has_their_addresses() {
    let inventory = read("worker: [10.0.1.0/24]\nmaster: [10.0.0.1]\n").unwrap();
    let node = model::product("kublr").unwrap().role("node").unwrap();
    assert_eq!(inventory.addresses(node).unwrap().networks.len(), 2);
}

#[test]
fn a_huge_inventory_ends_with_one_sentence() {
    let mut text = String::from("worker:\n");
    for number in 0..MAX_ADDRESSES + 5 {
        text.push_str(&format!("- 10.{}.{}.{}\n", number >> 16, number >> 8 & 255, number & 255));
    }
    assert!(problem(&text).message.contains("more than"));
}
