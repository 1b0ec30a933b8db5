//! The definitions of Cilium's network policies, as Cilium releases them: what an API server judges policies
//! by.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::kubectl::Kubectl;
use crate::programs::{cache_dir, find};

/// Cilium's Go module, which the definitions are part of, and its checksum (as in a `go.sum`).
const MODULE: &str = "github.com/cilium/cilium@v1.18.2";
const CHECKSUM: &str = "h1:ZqxNBoVLMYbJIYiKXWXna5kxd4XiE9IRww9vdaKJZoo=";

/// Where they are in the module.
const FOLDER: &str = "pkg/k8s/apis/cilium.io/client/crds/v2";

/// The network policies of pods, and of nodes.
const KINDS: [&str; 2] = ["ciliumnetworkpolicies", "ciliumclusterwidenetworkpolicies"];

/// Defines Cilium's network policies and waits until the API server serves them.
pub fn install(kubectl: &Kubectl) -> Result<()> {
    let folder = module()?.join(FOLDER);
    for kind in KINDS {
        let file = folder.join(format!("{kind}.yaml"));
        let definition = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
        kubectl.apply(&definition)?;
    }
    KINDS.iter().try_for_each(|kind| kubectl.wait_served(&format!("{kind}.cilium.io")))
}

/// The folder of the module, fetched if it is not there.
fn module() -> Result<PathBuf> {
    let go = find("go").context("Cilium's definitions are fetched by Go: run scripts/setup test")?;
    fs::create_dir_all(cache_dir())?;
    let output = Command::new(go)
        // Outside of any module: nothing is built.
        .current_dir(cache_dir())
        .env("GO111MODULE", "on")
        .env("GOTOOLCHAIN", "local")
        .args(["mod", "download", "-json", MODULE])
        .output()
        .context("starting go")?;
    ensure!(
        output.status.success(),
        "{MODULE} cannot be fetched: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    let fetched: Value = serde_json::from_slice(&output.stdout).context("reading the answer of go")?;
    ensure!(fetched["Sum"] == CHECKSUM, "{MODULE} is not what it was: {fetched}");
    Ok(fetched["Dir"].as_str().context("go names no folder")?.into())
}
