//! `portico preflight --mesh` on two nodes beside a real API server, with the rights of deploy/mesh.yaml and
//! no others. The condition on each node, and what it says when a rule is missing.

use anyhow::{Result, bail, ensure};
use portico_lab::control_plane::Options;
use portico_lab::{ControlPlane, Etcd, Host, Kubectl, Lab, Process, programs, wait};
use serde_json::{Value, json};

use crate::common::PATIENCE;

/// Status, reason and message of the condition.
fn condition(kubectl: &Kubectl, node: &str) -> Result<(String, String)> {
    let node = kubectl.get(&["node", node])?;
    let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let Some(found) = conditions.iter().find(|condition| condition["type"] == "PorticoMesh") else {
        bail!("the condition is not there: {conditions:?}");
    };
    let text = |field: &str| found[field].as_str().unwrap_or_default().to_owned();
    Ok((text("status"), text("message")))
}

fn wait_for(kubectl: &Kubectl, node: &str, status: &str) -> String {
    wait::until(&format!("PorticoMesh={status} on {node}"), PATIENCE, || {
        let (found, message) = condition(kubectl, node)?;
        ensure!(found == status, "{found}: {message}");
        Ok(message)
    })
    .unwrap()
}

/// A firewall on a node that lets everything in but VXLAN.
fn drop_vxlan(node: &Host) {
    let rules = "table inet site {\nchain i { type filter hook input priority 0; udp dport 8472 drop; }\n}\n";
    node.run_with_input(&["nft", "-f", "-"], rules).unwrap();
}

/// The address of IPv6 that a node gets.
fn ipv6(node: &Host) -> String {
    format!("fd00:13::{}", node.address().octets()[3])
}

/// The endpoints of the headless Service, as the endpoint slice controller would keep them for a family.
fn members(nodes: &[&Host], family: &str) -> Value {
    let address = |node: &Host| if family == "IPv6" { ipv6(node) } else { node.address().to_string() };
    let endpoint = |node: &&Host| {
        let ready = json!({"ready": true});
        json!({"addresses": [address(node)], "nodeName": node.name(), "conditions": ready})
    };
    json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": format!("portico-mesh-{}", family.to_lowercase()),
            "namespace": "kube-system",
            "labels": {"kubernetes.io/service-name": "portico-mesh"},
        },
        "addressType": family,
        "endpoints": nodes.iter().map(endpoint).collect::<Vec<_>>(),
    })
}

#[test]
fn the_mesh_puts_a_flow_that_fails_on_its_node_with_row_and_remedy() {
    let lab = Lab::start("mesh").unwrap();
    let seed = lab.host("seed").unwrap();
    let nodes = [lab.host("node-1").unwrap(), lab.host("node-2").unwrap()];
    let etcd = Etcd::start(&seed).unwrap();
    let control_plane =
        ControlPlane::start(&seed, &etcd, &Options { controllers: false, ..Options::new("seed") }).unwrap();
    let kubectl = control_plane.access().kubectl(&seed).unwrap();
    let manifest = std::fs::read_to_string(programs::checkout().join("deploy/mesh.yaml")).unwrap();
    wait::until("kube-system to exist", PATIENCE, || kubectl.apply(&manifest)).unwrap();
    for node in &nodes {
        kubectl
            .apply_json(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node.name()}}))
            .unwrap();
    }
    kubectl.apply_json(&members(&[&nodes[0], &nodes[1]], "IPv4")).unwrap();
    let account = "system:serviceaccount:kube-system:portico-mesh";
    let kubeconfig = control_plane.access().kubeconfig(account, None).unwrap().display().to_string();
    // A network plugin has the port.
    let _vxlan = nodes[1].spawn("vxlan", "socat", ["-u", "UDP-RECV:8472", "OPEN:/dev/null"]).unwrap();
    let mesh = |node: &Host| {
        let arguments =
            ["preflight", "--mesh", "--strategy", "Tunneling", "--cni", "Canal", "--interval", "1s"];
        let own = ["--node", node.name(), "--kubeconfig", &kubeconfig, "--timeout", "3s"];
        node.spawn("mesh", env!("CARGO_BIN_EXE_portico"), arguments.into_iter().chain(own)).unwrap()
    };
    let running: Vec<Process> = nodes.iter().map(mesh).collect();
    for node in &nodes {
        wait_for(&kubectl, node.name(), "True");
    }
    drop_vxlan(&nodes[1]);
    let message = wait_for(&kubectl, "node-1", "False");
    let rule = format!("allow UDP 8472 from {} to {}", nodes[0].address(), nodes[1].address());
    assert!(
        message.contains("kkp-canal-vxlan udp udp/8472 to node-2") && message.contains(&rule),
        "{message}"
    );
    let metrics = nodes[0].run(&["curl", "-sS", "http://127.0.0.1:8006/metrics"]).unwrap();
    let line = "portico_mesh_checks{row=\"kkp-canal-vxlan\",check=\"udp\",status=\"failed\"} 1";
    assert!(metrics.contains(line), "{metrics}");
    assert_eq!(nodes[0].run(&["curl", "-sS", "http://127.0.0.1:8006/readyz"]).unwrap(), "ready\n");
    nodes[1].run(&["nft", "delete", "table", "inet", "site"]).unwrap();
    wait_for(&kubectl, "node-1", "True");
    assert_eq!(condition(&kubectl, "node-2").unwrap().0, "True", "its own flows worked all the time");

    // The nodes get addresses of the other family, and lose those they had.
    for node in &nodes {
        node.run(&["ip", "addr", "add", &format!("{}/64", ipv6(node)), "dev", "eth0", "nodad"]).unwrap();
    }
    kubectl.apply_json(&members(&[&nodes[0], &nodes[1]], "IPv6")).unwrap();
    kubectl.run(&["delete", "endpointslice", "portico-mesh-ipv4", "-n", "kube-system"]).unwrap();
    let rounds = || {
        let metrics = nodes[0].run(&["curl", "-sS", "http://127.0.0.1:8006/metrics"]).unwrap();
        let line = metrics.lines().find(|line| line.starts_with("portico_mesh_rounds_total ")).unwrap();
        line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()
    };
    let before = rounds();
    wait::until("some rounds with them", PATIENCE, || {
        ensure!(rounds() > before + 3);
        Ok(())
    })
    .unwrap();
    nodes.iter().for_each(|node| drop(wait_for(&kubectl, node.name(), "True")));
    drop_vxlan(&nodes[1]);
    let message = wait_for(&kubectl, "node-1", "False");
    let rule = format!("allow UDP 8472 from {} to {}", ipv6(&nodes[0]), ipv6(&nodes[1]));
    assert!(message.contains(&rule), "{message}");
    drop(running);
}
