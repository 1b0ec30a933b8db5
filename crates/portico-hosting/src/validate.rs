//! The problems of a Cluster as far as hosting goes, each with object, field, value and remedy.
//!
//! A mistake refuses the Cluster: what exists stays as it is. Portico does not follow some fields of KKP.
//! Such a field refuses the Cluster where leaving it out would weaken it, and is named as void where it would
//! not.

mod networks;
mod resources;

use portico_api::annotations::{ENDPOINTS, FEATURE_GATES, LAYOUT, PROMETHEUS, WITHOUT};
use portico_api::cluster::{Cluster, HostingSpec};
use portico_api::configuration::KubermaticConfiguration;
use portico_api::hosting::{Layout, LeaderElection, Oidc, PodSettings};
use portico_api::meta::Kind;
use portico_api::problem::Problem;
use portico_api::seed::Seed;
use portico_api::setting::Setting;
use portico_expose::findings::{Findings, Verdict};
use portico_expose::inputs::Scope;
use portico_expose::resolve::{seed_of, strategy};
use portico_expose::validate::usable;

use crate::config::required_claims;
use crate::inside::left_out;
use crate::network_policy::issuer_port;
use crate::settings::Settings;
use crate::versions::Versions;

/// Most members of etcd, as in KKP; the certificate has names for so many.
pub const MOST_MEMBERS: u16 = 9;
/// Most replicas of one program. More is a typing mistake.
const MOST_REPLICAS: u16 = 20;

/// Checks a Cluster that asks to be hosted. That it can be exposed is checked elsewhere.
pub fn validate(scope: &Scope<'_>, settings: &Settings) -> Verdict {
    let cluster = scope.cluster;
    let mut findings = Findings::of(Kind::Cluster, &cluster.metadata);
    let layout = layout(cluster, &mut findings);
    let written = HostingSpec::default();
    let hosting = cluster.spec.hosting.as_deref().unwrap_or(&written);
    version(hosting, &mut findings);
    networks::check(scope, settings, &mut findings);
    replicas(cluster, layout, &mut findings);
    pods(cluster, &mut findings);
    feature_gates(cluster, &mut findings);
    service_accounts(hosting, &mut findings);
    authentication(hosting, &mut findings);
    admission(hosting, &mut findings);
    parts(cluster, &mut findings);
    not_followed(cluster, hosting, &mut findings);
    findings.verdict
}

/// Checks `cluster` if it asks to be hosted. What keeps it from being exposed is found by others, and hides
/// nothing of this but in the same field.
pub fn judge<S: AsRef<Seed>>(
    cluster: &Cluster,
    seeds: &[S],
    configuration: Option<&KubermaticConfiguration>,
) -> Verdict {
    if !cluster.has_layout() {
        return Verdict { problems: Vec::new(), refused: false };
    }
    let unknown = Seed::default();
    let others = usable(cluster, seeds, configuration).err().unwrap_or_default();
    let seed = seed_of(cluster, seeds).map_or(&unknown, AsRef::as_ref);
    let decision = strategy(cluster, seed, configuration);
    let scope = Scope { cluster, decision, seed, configuration };
    let mut verdict = validate(&scope, &Settings::default());
    verdict.problems.retain(|problem| {
        let same_field = |other: &Problem| other.field.starts_with(&*problem.field);
        !others.iter().any(|other| other.object == problem.object && same_field(other))
    });
    verdict
}

/// Refuses a field whose text is no value of its kind.
fn readable<T>(
    setting: &Setting<T>,
    reason: &'static str,
    field: &str,
    remedy: &str,
    findings: &mut Findings,
) {
    if let Some(bad) = setting.bad() {
        let message = format!("{:?} cannot be used: {}", bad.value, bad.why);
        findings.refuse(reason, field, message, remedy);
    }
}

fn layout(cluster: &Cluster, findings: &mut Findings) -> Option<Layout> {
    let field = format!("metadata.annotations[{LAYOUT}]");
    let remedy = "write compact or dedicated";
    let Some(written) = cluster.metadata.annotation(LAYOUT) else {
        let message = "it is missing: Portico does not host this cluster".to_owned();
        findings.refuse("layout", &field, message, remedy);
        return None;
    };
    if cluster.metadata.annotation(ENDPOINTS).is_some() {
        let message = format!("the annotation {ENDPOINTS} says that the control plane runs elsewhere");
        findings.refuse("layout", &field, message, "remove one of the two annotations");
    }
    match written.parse() {
        Ok(layout) => Some(layout),
        Err(why) => {
            findings.refuse("layout", &field, format!("{written:?} is no layout: {why}"), remedy);
            None
        }
    }
}

fn version(hosting: &HostingSpec, findings: &mut Findings) {
    let known = Versions::known();
    let remedy = format!("write a version of {}, such as 1.{}.0", known.listed(), newest(known));
    let message = match &hosting.version {
        Setting::Unset => "it is missing".to_owned(),
        Setting::Bad(bad) => format!("{:?} is no version: {}", bad.value, bad.why),
        Setting::Good(version) if known.of(*version).is_none() => {
            format!("{version} cannot be hosted by this release of Portico")
        }
        Setting::Good(_) => return,
    };
    findings.refuse("unknown-version", "spec.version", message, &remedy);
}

fn newest(known: &Versions) -> u16 {
    known.minors.last().map_or(0, |minor| minor.minor)
}

fn replicas(cluster: &Cluster, layout: Option<Layout>, findings: &mut Findings) {
    let components = &cluster.spec.components_override;
    let pods = |pods: Option<&PodSettings>| pods.map(|pods| pods.replicas.clone());
    let counts = [
        ("apiserver.replicas", pods(components.apiserver.pods.as_deref())),
        ("controllerManager.replicas", pods(components.controller_manager.as_deref())),
        ("scheduler.replicas", pods(components.scheduler.as_deref())),
        ("etcd.clusterSize", components.etcd.as_ref().map(|etcd| etcd.cluster_size.clone())),
    ];
    for (name, count) in counts {
        let field = format!("spec.componentsOverride.{name}");
        let is_etcd = name.starts_with("etcd");
        let (most, odd) = if is_etcd { (MOST_MEMBERS, ", an odd number") } else { (MOST_REPLICAS, "") };
        let remedy = format!("write 1 to {most}{odd}, or leave the field out");
        match count {
            Some(Setting::Bad(bad)) => {
                let message = format!("{:?} is no number: {}", bad.value, bad.why);
                findings.refuse("replicas", &field, message, &remedy);
            }
            Some(Setting::Good(number)) if !(1..=most).contains(&number) => {
                findings.refuse("replicas", &field, format!("{number} is out of bounds"), &remedy);
            }
            Some(Setting::Good(number)) if is_etcd && number % 2 == 0 => {
                let message = format!("{number} members survive no more losses than {}", number - 1);
                findings.refuse("replicas", &field, message, &remedy);
            }
            Some(Setting::Good(2..)) if layout == Some(Layout::Compact) => {
                let message = "the layout compact is one pod".to_owned();
                let remedy = format!("leave the field out, or annotate {LAYOUT}: dedicated");
                findings.refuse("replicas", &field, message, &remedy);
            }
            Some(Setting::Good(_) | Setting::Unset) | None => {}
        }
    }
}

/// Resources, tolerations, anti-affinities and leader election.
fn pods(cluster: &Cluster, findings: &mut Findings) {
    let components = &cluster.spec.components_override;
    let at = |name: &str| format!("spec.componentsOverride.{name}");
    let affinity = "write preferred or required, or leave the field out";
    for (name, pods) in [
        ("apiserver", components.apiserver.pods.as_deref()),
        ("controllerManager", components.controller_manager.as_deref()),
        ("scheduler", components.scheduler.as_deref()),
    ] {
        let Some(pods) = pods else { continue };
        let at = |field: &str| at(&format!("{name}.{field}"));
        resources::check(pods.resources.as_ref(), &at("resources"), findings);
        readable(&pods.host_anti_affinity, "anti-affinity", &at("hostAntiAffinity"), affinity, findings);
        readable(&pods.zone_anti_affinity, "anti-affinity", &at("zoneAntiAffinity"), affinity, findings);
        leader_election(&pods.leader_election, &at("leaderElection"), findings);
    }
    if let Some(etcd) = components.etcd.as_deref() {
        resources::check(etcd.resources.as_ref(), &at("etcd.resources"), findings);
        readable(&etcd.host_anti_affinity, "anti-affinity", &at("etcd.hostAntiAffinity"), affinity, findings);
        readable(&etcd.zone_anti_affinity, "anti-affinity", &at("etcd.zoneAntiAffinity"), affinity, findings);
        let remedy = "write a whole number of GiB, or leave the field out for etcd's own 2 GiB";
        readable(&etcd.quota_backend_gb, "quota", &at("etcd.quotaBackendGb"), remedy, findings);
        if etcd.quota_backend_gb.get() == Some(&0) {
            let message = "0 GiB hold nothing".to_owned();
            findings.refuse("quota", &at("etcd.quotaBackendGb"), message, remedy);
        }
        resources::check_size(&etcd.disk_size, &at("etcd.diskSize"), findings);
    }
    if let Some(konnectivity) = components.konnectivity_proxy.as_deref() {
        resources::check(konnectivity.resources.as_ref(), &at("konnectivityProxy.resources"), findings);
        let remedy = "write a duration such as 1m, or leave the field out";
        let field = at("konnectivityProxy.keepaliveTime");
        readable(&konnectivity.keepalive_time, "keepalive-time", &field, remedy, findings);
    }
}

/// The programs do not start unless lease > deadline > retry.
fn leader_election(election: &LeaderElection, field: &str, findings: &mut Findings) {
    let remedy = "write whole seconds, or leave the field out";
    for (name, seconds) in [
        ("leaseDurationSeconds", &election.lease_duration_seconds),
        ("renewDeadlineSeconds", &election.renew_deadline_seconds),
        ("retryPeriodSeconds", &election.retry_period_seconds),
    ] {
        readable(seconds, "leader-election", &format!("{field}.{name}"), remedy, findings);
    }
    let seconds = |setting: &Setting<u32>, default| setting.get().copied().unwrap_or(default);
    let lease = seconds(&election.lease_duration_seconds, 15);
    let deadline = seconds(&election.renew_deadline_seconds, 10);
    let retry = seconds(&election.retry_period_seconds, 2);
    if lease <= deadline || f64::from(deadline) <= 1.2 * f64::from(retry) || retry == 0 {
        let message =
            format!("lease {lease} s, deadline {deadline} s and retry {retry} s do not go together");
        let remedy = "make the lease longer than the deadline, and the deadline than 1.2 times the retry; \
                      the defaults are 15, 10 and 2";
        findings.refuse("leader-election", field, message, remedy);
    }
}

fn feature_gates(cluster: &Cluster, findings: &mut Findings) {
    let Some(written) = cluster.metadata.annotation(FEATURE_GATES) else { return };
    let is_gate = |item: &str| {
        let (name, value) = item.split_once('=').unwrap_or((item, ""));
        !name.is_empty()
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric())
            && matches!(value, "true" | "false")
    };
    if let Some(bad) =
        written.trim().split(',').find(|item| !is_gate(item)).filter(|_| !written.trim().is_empty())
    {
        let field = format!("metadata.annotations[{FEATURE_GATES}]");
        let message = format!("{bad:?} is no feature gate");
        findings.refuse(
            "feature-gates",
            &field,
            message,
            "write NAME=true or NAME=false, separated by commas",
        );
    }
}

/// What the cluster has inside.
fn parts(cluster: &Cluster, findings: &mut Findings) {
    for message in left_out(cluster).filter_map(Result::err) {
        let remedy = "write kube-proxy, coredns or metrics-server, separated by commas";
        findings.refuse("without", &format!("metadata.annotations[{WITHOUT}]"), message, remedy);
    }
    if let Some(other) =
        cluster.metadata.annotation(PROMETHEUS).filter(|text| !matches!(*text, "true" | "false"))
    {
        let message = format!("{other:?} is neither true nor false");
        let remedy = "write \"true\" for a Prometheus of the cluster's own, or leave the annotation out";
        findings.refuse("prometheus", &format!("metadata.annotations[{PROMETHEUS}]"), message, remedy);
    }
    let mode = &*cluster.spec.cluster_network.proxy_mode;
    if !matches!(mode, "" | "iptables" | "ipvs" | "nftables" | "ebpf") {
        let message = format!("{mode:?} is no mode of kube-proxy");
        let remedy = "write iptables, ipvs or nftables, ebpf for none, or leave the field out";
        findings.refuse("proxy-mode", "spec.clusterNetwork.proxyMode", message, remedy);
    }
    let plugin = &*cluster.spec.cni_plugin.kind;
    if !matches!(plugin, "" | "none" | "canal" | "cilium") {
        let message = format!("{plugin:?} is no network plugin that is known");
        let remedy = "write none, and install one by its own manifest, or leave the field out";
        findings.refuse("cni-plugin", "spec.cniPlugin.type", message, remedy);
    } else if matches!(plugin, "canal" | "cilium") {
        let message =
            "Portico installs no network plugin: nodes are not ready before there is one".to_owned();
        let remedy = "install one by its own manifest, and write none";
        findings.void("cni-plugin", "spec.cniPlugin.type", message, remedy);
    }
}

fn service_accounts(hosting: &HostingSpec, findings: &mut Findings) {
    let issuer = &hosting.service_account.issuer;
    if !issuer.is_empty() && issuer_port(issuer).is_none() {
        let message = format!("{issuer:?} is no issuer");
        let remedy = "write https:// and a host, or leave the field out";
        findings.refuse("issuer", "spec.serviceAccount.issuer", message, remedy);
    }
    for (index, audience) in hosting.service_account.api_audiences.iter().enumerate() {
        if audience.is_empty() || audience.contains([',', ' ']) {
            let field = format!("spec.serviceAccount.apiAudiences[{index}]");
            let message = format!("{audience:?} is no audience");
            findings.refuse("audience", &field, message, "write one without spaces and commas");
        }
    }
}

fn authentication(hosting: &HostingSpec, findings: &mut Findings) {
    let Oidc { issuer_url, client_id, required_claim, .. } = &hosting.oidc;
    if !issuer_url.is_empty() && issuer_port(issuer_url).is_none() {
        let message = format!("{issuer_url:?} is no issuer");
        let remedy = "write https:// and the host of the identity provider";
        findings.refuse("oidc", "spec.oidc.issuerURL", message, remedy);
    }
    if !issuer_url.is_empty() && client_id.is_empty() {
        let message = "it is missing: tokens are for the client that it names".to_owned();
        findings.refuse("oidc", "spec.oidc.clientID", message, "write the client of the identity provider");
    }
    if let Some((key, _)) =
        required_claims(required_claim).find(|(key, value)| key.is_empty() || value.is_empty())
    {
        let message = format!("{key:?} has no value");
        findings.refuse("oidc", "spec.oidc.requiredClaim", message, "write KEY=VALUE, separated by commas");
    }
    let file = &hosting.authentication_configuration;
    if file.secret_name.is_empty() != file.secret_key.is_empty() {
        let message = "secretName and secretKey belong together".to_owned();
        findings.refuse("authentication", "spec.authenticationConfiguration", message, "write both");
    }
    if !file.secret_name.is_empty() && !issuer_url.is_empty() {
        let message = "it does not count beside authenticationConfiguration".to_owned();
        findings.void("oidc", "spec.oidc", message, "remove one of the two");
    }
}

fn admission(hosting: &HostingSpec, findings: &mut Findings) {
    for (index, plugin) in hosting.admission_plugins.iter().enumerate() {
        if plugin.is_empty() || !plugin.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            let field = format!("spec.admissionPlugins[{index}]");
            let message = format!("{plugin:?} is no admission plugin");
            findings.refuse(
                "admission-plugin",
                &field,
                message,
                "write the name of one, such as AlwaysPullImages",
            );
        }
    }
    for (kind, limit) in &hosting.event_rate_limit_config {
        let field = format!("spec.eventRateLimitConfig.{kind}");
        if !["server", "namespace", "user", "sourceAndObject"].contains(&&**kind) {
            let message = format!("{kind:?} is no type of limit");
            let remedy = "write server, namespace, user or sourceAndObject";
            findings.refuse("event-rate-limit", &field, message, remedy);
        }
        let Some(limit) = limit else { continue };
        for (name, number) in [("qps", &limit.qps), ("burst", &limit.burst), ("cacheSize", &limit.cache_size)]
        {
            readable(
                number,
                "event-rate-limit",
                &format!("{field}.{name}"),
                "write a whole number",
                findings,
            );
        }
        if [&limit.qps, &limit.burst].iter().any(|number| number.get().is_none_or(|&number| number == 0)) {
            let message = "qps and burst must be 1 or more".to_owned();
            findings.refuse("event-rate-limit", &field, message, "write both");
        }
    }
    if hosting.use_event_rate_limit_admission_plugin
        && hosting.event_rate_limit_config.values().flatten().next().is_none()
    {
        let message = "there is no limit, and the plugin does not start without one".to_owned();
        let remedy = "write a limit, or leave useEventRateLimitAdmissionPlugin out";
        findings.refuse("event-rate-limit", "spec.eventRateLimitConfig", message, remedy);
    }
}

/// Fields of KKP that Portico does not follow.
fn not_followed(cluster: &Cluster, hosting: &HostingSpec, findings: &mut Findings) {
    let reason = "not-hosted";
    if hosting.encryption_configuration.enabled {
        let message = "Portico does not encrypt Secrets at rest".to_owned();
        let remedy = "set it to false, and encrypt the volumes of etcd by their storage class";
        findings.refuse(reason, "spec.encryptionConfiguration.enabled", message, remedy);
    }
    if hosting.authorization_config.as_ref().is_some_and(|value| !value.is_null()) {
        let message = "the API servers of Portico decide by Node and RBAC, and by nothing else".to_owned();
        findings.refuse(reason, "spec.authorizationConfig", message, "leave the field out");
    }
    let audit = &hosting.audit_logging;
    let remedy = "write metadata, recommended or minimal";
    readable(&audit.policy_preset, "audit", "spec.auditLogging.policyPreset", remedy, findings);
    if audit.webhook_backend.as_ref().is_some_and(|value| !value.is_null()) {
        let message = "it does not count: the audit log goes to standard output of the API server".to_owned();
        let remedy = "collect it there with the logs of the seed, and leave the field out";
        findings.void(reason, "spec.auditLogging.webhookBackend", message, remedy);
    }
    let domain = &*cluster.spec.cluster_network.dns_domain;
    if !matches!(domain, "" | "cluster.local") {
        let message = format!("{domain:?} cannot be used: names of user clusters end with cluster.local");
        findings.refuse("dns-domain", "spec.clusterNetwork.dnsDomain", message, "leave the field out");
    }
}

#[cfg(test)]
mod tests;
