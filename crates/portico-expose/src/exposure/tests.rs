use portico_api::cluster::Address;
use portico_api::exposed_cluster::MigrationState;
use serde_json::json;

use super::*;
use crate::migration::plan::{has_two_doors, managed_by};
use crate::migration::{Now, Second};
use crate::testing::{configuration, read, seed};
use crate::validate::usable;

const HOST: &str = "a.north.kkp.example.com";

fn cluster(spec: &str) -> Cluster {
    read(&format!(r#"{{"metadata": {{"name": "a", "uid": "7"}}, "spec": {spec}}}"#))
}

fn exposed(cluster: &Cluster, found: &Found) -> Exposure {
    let (seeds, above) = (
        [Box::new(seed("north", "{}"))],
        configuration(r#"{"ingress": {"domain": "kkp.example.com"}, "exposeStrategy": "Tunneling"}"#),
    );
    exposure(usable(cluster, &seeds, Some(&above)).unwrap(), found, 6_443).unwrap()
}

fn allocated() -> Found {
    let ports = [("apiserver-external", 31_001), ("konnectivity-server", 31_002)];
    let node_ports = ports.map(|(service, number)| ((service.into(), "secure".into()), number)).into();
    Found { node_ports, ..Found::default() }
}

/// Doors by these strategies, both open.
fn doors(cluster: &Cluster, first: ExposeStrategy, second: ExposeStrategy) -> Doors {
    let second =
        Second { strategy: second, state: MigrationState::Opening, since: jiff::Timestamp::UNIX_EPOCH };
    let now = Now { first, second: Some(second) };
    Doors { now, ..Doors::new(cluster, first) }
}

fn ingress(ip: &str) -> Vec<Ingress> {
    vec![Ingress { ip: Some(ip.parse().unwrap()), hostname: "".into() }]
}

#[test]
fn everything_is_labelled_and_the_namespace_goes_with_its_cluster() {
    let cluster = cluster("{}");
    let namespace = namespace(&cluster);
    assert_eq!(namespace.name, "cluster-a");
    let owner = &namespace.fields["metadata"]["ownerReferences"][0];
    assert_eq!((&owner["kind"], &owner["uid"]), (&json!("Cluster"), &json!("7")));
    let exposure = exposed(&cluster, &Found::default());
    assert_eq!(exposure.services.len(), 2);
    for object in exposure.services.iter().chain(&exposure.slices) {
        let metadata = &object.fields["metadata"];
        assert_eq!(metadata["namespace"], "cluster-a");
        assert_eq!(metadata["labels"]["app.kubernetes.io/managed-by"], "portico");
        assert_eq!(metadata["labels"]["portico.k8c.io/cluster"], "a");
        assert!(metadata.get("uid").is_none() && metadata.get("creationTimestamp").is_none());
    }
}

#[test]
fn a_load_balancer_waits_for_node_ports_and_leads_to_the_gateway_with_the_ports_of_its_cluster_alone() {
    let cluster = cluster(r#"{"exposeStrategy": "LoadBalancer"}"#);
    let first = exposed(&cluster, &Found::default());
    assert_eq!(first.unallocated.len(), 2);
    assert!(first.services.iter().all(|service| service.name != FRONT));
    let mut found = allocated();
    found.gateways = ["10.0.0.8", "10.0.0.7", "fd00::7"].map(|ip| ip.parse().unwrap()).into();
    let second = exposed(&cluster, &found);
    let front = second.services.iter().find(|service| service.name == FRONT).unwrap();
    let ports = &front.fields["spec"]["ports"];
    let port = |service: &str, number: u16| {
        let name = format!("cluster-a-{service}-{number}");
        json!({"name": name, "protocol": "TCP", "port": number, "targetPort": number})
    };
    let expected = json!([port("apiserver-external", 31_001), port("konnectivity-server", 31_002)]);
    assert_eq!(ports, &expected);
    assert!(front.fields["spec"].get("selector").is_none());
    let names: Vec<&str> = second.slices.iter().map(|slice| &*slice.name).collect();
    assert_eq!(names, ["front-loadbalancer-v4-gateway", "front-loadbalancer-v6-gateway"]);
    let addresses: Vec<_> = second.slices[0].fields["endpoints"].as_array().unwrap().iter().collect();
    assert_eq!(addresses[0]["addresses"], json!(["10.0.0.7"]));
    assert_eq!(second.slices[0].fields["ports"][0]["name"], ports[0]["name"]);
    let api = second.services.iter().find(|service| service.name == APISERVER).unwrap();
    let annotations = &api.fields["metadata"]["annotations"];
    assert_eq!(annotations["nodeport-proxy.k8s.io/expose-namespaced"], "true");
    assert_eq!(api.fields["spec"]["ports"][0]["targetPort"], 31_001);
}

/// A Cluster by NodePort with this in its metadata.
fn marked(marks: &str) -> Cluster {
    read(&format!(r#"{{"metadata": {{"name": "a", {marks}}}, "spec": {{"exposeStrategy": "NodePort"}}}}"#))
}

#[test]
fn a_control_plane_that_was_begun_here_is_exposed_as_before_without_its_annotation() {
    let label = "pod-security.kubernetes.io/enforce";
    let begun = r#""finalizers": ["somebody/else", "portico.k8c.io/control-plane"]"#;
    for cluster in [marked(begun), marked(begun).trimmed()] {
        let api = &exposed(&cluster, &allocated()).services[0];
        assert_eq!(api.fields["spec"]["ports"][0]["targetPort"], 6_443);
        assert_eq!(namespace(&cluster).fields["metadata"]["labels"][label], "restricted");
        assert!(has_two_doors(managed_by(&cluster, false)));
    }
}

#[test]
fn an_annotation_alone_takes_no_way_in_away_from_the_pods_of_somebody_else() {
    let asks = marked(r#""annotations": {"portico.k8c.io/layout": "compact"}"#);
    let api = &exposed(&asks, &allocated()).services[0];
    assert_eq!(api.fields["spec"]["ports"][0]["targetPort"], 31_001);
}

#[test]
fn a_control_plane_that_runs_elsewhere_has_endpoints_and_no_selector() {
    let cluster: Cluster = read(
        r#"{"metadata": {"name": "a", "annotations": {
            "portico.k8c.io/endpoints": "192.0.2.8:6443,192.0.2.7:6443,[2001:db8::7]:7443",
            "portico.k8c.io/konnectivity-endpoints": "192.0.2.7:8132"}}}"#,
    );
    let exposure = exposed(&cluster, &Found::default());
    assert!(exposure.services.iter().all(|service| service.fields["spec"].get("selector").is_none()));
    let names: Vec<&str> = exposure.slices.iter().map(|slice| &*slice.name).collect();
    assert_eq!(
        names,
        ["apiserver-external-v4-6443", "apiserver-external-v6-7443", "konnectivity-server-v4-8132"]
    );
    let slice = &exposure.slices[0].fields;
    assert_eq!(slice["metadata"]["labels"]["kubernetes.io/service-name"], "apiserver-external");
    assert_eq!(slice["endpoints"][1]["addresses"], json!(["192.0.2.8"]));
    assert_eq!(slice["ports"], json!([{"name": "secure", "protocol": "TCP", "port": 6_443}]));
    let mut bad = cluster;
    bad.metadata.annotations.insert("portico.k8c.io/endpoints".into(), "127.0.0.1:6443".into());
    let refused = usable(&bad, &[Box::new(seed("north", "{}"))], None).map(drop);
    assert!(refused.unwrap_err().iter().any(|problem| problem.reason == "endpoints"));
}

#[test]
fn another_strategy_than_the_one_in_force_needs_the_label() {
    // The field was emptied, and the level above says something else.
    let mut cluster = cluster("{}");
    let doors = Some(Doors::new(&cluster, ExposeStrategy::LoadBalancer));
    let found = Found { doors, ..Found::default() };
    let seeds = [Box::new(seed("north", "{}"))];
    let plan = |cluster: &Cluster| exposure(usable(cluster, &seeds, None).unwrap(), &found, 6_443);
    assert_eq!(plan(&cluster).unwrap_err().reason, "strategy-change");
    cluster.metadata.labels.insert("unsafe-expose-strategy-migration".into(), "".into());
    assert!(plan(&cluster).is_ok());
}

#[test]
fn a_service_that_is_gone_asks_for_the_port_that_users_know() {
    let mut cluster = cluster(r#"{"exposeStrategy": "NodePort"}"#);
    let remembered = |cluster: &Cluster, doors: Option<&Doors>| {
        let found = Found { doors: doors.cloned(), ..Found::default() };
        remembered_node_port(cluster, &exposed(cluster, &found), doors)
    };
    assert_eq!(remembered(&cluster, None), None);
    cluster.status.address = Address { port: Some(31_001), ..Address::default() };
    assert_eq!(remembered(&cluster, None), Some((APISERVER, 31_001)));
    cluster.status.address.port = Some(6_443);
    assert_eq!(remembered(&cluster, None), None, "that was another strategy");
    let second = Address { port: Some(31_002), ..Address::default() };
    let doors = Doors { second, ..doors(&cluster, ExposeStrategy::Tunneling, ExposeStrategy::NodePort) };
    assert_eq!(remembered(&cluster, Some(&doors)), Some((APISERVER, 31_002)), "of the other door");
    let first = Address { port: Some(443), ..Address::default() };
    let doors = Doors { first, ..doors };
    cluster.status.address.port = Some(443);
    assert_eq!(remembered(&cluster, Some(&doors)), Some((APISERVER, 31_002)), "a front may listen anywhere");
}

#[test]
fn how_it_stands_names_what_is_missing_and_what_to_do() {
    let reason = |spec: &str, found: &Found| {
        let reachability = reachability(&exposed(&cluster(spec), found), found);
        (reachability.exposed, reachability.reason, reachability.message)
    };
    let (tunneling, load_balancer) = ("{}", r#"{"exposeStrategy": "LoadBalancer"}"#);
    assert_eq!(reason(load_balancer, &Found::default()).1, "NodePortPending");
    assert_eq!(reason(load_balancer, &allocated()).1, "LoadBalancerPending");
    let mut found = allocated();
    found.known.front = ingress("203.0.113.9");
    assert_eq!(
        reason(load_balancer, &found),
        (true, "Exposed", "reached at https://203.0.113.9:31001".to_owned())
    );
    found.no_endpoints = true;
    let (exposed, reason_, message) = reason(load_balancer, &found);
    assert_eq!((exposed, reason_), (true, "NoEndpoints"));
    assert!(message.contains("no API server is ready behind it: start pods with the label"), "{message}");

    let mut found = Found { dns_error: Some("no such host".into()), ..Found::default() };
    found.front = ingress("203.0.113.1");
    let (exposed, reason_, message) = reason(tunneling, &found);
    assert_eq!((exposed, reason_), (false, "NameNotResolved"));
    assert_eq!(message, format!("{HOST}: no such host; let it lead to 203.0.113.1"));
    found.dns_error = None;
    found.known.resolved = vec!["203.0.113.1".parse().unwrap()];
    assert_eq!(reason(tunneling, &found).1, "Exposed");
    found.known.resolved = vec!["198.51.100.1".parse().unwrap()];
    let (exposed, reason_, message) = reason(tunneling, &found);
    assert_eq!((exposed, reason_), (true, "NameLeadsElsewhere"));
    assert!(message.contains("leads to 198.51.100.1, the seed is reached at 203.0.113.1"), "{message}");
}

#[test]
fn a_cluster_whose_port_the_load_balancer_in_front_does_not_publish_is_not_reached() {
    let reason = |spec: &str, found: &Found| {
        let reachability = reachability(&exposed(&cluster(spec), found), found);
        (reachability.exposed, reachability.reason)
    };
    let by_port = r#"{"exposeStrategy": "NodePort"}"#;
    let mut found = allocated();
    found.known.resolved = vec!["203.0.113.1".parse().unwrap()];
    assert_eq!(reason(by_port, &found), (true, "Exposed"), "there is no load balancer to ask");
    found.front_ports = Some([6_443, 31_002].into());
    assert_eq!(reason(by_port, &found), (false, "PortNotPublished"));
    for other in ["Tunneling", "LoadBalancer"] {
        let spec = format!(r#"{{"exposeStrategy": "{other}"}}"#);
        assert_ne!(reason(&spec, &found).1, "PortNotPublished", "{other}");
    }
    found.front_ports = Some([6_443, 31_001].into());
    assert_eq!(reason(by_port, &found), (true, "Exposed"));
}

#[test]
fn a_port_that_somebody_added_to_the_load_balancer_does_not_lead_to_the_gateway() {
    let cluster = cluster(r#"{"exposeStrategy": "LoadBalancer"}"#);
    let ports = [31_001, 31_002, 8_002, 6_443, 8_088, 31_003]
        .map(|number| json!({"name": format!("p-{number}"), "protocol": "TCP", "port": number}));
    let front = json!({"spec": {"ports": ports}});
    let mut found = allocated();
    found.gateways = ["10.0.0.7"].map(|ip| ip.parse().unwrap()).into();
    let numbers = |found: &Found| -> Vec<_> {
        let slices = slices_to_gateways(&cluster, &front, found);
        let ports = slices[0].fields["ports"].as_array().unwrap();
        ports.iter().map(|port| port["port"].clone()).collect()
    };
    assert_eq!(numbers(&found), [31_001, 31_002]);
    // Also where the seed allocates NodePorts from where the gateway itself listens.
    found.node_ports.insert(("apiserver-external".into(), "admin".into()), 8_002);
    assert_eq!(numbers(&found), [31_001, 31_002]);
}

#[test]
fn of_two_doors_both_are_open_until_the_second_is_being_closed() {
    let cluster = cluster(r#"{"exposeStrategy": "Tunneling"}"#);
    let mut doors = doors(&cluster, ExposeStrategy::NodePort, ExposeStrategy::Tunneling);
    let annotation = |exposure: &Exposure| {
        let service = exposure.services.iter().find(|service| service.name == APISERVER).unwrap();
        let fields = &service.fields;
        let exposed = fields["metadata"]["annotations"]["nodeport-proxy.k8s.io/expose"].clone();
        (exposed, fields["spec"]["type"].clone())
    };
    let found = |doors: &Doors| Found { doors: Some(doors.clone()), ..allocated() };
    let both = exposed(&cluster, &found(&doors));
    assert_eq!(annotation(&both), (json!("NodePort,SNI,Tunneling"), json!("NodePort")));
    assert_eq!(both.plan.decision.strategy, ExposeStrategy::NodePort, "what users have been told of");
    assert_eq!(both.second.unwrap().decision.strategy, ExposeStrategy::Tunneling);
    assert_eq!(both.decision.strategy, ExposeStrategy::Tunneling);
    doors.now = Now { first: ExposeStrategy::Tunneling, ..doors.now };
    let second = doors.now.second.as_mut().unwrap();
    (second.strategy, second.state) = (ExposeStrategy::NodePort, MigrationState::Closing);
    let closing = exposed(&cluster, &found(&doors));
    assert_eq!((annotation(&closing).1, closing.second), (json!("ClusterIP"), None));
}

#[test]
fn the_second_door_waits_for_its_node_ports_and_its_own_name() {
    let cluster = cluster(r#"{"exposeStrategy": "LoadBalancer"}"#);
    let doors = doors(&cluster, ExposeStrategy::Tunneling, ExposeStrategy::LoadBalancer);
    let mut found = Found { doors: Some(doors), ..Found::default() };
    found.known.resolved = vec!["203.0.113.9".parse().unwrap()];
    let reasons = |found: &Found| {
        let exposure = exposed(&cluster, found);
        let second = reachability_of_second(&exposure, found).unwrap();
        (exposure.unallocated.len(), reachability(&exposure, found).reason, second.reason)
    };
    assert_eq!(reasons(&found), (2, "NodePortPending", "NodePortPending"));
    found.node_ports = allocated().node_ports;
    assert_eq!(reasons(&found), (0, "Exposed", "LoadBalancerPending"));
    found.known.front = vec![Ingress { ip: None, hostname: "lb.example.com".into() }];
    found.second_dns_error = Some("no such host".into());
    assert_eq!(reasons(&found), (0, "Exposed", "NameNotResolved"));
    found.second_resolved = vec!["203.0.113.10".parse().unwrap()];
    found.second_dns_error = None;
    assert_eq!(reasons(&found).2, "Exposed");
}
