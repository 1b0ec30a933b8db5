//! The admission webhook, asked by a real API server. Mistakes across objects are refused in the words of
//! `portico check`. What was wrong before may stay, and nothing is refused while it is away. And a kill at
//! every write of it.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::{SignedDuration, Timestamp};
use kube::Client;
use portico_api::annotations::EXPOSE;
use portico_api::meta::ObjectKey;
use portico_lab::faulty_api::FaultyApi;
use portico_lab::{ApiServer, Kubectl};
use portico_operator::{Reached, WebhookSettings, WebhookStatus};
use portico_sync::{ReadAs, Site, SiteSettings};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::support::{Running, beside_kkp, cluster, install_operator, release};
use crate::until;

/// The authority, and the certificate.
const SECRETS: [&str; 2] = ["secret/portico-webhook-ca", "secret/portico-webhook"];

/// What the API server trusts.
const BUNDLE: &str = "/webhooks/0/clientConfig/caBundle";

async fn start(client: &Client, identity: &str, listener: TcpListener, reached: Reached) -> Running {
    start_at(client, identity, listener, reached, Timestamp::now)
}

fn start_at(
    client: &Client,
    identity: &str,
    listener: TcpListener,
    reached: Reached,
    clock: fn() -> Timestamp,
) -> Running {
    let webhook = WebhookSettings {
        listener,
        reached,
        namespace: "portico".to_owned(),
        expose_annotation: EXPOSE.to_owned(),
        seed_is_named: false,
        clock,
    };
    Running::start_with(client, identity, |operator| operator.with_webhook(webhook))
}

/// On the machine's own address in the lab, which the API server reaches.
async fn listen(api: &ApiServer) -> TcpListener {
    let [a, b, c, _] = api.host().address().octets();
    TcpListener::bind((Ipv4Addr::new(a, b, c, 1), 0)).await.unwrap()
}

fn webhook(operator: &Running) -> WebhookStatus {
    operator.status.get().webhook.unwrap_or_default()
}

fn configuration(kubectl: &Kubectl) -> Result<Value> {
    kubectl.get(&["validatingwebhookconfiguration", "portico"])
}

fn in_datacenter(name: &str, datacenter: &str) -> Value {
    let mut cluster = cluster(name, "Tunneling");
    cluster["spec"]["cloud"]["dc"] = json!(datacenter);
    cluster
}

fn service(namespace: &str, host: &str) -> Value {
    let mapping = format!(r#"{{"https": "{host}"}}"#);
    json!({"apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "web", "namespace": namespace, "annotations": {
            EXPOSE: "SNI", portico_api::annotations::PORT_MAPPING: mapping}},
        "spec": {"ports": [{"name": "https", "port": 443}]}})
}

fn dry_run(kubectl: &Kubectl, object: &Value) -> Result<String> {
    kubectl.run_with_input(&["apply", "--server-side", "--dry-run=server", "-f", "-"], &object.to_string())
}

/// Waits until the API server asks.
fn wait_asked(kubectl: &Kubectl) {
    until("the webhook to be asked", || {
        let admitted = dry_run(kubectl, &in_datacenter("probe", "lab-9")).is_ok();
        ensure!(!admitted, "a Cluster without a Seed is admitted");
        Ok(())
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mistakes_across_objects_are_refused_when_they_are_made() {
    // There is no kube-proxy: it goes to the endpoints of a Service itself.
    let api = ApiServer::start_with("webhook", &["--enable-aggregator-routing=true"]).unwrap();
    let kubectl = api.kubectl();
    let client = install_operator(kubectl, api.access()).await;
    kubectl.apply_json(&south()).unwrap();
    // This Cluster existed before the webhook, and is wrong.
    kubectl.apply_json(&in_datacenter("lost", "lab-9")).unwrap();
    for namespace in ["one", "two"] {
        kubectl.run(&["create", "namespace", namespace]).unwrap();
    }
    kubectl.apply_json(&service("one", "b.north.kkp.invalid")).unwrap();
    let listener = listen(&api).await;
    let address = listener.local_addr().unwrap();
    let url = format!("https://{address}").parse().unwrap();
    let operator = start(&client, "first", listener, Reached::Url(url)).await;
    wait_asked(kubectl);

    what_is_right_is_admitted(kubectl);
    mistakes_are_refused_in_the_words_of_the_check(kubectl);
    what_was_wrong_before_may_stay(kubectl);
    hostile_clients_disturb_nobody(kubectl, address).await;
    certificate_and_authority_are_made_anew(kubectl);
    let counted = webhook(&operator).reviews;
    assert!(counted["Cluster"]["refused"] > 0 && counted["Service"]["refused"] > 0, "{counted:?}");
    let observing = || webhook(&operator).observing;
    beside_kkp(kubectl, observing, || {
        until("the configuration to go", || {
            ensure!(kubectl.is_gone(&["validatingwebhookconfiguration", "portico"]), "it is there");
            Ok(())
        });
        let decided = observing().unwrap_or_default();
        assert!(decided.contains("they decide what is admitted"), "{decided}");
    });
    wait_asked(kubectl);
    operator.stop().await;
    // The configuration stands, and nobody answers.
    kubectl.apply_json(&in_datacenter("b", "lab-9")).unwrap();
    kubectl.run(&["delete", "cluster", "b"]).unwrap();
    // By another name, and so with another certificate.
    let listener = listen(&api).await;
    kubectl.apply_json(&endpoints(listener.local_addr().unwrap())).unwrap();
    let operator = start(&client, "second", listener, by_service()).await;
    wait_asked(kubectl);
    operator.stop().await;
}

/// What the controller of EndpointSlices would make of a pod of the operator.
fn endpoints(address: SocketAddr) -> Value {
    json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {"name": "portico-operator-1", "namespace": "portico",
            "labels": {"kubernetes.io/service-name": "portico-operator"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address.ip()], "conditions": {"ready": true}}],
        "ports": [{"name": "webhook", "protocol": "TCP", "port": address.port()}]})
}

fn south() -> Value {
    json!({"apiVersion": "kubermatic.k8c.io/v1", "kind": "Seed",
        "metadata": {"name": "south", "namespace": "portico"},
        "spec": {"datacenters": {"lab-2": {"spec": {"bringyourown": {}}}}}})
}

fn what_is_right_is_admitted(kubectl: &Kubectl) {
    kubectl.apply_json(&in_datacenter("a", "lab-2")).unwrap();
    kubectl.apply_json(&service("two", "web.example.com")).unwrap();
    // A datacenter of a moment ago: the caches may not have it yet.
    let mut south = south();
    south["spec"]["datacenters"]["lab-3"] = json!({"spec": {"bringyourown": {}}});
    kubectl.apply_json(&south).unwrap();
    kubectl.apply_json(&in_datacenter("c", "lab-3")).unwrap();
}

fn mistakes_are_refused_in_the_words_of_the_check(kubectl: &Kubectl) {
    let mut twin = south();
    twin["metadata"]["name"] = json!("east");
    let mut without = south();
    without["spec"]["datacenters"] = json!({"lab-7": {"spec": {"bringyourown": {}}}});
    let second = json!({"apiVersion": "kubermatic.k8c.io/v1", "kind": "KubermaticConfiguration",
        "metadata": {"name": "second", "namespace": "portico"}, "spec": {}});
    for (object, reason) in [
        (in_datacenter("d", "lab-9"), "which-seed"),
        (service("two", "b.north.kkp.invalid"), "host-conflict"),
        (twin, "duplicate-datacenter"),
        (without, "which-seed"),
        (second, "duplicate-configuration"),
    ] {
        let expected = said_by_the_check(kubectl, &object, reason);
        let error = format!("{:#}", dry_run(kubectl, &object).expect_err(reason));
        assert!(expected.iter().any(|text| error.contains(text)), "{error}\nThe check: {expected:?}");
    }
    // A Service that has its name keeps no Cluster out: that gets a warning.
    dry_run(kubectl, &in_datacenter("b", "lab-1")).unwrap();
}

/// What `portico check` says for `reason` with the objects there are, and one more.
fn said_by_the_check(kubectl: &Kubectl, object: &Value, reason: &str) -> Vec<String> {
    let kinds = "seeds,kubermaticconfigurations,clusters,services";
    let mut all = kubectl.get(&[kinds, "-A"]).unwrap();
    let items = all["items"].as_array_mut().unwrap();
    let same = |other: &Value| {
        ["kind", "/metadata/name", "/metadata/namespace"].iter().all(|path| {
            let path = if path.starts_with('/') { (*path).to_owned() } else { format!("/{path}") };
            other.pointer(&path) == object.pointer(&path)
        })
    };
    items.retain(|other| !same(other));
    let mut object = object.clone();
    object["metadata"]["creationTimestamp"] = json!(Timestamp::now().to_string());
    items.push(object);
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("all.json"), all.to_string()).unwrap();
    let site = Site::read(directory.path(), Some(ReadAs::Seed), &SiteSettings::default()).unwrap();
    let problems = site.pipeline.problems();
    problems.iter().filter(|problem| problem.reason == reason).map(ToString::to_string).collect()
}

fn what_was_wrong_before_may_stay(kubectl: &Kubectl) {
    kubectl.run(&["label", "cluster", "lost", "touched=yes"]).unwrap();
    let mut lost = in_datacenter("lost", "lab-9");
    lost["spec"]["humanReadableName"] = json!("another");
    kubectl.apply_json(&lost).unwrap();
    lost["spec"]["cloud"]["dc"] = json!("lab-8");
    assert!(kubectl.apply_json(&lost).is_err(), "another mistake");
    kubectl.run(&["delete", "cluster", "lost"]).unwrap();
}

/// Another certificate, then another authority: the API server goes on asking.
fn certificate_and_authority_are_made_anew(kubectl: &Kubectl) {
    let bundle = || configuration(kubectl).map(|found| found.pointer(BUNDLE).cloned());
    let before = bundle().unwrap();
    let uid = |name: &str| -> Result<Value> {
        let secret = kubectl.get(&["secret", name, "-n", "portico"])?;
        Ok(secret["metadata"]["uid"].clone())
    };
    for name in ["portico-webhook", "portico-webhook-ca"] {
        let former = uid(name).unwrap();
        kubectl.run(&["delete", "secret", name, "-n", "portico"]).unwrap();
        until("another one", || {
            ensure!(uid(name)? != former, "it is the same");
            Ok(())
        });
        wait_asked(kubectl);
    }
    until("another authority to be trusted", || {
        ensure!(bundle()? != before, "it is the former");
        Ok(())
    });
    wait_asked(kubectl);
    let events = kubectl.run(&["get", "events", "-A"]).unwrap();
    assert!(events.contains("CertificateIssued") && events.contains("WebhookRegistered"), "{events}");
}

/// A connection as the API server has one.
async fn connect(address: SocketAddr, bundle: &[u8]) -> Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(bundle) {
        roots.add(certificate?)?;
    }
    let config = ClientConfig::builder_with_provider(portico_dial::provider())
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::IpAddress(IpAddr::into(address.ip()));
    Ok(TlsConnector::from(Arc::new(config)).connect(name, TcpStream::connect(address).await?).await?)
}

/// The status of the answer to a request.
async fn status(address: SocketAddr, bundle: &[u8], head: &str, body: &[u8]) -> Result<String> {
    let mut stream = connect(address, bundle).await?;
    stream.write_all(format!("{head}\r\nHost: webhook\r\n").as_bytes()).await?;
    stream.write_all(body).await?;
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await?;
    Ok(String::from_utf8_lossy(&answer[9..]).into_owned())
}

async fn hostile_clients_disturb_nobody(kubectl: &Kubectl, address: SocketAddr) {
    let found = configuration(kubectl).unwrap();
    let bundle = found.pointer(BUNDLE).and_then(Value::as_str).context("a bundle").unwrap();
    let bundle = STANDARD.decode(bundle).unwrap();
    let post = "POST /review HTTP/1.1";
    let nested = "[".repeat(100_000);
    for (head, body, expected) in [
        (post, "Content-Length: 7\r\n\r\ngarbage", "400"),
        (post, "Content-Length: 2\r\n\r\n{}", "400"),
        (post, &format!("Content-Length: {}\r\n\r\n{nested}", nested.len()), "400"),
        (post, "Content-Length: 4194305\r\n\r\n", "413"),
        (post, "Content-Length: 99999999999\r\n\r\n", "413"),
        (post, "Transfer-Encoding: chunked\r\n\r\n", "411"),
        ("GET /review HTTP/1.1", "\r\n", "405"),
        ("POST /other HTTP/1.1", "Content-Length: 2\r\n\r\n{}", "404"),
    ] {
        let answered = status(address, &bundle, head, body.as_bytes()).await.unwrap();
        assert_eq!(answered, expected, "{head} {body:.60}");
    }
    // Eight of the largest would be twice what is read at a time. They send nothing, so take nothing, and
    // are given up soon.
    let mut stalled = Vec::new();
    for _ in 0..8 {
        let mut stream = connect(address, &bundle).await.unwrap();
        stream
            .write_all(format!("{post}\r\nHost: w\r\nContent-Length: 4194304\r\n\r\n").as_bytes())
            .await
            .unwrap();
        stalled.push(stream);
    }
    let error = format!("{:#}", dry_run(kubectl, &in_datacenter("d", "lab-9")).unwrap_err());
    assert!(error.contains("no Seed lists the datacenter"), "{error}");
    for mut stream in stalled {
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer[9..], b"408");
    }
    // More than there are slots: none of them speaks, and the API server has its slot all the same.
    let mut silent = Vec::new();
    for _ in 0..250 {
        silent.push(TcpStream::connect(address).await.unwrap());
    }
    let error = format!("{:#}", dry_run(kubectl, &in_datacenter("d", "lab-9")).unwrap_err());
    assert!(error.contains("no Seed lists the datacenter"), "{error}");
    drop(silent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn by_a_clock_that_is_far_off_neither_certificate_nor_authority_is_replaced_and_both_serve_on() {
    let api = ApiServer::start("webhook-clock").unwrap();
    let kubectl = api.kubectl();
    let client = install_operator(kubectl, api.access()).await;
    let operator = start(&client, "first", listen(&api).await, by_service()).await;
    until("the webhook", || {
        ensure!(webhook(&operator).registered, "{:?}", webhook(&operator));
        Ok(())
    });
    operator.stop().await;
    let held = || SECRETS.map(|secret| kubectl.get(&[secret, "-n", "portico"]).unwrap()["data"].take());
    let before = held();
    let bundle = || configuration(kubectl).ok()?.pointer(BUNDLE).cloned();
    let registered = bundle();
    assert!(registered.is_some());
    let month: fn() -> Timestamp = || Timestamp::now() + SignedDuration::from_hours(24 * 336);
    let decade: fn() -> Timestamp = || Timestamp::now() + SignedDuration::from_hours(24 * 3_660);
    for (identity, clock) in [("a-month-before", month), ("after-the-authority", decade)] {
        kubectl.run(&["delete", "validatingwebhookconfiguration", "portico"]).unwrap();
        let operator = start_at(&client, identity, listen(&api).await, by_service(), clock);
        until("a pass", || {
            ensure!(webhook(&operator).registered || webhook(&operator).trouble.is_some());
            Ok(())
        });
        let trouble = webhook(&operator).trouble.unwrap_or_default();
        assert!(trouble.starts_with("ClockOff: "), "{trouble}");
        assert_eq!(held(), before, "{identity}");
        assert_eq!(bundle(), registered, "{identity}: with what is there, which is good");
        operator.stop().await;
    }
}

/// As deploy/operator.yaml has it.
fn by_service() -> Reached {
    Reached::Service(ObjectKey::new("portico", "portico-operator"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_at_any_write_the_next_one_registers_the_same_webhook() {
    let api = ApiServer::start("webhook-kill").unwrap();
    let kubectl = api.kubectl();
    let direct = install_operator(kubectl, api.access()).await;
    let mut expected: Option<Value> = None;
    for writes in 0.. {
        let faulty = FaultyApi::default();
        faulty.rules(|rules| rules.writes_left = Some(writes));
        let client = faulty.client(&direct);
        let killed = start(&client, &format!("killed-{writes}"), listen(&api).await, by_service()).await;
        let mut complete = false;
        until("a write that is withheld, or the end", || {
            complete = webhook(&killed).registered;
            ensure!(complete || faulty.rules(|rules| rules.withheld), "{:?}", webhook(&killed));
            Ok(())
        });
        killed.kill().await;
        release(kubectl);
        let next = start(&direct, &format!("next-{writes}"), listen(&api).await, by_service()).await;
        until("the webhook", || {
            ensure!(webhook(&next).registered, "{:?}", webhook(&next));
            Ok(())
        });
        next.stop().await;
        let mut found = configuration(kubectl).unwrap()["webhooks"].take();
        let authority = kubectl.get(&[SECRETS[0], "-n", "portico"]).unwrap()["data"]["ca.crt"].take();
        for webhook in found.as_array_mut().unwrap() {
            assert_eq!(webhook["clientConfig"]["caBundle"].take(), authority, "killed after {writes} writes");
        }
        assert_eq!(*expected.get_or_insert_with(|| found.clone()), found, "killed after {writes} writes");
        if complete {
            assert!(writes > 2, "only {writes} writes were withheld");
            return;
        }
        kubectl.run(&["delete", "validatingwebhookconfiguration", "portico"]).unwrap();
        kubectl.run(&[&["delete", "-n", "portico"][..], &SECRETS].concat()).unwrap();
    }
}
