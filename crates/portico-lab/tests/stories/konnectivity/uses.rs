//! Everything that an API server sends into its cluster: to kubelets, to pods, to webhooks.

use std::fs;
use std::io::{Read, Write};
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Result, ensure};
use portico_lab::{Authority, Host, Kubectl, long_form, say, wait};
use serde_json::json;

use super::metrics_server;
use super::story::Story;
use crate::support::{SOON, ticking_pod};
use crate::tunnel::seed::put_secret;

/// Sent to the pod and back by `exec`.
const SENT: usize = 1_000_000;

/// Copied to the pod and back: MiB.
fn copied() -> u64 {
    long_form(32, 200)
}

/// With metrics-server: in the short form only hosted clusters have it.
fn is_long() -> bool {
    long_form(false, true)
}

/// A pod to talk to, and a webhook.
pub(crate) fn prepare(story: &Story) {
    let kubectl = story.kubectl();
    deploy_webhook(kubectl, &story.client, story.cluster.authority());
    kubectl.apply_json(&ticking_pod()).unwrap();
    kubectl.wait_pod_ready("default", "web", SOON).unwrap();
    if is_long() {
        metrics_server::deploy(story);
    }
}

/// A webhook that judges ConfigMaps of namespace `default`, with a certificate of this authority.
pub(crate) fn deploy_webhook(kubectl: &Kubectl, client: &Host, authority: &Authority) {
    let identity = authority.server("webhook", &["webhook.default.svc"]).unwrap();
    let files = [("tls.crt", identity.cert.as_str()), ("tls.key", identity.key.as_str())];
    put_secret(kubectl, "default", "webhook", &files);
    let container = json!({
        "name": "webhook",
        "image": "lab/webhook:1",
        "imagePullPolicy": "Never",
        "args": ["--cert=/files/tls.crt", "--key=/files/tls.key"],
        "volumeMounts": [{"name": "files", "mountPath": "/files"}],
        "readinessProbe": {
            "httpGet": {"scheme": "HTTPS", "path": "/healthz", "port": 8443},
            "periodSeconds": 1,
        },
    });
    let pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "webhook", "labels": {"app": "webhook"}},
        "spec": {
            "containers": [container],
            "volumes": [{"name": "files", "secret": {"secretName": "webhook"}}],
            "terminationGracePeriodSeconds": 0,
        },
    });
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "webhook"},
        "spec": {"selector": {"app": "webhook"}, "ports": [{"port": 443, "targetPort": 8443}]},
    });
    let authority = client.run_with_input(&["base64", "-w0"], &authority.cert()).unwrap();
    let hook = json!({
        "name": "refuses.portico.test",
        "clientConfig": {
            "service": {"namespace": "default", "name": "webhook", "path": "/validate"},
            "caBundle": authority,
        },
        "rules": [{
            "apiGroups": [""],
            "apiVersions": ["v1"],
            "operations": ["CREATE"],
            "resources": ["configmaps"],
        }],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "default"}},
        "failurePolicy": "Fail",
        "timeoutSeconds": 10,
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    });
    let configuration = json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": "refuses"},
        "webhooks": [hook],
    });
    // Pods are refused until the controller manager has made the namespace's service account.
    wait::until("the webhook's pod to be accepted", SOON, || kubectl.apply_json(&pod)).unwrap();
    kubectl.apply_json(&service).unwrap();
    kubectl.wait_pod_ready("default", "webhook", SOON).unwrap();
    kubectl.apply_json(&configuration).unwrap();
}

/// Everything, with much of it.
pub(crate) fn everything(story: &Story) {
    the_most(story);
    copies(story, copied());
    if is_long() {
        metrics_server::answers(story.kubectl(), story.worker.host().name());
    }
    say("logs -f, exec, port-forward, attach, cp and a webhook go through the tunnel");
}

/// Everything in short.
pub(crate) fn the_most(story: &Story) {
    for web_sockets in [true, false] {
        execs(story, web_sockets);
        forwards(story, web_sockets);
    }
    logs_and_attaches(story);
    admits(story.kubectl());
}

/// A megabyte to the pod and back.
fn execs(story: &Story, web_sockets: bool) {
    let body = "0123456789abcdef".repeat(SENT / 16);
    let mut command = story.kubectl().command(&["exec", "-i", "web", "--", "cat"]).unwrap();
    command.env("KUBECTL_REMOTE_COMMAND_WEBSOCKETS", web_sockets.to_string());
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = piped.spawn().unwrap();
    let (mut to_pod, mut from_pod) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let sent = body.clone();
    let writing = std::thread::spawn(move || to_pod.write_all(sent.as_bytes()));
    let mut back = String::new();
    from_pod.read_to_string(&mut back).unwrap();
    let sent = writing.join().unwrap();
    let mut errors = String::new();
    child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    let status = child.wait().unwrap();
    assert!(
        status.success() && sent.is_ok() && back == body,
        "exec by {} gave back {} of {} bytes: {errors}",
        protocol(web_sockets),
        back.len(),
        body.len()
    );
}

fn protocol(web_sockets: bool) -> &'static str {
    if web_sockets { "WebSocket" } else { "SPDY" }
}

/// A page of the pod by a port of the client.
fn forwards(story: &Story, web_sockets: bool) {
    let port = 18_080 + next() % 1000;
    let ports = format!("{port}:8080");
    let mut command = story.kubectl().command(&["port-forward", "pod/web", &ports]).unwrap();
    command.env("KUBECTL_PORT_FORWARD_WEBSOCKETS", web_sockets.to_string());
    let forward = story.client.spawn_command(&format!("forward-{port}"), command).unwrap();
    forward.wait_for_log("Forwarding from 127.0.0.1", SOON).unwrap();
    let url = format!("http://127.0.0.1:{port}/");
    let page = story.client.run(&["curl", "-sS", "--max-time", "20", &url]).unwrap();
    assert_eq!(page, "web\n", "port-forward by {}", protocol(web_sockets));
}

/// What the pod says, one line a second, comes as it is said.
fn logs_and_attaches(story: &Story) {
    let follow = ["logs", "-f", "--tail=1", "web"];
    let follows = [("logs", &follow[..]), ("attach", &["attach", "web"])];
    let follows =
        follows.map(|(name, args)| story.kubectl().spawn(&format!("{name}-{}", next()), args).unwrap());
    for process in &follows {
        wait::until(&format!("three lines by {}", process.name()), SOON, || {
            process.check()?;
            let said = process.log().lines().filter(|line| line.starts_with("tick ")).count();
            ensure!(said >= 3, "it says {}", process.log());
            Ok(())
        })
        .unwrap();
    }
}

/// A number that nothing else has: logs of processes are named by it.
fn next() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// A file to the pod and back, with its checksum.
fn copies(story: &Story, mebibytes: u64) {
    let (kubectl, client) = (story.kubectl(), &story.client);
    let [there, back] = ["there", "back"].map(|name| client.dir().join(name).display().to_string());
    let count = format!("count={mebibytes}");
    client.run(&["dd", "if=/dev/urandom", &format!("of={there}"), "bs=1M", &count, "status=none"]).unwrap();
    let sum = |text: String| text.split_whitespace().next().unwrap_or_default().to_owned();
    let wanted = sum(client.run(&["sha256sum", &there]).unwrap());
    let begun = std::time::Instant::now();
    kubectl.run(&["cp", &there, "web:/www/copy"]).unwrap();
    assert_eq!(sum(kubectl.run(&["exec", "web", "--", "sha256sum", "/www/copy"]).unwrap()), wanted);
    kubectl.run(&["cp", "web:/www/copy", &back]).unwrap();
    assert_eq!(sum(client.run(&["sha256sum", &back]).unwrap()), wanted);
    say(format_args!("cp of {mebibytes} MiB to the pod and back: {:.1} s", begun.elapsed().as_secs_f64()));
    kubectl.run(&["exec", "web", "--", "rm", "/www/copy"]).unwrap();
    [there, back].iter().for_each(|file| fs::remove_file(file).unwrap());
}

/// The webhook is asked, and what it says counts.
pub(crate) fn admits(kubectl: &Kubectl) {
    let create = |name: &str| -> Result<String> { kubectl.run(&["create", "configmap", name]) };
    wait::until("the webhook to be asked", SOON, || {
        let error = match create("refused") {
            Ok(said) => anyhow::bail!("nobody refused it: {said}"),
            Err(error) => format!("{error:#}"),
        };
        ensure!(error.contains("a webhook in the user cluster refuses it"), "{error}");
        Ok(())
    })
    .unwrap();
    create("admitted").unwrap();
    kubectl.run(&["delete", "configmap", "admitted"]).unwrap();
}
