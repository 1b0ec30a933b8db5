//! What holds for every plan.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use portico_api::hosting::Layout;
use portico_api::strategy::ExposeStrategy;
use portico_expose::doors::Doors;
use portico_expose::inputs::{Ingress, Inputs, Known, LoadBalancers};
use portico_expose::plan as exposure;
use portico_expose::validate::usable;
use portico_hosting::{Digests, digests, pki, secrets};
use portico_pki::inventory::{LEAVES, Signer};
use portico_pki::{ClusterPki, KeyKind, Secrets};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::*;

/// The first value of an object that an API server does not keep.
fn unkept(value: &Value) -> Option<&Value> {
    match value {
        Value::Null => Some(value),
        Value::Array(items) if items.is_empty() => Some(value),
        Value::Array(items) => items.iter().find_map(unkept),
        Value::Object(fields) => fields.values().find_map(unkept),
        _ => None,
    }
}

/// A Cluster of either layout, with any of the fields of [`everything`].
fn any_spec() -> impl Strategy<Value = (&'static str, Value)> {
    let chosen = prop::collection::vec(any::<bool>(), everything("compact").as_object().unwrap().len());
    (prop::sample::select(vec!["compact", "dedicated"]), chosen).prop_map(|(layout, chosen)| {
        let mut chosen = chosen.into_iter();
        let mut spec = everything(layout);
        let fields = spec.as_object_mut().unwrap();
        fields.retain(|_, _| chosen.next().unwrap_or_default());
        // The plugin does not start without limits.
        if !fields.contains_key("eventRateLimitConfig") {
            fields.remove("useEventRateLimitAdmissionPlugin");
        }
        (layout, spec)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// A migration from one strategy to another restarts nothing.
    #[test]
    fn a_plan_does_not_depend_on_the_strategy_and_is_the_same_each_time((layout, spec) in any_spec()) {
        let plans = ExposeStrategy::ALL.map(|strategy| {
            let mut spec = spec.clone();
            spec["exposeStrategy"] = json!(strategy.name());
            planned(layout, &spec)
        });
        prop_assert_eq!(&plans[0], &plans[1]);
        prop_assert_eq!(&plans[0], &plans[2]);
        prop_assert_eq!(&plans[0], &planned(layout, &spec));
    }

    /// An API server does not keep them, and each look at the object would find that something is missing.
    #[test]
    fn no_object_has_an_empty_list_or_a_null((layout, spec) in any_spec()) {
        for object in &planned(layout, &spec).objects {
            prop_assert_eq!(unkept(object), None, "{}", object);
        }
    }

    #[test]
    fn every_file_that_a_program_names_is_mounted_and_is_one_that_is_made((layout, spec) in any_spec()) {
        let plane = planned(layout, &spec);
        let configs: BTreeMap<&str, Vec<&str>> = plane
            .objects
            .iter()
            .filter(|object| object["kind"] == "ConfigMap")
            .map(|object| {
                let keys = object["data"].as_object().unwrap().keys().map(String::as_str).collect();
                (object["metadata"]["name"].as_str().unwrap(), keys)
            })
            .collect();
        let made: BTreeMap<String, Vec<String>> =
            secrets().into_iter().map(|secret| (secret.name, secret.keys)).collect();
        for (_, template) in templates(&plane) {
            for container in containers(template) {
                let name = format!("{}-files", container["name"].as_str().unwrap());
                let volume = template["spec"]["volumes"].as_array().unwrap().iter()
                    .find(|volume| volume["name"] == name.as_str()).unwrap();
                let mut paths = Vec::new();
                for source in volume["projected"]["sources"].as_array().unwrap() {
                    let (kind, source) = source.as_object().unwrap().iter().next().unwrap();
                    let name = source["name"].as_str().unwrap();
                    for item in source["items"].as_array().unwrap() {
                        let key = item["key"].as_str().unwrap();
                        let there = match &**kind {
                            "secret" => made[name].iter().any(|made| made == key),
                            _ => configs[name].contains(&key),
                        };
                        prop_assert!(there, "{name}/{key}");
                        paths.push(format!("/etc/kubernetes/{}", item["path"].as_str().unwrap()));
                    }
                }
                for arg in container["args"].as_array().unwrap() {
                    let value = arg.as_str().unwrap().split_once('=').map_or("", |(_, value)| value);
                    if value.starts_with("/etc/kubernetes/") {
                        prop_assert!(paths.iter().any(|path| path == value), "{arg}");
                    }
                }
            }
        }
    }

    #[test]
    fn every_object_is_of_its_cluster_and_ends_with_it((layout, spec) in any_spec()) {
        let plane = planned(layout, &spec);
        for object in &plane.objects {
            let meta = &object["metadata"];
            // The namespace is one as every cluster has it.
            if object["kind"] != "Namespace" {
                prop_assert_eq!(&meta["labels"]["cluster"], "a");
            }
            prop_assert_eq!(&meta["labels"]["portico.k8c.io/cluster"], "a");
            prop_assert_eq!(&meta["ownerReferences"][0]["kind"], "Cluster");
            let namespace = if object["kind"] == "Namespace" { &meta["name"] } else { &meta["namespace"] };
            prop_assert_eq!(namespace, "cluster-a");
        }
        for (name, template) in templates(&plane) {
            prop_assert_eq!(&template["metadata"]["labels"]["cluster"], "a", "{}", name);
            prop_assert_eq!(&template["spec"]["automountServiceAccountToken"], false);
        }
    }
}

/// A pod that is not ready gets no connections: no scheduler must take an API server away from its users.
#[test]
fn in_one_pod_the_api_server_alone_decides_whether_that_is_ready() {
    let ready = |layout: &str| -> Vec<String> {
        let plane = planned(layout, &json!({}));
        let all: Vec<&Value> = templates(&plane).into_iter().flat_map(|(_, one)| containers(one)).collect();
        let ready = all.into_iter().filter(|container| container["readinessProbe"].is_object());
        ready.map(|container| container["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(ready("compact"), ["apiserver"]);
    assert_eq!(ready("dedicated"), ["etcd", "apiserver", "controller-manager", "scheduler"]);
}

/// The one door of a cluster, as planned.
fn doors(inputs: &Inputs<'_>) -> Doors {
    let planned = exposure::plan(inputs);
    let doors = Doors::new(inputs.scope.cluster, planned.decision.strategy);
    Doors { first: planned.address, ..doors }
}

/// The PKI of a cluster of this layout.
pub(crate) fn pki_of(layout: Layout) -> ClusterPki {
    let (seeds, configuration) = (seeds(), configuration());
    let cluster = cluster(layout.name(), &json!({}));
    let scope = usable(&cluster, &seeds, Some(&configuration)).unwrap();
    let (known, load_balancers) = (Known::default(), LoadBalancers::CloudAndGateway);
    let inputs =
        Inputs { scope, node_ports: &|_, _| Some(31_000), known: &known, load_balancers, sni_port: 6_443 };
    pki(&inputs, &doors(&inputs), layout, KeyKind::default())
}

/// Makes what is due. Returns how many Secrets that are.
pub(crate) fn kept(pki: &ClusterPki, secrets: &mut Secrets, now: Timestamp) -> usize {
    let review = pki.review(secrets, false, now).unwrap();
    for due in &review.due {
        let data = due.data.iter().map(|(&key, value)| (key.to_owned(), value.clone()));
        secrets.insert(due.secret.to_owned(), data.collect());
    }
    review.due.len()
}

/// What is read at the start replaces pods when it changes; what is read again does not.
#[test]
fn renewed_certificates_restart_nothing_and_a_new_authority_or_address_does() {
    let now: Timestamp = "2026-11-22T12:30:00Z".parse().unwrap();
    for layout in [Layout::Compact, Layout::Dedicated] {
        let planned = |secrets: &Secrets| {
            planned_with(&cluster(layout.name(), &json!({})), &settings(), &digests(secrets))
        };
        let pki = pki_of(layout);
        let mut secrets = Secrets::new();
        let all = kept(&pki, &mut secrets, now);
        let before = planned(&secrets);
        let leaves = LEAVES.iter().filter(|leaf| Signer::OF_A_CLUSTER.contains(&leaf.signer)).count();
        let later = now.checked_add(SignedDuration::from_hours(340 * 24)).unwrap();
        let mut renewed = secrets.clone();
        assert_eq!((kept(&pki, &mut renewed, later), all), (leaves, leaves + Signer::OF_A_CLUSTER.len() + 1));
        assert_eq!(planned(&renewed), before, "{layout}");
        // Authorities of which a program has the certificate, and keys.
        for (secret, key) in [("ca", "ca.crt"), ("client-ca", "ca.crt"), ("service-account-key", "sa.pub")] {
            let mut changed = secrets.clone();
            changed.get_mut(secret).unwrap().insert(key.to_owned(), "another".to_owned());
            assert_ne!(planned(&changed), before, "{layout}: {secret}");
        }
        let moved = ClusterPki { control_plane_url: "https://192.0.2.1".to_owned(), ..pki };
        assert_eq!(kept(&moved, &mut secrets, now), 3);
        let after = planned(&secrets);
        for (name, template) in templates(&after) {
            let before = templates(&before).into_iter().find(|(found, _)| *found == name).unwrap().1;
            assert_eq!(template != before, name != "etcd", "{layout}: {name}");
        }
    }
    // The digest of a ConfigMap changes with what the plan puts into it.
    let of = |preset: &str| {
        let spec = json!({"auditLogging": {"enabled": true, "policyPreset": preset}});
        let plane = planned("compact", &spec);
        templates(&plane)[0].1["metadata"]["annotations"]["checksum.portico.k8c.io/audit-config"].clone()
    };
    assert!(of("metadata").is_string() && of("metadata") != of("minimal"));
}

#[test]
fn a_key_of_an_authority_is_only_where_it_signs() {
    for layout in ["compact", "dedicated"] {
        let plane = planned(layout, &everything(layout));
        for (_, template) in templates(&plane) {
            for volume in template["spec"]["volumes"].as_array().unwrap() {
                let text = volume.to_string();
                let signs = volume["name"] == "controller-manager-files";
                assert_eq!(text.contains("ca.key"), signs, "{text}");
                assert!(!text.contains("etcd-ca") && !text.contains("admin-kubeconfig"), "{text}");
            }
        }
    }
}

#[test]
fn images_come_from_a_mirror_by_digest_and_with_credentials() {
    let digest = "sha256:0000000000000000000000000000000000000000000000000000000000000000";
    let settings = Settings {
        registry_mirror: Some("mirror.example.com/k8s/".to_owned()),
        digests: [("mirror.example.com/k8s/kube-apiserver:v1.34.4".to_owned(), digest.to_owned())].into(),
        pull_secrets: vec!["dockercfg".to_owned()],
        ..settings()
    };
    let plane = planned_with(&cluster("compact", &json!({})), &settings, &Digests::new());
    let (_, template) = templates(&plane)[0];
    let images: Vec<&str> = containers(template).map(|one| one["image"].as_str().unwrap()).collect();
    assert_eq!(
        images,
        [
            "mirror.example.com/k8s/etcd:3.6.5-0",
            "registry.example.com/portico:1",
            &format!("mirror.example.com/k8s/kube-apiserver:v1.34.4@{digest}"),
            "mirror.example.com/k8s/kube-controller-manager:v1.34.4",
            "mirror.example.com/k8s/kube-scheduler:v1.34.4",
        ]
    );
    assert_eq!(template["spec"]["imagePullSecrets"], json!([{"name": "dockercfg"}]));
    assert!(plane.secrets.iter().any(|secret| secret.name == "dockercfg"));
}

/// No leaf changes when the strategy does, but for a load balancer that was not there before.
#[test]
fn names_of_certificates_are_the_same_under_each_strategy() {
    let (seeds, configuration) = (seeds(), configuration());
    let of = |strategy: ExposeStrategy, known: &Known| {
        let cluster = cluster("compact", &json!({"exposeStrategy": strategy.name()}));
        let scope = usable(&cluster, &seeds, Some(&configuration)).unwrap();
        let inputs = Inputs {
            scope,
            node_ports: &|_, _| Some(31_000),
            known,
            load_balancers: LoadBalancers::CloudAndGateway,
            sni_port: 6_443,
        };
        pki(&inputs, &doors(&inputs), Layout::Compact, KeyKind::default())
    };
    let known = Known { resolved: vec!["203.0.113.9".parse().unwrap()], ..Known::default() };
    let port = of(ExposeStrategy::NodePort, &known);
    assert!(port.api_server.dns.contains("a.north.example.com"));
    assert!(port.api_server.ips.contains(&"100.64.30.10".parse().unwrap()));
    for strategy in ExposeStrategy::ALL {
        let other = of(strategy, &known);
        assert_eq!(other.api_server.dns, port.api_server.dns, "{strategy}");
        assert_eq!(other.api_server.ips, port.api_server.ips, "{strategy}");
        assert_eq!(other.konnectivity, port.konnectivity, "{strategy}");
    }
    assert!(port.konnectivity.dns.contains("konnectivity-server.a.north.example.com"));
    let ingress = Ingress { ip: Some("203.0.113.20".parse().unwrap()), hostname: "".into() };
    let known = Known { front: vec![ingress], ..known };
    let balanced = of(ExposeStrategy::LoadBalancer, &known).api_server;
    assert!(balanced.dns == port.api_server.dns && balanced.ips.contains(&"203.0.113.20".parse().unwrap()));
    assert_eq!(port.control_plane_url, "https://127.0.0.1:6443");
    assert_eq!(port.internal_url, "https://apiserver-external.cluster-a.svc.cluster.local.");
}

/// The Services of the exposure lead to the port that a hosted API server listens on.
#[test]
fn services_lead_to_the_same_port_under_each_strategy() {
    let (seeds, configuration) = (seeds(), configuration());
    for strategy in ExposeStrategy::ALL {
        let cluster = cluster("dedicated", &json!({"exposeStrategy": strategy.name()})).begun();
        let scope = usable(&cluster, &seeds, Some(&configuration)).unwrap();
        let inputs = Inputs {
            scope,
            node_ports: &|_, _| Some(31_000),
            known: &Known::default(),
            load_balancers: LoadBalancers::CloudAndGateway,
            sni_port: 6_443,
        };
        let services = exposure::plan(&inputs).services;
        let service =
            services.iter().find(|service| &*service.metadata.name == "apiserver-external").unwrap();
        let written = serde_json::to_value(&service.spec).unwrap();
        assert_eq!(written["ports"][0]["targetPort"], 6_443, "{strategy}");
    }
}

/// Requests of CPU in thousandths, and of memory in MiB.
fn requests(layout: &str) -> (u64, u64) {
    let plane = planned(layout, &json!({}));
    let number = |text: &Value, unit: &str| -> u64 {
        text.as_str().unwrap().strip_suffix(unit).unwrap().parse().unwrap()
    };
    let sets = plane.objects.iter().filter(|object| object["spec"]["template"].is_object());
    let all = sets.flat_map(|set| {
        let replicas = set["spec"]["replicas"].as_u64().unwrap();
        containers(&set["spec"]["template"])
            .map(move |container| (replicas, &container["resources"]["requests"]))
    });
    all.fold((0, 0), |(cpu, memory), (replicas, requests)| {
        (
            cpu + replicas * number(&requests["cpu"], "m"),
            memory + replicas * number(&requests["memory"], "Mi"),
        )
    })
}

#[test]
fn the_manual_knows_what_the_layouts_request() {
    let words = |layout| {
        let (cpu, memory) = requests(layout);
        format!("{cpu}m CPU, {memory} MiB")
    };
    let row = format!("| requests | {} | {} |", words("compact"), words("dedicated"));
    let manual = include_str!("../../../../docs/hosting.md");
    assert!(manual.contains(&row), "docs/hosting.md has no {row}");
    let versions = portico_hosting::versions::Versions::known();
    let (first, last) = (versions.minors.first().unwrap().minor, versions.minors.last().unwrap().minor);
    assert!(manual.contains(&format!("1.{first} to 1.{last}")));
}
