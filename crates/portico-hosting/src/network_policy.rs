//! The traffic from and to the pods of a control plane.
//!
//! A user cluster's administrator decides where its API server sends webhooks. They go through Konnectivity
//! into the user cluster; the policies see to it that nothing goes to the seed or to other tenants instead.
//! Names are KKP's where KKP has one. Clients may come from anywhere, to the ports that are theirs. Ports
//! of metrics answer strangers with as much memory as those like to use, so they are for Portico's own pods.

use ipnet::IpNet;
use portico_api::hosting::Layout;
use serde_json::{Value, json};

use crate::facts::Facts;
use crate::program::{api_server, controller_manager, etcd, konnectivity, scheduler};

/// Switches the policies off that restrict the API server.
const FEATURE: &str = "apiserverNetworkPolicy";

/// Port of an issuer whose URL names none.
const HTTPS: u16 = 443;

/// Addresses on the link, among them those of clouds that hand out credentials.
const LINK_LOCAL: [&str; 2] = ["169.254.0.0/16", "fe80::/10"];

/// The pods of Portico that ask programs for metrics and alarms, by their label.
const WATCHERS: (&str, [&str; 2]) = ("app.kubernetes.io/name", ["portico-operator", "portico-metrics"]);

/// Every policy, by name, with its `spec`.
pub(crate) fn policies(facts: &Facts<'_>) -> Vec<(&'static str, Value)> {
    let cluster = facts.scope.cluster;
    let dedicated = facts.layout == Layout::Dedicated;
    let pods: &[&str] = match facts.layout {
        Layout::Compact => &[api_server::NAME],
        Layout::Dedicated => &[api_server::NAME, etcd::NAME, controller_manager::NAME, scheduler::NAME],
    };
    let clients = json!({"ports": ports(&[api_server::PORT, konnectivity::AGENT_PORT])});
    let mut policies = vec![("control-plane-ingress", ingress(pods, &[clients, watchers()]))];
    if dedicated {
        policies.push(("etcd-ingress", etcd_ingress()));
    }
    if cluster.spec.features.get(FEATURE) == Some(&false) {
        return policies;
    }
    // A pod that any policy of egress selects reaches what policies allow, and nothing else. This one selects
    // them all, so that KKP's `default-deny-all-egress`, which allows nothing, would add nothing to it.
    let dns = json!({"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]});
    policies.push(("dns-allow", egress(pods, dns)));
    if dedicated {
        let to_etcd = to(etcd::NAME, &[etcd::CLIENT_PORT, etcd::PEER_PORT]);
        policies.push(("etcd-allow", egress(&[api_server::NAME, etcd::NAME], to_etcd)));
        let to_api_server = to(api_server::NAME, &[api_server::PORT]);
        policies.push(("apiserver-internal-allow", egress(pods, to_api_server)));
    }
    // The issuers in a file of the user's own are not known: any HTTPS outside.
    let by_file = !facts.hosting.authentication_configuration.secret_name.is_empty();
    let port = if by_file { Some(HTTPS) } else { issuer_port(&facts.hosting.oidc.issuer_url) };
    if let Some(port) = port {
        policies.push(("oidc-issuer-allow", egress(&[api_server::NAME], outside(facts, port))));
    }
    policies
}

fn selected(pods: &[&str]) -> Value {
    match pods {
        [one] => json!({"matchLabels": {"app": one}}),
        _ => json!({"matchExpressions": [{"key": "app", "operator": "In", "values": pods}]}),
    }
}

/// The targets that these pods may reach besides those that other policies allow.
fn egress(pods: &[&str], rule: Value) -> Value {
    json!({"podSelector": selected(pods), "policyTypes": ["Egress"], "egress": [rule]})
}

/// The clients that may reach these pods besides those that other policies admit. A node reaches its own pods
/// in any case, by what Kubernetes asks of network plugins: probes.
fn ingress(pods: &[&str], rules: &[Value]) -> Value {
    json!({"podSelector": selected(pods), "policyTypes": ["Ingress"], "ingress": rules})
}

/// The operator and the relay of metrics, in whatever namespace they are.
fn watchers() -> Value {
    let (label, names) = WATCHERS;
    let pods = json!({"matchExpressions": [{"key": label, "operator": "In", "values": names}]});
    json!({
        "from": [{"namespaceSelector": {}, "podSelector": pods}],
        "ports": ports(&[
            etcd::METRICS_PORT,
            konnectivity::HEALTH_PORT,
            controller_manager::PORT,
            scheduler::PORT,
        ]),
    })
}

fn ports(numbers: &[u16]) -> Value {
    numbers.iter().map(|port| json!({"protocol": "TCP", "port": port})).collect()
}

fn to(pods: &str, numbers: &[u16]) -> Value {
    json!({"to": [{"podSelector": selected(&[pods])}], "ports": ports(numbers)})
}

/// Members know each other and the API server.
fn etcd_ingress() -> Value {
    let from = json!([{"podSelector": selected(&[api_server::NAME, etcd::NAME])}]);
    let members = json!({"from": from, "ports": ports(&[etcd::CLIENT_PORT, etcd::PEER_PORT])});
    ingress(&[etcd::NAME], &[members])
}

/// Any address but those of the seed and of the link. An issuer inside the seed needs a policy of its own.
fn outside(facts: &Facts<'_>, port: u16) -> Value {
    let link_local = LINK_LOCAL.iter().filter_map(|network| network.parse::<IpNet>().ok());
    let inside: Vec<IpNet> = facts.settings.seed_networks.iter().copied().chain(link_local).collect();
    let any = |everything: &str, v4: bool| {
        let except: Vec<&IpNet> = inside.iter().filter(|network| network.addr().is_ipv4() == v4).collect();
        json!({"ipBlock": {"cidr": everything, "except": except}})
    };
    json!({"to": [any("0.0.0.0/0", true), any("::/0", false)], "ports": ports(&[port])})
}

/// The port of `https://HOST[:PORT][/PATH]`.
pub(crate) fn issuer_port(url: &str) -> Option<u16> {
    let authority = url.strip_prefix("https://")?.split(['/', '?', '#']).next()?;
    let port = match authority.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && !port.contains(']') => port.parse().ok()?,
        _ if authority.is_empty() => return None,
        _ => HTTPS,
    };
    (port > 0).then_some(port)
}

#[cfg(test)]
mod tests {
    use super::{WATCHERS, issuer_port};

    #[test]
    fn the_pods_that_ask_for_metrics_have_the_label_that_lets_them() {
        let manifests =
            [include_str!("../../../deploy/operator.yaml"), include_str!("../../../deploy/monitoring.yaml")];
        let (label, names) = WATCHERS;
        for (name, manifest) in names.into_iter().zip(manifests) {
            assert!(manifest.contains(&format!("\n      labels: {{{label}: {name}, ")), "{name}");
        }
    }

    #[test]
    fn the_port_of_an_issuer_is_that_of_its_url() {
        for (url, port) in [
            ("https://login.example.com", Some(443)),
            ("https://login.example.com:8443/realms/a", Some(8_443)),
            ("https://[2001:db8::7]/a", Some(443)),
            ("https://[2001:db8::7]:9443", Some(9_443)),
            ("http://login.example.com", None),
            ("https://", None),
            ("https://login.example.com:0", None),
            ("https://login.example.com:port", None),
        ] {
            assert_eq!(issuer_port(url), port, "{url}");
        }
    }
}
