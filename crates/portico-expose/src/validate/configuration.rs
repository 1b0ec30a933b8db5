//! What is wrong with a KubermaticConfiguration.

use portico_api::configuration::KubermaticConfiguration;
use portico_api::meta::Kind;
use portico_api::names::HostName;

use crate::findings::{Findings, Verdict};
use crate::strategy;

/// Checks the configuration of an installation.
pub fn configuration(configuration: &KubermaticConfiguration) -> Verdict {
    let spec = &configuration.spec;
    let mut findings = Findings::of(Kind::KubermaticConfiguration, &configuration.metadata);
    findings.strategy(&spec.expose_strategy, "or leave the field out for NodePort");

    let field = "spec.ingress.domain";
    let domain = &spec.ingress.domain;
    if domain.is_empty() {
        let by_name = strategy::names(|strategy| strategy.needs_domain());
        let message =
            format!("it is empty, so no cluster has a host name and none can use the strategy {by_name}");
        findings.void("domain-missing", field, message, "write the base domain, as in kkp.example.com");
    } else if let Err(error) = HostName::parse(domain) {
        let message = format!("{domain:?} is no domain: {error}");
        findings.refuse("not-a-domain", field, message, "write the base domain, as in kkp.example.com");
    }

    if let Some(bad) = spec.user_cluster.node_port_range.bad() {
        let message = format!("{:?} is no port range: {}", bad.value, bad.why);
        let remedy = "write the seed's own NodePort range, or leave the field out for 30000-32767";
        findings.refuse("node-port-range", "spec.userCluster.nodePortRange", message, remedy);
    }
    findings.verdict
}

#[cfg(test)]
mod tests {
    use portico_api::strategy::{ExposeStrategy, UnknownStrategy};

    use crate::strategy;
    use crate::testing::configuration as read;

    fn problems(spec: &str) -> String {
        let verdict = super::configuration(&read(spec));
        let lines: Vec<String> = verdict.problems.iter().map(ToString::to_string).collect();
        format!("refused: {}\n{}", verdict.refused, lines.join("\n"))
    }

    #[test]
    fn a_configuration_without_a_domain_is_used_but_reported() {
        let by_name = strategy::names(|strategy| strategy.needs_domain());
        assert_eq!(
            problems("{}"),
            format!(
                "refused: false\n\
                 KubermaticConfiguration kubermatic/kubermatic: spec.ingress.domain: it is empty, so no \
                 cluster has a host name and none can use the strategy {by_name}; write the base domain, as \
                 in kkp.example.com"
            )
        );
    }

    #[test]
    fn every_bad_field_is_named_with_its_value() {
        let all = ExposeStrategy::one_of(ExposeStrategy::ALL);
        assert_eq!(
            problems(
                r#"{"exposeStrategy": "Nodeport", "ingress": {"domain": "kkp..com"},
                    "userCluster": {"nodePortRange": "32767-30000"}}"#
            ),
            format!(
                "refused: true\n\
                 KubermaticConfiguration kubermatic/kubermatic: spec.exposeStrategy: \"Nodeport\" is no \
                 strategy: {UnknownStrategy}; write {all}, or leave the field out for NodePort\n\
                 KubermaticConfiguration kubermatic/kubermatic: spec.ingress.domain: \"kkp..com\" is no \
                 domain: the label \"\" must have 1 to 63 characters; write the base domain, as in \
                 kkp.example.com\n\
                 KubermaticConfiguration kubermatic/kubermatic: spec.userCluster.nodePortRange: \
                 \"32767-30000\" is no port range: its first port is greater than its last; write the seed's \
                 own NodePort range, or leave the field out for 30000-32767"
            )
        );
    }
}
