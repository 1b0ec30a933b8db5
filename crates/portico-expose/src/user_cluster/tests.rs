use portico_api::exposed_cluster::{ExposedClusterSpec, SecondDoor};
use serde_json::json;

use super::manifests::{CONTAINER, INIT_CONTAINER};
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
    Facts {
        exposed,
        second: None,
        endpoints: true,
        konnectivity: at,
        next: None,
        cluster_info: CLUSTER_INFO,
        agents,
        nodes: NodeMoves::InPlace,
        tunnel_ca: None,
    }
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
    // Compares only what is filled into the manifests: the rest is in deploy/.
    let made = inside.wanted.iter().map(|object| match object.fields.pointer(CONTAINER) {
        Some(container) => {
            json!({"id": object.id.to_string(), "image": container["image"], "args": container["args"]})
        }
        None => object.fields.clone(),
    });
    insta::assert_yaml_snapshot!(made.collect::<Vec<_>>());
    assert!(inside.tunneling && inside.waiting.is_empty());
    assert_eq!(inside.unwanted, [KONNECTIVITY_AGENT_NEXT, NODE_PROBE]);
}

#[test]
fn other_strategies_have_no_agents_and_lead_to_the_address() {
    let (exposed, agents) = (by_port(), agents());
    let at = Konnectivity::At("a.north.example.com".into(), 32_000);
    let inside = inside(&facts(&exposed, &agents, &at));
    let (agent, rest): (Vec<_>, Vec<_>) =
        inside.unwanted.iter().map(ToString::to_string).partition(|id| id.ends_with("portico-agent"));
    assert_eq!(agent[0], NODE_AGENT.to_string());
    assert_eq!((agent.len(), rest.len()), (5, 2));
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
    assert_eq!(without_image.unwanted, [KONNECTIVITY_AGENT_NEXT, NODE_PROBE]);
    // Somebody else keeps the endpoints.
    let found = inside(&Facts { endpoints: false, ..facts(&tunneling, &agents, &Konnectivity::Off) });
    assert_eq!(names(&found), only);
    assert_eq!(found.unwanted.len(), 5, "{:?}", found.unwanted);
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

/// A cluster by each strategy, and where its Konnectivity server is then.
fn door(strategy: &str) -> (ExposedCluster, Konnectivity) {
    let by_port = |host: &str, ip: &str| {
        let url = format!("https://{host}:31234");
        let address = json!({"externalName": host, "url": url, "port": 31_234, "ip": ip});
        (exposed(strategy, address), Konnectivity::At(host.into(), 32_000))
    };
    match strategy {
        "Tunneling" => {
            let host = "a.north.example.com";
            let url = format!("https://{host}:6443");
            (exposed(strategy, json!({"externalName": host, "url": url, "port": 6443})), at())
        }
        "NodePort" => by_port("a.north.example.com", "203.0.113.9"),
        _ => by_port("203.0.113.10", "203.0.113.10"),
    }
}

const STRATEGIES: [&str; 3] = ["NodePort", "LoadBalancer", "Tunneling"];

/// A cluster with a second door, as it is recorded.
fn recorded(first: ExposedCluster, second: &ExposedCluster, state: MigrationState) -> ExposedCluster {
    let ExposedClusterSpec { expose_strategy, address, tunnel, .. } = second.spec.clone();
    let since = "2026-01-02T03:04:05.000000006Z".parse().unwrap();
    let second = SecondDoor { expose_strategy, address, tunnel };
    let migration = Some(Box::new(Migration { state, since, second }));
    ExposedCluster { spec: ExposedClusterSpec { migration, ..first.spec }, ..first }
}

/// The objects inside a cluster in a state between two doors, without those that it always has.
fn migrating(first: &str, second: &str, state: MigrationState) -> Inside {
    let ((exposed, at), (second, next), agents) = (door(first), door(second), agents());
    let exposed = recorded(exposed, &second, state);
    let facts = Facts { second: Some(&second), next: Some(&next), ..facts(&exposed, &agents, &at) };
    let inside = inside(&facts);
    assert_eq!(inside.waiting, <[&str; 0]>::default());
    let wanted: Vec<&Id> = inside.wanted.iter().map(|object| &object.id).collect();
    assert!(inside.unwanted.iter().all(|id| !wanted.contains(&id)), "{:?}", inside.unwanted);
    inside
}

#[test]
fn each_state_of_a_migration_has_what_its_doors_need_and_no_more() {
    use MigrationState::{Closing, Moving, MovingNodes, Proving, Quieting};

    for state in MigrationState::ALL {
        for (first, second) in pairs() {
            let inside = migrating(first, second, state);
            let has = |id: &Id| inside.wanted.iter().any(|object| object.id == *id);
            let case = format!("{first}, {second}, {state:?}");
            let tunnels = first == "Tunneling" || second == "Tunneling" && state != Closing;
            assert_eq!((has(&NODE_AGENT), inside.tunneling), (tunnels, tunnels), "{case}");
            assert!(has(&KONNECTIVITY_AGENT), "{case}");
            assert_eq!(has(&KONNECTIVITY_AGENT_NEXT), [Proving, Moving].contains(&state), "{case}");
            assert_eq!(has(&NODE_PROBE), [Proving, MovingNodes].contains(&state), "{case}");
            for id in of_second_door(&door(first).0) {
                // Nodes that come late are still moved.
                let is_left_alone = state == Quieting && id == NODE_PROBE;
                assert_eq!(has(&id), !inside.unwanted.contains(&id) && !is_left_alone, "{id}: {case}");
                assert!(state != Closing || !has(&id), "{id}: {case}");
            }
            // Whatever else there is, pods and machines are led to the first door.
            let find = |kind| inside.wanted.iter().find(|object| object.id.kind == kind).unwrap();
            let address = &find(Kind::EndpointSlice).fields["endpoints"][0]["addresses"][0];
            let expected = match first {
                "Tunneling" => "100.64.30.10",
                "NodePort" => "203.0.113.9",
                _ => "203.0.113.10",
            };
            assert_eq!(address, expected, "{case}");
            let (_, at) = door(first);
            assert_eq!(server(&inside, "konnectivity-agent"), at, "{case}");
        }
    }
}

/// All pairs of two strategies.
fn pairs() -> impl Iterator<Item = (&'static str, &'static str)> {
    let all = STRATEGIES.into_iter().flat_map(|first| STRATEGIES.map(|second| (first, second)));
    all.filter(|(first, second)| first != second)
}

/// Where the Konnectivity agents of a Deployment go.
fn server(inside: &Inside, name: &str) -> Konnectivity {
    let args = args(inside, name);
    let value = |flag: &str| args.iter().find_map(|arg| arg.strip_prefix(flag)).unwrap().to_owned();
    Konnectivity::At(value("--proxy-server-host="), value("--proxy-server-port=").parse().unwrap())
}

#[test]
fn konnectivity_agents_that_were_proven_are_not_touched_when_the_doors_change_places() {
    let next = |inside: Inside| {
        inside.wanted.into_iter().find(|object| object.id == KONNECTIVITY_AGENT_NEXT).unwrap()
    };
    for (first, second) in pairs() {
        let before = migrating(first, second, MigrationState::Proving);
        let after = migrating(second, first, MigrationState::Moving);
        assert_eq!(server(&before, "konnectivity-agent-next"), door(second).1);
        assert_eq!(next(before), next(after), "{first}, {second}");
    }
}

#[test]
fn agents_go_to_the_gateways_by_the_name_of_the_door_with_the_tunnel() {
    for state in [MigrationState::Opening, MigrationState::MovingNodes] {
        let args = args(&migrating("LoadBalancer", "Tunneling", state), "portico-agent");
        assert!(args.contains(&"--gateway=a.north.example.com:8088".into()), "{args:?}");
        assert!(args.contains(&"--address=100.64.30.10".into()), "{args:?}");
    }
}

#[test]
fn the_objects_of_a_migration_are_as_before() {
    let inside = migrating("NodePort", "Tunneling", MigrationState::Proving);
    let new =
        inside.wanted.into_iter().filter(|object| [KONNECTIVITY_AGENT_NEXT, NODE_PROBE].contains(&object.id));
    insta::assert_yaml_snapshot!(new.map(|object| object.fields).collect::<Vec<_>>());
}

#[test]
fn nodes_try_the_address_of_the_second_door_and_that_of_its_agents() {
    let urls = |second: &str| {
        let inside = migrating("NodePort", second, MigrationState::Proving);
        let probe = inside.wanted.iter().find(|object| object.id == NODE_PROBE).unwrap();
        let asked = probe.fields.pointer(CONTAINER).unwrap()["readinessProbe"]["exec"]["command"].clone();
        let asked: Vec<String> = serde_json::from_value(asked).unwrap();
        let urls = |all: &[String]| -> Vec<String> {
            all.iter().filter(|arg| arg.starts_with("https:")).cloned().collect()
        };
        assert_eq!(urls(&args(&inside, "portico-migration")), urls(&asked));
        urls(&asked)
    };
    assert_eq!(urls("LoadBalancer"), ["https://203.0.113.10:31234"]);
    assert_eq!(urls("Tunneling"), ["https://a.north.example.com:6443", "https://100.64.30.10:6443"]);
}

#[test]
fn kubelets_are_led_from_the_second_door_to_the_first_each_in_its_turn() {
    let moves = |nodes: NodeMoves| {
        let ((exposed, at), (second, _), agents) = (door("Tunneling"), door("NodePort"), agents());
        let exposed = recorded(exposed, &second, MigrationState::MovingNodes);
        let facts = Facts { second: Some(&second), nodes, ..facts(&exposed, &agents, &at) };
        inside(&facts).wanted.into_iter().find(|object| object.id == NODE_PROBE).unwrap().fields
    };
    let in_place = moves(NodeMoves::InPlace);
    insta::assert_yaml_snapshot!(in_place["spec"]);
    let drained = moves(NodeMoves::Drained);
    let arguments = drained.pointer(INIT_CONTAINER).unwrap()["args"].as_array().unwrap();
    assert!(arguments.contains(&"--drain".into()), "{arguments:?}");
    let by_hand = moves(NodeMoves::ByHand);
    let pods = &by_hand["spec"]["template"]["spec"];
    for field in ["initContainers", "volumes", "hostPID"] {
        assert!(pods.get(field).is_none(), "{pods}");
    }
    assert_eq!(pods["containers"], in_place["spec"]["template"]["spec"]["containers"]);
}

#[test]
fn the_pods_of_one_attempt_are_told_from_those_of_another() {
    let inside = migrating("NodePort", "Tunneling", MigrationState::Proving);
    let probe = inside.wanted.iter().find(|object| object.id == NODE_PROBE).unwrap();
    let labels = probe.fields.pointer("/spec/template/metadata/labels").unwrap();
    assert_eq!(labels[ATTEMPT_LABEL], "1767323045000000006");
    let selector = probe.fields.pointer("/spec/selector/matchLabels").unwrap();
    assert!(selector.get(ATTEMPT_LABEL).is_none(), "a selector cannot be changed: {selector}");
}

#[test]
fn of_a_second_door_that_is_not_known_yet_nothing_is_made_or_removed() {
    let ((exposed, at), with_image) = (door("NodePort"), agents());
    let without_image = AgentSettings { image: None, ..agents() };
    let with_gateways = AgentSettings { gateways: vec!["gw.example.com:8088".into()], ..agents() };
    let second = self::exposed("Tunneling", json!({}));
    let exposed = recorded(exposed, &second, MigrationState::Proving);
    let facts = |agents| Facts {
        second: Some(&second),
        next: Some(&Konnectivity::Pending),
        ..facts(&exposed, agents, &at)
    };
    let new = [NODE_AGENT, KONNECTIVITY_AGENT_NEXT, NODE_PROBE];
    let untouched = |inside: &Inside| {
        let ids = inside.wanted.iter().map(|object| &object.id).chain(&inside.unwanted);
        ids.filter(|id| new.contains(id)).count() == 0
    };
    let found = inside(&facts(&with_image));
    assert!(untouched(&found) && found.waiting.len() == 3, "{:?}", found.waiting);
    let moving = recorded(exposed.clone(), &second, MigrationState::MovingNodes);
    let found = inside(&Facts { exposed: &moving, ..facts(&with_image) });
    assert!(found.unwanted.contains(&NODE_PROBE), "nothing can use a door without an address");
    let found = inside(&facts(&without_image));
    assert!(untouched(&found) && found.waiting.len() == 4, "{:?}", found.waiting);
    // Where gateways have a name of their own, that of the cluster is not needed.
    let found = inside(&facts(&with_gateways));
    assert_eq!(args(&found, "portico-agent")[1], "--gateway=gw.example.com:8088");
}

#[test]
fn without_konnectivity_there_is_none_by_the_second_door() {
    let ((first, _), (second, _), agents) = (door("NodePort"), door("Tunneling"), agents());
    for state in MigrationState::ALL {
        let exposed = recorded(first.clone(), &second, state);
        let facts = Facts {
            second: Some(&second),
            next: Some(&Konnectivity::Off),
            ..facts(&exposed, &agents, &Konnectivity::Off)
        };
        assert!(inside(&facts).unwanted.contains(&KONNECTIVITY_AGENT_NEXT), "{state:?}");
    }
}

#[test]
fn a_path_is_that_of_the_api() {
    assert_eq!(ENVOY_AGENT.path(), "/apis/apps/v1/namespaces/kube-system/daemonsets/envoy-agent");
    let info = id(Kind::ConfigMap, "kube-public", "cluster-info");
    assert_eq!(info.path(), "/api/v1/namespaces/kube-public/configmaps/cluster-info");
    let role = Id { kind: Kind::ClusterRole, namespace: None, name: "portico-agent".into() };
    assert_eq!(role.path(), "/apis/rbac.authorization.k8s.io/v1/clusterroles/portico-agent");
}
