//! What the directory source costs, with 10,000 clusters unless CLUSTERS says otherwise:
//!
//! ```text
//! cargo run --release -p portico-source --no-default-features --example directory_cost [CLUSTERS [one-file]]
//! ```
//!
//! Writes CLUSTERS (10,000) files of one Cluster, two Services and two EndpointSlices each, reads them, and
//! then replaces single files. Good numbers: 1.4 KiB kept a cluster, and 2 to 3 ms from rename to step,
//! nearly all of it the pause that ends a burst.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program for a person")]

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use portico_source::DirectorySource;

fn manifest(index: usize, round: usize) -> String {
    let mut text = format!(
        "apiVersion: kubermatic.k8c.io/v1\nkind: Cluster\nmetadata: {{name: c{index}}}\n\
         spec: {{exposeStrategy: Tunneling, humanReadableName: r{round}}}\n"
    );
    for service in ["apiserver-external", "konnectivity-server"] {
        text.push_str(&format!(
            r#"---
apiVersion: v1
kind: Service
metadata:
  name: {service}
  namespace: cluster-c{index}
  annotations:
    nodeport-proxy.k8s.io/expose: SNI,Tunneling
    nodeport-proxy.k8s.io/port-mapping: '{{"secure": "{service}.c{index}.example.com"}}'
spec:
  type: ClusterIP
  ports: [{{name: secure, port: 443, targetPort: 6443}}]
"#
        ));
        text.push_str(&format!(
            r#"---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: {service}-x{round}
  namespace: cluster-c{index}
  labels: {{kubernetes.io/service-name: {service}}}
addressType: IPv4
endpoints:
- addresses: [10.0.{}.{}]
  conditions: {{ready: true}}
ports: [{{name: secure, port: 6443, protocol: TCP}}]
"#,
            index / 250 % 250,
            index % 250
        ));
    }
    text
}

fn put(folder: &Path, index: usize, round: usize) {
    let temporary = folder.join(".next");
    fs::write(&temporary, manifest(index, round)).unwrap();
    fs::rename(temporary, folder.join(format!("{index}.yaml"))).unwrap();
}

fn memory() -> usize {
    let statm = fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

/// Takes steps up to a complete one and drops them: what is left in memory is the source's own.
async fn burst(source: &mut DirectorySource) -> usize {
    let mut changes = 0;
    loop {
        let step = source.next().await.unwrap();
        changes += step.changes.len();
        if step.complete {
            return changes;
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let clusters = std::env::args().nth(1).map_or(10_000, |clusters| clusters.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let in_one_file = std::env::args().nth(2).is_some_and(|argument| argument == "one-file");
    if in_one_file {
        let all: Vec<String> = (0..clusters).map(|index| manifest(index, 0)).collect();
        fs::write(folder.path().join("all.yaml"), all.join("---\n")).unwrap();
    }
    for index in (0..clusters).filter(|_| !in_one_file) {
        fs::write(folder.path().join(format!("{index}.yaml")), manifest(index, 0)).unwrap();
    }
    let before = memory();
    let start = Instant::now();
    let mut source = DirectorySource::open(folder.path()).unwrap();
    let objects = burst(&mut source).await;
    println!("{clusters} clusters, {objects} objects: read in {:?}", start.elapsed());
    println!("kept: {} KiB, {} bytes a cluster", (memory() - before) >> 10, (memory() - before) / clusters);

    if in_one_file {
        return;
    }
    let mut times: Vec<Duration> = Vec::new();
    for round in 1..=100 {
        put(folder.path(), round * 31 % clusters, round);
        let start = Instant::now();
        burst(&mut source).await;
        times.push(start.elapsed());
    }
    times.sort();
    println!("one file replaced, until its step: median {:?}, worst {:?}", times[50], times[99]);
}
