//! Konnectivity in a hosted user cluster: the server as `deploy/konnectivity` has it, a sidecar of the API
//! server in the seed.

use std::fs;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::kubectl::Kubectl;
use crate::programs;
use crate::seed::Seed;
use crate::user_cluster::UserCluster;

/// A file of `deploy/konnectivity`.
pub fn shipped(name: &str) -> Result<String> {
    let path = programs::checkout().join("deploy/konnectivity").join(name);
    fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
}

/// Puts the server beside the API server of a cluster that is known by this name, with those objects of
/// `server.yaml` that are `wanted` by their text.
pub fn beside(
    seed: &Seed,
    cluster: &UserCluster,
    external_name: &str,
    wanted: impl Fn(&str) -> bool,
) -> Result<()> {
    let (kubectl, namespace) = (seed.kubectl(), cluster.namespace());
    let manifest = shipped("server.yaml")?;
    ensure!(manifest.matches("EXTERNAL-NAME").count() == 2, "once in a comment, once to be replaced");
    let objects: Vec<&str> = manifest.split("\n---\n").filter(|object| wanted(object)).collect();
    let manifest = objects.join("\n---\n").replace("EXTERNAL-NAME", external_name);
    kubectl.run_with_input(&["apply", "--server-side", "-n", namespace, "-f", "-"], &manifest)?;
    give_files(seed, cluster, external_name)?;
    let patch = programs::checkout().join("deploy/konnectivity/server-patch.yaml").display().to_string();
    kubectl.run(&["patch", "deployment", "apiserver", "-n", namespace, "--patch-file", &patch])?;
    let flag = "--egress-selector-config-file=/etc/konnectivity-egress/egress-selector.yaml";
    let flags = json!([{"op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": flag}]);
    kubectl.patch(namespace, "deployment/apiserver", "json", &flags)
}

/// The Secret that the patch mounts.
fn give_files(seed: &Seed, cluster: &UserCluster, external_name: &str) -> Result<()> {
    let dir = seed.host().dir().join(format!("{}-konnectivity", cluster.name()));
    fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
    let names = [
        format!("konnectivity-server.{external_name}"),
        external_name.to_owned(),
        seed.host().address().to_string(),
        // The API server's way to it over TCP.
        "127.0.0.1".to_owned(),
    ];
    cluster.authority().server("konnectivity-server", &names)?.write(&dir, "server")?;
    let access = cluster.access(seed, &format!("https://127.0.0.1:{}", cluster.port()));
    let kubeconfig = access.kubeconfig("system:konnectivity-server", None)?;
    let beside = kubeconfig.parent().context("a kubeconfig lies in a directory")?;
    let mut words: Vec<String> =
        ["create", "secret", "generic", "konnectivity-server", "-n", cluster.namespace()]
            .map(str::to_owned)
            .to_vec();
    words.push(format!("--from-file=kubeconfig={}", kubeconfig.display()));
    let own = ["server.crt", "server.key"].map(|name| dir.join(name));
    let users = ["ca.crt", "system-konnectivity-server.crt", "system-konnectivity-server.key"];
    let users = users.map(|name| beside.join(name));
    words.extend(own.iter().chain(&users).map(|file| format!("--from-file={}", file.display())));
    seed.kubectl().run(&words.iter().map(String::as_str).collect::<Vec<_>>()).map(drop)
}

/// Gives the server its rights in the user cluster.
pub fn grant(inside: &Kubectl) -> Result<()> {
    inside.apply(&shipped("server-rights.yaml")?).map(drop)
}
