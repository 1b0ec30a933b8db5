//! Volumes of a seed: folders of its host, for pods that keep data.
//!
//! They are `local` volumes and not `hostPath`, because the kubelet gives only those to the group of a pod
//! (`fsGroup`). Nothing makes them on demand: a story says how many it needs.

use std::fs;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::seed::Seed;

/// The class of the volumes, which is the seed's default.
pub const CLASS: &str = "lab";

/// Gives the seed this many volumes of `size`, such as `5Gi`, which nothing enforces. Each is used once: it
/// keeps what a claim left in it. To be called once a seed.
pub fn offer(seed: &Seed, count: usize, size: &str) -> Result<()> {
    let mut items = vec![json!({
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": CLASS, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "WaitForFirstConsumer",
    })];
    for number in 0..count {
        items.push(volume(seed, number, size)?);
    }
    seed.kubectl().apply_json(&json!({"apiVersion": "v1", "kind": "List", "items": items})).map(drop)
}

fn volume(seed: &Seed, number: usize, size: &str) -> Result<Value> {
    let host = seed.host();
    let folder = host.dir().join(format!("volumes/{number}"));
    fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    let here = json!({"key": "kubernetes.io/hostname", "operator": "In", "values": [host.name()]});
    Ok(json!({
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": format!("{CLASS}-{number}")},
        "spec": {
            "capacity": {"storage": size},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": CLASS,
            "local": {"path": folder},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
        },
    }))
}
