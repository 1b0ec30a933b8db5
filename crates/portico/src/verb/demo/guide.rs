//! The text of the demo: where each cluster is, and lines to paste that show it. Writes the kubeconfigs the
//! lines name.

use anyhow::Context;
use portico_admin::table;
use portico_expose::plan::Plan;
use portico_expose::services::{APISERVER, KONNECTIVITY};
use portico_expose::strategy;

use super::nodes::{KUBELET_LOG, POD_LOG};
use super::ports::Ports;
use super::site::{AUTHORITY_PORT, CLUSTERS, Site, UserCluster, WITH_NODE};
use crate::shell;

/// The text, for a gateway that has put `plans` into force.
pub(super) fn guide(site: &Site, ports: &Ports, plans: &[Plan]) -> anyhow::Result<String> {
    let mut rows = Vec::new();
    let mut stories = String::new();
    for cluster in &CLUSTERS {
        let port = port(cluster, ports, plans)?;
        let kubeconfig = format!("{}.kubeconfig", cluster.name);
        let server = format!("https://127.0.0.1:{port}");
        site.kubeconfig(&kubeconfig, cluster, &server, &cluster.host(), None)?;
        rows.push([
            cluster.name.to_owned(),
            cluster.strategy.to_string(),
            format!("https://{}:{port}", cluster.host()),
            site.path(&kubeconfig).display().to_string(),
        ]);
        stories.push_str(&story(site, cluster, port));
        if cluster.name == WITH_NODE.name {
            stories.push_str(&node_story(site, cluster, port));
        }
        if strategy::of(cluster.strategy).has_agent() {
            stories.push_str(&server_name_story(site, cluster, ports));
            stories.push_str(&tunnel_story(site, cluster, ports)?);
            stories.push_str(&agent_story(site, cluster, ports)?);
        }
    }
    let table = table::render(["CLUSTER", "STRATEGY", "ADDRESS", "KUBECONFIG"], &rows);
    let manifests = shell::word(&site.path("manifests").display().to_string());
    // The program need not be on the PATH.
    let program = std::env::current_exe()
        .map_or_else(|_| "portico".into(), |path| shell::word(&path.display().to_string()));
    let (admin, agent_admin) = (ports.admin, ports.agent_admin);
    let (server_admin, konnectivity_admin) = (ports.konnectivity + 1, ports.konnectivity + 2);
    Ok(format!(
        "\nA gateway, three user clusters, one per expose strategy, a node agent, and Konnectivity, all on \
         loopback.\n\n\
         {table}{stories}\n\
         What the gateway sees\n\
         \x20 curl 'http://127.0.0.1:{admin}/routes?o=table'\n\
         \x20 curl 'http://127.0.0.1:{admin}/connections?o=table'\n\
         \x20 curl http://127.0.0.1:{admin}/metrics\n\
         \x20 {program} check {manifests}\n\
         What the node agent sees\n\
         \x20 curl 'http://127.0.0.1:{agent_admin}/tunnels?o=table'\n\
         \x20 curl 'http://127.0.0.1:{agent_admin}/readyz?verbose'\n\
         What Konnectivity sees, server and agent, while a log is followed\n\
         \x20 curl 'http://127.0.0.1:{server_admin}/connections?o=table'\n\
         \x20 curl 'http://127.0.0.1:{konnectivity_admin}/connections?o=table'\n\
         Edit the manifests while a watch runs: no other cluster notices.\n\n\
         Ctrl-C stops the demo and removes its files.\n"
    ))
}

/// The NodePort of a cluster's Service, which the gateway listens on.
fn node_port(cluster: &UserCluster, service: &str, plans: &[Plan]) -> anyhow::Result<u16> {
    let plan = plans.iter().find(|plan| plan.cluster.as_str() == cluster.name);
    let entry = plan.and_then(|plan| plan.entries.iter().find(|entry| entry.service == service));
    let name = cluster.name;
    entry
        .and_then(|entry| entry.node_port)
        .with_context(|| format!("{service} of the cluster {name} got no NodePort; see the log"))
}

/// Where the agent of the node reaches its Konnectivity server.
pub(super) fn konnectivity_port(plans: &[Plan]) -> anyhow::Result<u16> {
    node_port(&WITH_NODE, KONNECTIVITY, plans)
}

/// Where a cluster's API server is reached.
fn port(cluster: &UserCluster, ports: &Ports, plans: &[Plan]) -> anyhow::Result<u16> {
    if !strategy::of(cluster.strategy).has_node_ports() {
        return Ok(ports.sni);
    }
    node_port(cluster, APISERVER, plans)
}

/// The folder of the demo's files, as a shell takes it.
fn folder(site: &Site) -> String {
    shell::word(&site.folder().display().to_string())
}

fn node_story(site: &Site, cluster: &UserCluster, port: u16) -> String {
    let (name, host, folder) = (cluster.name, cluster.host(), folder(site));
    let (token, kubelet) = (cluster.token(), site.kubelet());
    format!(
        "The way back: the log of a pod. The API server asks the Konnectivity server beside it; the agent on \
         the node, which has connected through the gateway, dials the kubelet:\n\
         \x20 curl --cacert {folder}/ca.crt --resolve {host}:{port}:127.0.0.1 \
         -H 'Authorization: Bearer {token}' https://{host}:{port}{POD_LOG}\n\
         \x20 kubectl --kubeconfig {folder}/{name}.kubeconfig logs -f web\n\
         Nobody else reaches the kubelet:\n\
         \x20 curl --cacert {folder}/ca.crt https://{kubelet}{KUBELET_LOG}\n"
    )
}

fn story(site: &Site, cluster: &UserCluster, port: u16) -> String {
    let UserCluster { name, strategy, story, .. } = cluster;
    let host = cluster.host();
    let folder = folder(site);
    format!(
        "\n{name} ({strategy}). {story}\n\
         \x20 curl --cacert {folder}/ca.crt --resolve {host}:{port}:127.0.0.1 https://{host}:{port}/version\n\
         \x20 kubectl --kubeconfig {folder}/{name}.kubeconfig get namespaces --watch\n"
    )
}

fn server_name_story(site: &Site, cluster: &UserCluster, ports: &Ports) -> String {
    let (host, sni, folder) = (cluster.host(), ports.sni, folder(site));
    format!(
        "\x20 openssl s_client -connect 127.0.0.1:{sni} -servername {host} -CAfile {folder}/ca.crt -brief \
         </dev/null\n\
         A name nobody exposes is refused in TLS itself (alert unrecognized_name):\n\
         \x20 openssl s_client -connect 127.0.0.1:{sni} -servername nobody.portico.test -brief </dev/null\n"
    )
}

fn tunnel_story(site: &Site, cluster: &UserCluster, ports: &Ports) -> anyhow::Result<String> {
    let (name, tunnel, folder) = (cluster.name, ports.tunnel, folder(site));
    let host = cluster.internal_host();
    let kubeconfig = format!("{name}-tunnel.kubeconfig");
    let server = format!("https://{host}:{AUTHORITY_PORT}");
    let proxy = format!("http://127.0.0.1:{tunnel}");
    site.kubeconfig(&kubeconfig, cluster, &server, &host, Some(&proxy))?;
    Ok(format!(
        "The same through CONNECT; in plain text, then under TLS with a client certificate:\n\
         \x20 curl --cacert {folder}/ca.crt --proxytunnel --proxy {proxy} {server}/version\n\
         \x20 curl --cacert {folder}/ca.crt --proxytunnel --proxy https://127.0.0.1:{tunnel} \
         --proxy-cacert {folder}/ca.crt --proxy-cert {folder}/{name}.crt --proxy-key {folder}/{name}.key \
         {server}/version\n\
         \x20 kubectl --kubeconfig {folder}/{kubeconfig} version\n"
    ))
}

fn agent_story(site: &Site, cluster: &UserCluster, ports: &Ports) -> anyhow::Result<String> {
    let (agent, folder, host) = (ports.agent, folder(site), cluster.internal_host());
    let kubeconfig = format!("{}-agent.kubeconfig", cluster.name);
    site.kubeconfig(&kubeconfig, cluster, &format!("https://127.0.0.1:{agent}"), &host, None)?;
    Ok(format!(
        "Through the node agent, as pods reach it: they see no tunnel. On a node it holds 100.64.30.10:\n\
         \x20 curl --cacert {folder}/ca.crt --connect-to {host}:{AUTHORITY_PORT}:127.0.0.1:{agent} \
         https://{host}:{AUTHORITY_PORT}/version\n\
         \x20 kubectl --kubeconfig {folder}/{kubeconfig} get namespaces --watch\n"
    ))
}
