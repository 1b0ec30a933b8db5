//! The controller that makes the gateway, from one Seed, with the rights of deploy/operator.yaml alone. What
//! admins break, objects of others, a certificate of others, several Seeds, KKP, and a kill at every write.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use jiff::fmt::rfc2822::DateTimePrinter;
use jiff::{SignedDuration, Timestamp};
use kube::Client;
use portico_api::meta::ObjectKey;
use portico_expose::components::GatewaySettings;
use portico_lab::faulty_api::{Answer, FaultyApi};
use portico_lab::{ApiServer, Authority, Kubectl, long_form};
use portico_operator::{ComponentSettings, SeedsStatus, WorkStatus};
use serde_json::{Value, json};

use crate::support::{Running, beside_kkp, install, install_operator, kkp_deployment, release, withheld_or};
use crate::until;

/// The objects of the gateway, as kubectl names them.
const OBJECTS: [&str; 10] = [
    "serviceaccount/portico-gateway",
    "clusterrole/portico-gateway",
    "clusterrolebinding/portico-gateway",
    "secret/portico-tunnel-ca",
    "secret/portico-tunnel",
    "configmap/portico-tunnel-ca",
    "networkpolicy/portico-gateway",
    "poddisruptionbudget/portico-gateway",
    "deployment/portico-gateway",
    "service/portico",
];

pub(crate) fn settings(clock: fn() -> Timestamp, seed: Option<&str>) -> ComponentSettings {
    let gateway = GatewaySettings {
        front: ObjectKey::new("portico", "portico"),
        image: "localhost/portico:1".into(),
        expose_annotation: portico_api::annotations::EXPOSE.into(),
        arguments: Vec::new(),
        admin_from: vec!["monitoring".parse().unwrap()],
    };
    ComponentSettings { gateway, seed: seed.map(str::to_owned), clock }
}

fn start(client: &Client, identity: &str) -> Running {
    start_with(client, identity, settings(Timestamp::now, None))
}

fn start_with(client: &Client, identity: &str, settings: ComponentSettings) -> Running {
    Running::start_with(client, identity, |operator| operator.with_components(settings))
}

/// An API server with the kinds and the operator's rights, and nothing that the operator makes.
async fn installed(name: &str) -> (ApiServer, Client) {
    let api = ApiServer::start(name).unwrap();
    let client = install_operator(api.kubectl(), api.access()).await;
    (api, client)
}

fn seed(name: &str, proxy: &Value) -> Value {
    json!({"apiVersion": "kubermatic.k8c.io/v1", "kind": "Seed",
        "metadata": {"name": name, "namespace": "portico"},
        "spec": {"nodeportProxy": proxy, "datacenters": {"lab-1": {"spec": {"bringyourown": {}}}}}})
}

/// No settings.
fn plain() -> Value {
    json!({"disable": false})
}

fn get(kubectl: &Kubectl, object: &str) -> Result<Value> {
    kubectl.get(&[object, "-n", "portico"])
}

fn condition(kubectl: &Kubectl, seed: &str) -> Result<Value> {
    let seed = get(kubectl, &format!("seed/{seed}"))?;
    Ok(seed.pointer("/status/conditions/PorticoSeedReady").context("no condition")?.clone())
}

fn wait_reason(kubectl: &Kubectl, seed: &str, expected: &str) -> String {
    let mut message = String::new();
    until(expected, || {
        let found = condition(kubectl, seed)?;
        ensure!(found["reason"] == expected, "{seed}: {found}");
        message = found["message"].as_str().unwrap_or_default().to_owned();
        Ok(())
    });
    message
}

/// There is no controller of Deployments here: its pods are what the test says.
fn pods_serve(kubectl: &Kubectl, pods: u64) {
    let status = json!({"status": {"replicas": pods, "updatedReplicas": pods, "readyReplicas": pods,
        "availableReplicas": pods}})
    .to_string();
    let patch = ["patch", "deployment", "portico-gateway", "-n", "portico", "--subresource=status"];
    kubectl.run(&[&patch[..], &["--type=merge", "-p", &status]].concat()).unwrap();
}

fn container(kubectl: &Kubectl) -> Result<Value> {
    let deployment = get(kubectl, "deployment/portico-gateway")?;
    Ok(deployment.pointer("/spec/template/spec/containers/0").context("no container")?.clone())
}

fn patch(kubectl: &Kubectl, object: &str, patch: &Value) {
    kubectl.run(&["patch", object, "-n", "portico", "--type=merge", "-p", &patch.to_string()]).unwrap();
}

fn seeds(running: &Running) -> SeedsStatus {
    running.status.get().seeds.unwrap_or_default()
}

fn work(operator: &Running) -> WorkStatus {
    operator.work("portico-seed-components")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_seed_makes_its_gateway_and_it_stays_so() {
    let (api, client) = installed("components").await;
    let kubectl = api.kubectl();
    let operator = start(&client, "first");
    everything_is_made(kubectl);
    operator.stop().await;
    let operator = start(&client, "second");
    nothing_is_written_at_rest(kubectl, &operator);
    operator.stop().await;
    another_image_is_written_to_the_deployment_alone(kubectl, &client).await;
    a_load_balancer_without_address_is_reported_after_a_while_and_heals(kubectl, &client).await;
    let operator = start(&client, "third");
    settings_of_the_seed_are_carried(kubectl);
    what_an_admin_breaks_heals(kubectl);
    a_lost_authority_is_reported_and_not_made_anew(kubectl, &operator);
    a_certificate_of_others_is_judged(kubectl);
    of_two_seeds_none_is_chosen(kubectl);
    without_a_gateway_nothing_is_left(kubectl);
    // Where neither KKP nor Portico is installed the name says nothing: this one stays.
    kubectl.apply_json(&kkp_deployment("default")).unwrap();
    let observing = || seeds(&operator).observing;
    beside_kkp(kubectl, observing, || {
        kubectl.apply_json(&seed("north", &plain())).unwrap();
        until("the Seed to be seen", || {
            let seed = get(kubectl, "seed/north")?;
            ensure!(seed["spec"]["nodeportProxy"]["disable"] == false);
            Ok(())
        });
        let ours = ["deployment/portico-gateway", "-n", "portico"];
        assert!(kubectl.is_gone(&ours), "that is KKP's to make");
    });
    until("the gateway, once KKP is gone", || get(kubectl, "deployment/portico-gateway").map(drop));
    operator.stop().await;
}

fn everything_is_made(kubectl: &Kubectl) {
    let message = wait_reason(kubectl, "north", "GatewayUnavailable");
    assert!(message.contains("none of 2 pods serves"), "{message}");
    for object in OBJECTS {
        let found = get(kubectl, object).unwrap();
        assert_eq!(found["metadata"]["labels"]["app.kubernetes.io/managed-by"], "portico", "{object}");
    }
    pods_serve(kubectl, 2);
    wait_reason(kubectl, "north", "GatewayReady");
    let secret = get(kubectl, "secret/portico-tunnel").unwrap();
    assert_eq!(secret["type"], "kubernetes.io/tls");
    let trusted = get(kubectl, "configmap/portico-tunnel-ca").unwrap()["data"].to_string();
    assert!(trusted.contains("BEGIN CERTIFICATE") && !trusted.contains("KEY"), "{trusted}");
    let service = get(kubectl, "service/portico").unwrap();
    assert_eq!(service["spec"]["externalTrafficPolicy"], "Local");
    let container = container(kubectl).unwrap();
    assert_eq!(container["image"], "localhost/portico:1");
    assert!(container["args"].as_array().unwrap().contains(&json!("--tunnel-token-review")), "{container}");
    let events = kubectl.run(&["events", "-n", "portico", "--for=seed/north"]).unwrap();
    assert!(events.contains("CertificateIssued") && events.contains("GatewayReady"), "{events}");
}

/// A process that has just started finds everything as it should be.
fn nothing_is_written_at_rest(kubectl: &Kubectl, operator: &Running) {
    let passes = |more: u64| {
        until("a pass", || {
            let seeds = seeds(operator);
            ensure!(seeds.reports.len() == 1 && work(operator).passes >= more, "{seeds:?}");
            Ok(())
        });
    };
    passes(1);
    let before = work(operator).passes;
    kubectl.run(&["label", "seed", "north", "-n", "portico", "touched=yes"]).unwrap();
    passes(before + 1);
    assert_eq!(work(operator).writes, BTreeMap::new());
    assert!(seeds(operator).certificate_ends.is_some());
}

/// As the next version of the operator comes, and as it is taken back.
async fn another_image_is_written_to_the_deployment_alone(kubectl: &Kubectl, client: &Client) {
    for image in ["localhost/portico:2", "localhost/portico:1"] {
        let mut settings = settings(Timestamp::now, None);
        settings.gateway.image = image.into();
        let operator = start_with(client, image, settings);
        until("a pass", || {
            ensure!(container(kubectl)?["image"] == image);
            ensure!(seeds(&operator).reports.len() == 1, "{:?}", seeds(&operator));
            Ok(())
        });
        assert_eq!(work(&operator).writes, [("Deployment", 1)].into());
        operator.stop().await;
    }
}

/// Nothing gives addresses here but the test.
async fn a_load_balancer_without_address_is_reported_after_a_while_and_heals(
    kubectl: &Kubectl,
    client: &Client,
) {
    let message = wait_reason(kubectl, "north", "GatewayReady");
    assert!(message.contains("Service portico/portico has no address yet"), "{message}");
    let later = settings(|| Timestamp::now() + SignedDuration::from_mins(6), None);
    let operator = start_with(client, "later", later);
    let message = wait_reason(kubectl, "north", "LoadBalancerPending");
    assert!(message.contains("Service portico/portico has no address"), "{message}");
    assert_eq!(condition(kubectl, "north").unwrap()["status"], "False");
    // The metric is made of this status.
    assert_eq!(seeds(&operator).reports.into_values().next().unwrap().reason, "LoadBalancerPending");
    until("the Event", || {
        let events = kubectl.run(&["events", "--for=seed/north", "-n", "portico"])?;
        ensure!(events.contains("LoadBalancerPending"), "{events}");
        Ok(())
    });
    give_address(kubectl, "203.0.113.6");
    // That the clock is off is reported where nothing is worse.
    let message = wait_reason(kubectl, "north", "ClockOff");
    assert!(message.contains("pods serve") && message.contains("more than 5 minutes ahead of"), "{message}");
    assert_eq!(condition(kubectl, "north").unwrap()["status"], "True");
    assert_eq!(seeds(&operator).reports.into_values().next().unwrap().reason, "ClockOff");
    until("the Event", || {
        let events = kubectl.run(&["events", "--for=seed/north", "-n", "portico"])?;
        ensure!(events.contains("ClockOff"), "{events}");
        Ok(())
    });
    operator.stop().await;
    let operator = start(client, "in-time");
    let message = wait_reason(kubectl, "north", "GatewayReady");
    assert!(!message.contains("no address"), "{message}");
    operator.stop().await;
}

/// As a cloud does.
fn give_address(kubectl: &Kubectl, ip: &str) {
    let status = json!({"status": {"loadBalancer": {"ingress": [{"ip": ip}]}}}).to_string();
    let change = ["patch", "service", "portico", "-n", "portico", "--subresource=status", "--type=merge"];
    kubectl.run(&[&change[..], &["-p", &status]].concat()).unwrap();
}

fn settings_of_the_seed_are_carried(kubectl: &Kubectl) {
    let proxy = json!({"envoy": {"replicas": 3, "resources": {"limits": {"memory": "2Gi"}},
        "connectionSettings": {"sniListenerIdleTimeout": "90s"},
        "loadBalancerService": {"sourceRanges": ["203.0.113.0/24"]}}});
    kubectl.apply_json(&seed("north", &proxy)).unwrap();
    until("the settings", || {
        let container = container(kubectl)?;
        ensure!(container["resources"]["limits"]["memory"] == "2Gi", "{container}");
        ensure!(container["args"].to_string().contains("--sni-idle-timeout=90000ms"), "{container}");
        ensure!(get(kubectl, "deployment/portico-gateway")?["spec"]["replicas"] == 3);
        let ranges = &get(kubectl, "service/portico")?["spec"]["loadBalancerSourceRanges"];
        ensure!(*ranges == json!(["203.0.113.0/24"]), "{ranges}");
        Ok(())
    });
    // The load balancer gets its address, and the certificate has it.
    let before = get(kubectl, "secret/portico-tunnel").unwrap()["data"]["tls.crt"].clone();
    give_address(kubectl, "203.0.113.7");
    until("a certificate with the address", || {
        ensure!(get(kubectl, "secret/portico-tunnel")?["data"]["tls.crt"] != before);
        Ok(())
    });
    // What cannot be used changes nothing.
    let resources = json!({"envoy": {"replicas": 3, "resources": {"limits": {"memory": "much"}}}});
    kubectl.apply_json(&seed("north", &resources)).unwrap();
    let message = wait_reason(kubectl, "north", "WriteRefused");
    assert!(message.contains("portico-gateway"), "{message}");
    assert_eq!(container(kubectl).unwrap()["resources"]["limits"]["memory"], "2Gi");
    kubectl.apply_json(&seed("north", &plain())).unwrap();
    wait_reason(kubectl, "north", "GatewayReady");
    let domain = |name: &str| {
        let ingress = json!({"spec": {"ingress": {"domain": name}}});
        patch(kubectl, "kubermaticconfiguration/kkp", &ingress);
    };
    domain("bücher.invalid");
    let message = wait_reason(kubectl, "north", "InvalidConfiguration");
    assert!(message.contains("*.north.bücher.invalid"), "{message}");
    domain("kkp.invalid");
    wait_reason(kubectl, "north", "GatewayReady");
}

fn what_an_admin_breaks_heals(kubectl: &Kubectl) {
    patch(kubectl, "deployment/portico-gateway", &json!({"spec": {"replicas": 7}}));
    until("the replicas of before", || {
        ensure!(get(kubectl, "deployment/portico-gateway")?["spec"]["replicas"] == 2);
        let events = kubectl.run(&["events", "--for=seed/north", "-n", "portico"])?;
        ensure!(events.contains("PutBack") && events.contains("changed by \"kubectl-patch\""), "{events}");
        Ok(())
    });
    for object in OBJECTS.iter().filter(|object| **object != "secret/portico-tunnel-ca") {
        kubectl.run(&["delete", object, "-n", "portico", "--wait=false"]).unwrap();
        until(object, || {
            let found = get(kubectl, object)?;
            ensure!(found["metadata"].get("deletionTimestamp").is_none());
            Ok(())
        });
    }
    until("the ports of the front Service", || {
        let ports = get(kubectl, "service/portico")?["spec"]["ports"].to_string();
        ensure!(ports.contains("sni-listener"), "{ports}");
        Ok(())
    });
    pods_serve(kubectl, 2);
    wait_reason(kubectl, "north", "GatewayReady");
}

fn a_lost_authority_is_reported_and_not_made_anew(kubectl: &Kubectl, operator: &Running) {
    let backup = get(kubectl, "secret/portico-tunnel-ca").unwrap();
    kubectl.run(&["delete", "secret", "portico-tunnel-ca", "-n", "portico"]).unwrap();
    let message = wait_reason(kubectl, "north", "AuthorityMissing");
    assert!(message.contains("restore it from a backup"), "{message}");
    assert!(kubectl.is_gone(&["secret/portico-tunnel-ca", "-n", "portico"]));
    let mut restored = backup;
    for field in ["uid", "resourceVersion", "managedFields", "creationTimestamp"] {
        restored["metadata"].as_object_mut().unwrap().remove(field);
    }
    let certificate = get(kubectl, "secret/portico-tunnel").unwrap()["data"].clone();
    // Half of it comes from elsewhere.
    let mut wrong = restored.clone();
    let other = Authority::new("other").unwrap().identity().key;
    wrong["data"].as_object_mut().unwrap().remove("ca.key");
    wrong["stringData"] = json!({"ca.key": other});
    kubectl.apply_json(&wrong).unwrap();
    let message = wait_reason(kubectl, "north", "AuthorityUnusable");
    assert!(message.contains("portico/portico-tunnel-ca"), "{message}");
    assert_eq!(seeds(operator).reports.into_values().next().unwrap().reason, "AuthorityUnusable");
    until("the Event", || {
        let events = kubectl.run(&["events", "--for=seed/north", "-n", "portico"])?;
        ensure!(events.contains("AuthorityUnusable"), "{events}");
        Ok(())
    });
    kubectl.apply_json(&restored).unwrap();
    wait_reason(kubectl, "north", "GatewayReady");
    assert_eq!(get(kubectl, "secret/portico-tunnel").unwrap()["data"], certificate, "it fits as before");
}

fn a_certificate_of_others_is_judged(kubectl: &Kubectl) {
    let fits = get(kubectl, "secret/portico-tunnel").unwrap()["data"].clone();
    let annotate = |value: &str| {
        let annotation = format!("portico.k8c.io/tunnel-certificate{value}");
        kubectl.run(&["annotate", "seed", "north", "-n", "portico", "--overwrite", &annotation]).unwrap();
    };
    annotate("=provided");
    until("the annotation to be seen, after which no Secret is made", || {
        kubectl.run(&["delete", "secret", "portico-tunnel", "-n", "portico", "--ignore-not-found"])?;
        ensure!(condition(kubectl, "north")?["reason"] == "CertificateMissing");
        Ok(())
    });
    let message = wait_reason(kubectl, "north", "CertificateMissing");
    assert!(message.contains("portico/portico-tunnel"), "{message}");
    assert!(!container(kubectl).unwrap()["args"].to_string().contains("tunnel-tls"));
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls",
        "metadata": {"name": "portico-tunnel", "namespace": "portico"},
        "stringData": {"tls.crt": "none", "tls.key": "none"}});
    kubectl.apply_json(&secret).unwrap();
    let message = wait_reason(kubectl, "north", "CertificateUnfit");
    assert!(message.contains("it holds no PEM certificate"), "{message}");
    let untouched = || {
        let untouched = get(kubectl, "secret/portico-tunnel").unwrap();
        assert!(untouched["metadata"].get("labels").is_none(), "{untouched}");
    };
    untouched();
    patch(kubectl, "secret/portico-tunnel", &json!({"data": fits}));
    wait_reason(kubectl, "north", "GatewayReady");
    assert!(container(kubectl).unwrap()["args"].to_string().contains("tunnel-tls"));
    untouched();
    annotate("-");
    let message = wait_reason(kubectl, "north", "NameTaken");
    assert!(message.contains("Secret portico/portico-tunnel") && message.contains("provided"), "{message}");
    kubectl.run(&["delete", "secret", "portico-tunnel", "-n", "portico"]).unwrap();
    wait_reason(kubectl, "north", "GatewayReady");
}

fn of_two_seeds_none_is_chosen(kubectl: &Kubectl) {
    let before = get(kubectl, "deployment/portico-gateway").unwrap()["spec"].clone();
    kubectl.apply_json(&seed("south", &json!({"envoy": {"replicas": 9}}))).unwrap();
    for name in ["north", "south"] {
        let message = wait_reason(kubectl, name, "SeveralSeeds");
        assert!(message.contains("portico/north, portico/south") && message.contains("--seed"), "{message}");
    }
    assert_eq!(get(kubectl, "deployment/portico-gateway").unwrap()["spec"], before);
    kubectl.run(&["delete", "seed", "south", "-n", "portico"]).unwrap();
    wait_reason(kubectl, "north", "GatewayReady");
}

fn without_a_gateway_nothing_is_left(kubectl: &Kubectl) {
    kubectl.apply_json(&seed("north", &json!({"disable": true}))).unwrap();
    wait_reason(kubectl, "north", "Disabled");
    for object in OBJECTS {
        // What agents trust stays, for the day when the gateway comes back.
        let stays = object.ends_with("/portico-tunnel-ca");
        assert_eq!(get(kubectl, object).is_ok(), stays, "{object}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_of_others_are_reported_and_left_alone_until_they_are_handed_over() {
    let api = ApiServer::start("components-foreign").unwrap();
    let kubectl = api.kubectl();
    let client = install(kubectl, api.access()).await;
    // KKP's schema wants a number that its controllers keep, which are not here.
    let status = "/spec/versions/0/schema/openAPIV3Schema/properties/status";
    let required = json!([{"op": "add", "path": format!("{status}/required"), "value": ["clusters"]}]);
    let definition = "crd/seeds.kubermatic.k8c.io";
    kubectl.run(&["patch", definition, "--type=json", "-p", &required.to_string()]).unwrap();
    let before = get(kubectl, "deployment/portico-gateway").unwrap();
    let operator = start(&client, "first");
    let message = wait_reason(kubectl, "north", "NameTaken");
    assert!(message.contains("Deployment portico/portico-gateway"), "{message}");
    assert_eq!(get(kubectl, "deployment/portico-gateway").unwrap(), before);
    let written: Vec<_> = work(&operator).writes.into_keys().collect();
    assert_eq!(written, ["Seed"], "the condition alone");
    let ours = "app.kubernetes.io/managed-by=portico";
    kubectl
        .run_with_input(&["label", "--overwrite", "-f", "-", ours], &crate::manifest("gateway.yaml"))
        .unwrap();
    wait_reason(kubectl, "north", "GatewayUnavailable");
    assert_eq!(container(kubectl).unwrap()["image"], "localhost/portico:1");
    until("another writer of the certificate to be yielded to", || {
        patch(kubectl, "secret/portico-tunnel", &json!({"data": {"tls.crt": "bm9uZQ=="}}));
        ensure!(condition(kubectl, "north")?["reason"] == "ForeignWriter");
        Ok(())
    });
    operator.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_policy_of_others_is_in_the_way_of_nothing_where_the_operator_makes_none() {
    let (api, client) = installed("components-policy").await;
    let kubectl = api.kubectl();
    kubectl.apply(&crate::manifest("network-policy.yaml")).unwrap();
    let policy = ["networkpolicy/portico-gateway", "-n", "portico"];
    let start = |identity: &str, admin_from: &[&str]| {
        let mut settings = settings(Timestamp::now, None);
        settings.gateway.admin_from = admin_from.iter().map(|peer| peer.parse().unwrap()).collect();
        start_with(&client, identity, settings)
    };
    let operator = start("first", &[]);
    wait_reason(kubectl, "north", "GatewayUnavailable");
    pods_serve(kubectl, 2);
    wait_reason(kubectl, "north", "GatewayReady");
    operator.stop().await;
    let before = kubectl.get(&policy).unwrap();

    // With a policy of its own, the name is taken.
    let operator = start("asks", &["monitoring"]);
    let message = wait_reason(kubectl, "north", "NameTaken");
    assert!(message.contains("kubectl label -n portico networkpolicy portico-gateway"), "{message}");
    operator.stop().await;
    assert_eq!(kubectl.get(&policy).unwrap(), before);

    // Handed over and not asked for, it stays.
    kubectl.run(&[&["label"], &policy[..], &["app.kubernetes.io/managed-by=portico"]].concat()).unwrap();
    let operator = start("second", &[]);
    wait_reason(kubectl, "north", "GatewayReady");
    operator.stop().await;
    assert_eq!(kubectl.get(&policy).unwrap()["spec"], before["spec"]);

    // What Portico has applied goes when it is not asked for any more.
    let operator = start("takes", &["monitoring"]);
    until("the policy as it is wanted", || {
        ensure!(kubectl.get(&policy)?["spec"] != before["spec"]);
        Ok(())
    });
    operator.stop().await;
    let operator = start("third", &[]);
    until("its end", || {
        ensure!(kubectl.is_gone(&policy));
        Ok(())
    });
    operator.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_are_renewed_before_they_end_and_a_named_seed_shares_its_gateway() {
    let (api, client) = installed("components-clock").await;
    let kubectl = api.kubectl();
    kubectl.apply_json(&seed("south", &plain())).unwrap();
    let start = |identity: &str, clock: fn() -> Timestamp| {
        start_with(&client, identity, settings(clock, Some("north")))
    };
    let data = |object: &str| get(kubectl, object).unwrap()["data"].clone();

    let operator = start_with(&client, "unknown", settings(Timestamp::now, Some("east")));
    for name in ["north", "south"] {
        let message = wait_reason(kubectl, name, "NoSuchSeed");
        assert!(
            message.contains("no Seed is called \"east\"") && message.contains("north, south"),
            "{message}"
        );
    }
    operator.stop().await;

    // A condition that cannot be written is tried again; nothing else about the gateway changes.
    let faulty = FaultyApi::default();
    faulty.rules(|rules| rules.answers = vec![("/seeds/north/status", Answer::Status(500), 2)]);
    let now = settings(Timestamp::now, Some("north"));
    let operator = start_with(&faulty.client(&client), "now", now);
    wait_reason(kubectl, "north", "GatewayUnavailable");
    assert!(faulty.has_answered() && work(&operator).errors["WriteRefused"] >= 2, "{:?}", work(&operator));
    let message = wait_reason(kubectl, "south", "GatewayShared");
    assert!(message.contains("Seed north"), "{message}");
    operator.stop().await;
    let (first, authority) = (data("secret/portico-tunnel"), data("secret/portico-tunnel-ca"));

    // Clocks that are off by an hour agree about all of it, and are reported.
    let ahead: fn() -> Timestamp = || Timestamp::now() + SignedDuration::from_hours(1);
    let behind: fn() -> Timestamp = || Timestamp::now() - SignedDuration::from_hours(1);
    for (identity, clock) in [("ahead", ahead), ("behind", behind)] {
        let operator = start(identity, clock);
        until("a pass over each", || {
            ensure!(seeds(&operator).reports.len() == 2 && work(&operator).passes >= 2);
            Ok(())
        });
        let message = wait_reason(kubectl, "south", "ClockOff");
        assert!(message.contains(&format!("more than 5 minutes {identity}")), "{message}");
        assert_eq!(work(&operator).writes, BTreeMap::from([("Seed", 1)]), "{identity}: the condition");
        operator.stop().await;
    }
    // What one makes that is ahead the other one takes.
    kubectl.run(&["delete", "secret", "portico-tunnel", "-n", "portico"]).unwrap();
    let operator = start("issues", ahead);
    until("another certificate", || {
        ensure!(get(kubectl, "secret/portico-tunnel")?["data"] != first);
        Ok(())
    });
    operator.stop().await;
    let first = data("secret/portico-tunnel");
    let operator = start("takes", behind);
    until("a pass over each", || {
        ensure!(seeds(&operator).reports.len() == 2 && work(&operator).passes >= 2);
        Ok(())
    });
    assert!(!work(&operator).writes.contains_key("Secret"), "{:?}", work(&operator));
    assert_eq!(data("secret/portico-tunnel"), first);
    operator.stop().await;

    // By a clock that is far off, nothing takes the place of what is there.
    let held = || OBJECTS.map(|object| get(kubectl, object).unwrap()["data"].take());
    let before = held();
    let north = ObjectKey::new("portico", "north");
    let month: fn() -> Timestamp = || Timestamp::now() + SignedDuration::from_hours(24 * 336);
    let decade: fn() -> Timestamp = || Timestamp::now() + SignedDuration::from_hours(24 * 3_660);
    for (identity, clock) in [("a-month-before", month), ("after-the-authority", decade)] {
        let operator = start(identity, clock);
        let mut reason = "";
        until("a pass", || {
            reason = seeds(&operator).reports.get(&north).context("no report")?.reason;
            Ok(())
        });
        assert_eq!(reason, "ClockOff");
        assert_eq!(held(), before, "{identity}");
        operator.stop().await;
    }

    // From here on the clock of the API server agrees. A month before the end of the certificate.
    let start = |identity: &str, clock: fn() -> Timestamp| {
        let faulty = FaultyApi::default();
        let date = DateTimePrinter::new().timestamp_to_rfc9110_string(&clock()).unwrap();
        faulty.rules(|rules| rules.date = Some(date));
        start_with(&faulty.client(&client), identity, settings(clock, Some("north")))
    };
    let operator = start("later", month);
    until("another certificate", || {
        ensure!(data("secret/portico-tunnel") != first);
        Ok(())
    });
    operator.stop().await;
    assert_eq!(data("secret/portico-tunnel-ca"), authority, "the authority has nine years left");

    // Half a year before the end of the authority: its successor is announced first, and then takes over.
    let bundle = |certificates: usize| {
        until("the bundle", || {
            let trusted = data("configmap/portico-tunnel-ca").to_string();
            let found = trusted.matches("BEGIN CERTIFICATE").count();
            ensure!(found == certificates, "{found} certificates");
            Ok(())
        });
    };
    let operator = start("announcing", || Timestamp::now() + SignedDuration::from_hours(24 * 3_300));
    bundle(2);
    operator.stop().await;
    assert_eq!(data("secret/portico-tunnel-ca")["ca.crt"], authority["ca.crt"]);
    let operator = start("succeeding", || Timestamp::now() + SignedDuration::from_hours(24 * 3_500));
    until("the successor", || {
        ensure!(data("secret/portico-tunnel-ca")["ca.crt"] != authority["ca.crt"]);
        Ok(())
    });
    bundle(2);
    operator.stop().await;
    let operator = start("forgetting", decade);
    bundle(1);
    operator.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_at_any_write_the_next_one_leaves_the_same_gateway() {
    let (api, direct) = installed("components-kill").await;
    let kubectl = api.kubectl();
    let mut expected: Option<Vec<Value>> = None;
    for writes in (0..).step_by(long_form(3, 1)) {
        let faulty = FaultyApi::default();
        faulty.rules(|rules| rules.writes_left = Some(writes));
        let killed = start(&faulty.client(&direct), &format!("killed-{writes}"));
        let complete = withheld_or(&faulty, || condition(kubectl, "north").is_ok());
        killed.kill().await;
        release(kubectl);
        let next = start(&direct, &format!("next-{writes}"));
        wait_reason(kubectl, "north", "GatewayUnavailable");
        let found: Vec<Value> = OBJECTS.iter().map(|object| stable(get(kubectl, object).unwrap())).collect();
        match &expected {
            None => expected = Some(found),
            Some(expected) => assert_eq!(*expected, found, "killed after {writes} writes"),
        }
        next.stop().await;
        if complete {
            assert!(writes > 10, "only {writes} writes were withheld");
            return;
        }
        for object in OBJECTS {
            kubectl.run(&["delete", object, "-n", "portico"]).unwrap();
        }
        kubectl.run(&["delete", "seed", "north", "-n", "portico"]).unwrap();
        kubectl.apply_json(&seed("north", &plain())).unwrap();
    }
}

/// Without what differs from run to run: certificates, and what the API server chooses.
fn stable(object: Value) -> Value {
    let mut spec = object.get("spec").cloned().unwrap_or_default();
    if let Some(fields) = spec.as_object_mut() {
        for chosen in ["clusterIP", "clusterIPs", "healthCheckNodePort", "ports"] {
            fields.remove(chosen);
        }
    }
    let keys = object["data"].as_object().map(|data| data.keys().cloned().collect::<Vec<_>>());
    json!({"kind": object["kind"], "labels": object["metadata"]["labels"], "spec": spec, "keys": keys,
        "rules": object["rules"], "subjects": object["subjects"]})
}
