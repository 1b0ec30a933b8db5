//! What is wrong with a Seed.

use portico_api::annotations::{MAX_HOSTED, PROVIDED, TUNNEL_CERTIFICATE};
use portico_api::duration::GoDuration;
use portico_api::meta::Kind;
use portico_api::names::HostName;
use portico_api::seed::{ConnectionSettings, SHORTEST_CONNECTION_SETTING, Seed};
use portico_api::setting::Setting;

use crate::findings::{Findings, Verdict};

/// The reason of a setting by which the operator cannot make the gateway: what it has made stays.
pub(crate) const GATEWAY_SETTING: &str = "gateway-setting";

const REPLICAS: &str = "spec.nodeportProxy.envoy.replicas";

/// Checks a Seed by itself. The planner checks it against the other Seeds.
pub fn seed(seed: &Seed) -> Verdict {
    let spec = &seed.spec;
    let mut findings = Findings::of(Kind::Seed, &seed.metadata);
    findings.strategy(&spec.expose_strategy, "or leave the field out to follow the KubermaticConfiguration");

    let label = seed.dns_label();
    if let Err(error) = HostName::parse(label) {
        let field = if *label == *seed.metadata.name { "metadata.name" } else { "spec.seedDNSOverwrite" };
        let message = format!("{label:?} cannot be part of a host name: {error}");
        findings.refuse("not-a-label", field, message, "write a DNS label in spec.seedDNSOverwrite");
    }

    for (name, datacenter) in &spec.datacenters {
        let kind = datacenter.as_ref().map(|datacenter| &datacenter.spec.api_server_service_type);
        if let Some(bad) = kind.and_then(Setting::bad) {
            let field = format!("spec.datacenters.{name}.spec.apiServerServiceType");
            let message = format!("{:?} is no Service type: {}", bad.value, bad.why);
            findings.void("service-type", &field, message, "write one of them, or leave the field out");
        }
    }

    let proxy = &spec.nodeport_proxy.envoy;
    findings.networks("spec.defaultAPIServerAllowedIPRanges", &spec.default_api_server_allowed_ip_ranges);
    findings.networks(
        "spec.nodeportProxy.envoy.loadBalancerService.sourceRanges",
        &proxy.load_balancer_service.source_ranges,
    );
    findings.connection_settings(&proxy.connection_settings);
    findings.replicas(&proxy.replicas);
    findings.tunnel_certificate(seed.metadata.annotation(TUNNEL_CERTIFICATE));
    findings.max_hosted(seed.max_hosted());
    findings.verdict
}

impl Findings {
    fn replicas(&mut self, replicas: &Setting<i32>) {
        let message = match replicas {
            Setting::Unset | Setting::Good(1..) => return,
            Setting::Good(number) => format!("{number} is less than 1"),
            Setting::Bad(bad) => format!("{:?} is no number of pods: {}", bad.value, bad.why),
        };
        self.void(GATEWAY_SETTING, REPLICAS, message, "write 1 or more, or set nodeportProxy.disable");
    }

    fn tunnel_certificate(&mut self, value: Option<&str>) {
        let Some(value) = value.filter(|&value| value != PROVIDED) else { return };
        let field = format!("metadata.annotations[{TUNNEL_CERTIFICATE}]");
        let message = format!("{value:?} is not {PROVIDED:?}");
        self.void(GATEWAY_SETTING, &field, message, "write it so, or leave the annotation out");
    }

    fn max_hosted(&mut self, limit: Result<Option<usize>, &str>) {
        let Err(value) = limit else { return };
        let field = format!("metadata.annotations[{MAX_HOSTED}]");
        let message = format!("{value:?} is no number of clusters: no new one is hosted meanwhile");
        self.void("max-hosted", &field, message, "write a number, or leave the annotation out");
    }

    fn connection_settings(&mut self, settings: &ConnectionSettings) {
        for (name, setting) in [
            ("sniListenerIdleTimeout", &settings.sni_listener_idle_timeout),
            ("tunnelingConnectionIdleTimeout", &settings.tunneling_connection_idle_timeout),
            ("tunnelingStreamIdleTimeout", &settings.tunneling_stream_idle_timeout),
            ("downstreamTCPKeepaliveTime", &settings.downstream_tcp_keepalive_time),
            ("downstreamTCPKeepaliveInterval", &settings.downstream_tcp_keepalive_interval),
            ("upstreamTCPKeepaliveTime", &settings.upstream_tcp_keepalive_time),
            ("upstreamTCPKeepaliveInterval", &settings.upstream_tcp_keepalive_interval),
        ] {
            self.connection_duration(name, setting);
        }
        for (name, setting) in [
            ("downstreamTCPKeepaliveProbes", &settings.downstream_tcp_keepalive_probes),
            ("upstreamTCPKeepaliveProbes", &settings.upstream_tcp_keepalive_probes),
        ] {
            self.probes(name, setting);
        }
    }

    fn connection_duration(&mut self, name: &str, setting: &Setting<GoDuration>) {
        let message = match setting {
            Setting::Unset => return,
            Setting::Good(duration) if duration.is_zero() => return,
            Setting::Good(duration) => match duration.get() {
                Some(span) if span >= SHORTEST_CONNECTION_SETTING => return,
                Some(_) => format!("{duration} is less than a second"),
                None => format!("{duration} is negative"),
            },
            Setting::Bad(bad) => format!("{:?} is no duration: {}", bad.value, bad.why),
        };
        let field = format!("spec.nodeportProxy.envoy.connectionSettings.{name}");
        self.void("connection-setting", &field, message, "write 0 for the default, or 1s or more");
    }

    fn probes(&mut self, name: &str, setting: &Setting<i32>) {
        let message = match setting {
            Setting::Unset => return,
            // KKP writes 0 for unset in its example of a Seed.
            Setting::Good(0..) => return,
            Setting::Good(count) => format!("{count} is negative"),
            Setting::Bad(bad) => format!("{:?} is no number of probes: {}", bad.value, bad.why),
        };
        let field = format!("spec.nodeportProxy.envoy.connectionSettings.{name}");
        self.void("connection-setting", &field, message, "write 1 or more, or 0 for the default");
    }
}

#[cfg(test)]
mod tests {
    use portico_api::strategy::{ExposeStrategy, UnknownStrategy};

    use crate::testing::seed as read;

    fn problems(spec: &str) -> String {
        let verdict = super::seed(&read("north", spec));
        let lines: Vec<String> = verdict.problems.iter().map(ToString::to_string).collect();
        format!("refused: {}\n{}", verdict.refused, lines.join("\n"))
    }

    #[test]
    fn a_seed_with_everything_right_has_no_problems() {
        assert_eq!(
            problems(
                r#"{"seedDNSOverwrite": "north", "exposeStrategy": "Tunneling",
                    "defaultAPIServerAllowedIPRanges": ["198.51.100.0/24", "2001:db8::/32"],
                    "nodeportProxy": {"envoy": {"replicas": 3,
                        "connectionSettings": {"downstreamTCPKeepaliveTime": "60s",
                            "sniListenerIdleTimeout": 0, "upstreamTCPKeepaliveProbes": 0,
                            "downstreamTCPKeepaliveInterval": "10s", "downstreamTCPKeepaliveProbes": 3},
                        "loadBalancerService": {"sourceRanges": ["203.0.113.0/24"]}}},
                    "datacenters": {"lab-1": {"country": "DE", "spec": {"bringyourown": {}}}}}"#
            ),
            "refused: false\n"
        );
    }

    #[test]
    fn a_bad_network_or_strategy_refuses_the_seed() {
        let all = ExposeStrategy::one_of(ExposeStrategy::ALL);
        assert_eq!(
            problems(
                r#"{"exposeStrategy": "None", "defaultAPIServerAllowedIPRanges": ["10.0.0.1", "10.0.0"],
                    "nodeportProxy": {"envoy": {"loadBalancerService": {
                        "sourceRanges": ["", "10.0.0.0/33"]}}}}"#
            ),
            format!(
                "refused: true\n\
                 Seed kubermatic/north: spec.exposeStrategy: \"None\" is no strategy: {UnknownStrategy}; \
                 write {all}, or leave the field out to follow the KubermaticConfiguration\n\
                 Seed kubermatic/north: spec.defaultAPIServerAllowedIPRanges[1]: \"10.0.0\" is no network in \
                 CIDR notation: \"10.0.0\" is no IP address; write address and prefix length, as in \
                 198.51.100.0/24 or 198.51.100.7/32\n\
                 Seed kubermatic/north: spec.nodeportProxy.envoy.loadBalancerService.sourceRanges[0]: it is \
                 empty; write address and prefix length, as in 198.51.100.0/24 or 198.51.100.7/32\n\
                 Seed kubermatic/north: \
                 spec.nodeportProxy.envoy.loadBalancerService.sourceRanges[1]: \"10.0.0.0/33\" is no network \
                 in CIDR notation: \"33\" is no prefix length from 0 to 32; write address and prefix length, \
                 as in 198.51.100.0/24 or 198.51.100.7/32"
            )
        );
    }

    #[test]
    fn bad_connection_settings_are_void_but_the_seed_is_used() {
        assert_eq!(
            problems(
                r#"{"nodeportProxy": {"envoy": {"connectionSettings": {
                    "sniListenerIdleTimeout": "500ms", "tunnelingConnectionIdleTimeout": "-1s",
                    "tunnelingStreamIdleTimeout": 60, "downstreamTCPKeepaliveProbes": -1,
                    "upstreamTCPKeepaliveProbes": "three"}}}}"#
            ),
            "refused: false\n\
             Seed kubermatic/north: spec.nodeportProxy.envoy.connectionSettings.sniListenerIdleTimeout: 0.5s \
             is less than a second; write 0 for the default, or 1s or more\n\
             Seed kubermatic/north: \
             spec.nodeportProxy.envoy.connectionSettings.tunnelingConnectionIdleTimeout: -1s is negative; \
             write 0 for the default, or 1s or more\n\
             Seed kubermatic/north: \
             spec.nodeportProxy.envoy.connectionSettings.tunnelingStreamIdleTimeout: \"60\" is no duration: \
             a unit is missing or unknown, as in 90s or 1m30s; write 0 for the default, or 1s or more\n\
             Seed kubermatic/north: \
             spec.nodeportProxy.envoy.connectionSettings.downstreamTCPKeepaliveProbes: -1 is negative; \
             write 1 or more, or 0 for the default\n\
             Seed kubermatic/north: \
             spec.nodeportProxy.envoy.connectionSettings.upstreamTCPKeepaliveProbes: \"three\" is no number \
             of probes: invalid digit found in string; write 1 or more, or 0 for the default"
        );
    }

    #[test]
    fn settings_that_make_no_gateway_are_void_but_the_seed_is_used() {
        let replicas = "Seed kubermatic/north: spec.nodeportProxy.envoy.replicas:";
        let remedy = "; write 1 or more, or set nodeportProxy.disable";
        for (written, why) in [
            ("0", "0 is less than 1"),
            (r#""two""#, r#""two" is no number of pods: invalid digit found in string"#),
        ] {
            let spec = format!(r#"{{"nodeportProxy": {{"envoy": {{"replicas": {written}}}}}}}"#);
            assert_eq!(problems(&spec), format!("refused: false\n{replicas} {why}{remedy}"));
        }
        let mut seed = read("north", "{}");
        seed.metadata.annotations.insert("portico.k8c.io/tunnel-certificate".into(), "theirs".into());
        let verdict = super::seed(&seed);
        assert_eq!((verdict.refused, verdict.problems.len()), (false, 1));
    }

    #[test]
    fn a_quota_that_is_no_number_is_reported_and_the_seed_is_used() {
        let mut seed = read("north", "{}");
        for (value, limit, problems) in [("3", Ok(Some(3)), 0), ("-1", Err("-1"), 1), ("few", Err("few"), 1)]
        {
            seed.metadata.annotations.insert("portico.k8c.io/max-hosted-clusters".into(), value.into());
            let verdict = super::seed(&seed);
            assert_eq!((verdict.refused, verdict.problems.len()), (false, problems), "{value}");
            assert_eq!(seed.max_hosted(), limit);
        }
    }

    #[test]
    fn names_that_cannot_be_in_a_host_name_and_unknown_service_types_are_reported() {
        assert_eq!(
            problems(
                r#"{"seed_dns_overwrite": "no rth",
                    "datacenters": {"lab-1": {"spec": {"apiServerServiceType": "nodeport"}}}}"#
            ),
            "refused: true\n\
             Seed kubermatic/north: spec.seedDNSOverwrite: \"no rth\" cannot be part of a host name: the \
             label \"no rth\" may only hold letters, digits, '-' and '_', and must not begin or end with \
             '-'; write a DNS label in spec.seedDNSOverwrite\n\
             Seed kubermatic/north: spec.datacenters.lab-1.spec.apiServerServiceType: \"nodeport\" is no \
             Service type: it is none of ClusterIP, NodePort, LoadBalancer (upper and lower case matter); \
             write one of them, or leave the field out"
        );
    }
}
