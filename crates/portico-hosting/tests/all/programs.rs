//! Real programs take the flags and the files of a plan.

use std::fs;
use std::path::Path;
use std::process::Command;

use portico_hosting::{ETCD_PROBES, has_etcd};
use portico_lab::{ApiServer, programs};
use serde_json::{Value, json};

use crate::*;

/// `--help` ends a program once all flags are read: one that is unknown, or has no value of its kind, fails.
#[test]
fn every_flag_of_kubernetes_and_etcd_is_known_to_its_program() {
    let folder = programs::kube().unwrap();
    let mut tried = 0;
    for layout in ["compact", "dedicated"] {
        for spec in [json!({}), everything(layout)] {
            let mut cluster = cluster(layout, &spec);
            cluster
                .metadata
                .annotations
                .insert("portico.k8c.io/feature-gates".into(), "AllAlpha=false,AllBeta=true".into());
            let plane = planned_with(&cluster, &settings(), &Digests::new());
            for (_, template) in templates(&plane) {
                for container in containers(template) {
                    // The Konnectivity server is the entrypoint of its image.
                    let Some(command) = container["command"][0].as_str() else { continue };
                    let args = container["args"].as_array().unwrap().iter().map(|arg| arg.as_str().unwrap());
                    let mut args: Vec<&str> = args.collect();
                    let mut name = command.trim_start_matches("/usr/local/bin/");
                    // What the launcher runs.
                    if let Some(end) = args.iter().position(|arg| *arg == "--") {
                        name = args[end + 1];
                        args.drain(..end + 2);
                    }
                    let output = Command::new(folder.join(name)).args(args).arg("--help").output().unwrap();
                    let said = String::from_utf8_lossy(&output.stderr);
                    assert!(output.status.success(), "{name}: {said}");
                    tried += 1;
                }
            }
        }
    }
    assert_eq!(tried, 16);
}

/// What the flags of etcd are tried with is what a plan of that version of Kubernetes runs.
#[test]
fn the_etcd_of_the_lab_is_the_one_that_is_planned() {
    let version = programs::kube_version().unwrap().trim_start_matches('v').parse().unwrap();
    let planned = portico_hosting::versions::Versions::known().of(version).unwrap();
    assert_eq!(planned.etcd, programs::etcd_tag().unwrap());
}

/// Audit policy, admission and authentication configuration, as a plan has them.
#[test]
fn a_real_api_server_starts_with_the_configuration_of_a_plan() {
    let folder = tempfile::tempdir().unwrap();
    let plane = planned("dedicated", &everything("dedicated"));
    let write = |plane: &ControlPlane, prefix: &Path| {
        for object in plane.objects.iter().filter(|object| object["kind"] == "ConfigMap") {
            for (key, text) in object["data"].as_object().unwrap() {
                fs::write(prefix.join(key), text.as_str().unwrap()).unwrap();
            }
        }
    };
    write(&plane, folder.path());
    let file = |flag: &str, key: &str| format!("--{flag}={}", folder.path().join(key).display());
    let flags = [
        file("audit-policy-file", "policy.yaml"),
        "--audit-log-path=-".to_owned(),
        file("admission-control-config-file", "admission-control.yaml"),
        "--enable-admission-plugins=PodNodeSelector,EventRateLimit".to_owned(),
        file("authentication-config", "authentication-configuration.yaml"),
    ];
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let api = ApiServer::start_with("hosting-config", &flags).unwrap();
    let version: Value =
        serde_json::from_str(&api.kubectl().run(&["get", "--raw", "/version"]).unwrap()).unwrap();
    assert_eq!(version["major"], "1");
}

#[test]
fn a_member_of_etcd_is_found_by_the_name_of_its_pod_and_asked_at_its_port() {
    for layout in ["compact", "dedicated"] {
        let plane = planned(layout, &json!({}));
        for (name, template) in templates(&plane) {
            let etcd = containers(template).find(|container| container["name"] == "etcd");
            assert_eq!(has_etcd(&format!("{name}-0")), etcd.is_some(), "{name}");
            let Some(etcd) = etcd else { continue };
            let ports = etcd["ports"].as_array().unwrap();
            assert!(ports.iter().any(|port| port["containerPort"] == ETCD_PROBES), "{ports:?}");
        }
    }
    assert!(!has_etcd("apiserver-77b9c6d5f-x2x7q"));
}
