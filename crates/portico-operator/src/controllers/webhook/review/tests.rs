use portico_api::annotations::LAYOUT;
use serde_json::{Value, json};

use super::*;

fn served<K: portico_source::served::ServedKind>(object: &Value) -> Arc<Served<K>> {
    Arc::new(serde_json::from_value(object.clone()).unwrap())
}

fn object<K: portico_source::served::ServedKind>(object: &Value) -> Object {
    served::<K>(object).object.clone().unwrap()
}

fn seed(name: &str, datacenter: &str) -> Value {
    json!({"metadata":
            {"name": name, "namespace": "portico", "creationTimestamp": "2026-08-01T00:00:00Z"},
        "spec": {"datacenters": {datacenter: {"spec": {"bringyourown": {}}}}}})
}

fn configuration(name: &str) -> Value {
    json!({"metadata": {"name": name, "namespace": "portico"},
        "spec": {"ingress": {"domain": "example.com"}, "exposeStrategy": "Tunneling"}})
}

fn cluster(name: &str, datacenter: &str) -> Value {
    json!({"metadata": {"name": name, "creationTimestamp": "2026-08-02T00:00:00Z"},
        "spec": {"exposeStrategy": "Tunneling", "cloud": {"dc": datacenter}}})
}

/// An exposed Service that maps its only port to `host`.
fn service(namespace: &str, name: &str, host: &str) -> Value {
    json!({"metadata": {"name": name, "namespace": namespace, "creationTimestamp": "2026-08-01T00:00:00Z",
            "annotations": {"nodeport-proxy.k8s.io/expose": "SNI",
                PORT_MAPPING: format!(r#"{{"https": "{host}"}}"#)}},
        "spec": {"type": "ClusterIP", "ports": [{"name": "https", "port": 443}]}})
}

/// Two Seeds, a configuration, the Cluster `a`.
fn world() -> World {
    World {
        seeds: vec![served(&seed("north", "lab-1")), served(&seed("south", "lab-2"))],
        configurations: vec![served(&configuration("kkp"))],
        clusters: vec![served(&cluster("a", "lab-1"))],
        ..World::default()
    }
}

fn created<K: portico_source::served::ServedKind>(world: &World, after: &Value) -> Vec<String> {
    changed::<K>(world, None, after)
}

fn changed<K: portico_source::served::ServedKind>(
    world: &World,
    before: Option<&Value>,
    after: &Value,
) -> Vec<String> {
    let change = ProposedChange { before: before.map(object::<K>), after: object::<K>(after) };
    review(world, &change).errors.iter().map(ToString::to_string).collect()
}

#[test]
fn what_is_right_is_admitted() {
    let world = world();
    for name in ["b", "a"] {
        assert_eq!(created::<Cluster>(&world, &cluster(name, "lab-2")), [""; 0]);
    }
    assert_eq!(created::<Seed>(&world, &seed("east", "lab-3")), [""; 0]);
    assert_eq!(created::<Service>(&world, &service("else", "web", "web.example.com")), [""; 0]);
}

#[test]
fn a_cluster_in_a_datacenter_of_no_seed_is_refused() {
    let error = "Cluster b: spec.cloud.dc: no Seed lists the datacenter \"lab-9\" (there are: north, south); \
                 add it to spec.datacenters of the Seed that hosts this cluster, or name one that is there";
    assert_eq!(created::<Cluster>(&world(), &cluster("b", "lab-9")), [error]);
}

#[test]
fn a_cluster_takes_its_name_from_a_service_of_somebody_else_and_that_is_reported() {
    let mut world = world();
    world.services.push(served(&service("else", "web", "B.North.example.com")));
    let change = ProposedChange { before: None, after: object::<Cluster>(&cluster("b", "lab-1")) };
    let verdict = review(&world, &change);
    assert_eq!(verdict.errors, []);
    let warnings: Vec<String> = verdict.warnings.iter().map(ToString::to_string).collect();
    let warning = warnings.iter().find(|warning| warning.starts_with("Service else/web: ")).unwrap();
    assert!(
        warning.contains(
            "host b.north.example.com belongs to Service cluster-b/apiserver-external: it follows from the \
             Cluster of that namespace; choose another host name"
        ),
        "{warning}"
    );
    let other = ProposedChange { before: None, after: object::<Cluster>(&cluster("c", "lab-1")) };
    assert!(review(&world, &other).warnings.iter().all(|warning| warning.object.kind != Kind::Service));
}

#[test]
fn of_two_services_the_younger_cannot_have_a_name_that_the_elder_has() {
    let mut world = world();
    world.services.push(served(&service("else", "web", "web.example.com")));
    let mut second = service("other", "web", "web.example.com");
    second["metadata"]["creationTimestamp"] = json!("2026-08-02T00:00:00Z");
    let errors = created::<Service>(&world, &second);
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert!(
        errors[0].contains(
            "host web.example.com belongs to the elder Service else/web, created 2026-08-01T00:00:00Z; \
             choose another host name, or remove Service else/web"
        ),
        "{errors:?}"
    );
    // A name of a cluster, claimed by an object that is older than it.
    world.services.push(served(&service("cluster-a", "apiserver-external", "a.north.example.com")));
    let errors = created::<Service>(&world, &service("other", "thief", "a.north.example.com"));
    assert!(errors[0].starts_with("Service other/thief: "), "{errors:?}");
}

/// [`world`] with the Cluster `evil`, whose tenant may make any Service in its namespace.
fn world_with_a_tenant() -> World {
    let mut world = world();
    world.clusters.push(served(&cluster("evil", "lab-1")));
    world
}

/// The errors of a new Service `squat` in `namespace` that claims `host`.
fn squatting(world: &World, namespace: &str, host: &str) -> Vec<String> {
    created::<Service>(world, &service(namespace, "squat", host))
}

#[test]
fn a_cluster_is_never_refused_for_a_service_in_the_namespace_of_another() {
    for host in ["y1.north.example.com", "Y1.North.Example.com.", "konnectivity-server.y1.north.example.com"]
    {
        let mut world = world_with_a_tenant();
        world.services.push(served(&service("cluster-evil", "apiserver-external", host)));
        let y1 = ProposedChange { before: None, after: object::<Cluster>(&cluster("y1", "lab-1")) };
        let verdict = review(&world, &y1);
        assert_eq!(verdict.errors, [], "{host}");
        let squat = |problem: &&Problem| &*problem.object.key.namespace == "cluster-evil";
        let warning = verdict.warnings.iter().find(squat).map(ToString::to_string).unwrap_or_default();
        assert!(warning.contains("it follows from the Cluster of that namespace"), "{warning}");
    }
}

#[test]
fn a_service_cannot_have_a_name_of_another_cluster_there_is_or_will_be() {
    let mut world = world_with_a_tenant();
    let mut by_port = cluster("n1", "lab-1");
    by_port["spec"]["exposeStrategy"] = json!("NodePort");
    world.clusters.push(served(&by_port));
    for (host, whose) in [
        ("a.north.example.com", "belongs to the Cluster a,"),
        ("A.North.example.com.", "belongs to the Cluster a,"),
        ("x.a.north.example.com", "belongs to the Cluster a,"),
        ("*.a.north.example.com", "belongs to the Cluster a,"),
        ("n1.north.example.com", "belongs to the Cluster n1,"),
        ("y1.north.example.com", "belongs to the Cluster y1,"),
        ("konnectivity-server.y1.south.example.com", "belongs to the Cluster y1,"),
        ("north.example.com", "is that of the Seed"),
        ("*.north.example.com", "stands for the names of Clusters too"),
        ("*.example.com", "stands for the names of Clusters too"),
        ("*.com", "stands for the names of Clusters too"),
    ] {
        let errors = squatting(&world, "cluster-evil", host);
        assert_eq!(errors.len(), 1, "{host}: {errors:?}");
        assert!(errors[0].starts_with("Service cluster-evil/squat: metadata.annotations["), "{errors:?}");
        assert!(errors[0].contains(whose) && errors[0].ends_with("; choose another host name"), "{errors:?}");
    }
    for host in ["evil.north.example.com", "x.evil.north.example.com", "*.evil.north.example.com"] {
        assert_eq!(squatting(&world, "cluster-evil", host), [""; 0], "its own: {host}");
    }
    for host in ["web.example.com", "xnorth.example.com", "*.web.example.com", "example.com"] {
        assert_eq!(squatting(&world, "cluster-evil", host), [""; 0], "nobody's: {host}");
    }
}

#[test]
fn a_service_of_no_cluster_may_have_a_name_below_a_seed_that_is_of_no_cluster_yet() {
    let world = world();
    for host in ["a.north.example.com", "x.a.north.example.com", "*.north.example.com", "*.example.com"] {
        assert_eq!(squatting(&world, "else", host).len(), 1, "{host}");
    }
    // A Cluster of this name is of another Seed, or there is none.
    for host in
        ["a.south.example.com", "grafana.north.example.com", "north.example.com", "*.south.example.com"]
    {
        assert_eq!(squatting(&world, "else", host), [""; 0], "{host}");
    }
}

#[test]
fn a_service_that_has_a_name_of_a_cluster_already_may_be_changed_in_another_way() {
    let world = world_with_a_tenant();
    let before = service("cluster-evil", "squat", "y1.north.example.com");
    let mut after = before.clone();
    after["metadata"]["labels"] = json!({"touched": "yes"});
    assert_eq!(changed::<Service>(&world, Some(&before), &after), [""; 0]);
    let other = service("cluster-evil", "squat", "y2.north.example.com");
    assert_eq!(changed::<Service>(&world, Some(&before), &other).len(), 1);
}

#[test]
fn what_was_wrong_before_may_stay_and_only_what_a_change_adds_is_refused() {
    let mut world = world();
    let (lost, mut touched) = (cluster("b", "lab-9"), cluster("b", "lab-9"));
    world.clusters.push(served(&lost));
    touched["metadata"]["labels"] = json!({"touched": "yes"});
    assert_eq!(changed::<Cluster>(&world, Some(&lost), &touched), [""; 0]);
    touched["spec"]["cloud"]["dc"] = json!("lab-8");
    assert_eq!(changed::<Cluster>(&world, Some(&lost), &touched).len(), 1, "another mistake");
    touched["spec"]["cloud"]["dc"] = json!("lab-2");
    assert_eq!(changed::<Cluster>(&world, Some(&lost), &touched), [""; 0], "mended");
    // The message on the Cluster names the Seeds, which are others now.
    assert_eq!(created::<Seed>(&world, &seed("east", "lab-3")), [""; 0]);
}

#[test]
fn a_seed_cannot_take_what_another_has_nor_leave_a_cluster_alone() {
    let world = world();
    let mut younger = seed("east", "lab-2");
    younger["metadata"]["creationTimestamp"] = json!("2026-08-02T00:00:00Z");
    let errors = created::<Seed>(&world, &younger);
    assert!(errors[0].contains("the datacenter \"lab-2\" belongs to Seed portico/south"), "{errors:?}");
    let mut twin = seed("north", "lab-4");
    twin["metadata"]["namespace"] = json!("other");
    assert!(created::<Seed>(&world, &twin)[0].contains("has the same name \"north\""));
    let errors = changed::<Seed>(&world, Some(&seed("north", "lab-1")), &seed("north", "lab-7"));
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert!(errors[0].starts_with("Cluster a: spec.cloud.dc: no Seed lists the datacenter \"lab-1\""));
}

#[test]
fn there_is_one_configuration_and_clusters_need_its_domain() {
    let world = world();
    assert!(
        created::<KubermaticConfiguration>(&world, &configuration("second"))[0]
            .contains("this one is ignored")
    );
    let mut without = configuration("kkp");
    without["spec"]["ingress"]["domain"] = json!("");
    let errors = changed::<KubermaticConfiguration>(&world, Some(&configuration("kkp")), &without);
    let of_cluster = errors.iter().filter(|error| error.starts_with("Cluster a: ")).count();
    assert!(of_cluster >= 1 && errors.len() > of_cluster, "{errors:?}");
}

#[test]
fn a_strategy_that_the_seed_decided_changes_with_the_label_alone() {
    let world = world();
    let mut before = cluster("a", "lab-1");
    before["spec"]["exposeStrategy"] = json!("");
    let mut after = before.clone();
    after["spec"]["exposeStrategy"] = json!("NodePort");
    let errors = changed::<Cluster>(&world, Some(&before), &after);
    assert!(
        errors[0].contains("it cannot change from Tunneling to NodePort (decided by: Cluster)"),
        "{errors:?}"
    );
    after["metadata"]["labels"] = json!({"unsafe-expose-strategy-migration": ""});
    assert_eq!(changed::<Cluster>(&world, Some(&before), &after), [""; 0]);
}

#[test]
fn a_service_of_a_cluster_that_does_not_exist_is_refused() {
    let errors = created::<Service>(&world(), &service("cluster-z", "web", "web.example.com"));
    assert!(errors[0].contains("what the cluster \"z\" allows is not known"), "{errors:?}");
}

#[test]
fn what_is_being_deleted_may_be_anything() {
    let mut lost = cluster("b", "lab-9");
    lost["metadata"]["deletionTimestamp"] = json!("2026-08-03T00:00:00Z");
    assert_eq!(created::<Cluster>(&world(), &lost), [""; 0]);
}

#[test]
fn numbers_that_the_api_server_gives_are_left_to_it() {
    let mut by_port = service("else", "web", "web.example.com");
    by_port["metadata"]["annotations"]["nodeport-proxy.k8s.io/expose"] = json!("NodePort");
    by_port["spec"]["type"] = json!("NodePort");
    assert_eq!(created::<Service>(&world(), &by_port), [""; 0], "a dry run");
    by_port["spec"]["ports"][0]["nodePort"] = json!(30_001);
    let mut world = world();
    world.services.push(served(&by_port));
    by_port["metadata"]["name"] = json!("second");
    assert_eq!(created::<Service>(&world, &by_port), [""; 0], "made up in a dry run");
}

#[test]
fn different_settings_of_two_seeds_are_a_warning() {
    let mut other = seed("east", "lab-3");
    other["spec"]["nodeportProxy"] =
        json!({"envoy": {"connectionSettings": {"sniListenerIdleTimeout": "90s"}}});
    let verdict = review(&world(), &ProposedChange { before: None, after: object::<Seed>(&other) });
    assert!(verdict.errors.is_empty(), "{verdict:?}");
    assert!(verdict.warnings.iter().any(|problem| problem.reason == "several-seeds"), "{verdict:?}");
}

#[test]
fn a_cluster_that_cannot_be_hosted_as_written_is_refused_if_it_asks_for_it() {
    let world = world();
    let mut hosted = cluster("b", "lab-1");
    hosted["spec"]["version"] = "v9.1.2".into();
    assert_eq!(created::<Cluster>(&world, &hosted), [""; 0], "KKP hosts it");
    hosted["metadata"]["annotations"] = json!({LAYOUT: "compact"});
    let errors = created::<Cluster>(&world, &hosted);
    assert!(errors.len() == 1 && errors[0].contains("spec.version: \"v9.1.2\" is no version"), "{errors:?}");
    let mut paused = hosted.clone();
    paused["spec"]["pause"] = true.into();
    assert_eq!(changed::<Cluster>(&world, Some(&hosted), &paused), [""; 0], "it was so before");
    hosted["spec"]["version"] = "1.35.8".into();
    hosted["spec"]["cniPlugin"] = json!({"type": "cilium"});
    assert_eq!(created::<Cluster>(&world, &hosted), [""; 0], "it is hosted, without a network plugin");
}
