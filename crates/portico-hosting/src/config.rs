//! Configuration files of the API server, in ConfigMaps with KKP's names.

use std::collections::BTreeMap;

use portico_api::cluster::HostingSpec;
use portico_api::hosting::{AuditPreset, Oidc, Version};
use serde_json::{Value, json};

/// How the API server reaches the user cluster.
pub(crate) const EGRESS: &str = "kube-apiserver-egress";
pub(crate) const EGRESS_KEY: &str = "egress-selector-configuration.yaml";
/// What the audit log records.
pub(crate) const AUDIT: &str = "audit-config";
pub(crate) const AUDIT_KEY: &str = "policy.yaml";
/// Settings of admission plugins.
pub(crate) const ADMISSION: &str = "adm-control";
pub(crate) const ADMISSION_KEY: &str = "admission-control.yaml";
/// Whose tokens are accepted. In KKP a Secret of this name.
pub(crate) const AUTHENTICATION: &str = "apiserver-authentication-configuration";
pub(crate) const AUTHENTICATION_KEY: &str = "authentication-configuration.yaml";

pub(crate) const POD_NODE_SELECTOR: &str = "PodNodeSelector";
pub(crate) const EVENT_RATE_LIMIT: &str = "EventRateLimit";

/// The default of Kubernetes for the claim that names a user.
const SUBJECT: &str = "sub";

/// The folder of the socket by which the API server asks its Konnectivity server for connections.
pub(crate) const SOCKET_FOLDER: &str = "/run/konnectivity-server";

/// The socket.
pub(crate) fn socket() -> String {
    format!("{SOCKET_FOLDER}/konnectivity-server.socket")
}

/// A file by its key.
pub(crate) type Files = BTreeMap<&'static str, String>;

/// ConfigMaps, by name.
pub(crate) type Configs = Vec<(&'static str, Files)>;

/// The ConfigMaps of the API server.
pub(crate) fn maps(hosting: &HostingSpec, version: Version) -> Configs {
    let mut maps = vec![(EGRESS, Files::from([(EGRESS_KEY, egress())]))];
    maps.extend(audited(hosting).map(|preset| (AUDIT, Files::from([(AUDIT_KEY, audit(preset))]))));
    maps.extend(admission(hosting).map(|files| (ADMISSION, files)));
    let authentication = authentication(hosting, version);
    maps.extend(authentication.map(|file| (AUTHENTICATION, Files::from([(AUTHENTICATION_KEY, file)]))));
    maps
}

/// Nodes, pods and webhooks are reached through Konnectivity; etcd and identity providers directly.
///
/// For Kubernetes a webhook that is named by its URL belongs to `controlplane`. Tenants write that URL.
/// Without a selection the API server would dial it from its pod, and reach whatever the seed reaches.
fn egress() -> String {
    let transport = json!({"uds": {"udsName": socket()}});
    let connection = json!({"proxyProtocol": "GRPC", "transport": transport});
    let selections = ["cluster", "controlplane"].map(|name| json!({"name": name, "connection": connection}));
    portico_yaml::write(&json!({
        "apiVersion": "apiserver.k8s.io/v1beta1",
        "kind": "EgressSelectorConfiguration",
        "egressSelections": selections,
    }))
}

/// The preset of the audit log, if there is one.
pub(crate) fn audited(hosting: &HostingSpec) -> Option<AuditPreset> {
    let audit = &hosting.audit_logging;
    audit.enabled.then(|| audit.policy_preset.get().copied().unwrap_or_default())
}

fn audit(preset: AuditPreset) -> String {
    let writes = json!(["create", "update", "patch", "delete", "deletecollection"]);
    let noise = [
        json!({"level": "None",
            "nonResourceURLs": ["/healthz*", "/livez*", "/readyz*", "/version", "/openapi*"]}),
        json!({"level": "None", "resources": [
            {"group": "", "resources": ["events"]}, {"group": "events.k8s.io", "resources": ["events"]},
            {"group": "coordination.k8s.io", "resources": ["leases"]}]}),
    ];
    // Bodies of these hold secrets, or would fill the log.
    let secrets = json!({"level": "Metadata", "resources": [
        {"group": "", "resources": ["secrets", "configmaps", "serviceaccounts/token"]},
        {"group": "authentication.k8s.io", "resources": ["tokenreviews"]}]});
    let rules = match preset {
        AuditPreset::Metadata => vec![json!({"level": "Metadata"})],
        AuditPreset::Minimal => {
            let [urls, resources] = noise;
            vec![urls, resources, json!({"level": "Metadata", "verbs": writes}), json!({"level": "None"})]
        }
        AuditPreset::Recommended => {
            let [urls, resources] = noise;
            let reads =
                json!({"level": "None", "userGroups": ["system:nodes"], "verbs": ["get", "list", "watch"]});
            let bodies = json!({"level": "Request", "verbs": writes});
            vec![urls, resources, secrets, reads, bodies, json!({"level": "Metadata"})]
        }
    };
    portico_yaml::write(&json!({
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        // Each request is recorded once, with its answer.
        "omitStages": ["RequestReceived"],
        "rules": rules,
    }))
}

/// The settings of admission plugins, if a plugin has some.
pub(crate) fn admission(hosting: &HostingSpec) -> Option<Files> {
    let mut plugins = Vec::new();
    let mut files = Files::new();
    if hosting.use_pod_node_selector_admission_plugin {
        let selectors =
            json!({"podNodeSelectorPluginConfig": hosting.pod_node_selector_admission_plugin_config});
        files.insert("podnodeselector.yaml", portico_yaml::write(&selectors));
        plugins.push(json!({"name": POD_NODE_SELECTOR, "path": "podnodeselector.yaml"}));
    }
    if hosting.use_event_rate_limit_admission_plugin {
        files.insert("eventconfig.yaml", event_rate_limit(hosting));
        plugins.push(json!({"name": EVENT_RATE_LIMIT, "path": "eventconfig.yaml"}));
    }
    if plugins.is_empty() {
        return None;
    }
    let configuration = json!({
        "apiVersion": "apiserver.config.k8s.io/v1",
        "kind": "AdmissionConfiguration",
        "plugins": plugins,
    });
    files.insert(ADMISSION_KEY, portico_yaml::write(&configuration));
    Some(files)
}

fn event_rate_limit(hosting: &HostingSpec) -> String {
    let limits = hosting.event_rate_limit_config.iter().filter_map(|(kind, limit)| {
        let limit = limit.as_ref()?;
        // KKP writes the types as fields: `sourceAndObject`.
        let (first, rest) = kind.split_at_checked(1)?;
        let mut item = json!({"type": first.to_uppercase() + rest});
        for (field, number) in
            [("qps", &limit.qps), ("burst", &limit.burst), ("cacheSize", &limit.cache_size)]
        {
            if let Some(number) = number.get() {
                item[field] = json!(number);
            }
        }
        Some(item)
    });
    portico_yaml::write(&json!({
        "apiVersion": "eventratelimit.admission.k8s.io/v1alpha1",
        "kind": "Configuration",
        "limits": limits.collect::<Vec<_>>(),
    }))
}

/// The identity provider of the Cluster, with the meaning that the flags of the API server gave to each
/// field. A file, because the API server reads it again when it changes.
pub(crate) fn authentication(hosting: &HostingSpec, version: Version) -> Option<String> {
    let oidc = &hosting.oidc;
    if oidc.issuer_url.is_empty() {
        return None;
    }
    let mut provider = json!({
        "issuer": {"url": oidc.issuer_url, "audiences": [oidc.client_id]},
        "claimMappings": claims(oidc),
    });
    let required: Vec<Value> = required_claims(&oidc.required_claim)
        .map(|(claim, value)| json!({"claim": claim, "requiredValue": value}))
        .collect();
    if !required.is_empty() {
        provider["claimValidationRules"] = json!(required);
    }
    // `v1` came with 1.34.
    let version = if version.minor < 34 { "v1beta1" } else { "v1" };
    Some(portico_yaml::write(&json!({
        "apiVersion": format!("apiserver.config.k8s.io/{version}"),
        "kind": "AuthenticationConfiguration",
        "jwt": [provider],
    })))
}

fn claims(oidc: &Oidc) -> Value {
    let user = if oidc.username_claim.is_empty() { SUBJECT } else { &oidc.username_claim };
    let prefix = match &*oidc.username_prefix {
        "-" => String::new(),
        // An address is a name by itself; other names could be those of another provider's users.
        "" if user == "email" => String::new(),
        "" => format!("{}#", oidc.issuer_url),
        written => written.to_owned(),
    };
    let mut claims = json!({"username": {"claim": user, "prefix": prefix}});
    if !oidc.groups_claim.is_empty() {
        claims["groups"] = json!({"claim": oidc.groups_claim, "prefix": oidc.groups_prefix});
    }
    claims
}

/// `KEY=VALUE`, separated by commas.
pub(crate) fn required_claims(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let items = text.split(',').map(str::trim).filter(|item| !item.is_empty());
    items.map(|item| item.split_once('=').unwrap_or((item, "")))
}
