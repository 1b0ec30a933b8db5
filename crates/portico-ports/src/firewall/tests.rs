use std::collections::BTreeSet;

use super::*;
use crate::facts::Facts;
use crate::inventory::Inventory;
use crate::model::{self, Protocol};

const INVENTORY: &str = "worker: [10.0.1.0/24, '2001:db8:1::/64']\nfront: [203.0.113.9, '2001:db8:9::9']\n\
                         user: [any]\nmaster: [10.0.2.0/24]\nseed: [10.0.3.0/24]\nseed-api: [10.0.3.7]\n\
                         dns: [10.0.0.53, '2001:db8::53']\nmaster-ingress: [203.0.113.10]\n\
                         provider-api: [198.51.100.0/24]\n";

fn ruleset(product: &str, role: &str, facts: &[&str], inventory: &str) -> Result<Ruleset, Vec<Missing>> {
    let product = model::product(product).unwrap();
    let mut known = Facts::default();
    facts.iter().for_each(|fact| known.assign(fact).unwrap());
    let roles: Vec<_> = role.split(',').map(|role| product.role(role).unwrap()).collect();
    rules(product, &roles, &known, &Inventory::read(inventory, &known).unwrap())
}

fn write(target: Target, role: &str, facts: &[&str], default_deny: bool) -> Written {
    let selector = [("app".to_owned(), "gateway".to_owned())];
    let writing = Writing { default_deny, selector: &selector, namespace: "portico" };
    target.write(&ruleset("kkp", role, facts, INVENTORY).unwrap(), &writing).unwrap()
}

const TARGETS: [Target; 10] = [
    Target::Nftables,
    Target::Iptables,
    Target::Aws,
    Target::Azure,
    Target::Gcp,
    Target::Openstack,
    Target::TerraformAws,
    Target::NetworkPolicy,
    Target::Cilium,
    Target::Ticket,
];

#[test]
fn a_worker_connects_to_the_front_and_other_workers_connect_to_it() {
    let rules = ruleset("kkp", "worker", &["strategy=Tunneling"], INVENTORY).unwrap();
    let text = |rule: &Rule| format!("{:?} {} {} {}", rule.direction, rule.ids(), rule.protocol, rule.ports);
    let of_ipv4: Vec<String> = rules.rules.iter().filter(|rule| !rule.is_ipv6()).map(text).collect();
    assert_eq!(
        of_ipv4,
        [
            "Egress kkp-8 TCP 6443, 8088",
            "Ingress kkp-kubelet TCP 10250",
            "Egress kkp-kubelet TCP 10250",
            "Egress kkp-dns TCP 53",
            "Egress kkp-dns UDP 53",
            "Ingress kkp-cilium-vxlan UDP 8472",
            "Egress kkp-cilium-vxlan UDP 8472",
            "Ingress kkp-cilium-health TCP 4240",
            "Egress kkp-cilium-health TCP 4240",
        ]
    );
    assert_eq!(rules.rules.len(), 2 * of_ipv4.len(), "both families have the same rules");
}

#[test]
fn ip_in_ip_is_for_addresses_of_ipv4() {
    let inventory = "worker: [10.0.1.0/24, '2001:db8:1::/64']\nmaster: [10.0.2.1, '2001:db8:2::1']\n\
                     internet: [any]\n";
    let rules = ruleset("kublr", "worker", &["cni=Calico"], inventory).unwrap();
    let of = |protocol: Protocol| rules.rules.iter().filter(move |rule| rule.protocol == protocol);
    assert!(of(Protocol::Udp).any(Rule::is_ipv6));
    assert!(of(Protocol::IpInIp).count() > 0 && !of(Protocol::IpInIp).any(Rule::is_ipv6));
}

#[test]
fn machines_of_two_roles_get_the_rules_of_both_in_one_table() {
    let both = ruleset("kkp", "seed-api,front", &["strategy=Tunneling"], INVENTORY).unwrap();
    for role in ["seed-api", "front"] {
        let one = ruleset("kkp", role, &["strategy=Tunneling"], INVENTORY).unwrap();
        let rows = |rules: &Ruleset| -> Vec<_> {
            rules.rules.iter().flat_map(|rule| &rule.rows).map(|row| row.id).collect()
        };
        let all = rows(&both);
        assert!(rows(&one).iter().all(|row| all.contains(row)), "{role}: {all:?}");
    }
    assert_eq!(both.own.networks.len(), 3);
    let writing = Writing { default_deny: true, selector: &[], namespace: "portico" };
    let text = Target::Nftables.write(&both, &writing).unwrap().text;
    assert!(text.contains(&format!("table inet portico_{}", both.name().replace('-', "_"))), "{text}");
    assert_eq!(text.matches("hook input").count(), 1, "a drop in one table is final: {text}");
    let many =
        ruleset("kkp", "master,master-ingress,seed-api,front", &["strategy=Tunneling"], INVENTORY).unwrap();
    let script = Target::Iptables.write(&many, &writing).unwrap().text;
    let chains = script.split_whitespace().filter(|word| word.starts_with(":PORTICO-"));
    assert!(chains.clone().count() == 2 && chains.clone().all(|name| name.len() <= 29), "{script}");
}

#[test]
fn two_rows_that_allow_the_same_become_one_rule() {
    let rules = ruleset("kkp", "seed-api", &["strategy=Tunneling"], INVENTORY).unwrap();
    assert_eq!(rules.rules.iter().map(Rule::ids).collect::<Vec<_>>(), ["kkp-2 kkp-3"]);
}

/// The gateway runs on a node of the seed: both may ask the seed's API, and are one machine.
const SHARED: &str = "front: [10.0.3.1]\nseed: [10.0.3.1, 10.0.3.2]\nseed-api: [10.0.4.1]\n";

#[test]
fn clouds_get_what_two_rows_need_once_and_with_both_rows() {
    let rules = ruleset("portico", "seed-api", &["strategy=Tunneling"], SHARED).unwrap();
    let writing = Writing { default_deny: false, selector: &[], namespace: "portico" };
    for target in [Target::Aws, Target::Openstack, Target::TerraformAws] {
        let text = target.write(&rules, &writing).unwrap().text;
        assert_eq!(text.matches("10.0.3.1/32").count(), 1, "{target:?}: {text}");
        assert!(text.contains("portico-gateway-seed-api portico-front-seed-api"), "{target:?}: {text}");
    }
}

/// The rules of one role and of each pair, of every product, in an inventory that has every address.
fn of_all_pairs() -> Vec<Ruleset> {
    let mut facts = Facts::default();
    ["strategy=Tunneling", "provider=aws"].iter().for_each(|fact| facts.assign(fact).unwrap());
    let mut all = Vec::new();
    for product in model::products() {
        let place = |(number, role): (usize, &model::Role)| format!("{}: [10.9.{number}.0/24]\n", role.key);
        let inventory: String = product.roles.iter().enumerate().map(place).collect();
        let inventory = Inventory::read(&inventory, &facts).unwrap();
        for first in product.roles {
            for second in product.roles {
                all.push(rules(product, &[first, second], &facts, &inventory).unwrap());
            }
        }
        let every: Vec<_> = product.roles.iter().collect();
        all.push(rules(product, &every, &facts, &inventory).unwrap());
    }
    all
}

#[test]
fn names_of_chains_are_short_enough_for_iptables() {
    let writing = Writing { default_deny: true, selector: &[], namespace: "portico" };
    for rules in of_all_pairs() {
        let script = Target::Iptables.write(&rules, &writing).unwrap().text;
        let names: Vec<&str> = script.lines().filter_map(|line| line.strip_prefix(':')).collect();
        let names: Vec<&str> = names.iter().filter_map(|line| line.split(' ').next()).collect();
        assert!(names.len() == 2 && names.iter().all(|name| name.len() <= 28), "{names:?}");
    }
}

#[test]
fn names_and_tags_are_short_enough_for_google_cloud_and_differ() {
    let writing = Writing { default_deny: true, selector: &[], namespace: "portico" };
    for rules in of_all_pairs() {
        let text = Target::Gcp.write(&rules, &writing).unwrap().text;
        let resources: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
        let names: BTreeSet<&str> = resources.iter().map(|one| one["name"].as_str().unwrap()).collect();
        assert_eq!(names.len(), resources.len(), "a name stands twice: {text}");
        let tags = resources.iter().map(|one| one["targetTags"][0].as_str().unwrap());
        for name in names.iter().copied().chain(tags) {
            assert!(name.len() <= 63 && !name.ends_with('-'), "{name}");
        }
    }
}

const PODS: &str = "user: [any]\nworker: [10.0.1.0/24]\nfront: [203.0.113.9]\nseed: [10.0.3.0/24]\n\
                    seed-api: [10.0.3.7]\ncontrol-plane: [10.244.0.0/16]\nworker-pods: [10.245.0.0/16]\n\
                    probes: [10.0.5.0/24]\n";

#[test]
fn cilium_is_not_told_to_refuse_pods_that_no_cidr_rule_of_it_can_allow() {
    let write = |role, default_deny| {
        let rules = ruleset("portico", role, &["strategy=Tunneling"], PODS).unwrap();
        Target::Cilium.write(&rules, &Writing { default_deny, selector: &[], namespace: "portico" })
    };
    for (role, row) in [
        ("front", "portico-gateway-api-server"),
        ("seed", "portico-operator-api-server"),
        ("worker", "portico-pods-agent"),
    ] {
        let refused = write(role, true).unwrap_err().to_string();
        assert!(refused.starts_with(row) && refused.contains("labels"), "{refused}");
        assert!(write(role, false).unwrap().text.contains("enableDefaultDeny"), "{role}");
    }
    let kkp = ruleset("kkp", "front", &["strategy=NodePort"], INVENTORY).unwrap();
    let writing = Writing { default_deny: true, selector: &[], namespace: "kubermatic" };
    let refused = Target::Cilium.write(&kkp, &writing).unwrap_err().to_string();
    assert!(refused.starts_with("API servers of user clusters: "), "no row of KKP's has them: {refused}");
    assert!(
        write("seed-api", true).unwrap().text.contains("enableDefaultDeny"),
        "it has no pods at the other end"
    );
}

#[test]
fn a_policy_of_cilium_says_what_its_cidr_rules_do_not_match() {
    for default_deny in [false, true] {
        let written = write(Target::Cilium, "worker", &["strategy=Tunneling"], default_deny);
        let header = written.text.lines().next().unwrap();
        for text in [header, &*written.notes.join("\n")] {
            assert!(text.contains("policyCIDRMatchMode: nodes") && text.contains("labels"), "{text}");
        }
    }
}

#[test]
fn what_is_missing_is_asked_for_and_nothing_is_opened_to_everybody() {
    let missing = ruleset("kkp", "front", &[], "worker: [10.0.1.0/24]\n").unwrap_err();
    let text = missing.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    assert!(text.contains("say --strategy VALUE: NodePort, LoadBalancer, Tunneling"), "{text}");
    let missing = ruleset("kkp", "front", &["strategy=Tunneling"], "worker: [10.0.1.0/24]\n").unwrap_err();
    let text = missing.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    assert!(text.contains("the role user has no address (kkp-11)"), "{text}");
    let names = "worker: [10.0.1.0/24]\nfront: [front.example.com]\ndns: [10.0.0.53]\n";
    let missing = ruleset("kkp", "worker", &["strategy=Tunneling"], names).unwrap_err();
    assert!(missing[0].to_string().contains("host names only"), "{missing:?}");
    let missing = ruleset("kkp", "seed", &["strategy=Tunneling"], INVENTORY).unwrap_err();
    assert!(missing[0].to_string().contains("--set provider=VALUE"), "{missing:?}");
    ruleset("kkp", "seed", &["strategy=Tunneling", "provider=aws"], INVENTORY).unwrap();
}

#[test]
fn roles_of_two_families_are_told_apart() {
    let mixed = "worker: ['2001:db8::/64']\nfront: [203.0.113.9]\ndns: ['2001:db8:1::53']\n";
    let missing = ruleset("kkp", "worker", &["strategy=Tunneling"], mixed).unwrap_err();
    assert_eq!(missing.len(), 1, "{missing:?}");
    assert!(missing[0].to_string().contains("no common address family (kkp-8)"), "{missing:?}");
}

#[test]
fn no_writer_opens_anything_to_everybody_unless_the_inventory_says_any() {
    for target in TARGETS {
        for default_deny in [false, true] {
            let written = write(target, "worker", &["strategy=Tunneling"], default_deny).text;
            let opens = written.lines().filter(|line| {
                (line.contains("0.0.0.0/0") || line.contains("::/0")) && !line.contains("open")
            });
            // What Google Cloud denies, and what Terraform must not take away.
            let allowed =
                matches!((target, default_deny), (Target::Gcp, true) | (Target::TerraformAws, false));
            assert!(allowed || opens.count() == 0, "{target:?}: {written}");
        }
        assert!(
            write(target, "front", &["strategy=Tunneling"], false).text.contains("0.0.0.0/0"),
            "{target:?}"
        );
    }
}

#[test]
fn every_writer_names_every_row_port_and_network_that_it_can() {
    for target in TARGETS {
        let written = write(target, "worker", &["strategy=NodePort", "cni=Cilium"], true).text;
        for wanted in
            ["203.0.113.9", "2001:db8:9::9", "30000", "32767", "8472", "10250", "10.0.1.0/24", "kkp-9"]
        {
            assert!(written.contains(wanted), "{target:?} has no {wanted}: {written}");
        }
    }
}

#[test]
fn ip_in_ip_is_written_where_it_can_be_and_reported_where_it_cannot() {
    let inventory = "master: [10.0.0.0/24]\nworker: [10.0.1.0/24]\ninternet: [any]\n";
    let rules = ruleset("kublr", "worker", &["cni=Calico", "strategy=NodePort"], inventory).unwrap();
    for target in TARGETS {
        let writing = Writing { default_deny: true, selector: &[], namespace: "portico" };
        let written = target.write(&rules, &writing).unwrap();
        let noted = written.notes.iter().any(|note| note.contains("IP-in-IP"));
        let cannot = [Target::Azure, Target::NetworkPolicy, Target::Cilium].contains(&target);
        assert_eq!(noted, cannot, "{target:?}: {:?}", written.notes);
        assert_eq!(written.text.contains("kublr-1.4"), !cannot || target != Target::Azure, "{target:?}");
    }
}

#[test]
fn default_deny_is_opt_in() {
    for (target, refuses) in [
        (Target::Nftables, "policy drop"),
        (Target::Iptables, "-j DROP"),
        (Target::Aws, "SecurityGroupEgress"),
        (Target::Azure, "Deny"),
        (Target::Gcp, "denied"),
        (Target::Openstack, "security group rule delete"),
        (Target::Cilium, "ingress: true"),
    ] {
        let text = |default_deny| write(target, "worker", &["strategy=Tunneling"], default_deny).text;
        assert!(!text(false).contains(refuses), "{target:?}");
        assert!(text(true).contains(refuses), "{target:?}");
    }
}

#[test]
fn a_list_of_many_ports_is_cut_for_multiport() {
    let mut rules = ruleset("kkp", "seed-api", &["strategy=Tunneling"], INVENTORY).unwrap();
    rules.rules[0].ports = (0..20).filter_map(|port| (1_000 + 2 * port).to_string().parse().ok()).collect();
    let writing = Writing { default_deny: false, selector: &[], namespace: "portico" };
    let text = Target::Iptables.write(&rules, &writing).unwrap().text;
    let lists: Vec<usize> = text
        .lines()
        .filter_map(|line| line.split("--dports ").nth(1))
        .map(|rest| rest.split(' ').next().unwrap_or_default().split(',').count())
        .collect();
    assert_eq!(lists, [15, 5]);
}
