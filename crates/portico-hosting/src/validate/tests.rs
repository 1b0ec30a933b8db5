//! Every problem of a Cluster, as it reads.

use portico_api::problem::Severity;
use portico_api::seed::Seed;
use portico_expose::resolve;
use serde_json::{Value, json};

use super::*;

/// What is found on a Cluster with this `spec`, beside version and layout, which are right.
fn found(annotations: &Value, spec: &Value) -> Vec<(Severity, String)> {
    let mut object = json!({"metadata": {"name": "a", "annotations": {LAYOUT: "dedicated"}},
        "spec": {"version": "1.35.8"}});
    for (path, more) in [("/metadata/annotations", annotations), ("/spec", spec)] {
        let part = object.pointer_mut(path).and_then(Value::as_object_mut).unwrap();
        part.extend(more.as_object().unwrap().clone());
    }
    let cluster: Cluster = serde_json::from_value(object).unwrap();
    let seed = Seed::default();
    let decision = resolve::strategy(&cluster, &seed, None);
    let scope = Scope { cluster: &cluster, decision, seed: &seed, configuration: None };
    let settings = Settings { seed_networks: vec!["10.96.0.0/12".parse().unwrap()], ..Settings::default() };
    let verdict = validate(&scope, &settings);
    let severe = verdict.problems.iter().any(|problem| problem.severity == Severity::Error);
    assert!(!verdict.refused || severe);
    verdict.problems.iter().map(|problem| (problem.severity, problem.to_string())).collect()
}

/// The one problem of a Cluster.
fn only(annotations: &Value, spec: &Value) -> String {
    match &*found(annotations, spec) {
        [(_, text)] => text.strip_prefix("Cluster a: ").unwrap().to_owned(),
        others => panic!("{spec}: {others:?}"),
    }
}

#[test]
fn the_shortest_cluster_has_no_problems_and_neither_has_one_with_everything() {
    assert_eq!(found(&json!({}), &json!({})), []);
    let everything = json!({
        "clusterNetwork": {"pods": {"cidrBlocks": ["172.30.0.0/16", "fd01::/48"]},
            "services": {"cidrBlocks": ["10.240.0.0/20", "fd02::/108"]}, "dnsDomain": "cluster.local",
            "nodeCidrMaskSizeIPv4": 25},
        "componentsOverride": {
            "apiserver": {"replicas": 3, "hostAntiAffinity": "required",
                "resources": {"requests": {"cpu": "100m"}, "limits": {"cpu": 2, "memory": "4Gi"}}},
            "controllerManager": {"leaderElection": {"leaseDurationSeconds": 30}},
            "etcd": {"clusterSize": 5, "diskSize": "10Gi", "quotaBackendGb": 4},
            "konnectivityProxy": {"keepaliveTime": "1m"}},
        "serviceAccount": {"issuer": "https://tokens.example.com", "apiAudiences": ["a"]},
        "oidc": {"issuerURL": "https://login.example.com", "clientID": "a",
            "requiredClaim": "hd=example.com"},
        "admissionPlugins": ["AlwaysPullImages"],
        "useEventRateLimitAdmissionPlugin": true,
        "eventRateLimitConfig": {"server": {"qps": 10, "burst": 20}},
        "auditLogging": {"enabled": true, "policyPreset": "recommended"}});
    assert_eq!(found(&json!({FEATURE_GATES: "A=true,B=false"}), &everything), []);
}

#[test]
fn versions_and_layouts_that_are_not_known_are_refused_with_those_that_are() {
    let version = |text: &str| only(&json!({}), &json!({"version": text}));
    let remedy = "write a version of 1.33, 1.34, 1.35, 1.36, such as 1.36.0";
    assert_eq!(version(""), format!("spec.version: it is missing; {remedy}"));
    assert_eq!(
        version("1.35"),
        format!("spec.version: \"1.35\" is no version: it must read 1.MINOR.PATCH, as in 1.35.8; {remedy}")
    );
    assert_eq!(
        version("1.20.3"),
        format!("spec.version: 1.20.3 cannot be hosted by this release of Portico; {remedy}")
    );
    assert_eq!(
        only(&json!({LAYOUT: "small"}), &json!({})),
        "metadata.annotations[portico.k8c.io/layout]: \"small\" is no layout: it is neither compact nor \
         dedicated; write compact or dedicated"
    );
    let elsewhere = only(&json!({ENDPOINTS: "192.0.2.7:6443"}), &json!({}));
    assert!(elsewhere.contains("runs elsewhere; remove one of the two annotations"), "{elsewhere}");
}

#[test]
fn parts_modes_and_network_plugins_are_those_that_are_known() {
    for (annotations, spec, expected) in [
        (
            json!({WITHOUT: "coredns, dns"}),
            json!({}),
            "\"dns\" is no part that can be left out; write kube-proxy",
        ),
        (
            json!({}),
            json!({"clusterNetwork": {"proxyMode": "userspace"}}),
            "write iptables, ipvs or nftables",
        ),
        (json!({PROMETHEUS: "yes"}), json!({}), "write \"true\" for a Prometheus of the cluster's own"),
        (json!({}), json!({"cniPlugin": {"type": "flannel"}}), "write none, and install one"),
        (json!({}), json!({"cniPlugin": {"type": "canal"}}), "Portico installs no network plugin"),
    ] {
        let problem = only(&annotations, &spec);
        assert!(problem.contains(expected), "{problem}");
    }
    let fine = json!({"clusterNetwork": {"proxyMode": "ebpf"}, "cniPlugin": {"type": "none"}});
    assert_eq!(found(&json!({WITHOUT: "kube-proxy,coredns,metrics-server"}), &fine), []);
}

#[test]
fn impossible_networks_are_refused() {
    let networks = |pods: &[&str], services: &[&str]| {
        let spec =
            json!({"clusterNetwork": {"pods": {"cidrBlocks": pods}, "services": {"cidrBlocks": services}}});
        found(&json!({}), &spec).into_iter().map(|(_, text)| text).collect::<Vec<_>>().join("\n")
    };
    for (pods, services, expected) in [
        (
            &["10.0.0.0/16", "10.9.0.0/16"][..],
            &["10.240.0.0/20", "fd02::/108"][..],
            "2 networks of these families",
        ),
        (&["10.0.0.0/16"], &["fd02::/108"], "the same families, in the same order"),
        (&["10.0.0.0/16"], &["172.16.0.0/11"], "write a prefix length from 12 to 28"),
        (&["10.0.0.0/16"], &["10.240.0.0/30"], "write a prefix length from 12 to 28"),
        (&["10.0.0.0/16"], &["10.0.16.0/20"], "10.0.16.0/20 overlaps the pod network 10.0.0.0/16"),
        (&["10.0.0.0/16"], &["10.100.0.0/20"], "10.100.0.0/20 overlaps the seed's network 10.96.0.0/12"),
        (&["10.96.0.0/12"], &["10.240.0.0/20"], "10.96.0.0/12 overlaps the seed's network 10.96.0.0/12"),
        (
            &["10.0.0.0/24"],
            &["10.240.0.0/20"],
            "networks of nodes with prefix length 24 do not fit into 10.0.0.0/24",
        ),
        (&["10.0.0.0/7"], &["172.16.0.0/20"], "write a number from 8 to 23"),
    ] {
        let found = networks(pods, services);
        assert!(found.contains(expected), "{pods:?} {services:?}: {found}");
    }
    let machines = json!({"machineNetworks": [{"cidr": "172.25.3.0/24"}]});
    let overlap = only(&json!({}), &machines);
    assert!(overlap.contains("172.25.0.0/16 overlaps the network of machines 172.25.3.0/24"), "{overlap}");
}

#[test]
fn numbers_of_pods_and_members_are_bounded() {
    let at = |path: &str, value: Value| {
        let (component, field) = path.split_once('.').unwrap();
        only(&json!({}), &json!({"componentsOverride": {component: {field: value}}}))
    };
    for (path, value, expected) in [
        ("apiserver.replicas", json!(0), "0 is out of bounds; write 1 to 20, or leave the field out"),
        ("scheduler.replicas", json!("two"), "\"two\" is no number"),
        (
            "etcd.clusterSize",
            json!(4),
            "4 members survive no more losses than 3; write 1 to 9, an odd number",
        ),
        ("etcd.clusterSize", json!(11), "11 is out of bounds"),
    ] {
        let found = at(path, value);
        assert!(found.starts_with("spec.componentsOverride.") && found.contains(expected), "{found}");
    }
    let spec = json!({"componentsOverride": {"apiserver": {"replicas": 2}}});
    assert_eq!(
        only(&json!({LAYOUT: "compact"}), &spec),
        "spec.componentsOverride.apiserver.replicas: the layout compact is one pod; leave the field out, or \
         annotate portico.k8c.io/layout: dedicated"
    );
}

#[test]
fn what_would_keep_a_program_from_starting_is_refused() {
    for (spec, expected) in [
        (
            json!({"componentsOverride": {"apiserver": {"resources": {"limits": {"cpu": "2 cores"}}}}}),
            "spec.componentsOverride.apiserver.resources.limits.cpu: \"2 cores\" is no quantity",
        ),
        (
            json!({"componentsOverride": {"etcd": {
                "resources": {"requests": {"memory": "3Gi"}, "limits": {"memory": "2Gi"}}}}}),
            "spec.componentsOverride.etcd.resources.requests.memory: it is more than the limit",
        ),
        (json!({"componentsOverride": {"etcd": {"diskSize": "big"}}}), "\"big\" is no size of a volume"),
        (json!({"componentsOverride": {"etcd": {"quotaBackendGb": 0}}}), "0 GiB hold nothing"),
        (
            json!({"componentsOverride": {"scheduler": {"leaderElection": {"renewDeadlineSeconds": 20}}}}),
            "lease 15 s, deadline 20 s and retry 2 s do not go together",
        ),
        (json!({"serviceAccount": {"issuer": "tokens"}}), "\"tokens\" is no issuer"),
        (json!({"serviceAccount": {"apiAudiences": ["a,b"]}}), "apiAudiences[0]: \"a,b\" is no audience"),
        (json!({"oidc": {"issuerURL": "https://login.example.com"}}), "spec.oidc.clientID: it is missing"),
        (
            json!({"oidc": {"issuerURL": "https://l.example.com", "clientID": "a", "requiredClaim": "hd"}}),
            "spec.oidc.requiredClaim: \"hd\" has no value",
        ),
        (
            json!({"authenticationConfiguration": {"secretName": "a"}}),
            "secretName and secretKey belong together",
        ),
        (json!({"admissionPlugins": ["a,b"]}), "admissionPlugins[0]: \"a,b\" is no admission plugin"),
        (json!({"useEventRateLimitAdmissionPlugin": true}), "there is no limit"),
        (json!({"auditLogging": {"policyPreset": "all"}}), "it is none of metadata, recommended, minimal"),
    ] {
        let found = only(&json!({}), &spec);
        assert!(found.contains(expected), "{found}");
    }
    let gates = only(&json!({FEATURE_GATES: "A=true,B"}), &json!({}));
    assert!(gates.contains("\"B\" is no feature gate; write NAME=true or NAME=false"), "{gates}");
}

/// Encryption that a user asks for and does not get must be an error.
#[test]
fn what_portico_does_not_follow_is_said() {
    let refused = only(&json!({}), &json!({"encryptionConfiguration": {"enabled": true}}));
    assert!(refused.contains("Portico does not encrypt Secrets at rest"), "{refused}");
    assert!(found(&json!({}), &json!({"encryptionConfiguration": {"enabled": false}})).is_empty());
    let refused = only(&json!({}), &json!({"authorizationConfig": {"enabledModes": ["Webhook"]}}));
    assert!(refused.contains("by Node and RBAC, and by nothing else"), "{refused}");
    let void = only(&json!({}), &json!({"auditLogging": {"enabled": true, "webhookBackend": {"a": 1}}}));
    assert!(void.contains("standard output of the API server"), "{void}");
    let domain = only(&json!({}), &json!({"clusterNetwork": {"dnsDomain": "a.local"}}));
    assert!(domain.contains("\"a.local\" cannot be used"), "{domain}");
}
