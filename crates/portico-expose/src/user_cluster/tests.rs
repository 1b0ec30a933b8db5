use serde_json::json;

use super::manifests::CONTAINER;
use super::*;

const CLUSTER_INFO: &str = "apiVersion: v1\nkind: Config\n";

fn exposed(strategy: &str, address: Value) -> ExposedCluster {
    let mut spec = json!({"exposeStrategy": strategy, "seed": "north", "address": address});
    if strategy == "Tunneling" {
        spec["tunnel"] = json!({"agentIP": "100.64.30.10"});
    }
    serde_json::from_value(json!({"metadata": {"name": "a"}, "spec": spec})).unwrap()
}

fn tunneling() -> ExposedCluster {
    exposed("Tunneling", json!({"externalName": "a.north.example.com", "port": 6443}))
}

fn by_port() -> ExposedCluster {
    exposed("NodePort", json!({"externalName": "a.north.example.com", "port": 31_234, "ip": "203.0.113.9"}))
}

fn agents() -> AgentSettings {
    AgentSettings {
        image: Some("registry.example.com/portico:1".into()),
        gateways: Vec::new(),
        server_name: None,
        tunnel_port: 8_088,
    }
}

fn facts<'a>(exposed: &'a ExposedCluster, agents: &'a AgentSettings, at: &'a Konnectivity) -> Facts<'a> {
    Facts { exposed, endpoints: true, konnectivity: at, cluster_info: CLUSTER_INFO, agents, tunnel_ca: None }
}

fn at() -> Konnectivity {
    Konnectivity::At("konnectivity-server.a.north.example.com".into(), 6_443)
}

fn names(inside: &Inside) -> Vec<String> {
    inside.wanted.iter().map(|object| object.id.to_string()).collect()
}

#[test]
fn under_tunneling_agents_hold_the_address_that_pods_find() {
    let (exposed, agents, at) = (tunneling(), agents(), at());
    let inside = inside(&Facts { tunnel_ca: Some("-----CA-----\n"), ..facts(&exposed, &agents, &at) });
    // Of the manifests only what is filled in: the rest is in deploy/.
    let made = inside.wanted.iter().map(|object| match object.fields.pointer(CONTAINER) {
        Some(container) => {
            json!({"id": object.id.to_string(), "image": container["image"], "args": container["args"]})
        }
        None => object.fields.clone(),
    });
    insta::assert_yaml_snapshot!(made.collect::<Vec<_>>());
    assert!(inside.tunneling && inside.unwanted.is_empty() && inside.waiting.is_empty());
}

#[test]
fn other_strategies_have_no_agents_and_lead_to_the_address() {
    let (exposed, agents) = (by_port(), agents());
    let at = Konnectivity::At("a.north.example.com".into(), 32_000);
    let inside = inside(&facts(&exposed, &agents, &at));
    let (agent, rest): (Vec<_>, Vec<_>) =
        inside.unwanted.iter().map(ToString::to_string).partition(|id| id.ends_with("portico-agent"));
    assert_eq!(agent[0], "DaemonSet kube-system/portico-agent");
    assert_eq!((agent.len(), rest.len()), (5, 0));
    let slice = inside.wanted.iter().find(|object| object.id.kind == Kind::EndpointSlice).unwrap();
    assert_eq!(slice.fields["endpoints"][0]["addresses"], json!(["203.0.113.9"]));
    assert_eq!(slice.fields["ports"][0]["port"], 31_234);
    let args = args(&inside, "konnectivity-agent");
    assert!(args.contains(&"--proxy-server-host=a.north.example.com".into()), "{args:?}");
    assert!(args.contains(&"--proxy-server-port=32000".into()), "{args:?}");
}

fn args(inside: &Inside, name: &str) -> Vec<String> {
    let workload = |object: &&Object| object.id.name == name && object.fields.get("spec").is_some();
    let object = inside.wanted.iter().find(workload).unwrap();
    let container = object.fields.pointer(CONTAINER).unwrap();
    serde_json::from_value(container["args"].clone()).unwrap()
}

/// The way by hand, and this one: what is left is the same, apart from the blanks and the label.
#[test]
fn agents_are_those_of_the_manifests_and_no_blank_stays() {
    let (exposed, agents, at) = (tunneling(), agents(), at());
    let inside = inside(&Facts { tunnel_ca: Some("-----CA-----\n"), ..facts(&exposed, &agents, &at) });
    let shipped = [
        include_str!("../../../../deploy/agent.yaml"),
        include_str!("../../../../deploy/konnectivity/agent.yaml"),
    ];
    let shipped: Vec<Value> = shipped
        .iter()
        .flat_map(|text| portico_yaml::Documents::new(text))
        .map(|document| document.unwrap().typed().unwrap())
        .collect();
    assert_eq!(shipped.len(), 8);
    for (shipped, made) in shipped.into_iter().zip(&inside.wanted) {
        let without = |mut object: Value| {
            object["metadata"]["labels"].as_object_mut().unwrap().remove(MANAGED_BY.0);
            object.as_object_mut().unwrap().remove("data");
            if let Some(container) = object.pointer_mut(CONTAINER) {
                container["image"].take();
                container["args"].take();
            }
            object
        };
        assert_eq!(without(shipped), without(made.fields.clone()));
        let text = made.fields.to_string();
        for blank in ["localhost/", "gateway.example", "server.example", "cluster-NAME", "REPLACE"] {
            assert!(!text.contains(blank), "{blank} is left in {}", made.id);
        }
    }
    let by_hand = ["agent", "--tls-ca=/etc/portico/ca.crt", "--linger", "--log-format=json"];
    let args = args(&inside, "portico-agent");
    assert!(by_hand.iter().all(|arg| args.iter().any(|made| made == arg)), "{args:?}");
}

#[test]
fn gateways_of_another_name_are_named_and_a_public_ca_needs_no_file() {
    let (exposed, at) = (tunneling(), at());
    let mut agents = agents();
    agents.gateways = vec!["gw-1.example.com:8088".into(), "gw-2.example.com:8088".into()];
    agents.server_name = Some("gw.example.com".into());
    let inside = inside(&facts(&exposed, &agents, &at));
    let args = args(&inside, "portico-agent");
    assert!(args.contains(&"--gateway=gw-1.example.com:8088,gw-2.example.com:8088".into()), "{args:?}");
    assert!(args.contains(&"--server-name=gw.example.com".into()), "{args:?}");
    assert!(!args.iter().any(|arg| arg.starts_with("--tls-ca")), "{args:?}");
}

#[test]
fn what_is_not_known_yet_is_left_as_it_is() {
    let mut agents = agents();
    agents.image = None;
    let waits = exposed("NodePort", json!({"externalName": "a.north.example.com", "port": 31_234}));
    let found = inside(&facts(&waits, &agents, &Konnectivity::Pending));
    assert_eq!(found.waiting.len(), 2, "{:?}", found.waiting);
    let only = ["ConfigMap", "Role", "RoleBinding"].map(|kind| format!("{kind} kube-public/cluster-info"));
    assert_eq!(names(&found), only);
    let tunneling = tunneling();
    let without_image = inside(&facts(&tunneling, &agents, &at()));
    assert!(without_image.unwanted.is_empty(), "{:?}", without_image.unwanted);
    // Somebody else keeps the endpoints.
    let found = inside(&Facts { endpoints: false, ..facts(&tunneling, &agents, &Konnectivity::Off) });
    assert_eq!(names(&found), only);
    assert_eq!(found.unwanted.len(), 3, "{:?}", found.unwanted);
}

#[test]
fn konnectivity_is_where_the_strategy_puts_it() {
    let read = |metadata: Value, spec: Value| -> Cluster {
        serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
    };
    let plain = read(json!({"name": "a"}), json!({}));
    assert_eq!(Konnectivity::of(&plain, &tunneling(), None), at());
    assert_eq!(
        Konnectivity::of(&plain, &by_port(), Some(32_000)),
        Konnectivity::At("a.north.example.com".into(), 32_000)
    );
    assert_eq!(Konnectivity::of(&plain, &by_port(), None), Konnectivity::Pending);
    let off = read(json!({"name": "a"}), json!({"clusterNetwork": {"konnectivityEnabled": false}}));
    assert_eq!(Konnectivity::of(&off, &tunneling(), None), Konnectivity::Off);
    let elsewhere = json!({"name": "a", "annotations": {"portico.k8c.io/endpoints": "192.0.2.7:6443"}});
    let elsewhere = read(elsewhere, json!({}));
    assert_eq!(Konnectivity::of(&elsewhere, &tunneling(), None), Konnectivity::Off);
}

#[test]
fn a_path_is_that_of_the_api() {
    assert_eq!(ENVOY_AGENT.path(), "/apis/apps/v1/namespaces/kube-system/daemonsets/envoy-agent");
    let info = id(Kind::ConfigMap, "kube-public", "cluster-info");
    assert_eq!(info.path(), "/api/v1/namespaces/kube-public/configmaps/cluster-info");
    let role = Id { kind: Kind::ClusterRole, namespace: None, name: "portico-agent".into() };
    assert_eq!(role.path(), "/apis/rbac.authorization.k8s.io/v1/clusterroles/portico-agent");
}
