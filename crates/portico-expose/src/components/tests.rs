use super::*;
use crate::testing::{configuration, seed};

fn settings() -> GatewaySettings {
    GatewaySettings {
        front: ObjectKey::new("portico", "portico"),
        image: "registry.example.com/portico:1".into(),
        expose_annotation: "nodeport-proxy.k8s.io/expose".into(),
        arguments: Vec::new(),
        admin_from: Vec::new(),
    }
}

fn objects(seed: &Seed, settings: &GatewaySettings) -> Components {
    let configuration = configuration(r#"{"ingress": {"domain": "kkp.example.com"}}"#);
    components(seed, &usable(seed).unwrap(), &configuration, settings, true)
}

fn object(components: &Components, part: Part) -> Value {
    let found = components.objects.iter().find(|(found, _)| *found == part);
    found.unwrap().1.fields.clone()
}

/// All documents of the manifest but the namespace, in which the operator itself runs.
#[test]
fn every_object_of_the_manifest_is_a_component() {
    let in_manifest: BTreeSet<String> = portico_yaml::Documents::new(GATEWAY)
        .map(|document| document.unwrap().to_value()["kind"].as_str().unwrap().to_owned())
        .filter(|kind| kind != "Namespace")
        .collect();
    let parts: BTreeSet<String> = Part::ALL.map(|part| part.kind().to_owned()).into();
    let policy = BTreeSet::from(["NetworkPolicy".to_owned()]);
    assert_eq!(in_manifest, parts.difference(&policy).cloned().collect());
    for part in Part::ALL {
        assert_eq!(part.template()["metadata"]["name"], *part.key(&settings().front).name, "{part:?}");
    }
}

#[test]
fn a_seed_without_settings_has_the_gateway_of_the_manifest() {
    let found = objects(&seed("north", "{}"), &settings());
    for (part, wanted) in &found.objects {
        let mut template = part.template();
        template["metadata"]["labels"][MANAGED_BY.0] = json!(MANAGED_BY.1);
        match part {
            Part::Deployment => {
                let container = "/spec/template/spec/containers/0";
                let template = template.pointer_mut(container).unwrap();
                let container = wanted.fields.pointer(container).unwrap();
                let own = template["args"].as_array().unwrap();
                assert!(container["args"].as_array().unwrap().starts_with(own), "{container}");
                for field in ["args", "image", "ports"] {
                    template[field] = container[field].clone();
                }
            }
            Part::Service => drop(template["spec"].as_object_mut().unwrap().remove("ports")),
            _ => {}
        }
        if *part != Part::Deployment {
            assert_eq!(wanted.fields, template, "{part:?}");
        }
    }
    assert!(found.objects.iter().all(|(part, _)| *part != Part::NetworkPolicy));
}

#[test]
fn what_a_seed_asks_for_is_in_its_gateway() {
    let seed = seed(
        "north",
        r#"{"nodeportProxy": {"ipFamilyPolicy": "PreferDualStack", "envoy": {"replicas": 5,
            "resources": {"requests": {"cpu": 2}, "limits": {"memory": "4Gi"}},
            "loadBalancerService": {"annotations": {"x": "y"}, "sourceRanges": ["203.0.113.0/24"]},
            "connectionSettings": {"sniListenerIdleTimeout": "1m30s", "tunnelingStreamIdleTimeout": "1500ms",
                "downstreamTCPKeepaliveTime": "60s", "upstreamTCPKeepaliveProbes": 500}}}}"#,
    );
    let settings = GatewaySettings {
        front: ObjectKey::new("edge", "front"),
        arguments: vec!["--workers=4".into()],
        admin_from: vec!["monitoring".parse().unwrap(), "192.0.2.9/24".parse().unwrap()],
        ..settings()
    };
    let found = objects(&seed, &settings);
    insta::assert_yaml_snapshot!("deployment", object(&found, Part::Deployment));
    insta::assert_yaml_snapshot!("policy", object(&found, Part::NetworkPolicy));
    insta::assert_yaml_snapshot!("binding", object(&found, Part::ClusterRoleBinding));
    insta::assert_yaml_snapshot!("front", found.front);
    assert!(object(&found, Part::Service)["spec"].get("ports").is_none(), "they are the front controller's");
}

#[test]
fn without_a_certificate_there_is_no_tunnel() {
    let configuration = configuration("{}");
    let seed = seed("north", "{}");
    let found = components(&seed, &usable(&seed).unwrap(), &configuration, &settings(), false);
    assert!(!object(&found, Part::Deployment).to_string().contains("tunnel-tls"));
}

#[test]
fn no_connection_is_cut_by_an_upgrade_within_the_drain_time() {
    let deployment = object(&objects(&seed("north", "{}"), &settings()), Part::Deployment);
    let spec = &deployment["spec"];
    assert_eq!(spec["strategy"]["rollingUpdate"], json!({"maxSurge": 1, "maxUnavailable": 0}));
    let pod = &spec["template"]["spec"];
    let container = &pod["containers"][0];
    assert!(container["args"].as_array().unwrap().contains(&json!("--drain-timeout=1h")));
    let pause = container["lifecycle"]["preStop"]["sleep"]["seconds"].as_u64().unwrap();
    assert!(pod["terminationGracePeriodSeconds"].as_u64().unwrap() > 3_600 + pause);
    assert!(container["readinessProbe"].is_object());
    let mode = pod["volumes"][0]["secret"]["defaultMode"].as_u64();
    assert_eq!(mode, Some(0o440), "readable by the group of the pod");
}

#[test]
fn a_seed_that_cannot_be_used_has_no_components() {
    for (spec, text) in [
        (r#"{"nodeportProxy": {"envoy": {"replicas": 0}}}"#, "replicas: 0 is less than 1"),
        (r#"{"exposeStrategy": "None"}"#, "is no strategy"),
        (
            r#"{"nodeportProxy": {"envoy": {"loadBalancerService": {"sourceRanges": ["nonsense"]}}}}"#,
            "nonsense",
        ),
    ] {
        let refused = usable(&seed("north", spec)).unwrap_err();
        assert!(refused.to_string().contains(text), "{refused}");
    }
    // A connection setting that is void counts as absent.
    let void = r#"{"nodeportProxy": {"envoy": {"connectionSettings": {"sniListenerIdleTimeout": "1ms"}}}}"#;
    assert!(usable(&seed("north", void)).is_ok());
}

#[test]
fn agents_of_every_seed_find_their_name_in_the_certificate() {
    let seeds = [seed("north", "{}"), seed("south", r#"{"seedDNSOverwrite": "s"}"#)].map(std::sync::Arc::new);
    let configuration = configuration(r#"{"ingress": {"domain": "kkp.example.com"}}"#);
    let ingress = [
        Ingress { ip: "203.0.113.7".parse().ok(), hostname: "".into() },
        Ingress { ip: None, hostname: "lb.example.net".into() },
    ];
    let hosts = tunnel_hosts(&seeds, &configuration, &ObjectKey::new("portico", "front"), &ingress);
    let expected = [
        "*.north.kkp.example.com",
        "*.s.kkp.example.com",
        "203.0.113.7",
        "front.portico",
        "front.portico.svc",
        "front.portico.svc.cluster.local",
        "lb.example.net",
    ];
    assert!(hosts.iter().eq(expected), "{hosts:?}");
}

#[test]
fn what_may_reach_the_admin_listener_is_a_network_an_address_or_a_namespace() {
    let read = |text: &str| text.parse::<AdminPeer>();
    assert_eq!(read("192.0.2.9/24"), Ok(AdminPeer::Network("192.0.2.0/24".parse().unwrap())));
    assert_eq!(read("2001:db8::1"), Ok(AdminPeer::Network("2001:db8::1/128".parse().unwrap())));
    assert_eq!(read("monitoring"), Ok(AdminPeer::Namespace("monitoring".into())));
    for bad in ["", "192.0.2.0/33", "Monitoring", "a/b"] {
        assert_eq!(read(bad), Err(NoAdminPeer), "{bad}");
    }
}
