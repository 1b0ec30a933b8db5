use portico_ports::site::{SiteCluster, SiteDatacenter};

use super::*;

const INVENTORY: &str = "
master: [10.0.0.1]
seed: [10.0.0.2]
seed-api: [10.0.0.2]
front: [10.0.0.3, gateway.example.com]
worker: [10.0.1.1, 10.0.1.2, 'fd00::1', 'fd00::2']
user: [any]
";

fn facts(all: &[&str]) -> Facts {
    let mut facts = Facts::default();
    all.iter().try_for_each(|text| facts.assign(text)).unwrap();
    facts
}

fn made(
    product: &str,
    role: &str,
    here: &[&str],
    known: &[&str],
    inventory: &str,
) -> Result<Plan, PlanError> {
    made_of(product, role, here, known, inventory, None)
}

fn made_of(
    product: &str,
    role: &str,
    here: &[&str],
    known: &[&str],
    inventory: &str,
    needs: Option<&Needs>,
) -> Result<Plan, PlanError> {
    let facts = facts(known);
    let here: Vec<IpAddr> = here.iter().map(|text| text.parse().unwrap()).collect();
    let products = [portico_ports::model::product(product).unwrap()];
    let inventory = Inventory::read(inventory, &facts).unwrap();
    let public = Arc::new(RootCertStore::empty());
    let tls = TlsTrust { public, own: None, server_name: None };
    let roles = [role.to_owned()];
    let (facts, inventory) = (&facts, &inventory);
    let (products, roles, here) = (products.as_slice(), roles.as_slice(), here.as_slice());
    plan(&Site { products, roles, facts, inventory, needs, here, tls: &tls })
}

fn kkp(role: &str, here: &[&str]) -> Plan {
    made("kkp", role, here, &["strategy=Tunneling", "cni=Canal", "provider=fake"], INVENTORY).unwrap()
}

/// `ROW TRANSPORT KIND FROM>TO` of each check that is tried.
fn lines(plan: &Plan, direction: Direction) -> Vec<String> {
    let kind = |what: &What| match what {
        What::Tcp { tls, .. } => {
            if tls.is_some() {
                "tls"
            } else {
                "tcp"
            }
        }
        What::TcpByName { .. } => "name",
        What::Datagram { .. } => "datagram",
        What::PathMtu { .. } => "mtu",
        What::Dns { .. } => "dns",
        What::Tls(_) => "tls-only",
        What::Back { .. } => "back",
        What::LocalPort { .. } => "port",
        What::Nothing { .. } => "nothing",
    };
    let wanted = plan.checks.iter().filter(|planned| planned.direction == direction);
    let tried = wanted.filter(|planned| planned.transport.is_some());
    tried
        .map(|planned| {
            let Planned { row, from, to, transport, what, .. } = planned;
            format!("{} {} {} {from}>{to}", row.id, transport.unwrap(), kind(what))
        })
        .collect()
}

fn skipped(plan: &Plan) -> Vec<String> {
    let why = |planned: &Planned| match &planned.what {
        What::Nothing { why } => Some(format!("{} {}: {why}", planned.row.id, planned.to)),
        _ => None,
    };
    plan.checks.iter().filter_map(why).collect()
}

#[test]
fn a_master_tries_what_it_opens_and_nothing_else() {
    let plan = kkp("master", &["127.0.0.1", "10.0.0.1"]);
    assert_eq!(
        lines(&plan, Direction::Out),
        [
            "kkp-2 tcp/6443 tls 10.0.0.1>10.0.0.2",
            "kkp-3 tcp/6443 tls 10.0.0.1>10.0.0.2",
            "kkp-4 tcp/6443 name this machine>gateway.example.com",
            "kkp-4 tcp/6443 tls 10.0.0.1>10.0.0.3",
        ]
    );
    assert!(lines(&plan, Direction::In).is_empty());
    assert_eq!(plan.addresses, ["10.0.0.1".parse::<IpAddr>().unwrap()]);
}

#[test]
fn workers_try_each_other_in_both_families_and_both_directions() {
    let plan = kkp("worker", &["10.0.1.1", "fd00::1"]);
    let out = lines(&plan, Direction::Out);
    for line in [
        "kkp-8 tcp/8088 tcp 10.0.1.1>10.0.0.3",
        "kkp-kubelet tcp/10250 tcp 10.0.1.1>10.0.1.2",
        "kkp-kubelet tcp/10250 tcp fd00::1>fd00::2",
        "kkp-canal-vxlan udp/8472 datagram 10.0.1.1>10.0.1.2",
        "kkp-canal-vxlan udp/8472 mtu fd00::1>fd00::2",
    ] {
        assert!(out.contains(&line.to_owned()), "{line} in {out:#?}");
    }
    assert!(!out.iter().any(|line| line.ends_with(">10.0.1.1")), "not to itself: {out:#?}");
    let back = lines(&plan, Direction::In);
    assert!(back.contains(&"kkp-canal-vxlan udp/8472 back 10.0.1.2>10.0.1.1".to_owned()), "{back:#?}");
    let here = lines(&plan, Direction::Here);
    assert!(here.contains(&"kkp-kubelet tcp/10250 port User cluster nodes>10.0.1.1".to_owned()), "{here:#?}");
    assert_eq!(plan.accepts, BTreeSet::from([Transport::Tcp(10250), Transport::Udp(8472)]));
}

#[test]
fn a_range_is_tried_at_its_ends_and_in_the_middle() {
    let known = ["strategy=NodePort", "cni=Canal", "node-port-range=31000-31010"];
    let plan = made("kkp", "worker", &["10.0.1.1"], &known, INVENTORY).unwrap();
    let ports: Vec<_> =
        plan.opens.iter().filter_map(|transport| transport.port()).filter(|port| *port > 30_000).collect();
    assert_eq!(ports, [31_000, 31_005, 31_010]);
}

/// Two clusters of a seed, and its datacenter.
fn objects() -> Needs {
    let cluster = |name: &str, strategy, cni, address: &str, ports: &[u16]| SiteCluster {
        name: name.into(),
        strategy,
        cni: Some(cni),
        address: address.into(),
        node_ports: ports.iter().map(|port| (*port, "apiserver-external".to_owned())).collect(),
    };
    Needs {
        domain: "kkp.example.com".into(),
        clusters: vec![
            cluster("a", "NodePort", "Canal", "a.example.com", &[31_001, 31_002]),
            cluster("b", "LoadBalancer", "Cilium", "203.0.113.9", &[31_003]),
        ],
        datacenters: vec![SiteDatacenter {
            name: "lab".into(),
            provider: "openstack",
            fields: [("authURL".to_owned(), "https://keystone.example.com:5000/v3".to_owned())].into(),
        }],
        ..Needs::default()
    }
}

#[test]
fn ports_and_addresses_that_objects_tell_are_tried_in_place_of_the_models() {
    let objects = objects();
    let made = |role, here| made_of("kkp", role, &[here], &[], INVENTORY, Some(&objects)).unwrap();
    let plan = made("worker", "10.0.1.1");
    let out = lines(&plan, Direction::Out);
    for line in [
        "kkp-9 tcp/31001 name this machine>a.example.com",
        "kkp-9 tcp/31002 name this machine>a.example.com",
        "kkp-10 tcp/31003 tcp 10.0.1.1>203.0.113.9",
        "kkp-canal-vxlan udp/8472 datagram 10.0.1.1>10.0.1.2",
        "kkp-cilium-vxlan udp/8472 datagram 10.0.1.1>10.0.1.2",
    ] {
        assert!(out.contains(&line.to_owned()), "{line} in {out:#?}");
    }
    let ways_in = out.iter().filter(|line| line.starts_with("kkp-9 ") || line.starts_with("kkp-10 "));
    assert_eq!(ways_in.count(), 3, "no other port, and not the inventory's front: {out:#?}");
    assert_eq!(
        lines(&made("seed", "10.0.0.2"), Direction::Out),
        ["kkp-7 tcp/5000 tls-only this machine>keystone.example.com"]
    );
    assert_eq!(
        lines(&made("user", "10.0.9.9"), Direction::Out)[0],
        "kkp-1 tcp/443 name this machine>kkp.example.com"
    );
    let accepted: Vec<_> = made("front", "10.0.0.3").accepts.into_iter().collect();
    assert_eq!(accepted, [31_001, 31_002, 31_003].map(Transport::Tcp));
}

#[test]
fn an_api_whose_port_nobody_knows_is_in_the_plan_with_the_reason() {
    let known = ["strategy=Tunneling", "cni=Canal", "provider=kubevirt"];
    let inventory = format!("{INVENTORY}provider-api: [198.51.100.7]\n");
    let plan = made("kkp", "seed", &["10.0.0.2"], &known, &inventory).unwrap();
    assert!(skipped(&plan).iter().any(|line| line.contains("which port")), "{:#?}", skipped(&plan));
}

#[test]
fn name_servers_are_asked_and_the_outside_is_reached_with_tls() {
    let inventory = "worker: [10.0.1.1]\nmaster: [10.0.0.1]\ninternet: [10.9.9.9, registry.example.com]";
    let plan = made("kublr", "worker", &["10.0.1.1"], &["cni=Calico"], inventory).unwrap();
    let out = lines(&plan, Direction::Out);
    for line in [
        "kublr-4.1 udp/53 dns 10.0.1.1>10.9.9.9",
        "kublr-4.1 tcp/53 dns 10.0.1.1>10.9.9.9",
        "kublr-4.2 tcp/443 tls-only this machine>registry.example.com",
        "kublr-1.4 ip/4 datagram 10.0.1.1>10.0.0.1",
    ] {
        assert!(out.contains(&line.to_owned()), "{line} in {out:#?}");
    }
    // The probe from here would have opened the way.
    assert!(!lines(&plan, Direction::In).iter().any(|line| line.contains("ip/4 back")));
}

#[test]
fn the_api_of_a_provider_is_known_by_name_and_one_that_needs_a_region_says_so() {
    let known = |provider: &'static str| ["strategy=Tunneling", "cni=Canal", provider];
    let plan = made("kkp", "seed", &["10.0.0.2"], &known("provider=digitalocean"), INVENTORY).unwrap();
    assert_eq!(lines(&plan, Direction::Out), ["kkp-7 tcp/443 tls-only this machine>api.digitalocean.com"]);
    let plan = made("kkp", "seed", &["10.0.0.2"], &known("provider=aws"), INVENTORY).unwrap();
    assert!(skipped(&plan).iter().any(|line| line.contains("needs the region")), "{:#?}", skipped(&plan));
    let plan = made("kkp", "seed", &["10.0.0.2"], &known("provider=fake"), INVENTORY).unwrap();
    assert!(plan.checks.is_empty(), "{:?}", plan.checks);
}

#[test]
fn what_cannot_be_tried_is_in_the_plan_with_its_reason() {
    let inventory = "worker: [10.0.1.1, 10.0.2.0/24, 'fd00::2']\nmaster: [10.0.0.1]";
    let plan = made("kublr", "worker", &["10.0.1.1"], &["cni=Flannel"], inventory).unwrap();
    let skipped = skipped(&plan).join("\n");
    for text in [
        "kublr-1.1 10.0.2.0/24: it is a network; list its machines",
        "kublr-1.1 fd00::2: this machine has no IPv6 address",
        "kublr-4.2 Internet: the inventory has no address for the role internet",
    ] {
        assert!(skipped.contains(text), "{text} in {skipped}");
    }
}

#[test]
fn a_machine_that_is_not_in_the_role_and_a_row_that_is_undecided_are_errors() {
    let known = ["strategy=Tunneling", "cni=Canal", "provider=fake"];
    let error = made("kkp", "worker", &["10.0.0.1"], &known, INVENTORY).unwrap_err();
    assert!(error.to_string().contains("(10.0.0.1) is among those of the role worker"), "{error}");
    let error = made("kkp", "worker", &["10.0.1.1"], &[], INVENTORY).unwrap_err().to_string();
    assert!(error.contains("--set strategy=NodePort|LoadBalancer|Tunneling"), "{error}");
    let error = made("kkp", "workr", &["10.0.1.1"], &known, INVENTORY).unwrap_err().to_string();
    assert!(error.contains("did you mean worker?"), "{error}");
}

#[test]
fn a_responder_answers_the_machines_of_the_inventory_and_not_everybody() {
    let plan = kkp("front", &["10.0.0.3"]);
    assert_eq!(plan.accepts, BTreeSet::from([Transport::Tcp(6443), Transport::Tcp(8088)]));
    assert!(plan.peers.iter().all(|network| network.prefix_len() > 0));
    assert!(plan.peers.iter().any(|network| network.contains(&"10.0.1.2".parse::<IpAddr>().unwrap())));
}
