//! The API server. No flag depends on the expose strategy. Under each of them the API server listens on the
//! same port, and issues tokens by the same name and for the same audiences.

use portico_api::hosting::Layout;
use portico_expose::hosts::HostSuffix;
use portico_expose::networks;

use super::etcd::CLIENT_PORT;
use super::{FileSource, Program, feature_gates, konnectivity, probe, resources};
use crate::config::{self, SOCKET_FOLDER};
use crate::facts::{Facts, joined};

pub(crate) const NAME: &str = "apiserver";
/// Where it listens.
pub(crate) const PORT: u16 = portico_expose::services::APISERVER_PORT;
pub(crate) const PORT_NAME: &str = "secure";

/// The issuer of the tokens of service accounts. Pods find its keys by this name; it is no other one when the
/// cluster's address changes.
const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";

/// The plugins that KKP enables beside the defaults of Kubernetes. Defaults are named too where they matter.
const ADMISSION_PLUGINS: &str = "NamespaceLifecycle,NodeRestriction,LimitRanger,ServiceAccount,\
                                 DefaultStorageClass,DefaultTolerationSeconds,MutatingAdmissionWebhook,\
                                 ValidatingAdmissionWebhook,Priority,ResourceQuota";

/// A replica that was signalled to stop serves for this long, until the others have all new connections.
const DRAIN: &str = "10s";

/// The share of requests after which the client is asked to connect anew. Kubernetes recommends to begin with
/// this value.
const GOAWAY: &str = "0.001";

pub(crate) fn program(facts: &Facts<'_>) -> Program {
    let command = &["/usr/local/bin/kube-apiserver"];
    let mut server = Program::new(NAME, facts.kubernetes("kube-apiserver"), command);
    server.binds_low_ports = true;
    addresses(&mut server, facts);
    etcd(&mut server, facts);
    certificates(&mut server);
    service_accounts(&mut server, facts);
    admission(&mut server, facts);
    authentication(&mut server, facts);
    server.arg_file("egress-selector-config-file", FileSource::config(config::EGRESS), config::EGRESS_KEY);
    if config::audited(facts.hosting).is_some() {
        server.arg_file("audit-policy-file", FileSource::config(config::AUDIT), config::AUDIT_KEY);
        // To standard output: whatever collects the logs of the seed has it, and no disk fills up.
        server.arg("audit-log-path", "-");
    }
    server.arg("profiling", false);
    feature_gates(&mut server, facts);
    // Without it a server that was signalled to stop waits a minute for each watch of its users.
    server.arg("shutdown-watch-termination-grace-period", "3s");
    if facts.layout == Layout::Dedicated {
        server.arg("shutdown-delay-duration", DRAIN);
    }
    // HTTP/2 clients keep one connection for ever, and so the way by which they came. That is the former
    // replica after a scale-up, or the former door after a migration. One request of a thousand asks its
    // client to connect anew; what is under way on the connection ends in peace. Kubernetes advises against
    // it for a single server without a load balancer, where a new connection changes nothing; here a gateway
    // is before each. With a single one too: a flag that followed a migration would restart API servers in
    // it.
    server.arg("goaway-chance", GOAWAY);
    server.small_heap(facts.layout);
    server.ports = vec![(PORT_NAME, PORT)];
    server.mounts.push((konnectivity::SOCKET_VOLUME, SOCKET_FOLDER));
    server.startup = Some(probe("HTTPS", "/livez", PORT, 1, 15, 120));
    server.liveness = probe("HTTPS", "/livez", PORT, 10, 15, 8);
    server.readiness = Some(probe("HTTPS", "/readyz", PORT, 5, 15, 3));
    let default = match facts.layout {
        Layout::Compact => [["100m", "192Mi"], ["2", "4Gi"]],
        Layout::Dedicated => [["100m", "256Mi"], ["2", "4Gi"]],
    };
    let written = facts.scope.cluster.spec.components_override.apiserver.pods.as_deref();
    server.resources = resources(written.and_then(|written| written.resources.as_ref()), default);
    server
}

fn addresses(server: &mut Program, facts: &Facts<'_>) {
    let scope = &facts.scope;
    server.arg("secure-port", PORT);
    let suffix = HostSuffix::of(&scope.cluster.name(), scope.seed, scope.configuration);
    if let Some(host) = suffix.and_then(|suffix| suffix.host("").ok()) {
        server.arg("external-hostname", host);
    }
    // The `kubernetes` endpoints are kept from the seed: the address of this pod is not reachable for nodes.
    server.arg("endpoint-reconciler-type", "none");
    server.arg("service-cluster-ip-range", joined(&networks::services(scope.cluster, facts.kubevirt)));
    server.arg("service-node-port-range", facts.node_port_range());
    server.arg("kubelet-preferred-address-types", "InternalIP,ExternalIP");
}

fn etcd(server: &mut Program, facts: &Facts<'_>) {
    let servers: Vec<String> = match facts.layout {
        Layout::Compact => vec![format!("https://127.0.0.1:{CLIENT_PORT}")],
        // The dot at the end spares the resolver the search path.
        Layout::Dedicated => (0..facts.members)
            .map(|number| {
                format!("https://etcd-{number}.etcd.{}.svc.cluster.local.:{CLIENT_PORT}", facts.namespace)
            })
            .collect(),
    };
    server.arg("etcd-servers", servers.join(","));
    let secret = "apiserver-etcd-client-certificate";
    server.arg_secret("etcd-cafile", secret, "ca.crt");
    server.arg_secret("etcd-certfile", secret, "apiserver-etcd-client.crt");
    server.arg_secret("etcd-keyfile", secret, "apiserver-etcd-client.key");
}

fn certificates(server: &mut Program) {
    server.arg_secret("tls-cert-file", "apiserver-tls", "apiserver-tls.crt");
    server.arg_secret("tls-private-key-file", "apiserver-tls", "apiserver-tls.key");
    server.arg_secret("client-ca-file", "client-ca", "ca.crt");
    server.arg_secret("kubelet-certificate-authority", "ca", "ca.crt");
    let kubelet = "kubelet-client-certificates";
    server.arg_secret("kubelet-client-certificate", kubelet, "kubelet-client.crt");
    server.arg_secret("kubelet-client-key", kubelet, "kubelet-client.key");
    let proxy = "apiserver-proxy-client-certificate";
    server.arg_secret("proxy-client-cert-file", proxy, "apiserver-proxy-client.crt");
    server.arg_secret("proxy-client-key-file", proxy, "apiserver-proxy-client.key");
    server.arg_secret("requestheader-client-ca-file", "front-proxy-ca", "ca.crt");
    server.arg("requestheader-allowed-names", "apiserver-aggregator");
    server.arg("requestheader-extra-headers-prefix", "X-Remote-Extra-");
    server.arg("requestheader-group-headers", "X-Remote-Group");
    server.arg("requestheader-username-headers", "X-Remote-User");
}

fn service_accounts(server: &mut Program, facts: &Facts<'_>) {
    let settings = &facts.hosting.service_account;
    let written = (!settings.issuer.is_empty()).then_some(&*settings.issuer);
    // The first issues tokens, the others are accepted: those of before somebody chose an issuer.
    for issuer in written.into_iter().chain([ISSUER].into_iter().filter(|&issuer| written != Some(issuer))) {
        server.arg("service-account-issuer", issuer);
    }
    server.arg_secret("service-account-key-file", "service-account-key", "sa.pub");
    server.arg_secret("service-account-signing-key-file", "service-account-key", "sa.key");
    let mut audiences: Vec<&str> = settings.api_audiences.iter().map(|audience| &**audience).collect();
    if audiences.is_empty() {
        audiences.extend(written.into_iter().chain([ISSUER].into_iter().filter(|&own| written != Some(own))));
    }
    audiences.push(konnectivity::AUDIENCE);
    server.arg("api-audiences", audiences.join(","));
}

fn admission(server: &mut Program, facts: &Facts<'_>) {
    let mut plugins = vec![ADMISSION_PLUGINS];
    plugins.extend(facts.hosting.use_pod_node_selector_admission_plugin.then_some(config::POD_NODE_SELECTOR));
    plugins.extend(facts.hosting.use_event_rate_limit_admission_plugin.then_some(config::EVENT_RATE_LIMIT));
    for plugin in &facts.hosting.admission_plugins {
        if !plugins.iter().any(|found| found.split(',').any(|found| found == &**plugin)) {
            plugins.push(plugin);
        }
    }
    server.arg("enable-admission-plugins", plugins.join(","));
    // kube-proxy and network plugins are privileged; Pod Security decides where pods may be.
    server.arg("allow-privileged", true);
    if let Some(files) = config::admission(facts.hosting) {
        // The first names the others by their place beside it.
        for key in files.keys() {
            server.file(FileSource::config(config::ADMISSION), key);
        }
        let holder = FileSource::config(config::ADMISSION);
        server.arg_file("admission-control-config-file", holder, config::ADMISSION_KEY);
    }
}

fn authentication(server: &mut Program, facts: &Facts<'_>) {
    server.arg("authorization-mode", "Node,RBAC");
    server.arg("enable-bootstrap-token-auth", true);
    let written = &facts.hosting.authentication_configuration;
    if !written.secret_name.is_empty() {
        let holder = FileSource::secret(&written.secret_name);
        server.arg_file("authentication-config", holder, &written.secret_key);
    } else if config::authentication(facts.hosting, facts.version).is_some() {
        let holder = FileSource::config(config::AUTHENTICATION);
        server.arg_file("authentication-config", holder, config::AUTHENTICATION_KEY);
    }
}
