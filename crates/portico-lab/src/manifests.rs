//! A Service and its EndpointSlice as manifests, for every test that exposes one.

use std::fmt::Write as _;
use std::net::IpAddr;

/// A Service with the port `secure`, 443, and these annotations; of type NodePort if it has one.
#[must_use]
pub fn service(namespace: &str, name: &str, annotations: &[(&str, &str)], node_port: Option<u16>) -> String {
    let (kind, port) = match node_port {
        Some(port) => ("NodePort", format!(", nodePort: {port}")),
        None => ("ClusterIP", String::new()),
    };
    let mut text = format!(
        "---
apiVersion: v1
kind: Service
metadata:
  name: {name}
  namespace: {namespace}
  annotations:
"
    );
    for (key, value) in annotations {
        // In YAML a quote is written twice.
        let _ = writeln!(text, "    {key}: '{}'", value.replace('\'', "''"));
    }
    let _ = writeln!(text, "spec:\n  type: {kind}\n  ports: [{{name: secure, port: 443{port}}}]");
    text
}

/// The EndpointSlice of a Service: one endpoint, which is ready, for the port `secure`.
#[must_use]
pub fn slice(namespace: &str, service: &str, address: IpAddr, port: u16) -> String {
    let family = if address.is_ipv6() { "IPv6" } else { "IPv4" };
    format!(
        "---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: {service}-1
  namespace: {namespace}
  labels: {{kubernetes.io/service-name: {service}}}
addressType: {family}
endpoints: [{{addresses: ['{address}'], conditions: {{ready: true}}}}]
ports: [{{name: secure, port: {port}}}]
"
    )
}
