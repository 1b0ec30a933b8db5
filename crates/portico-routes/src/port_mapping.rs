//! The port mapping annotation: which server name leads to which port of a Service.
//!
//! A JSON object from port name to host name. KKP drops the SNI part of the whole Service over one bad entry;
//! here a bad entry costs that entry. A host that another port or Service claims too is decided in
//! [`crate::claims`].

use std::collections::BTreeMap;
use std::net::IpAddr;

use portico_api::annotations::PORT_MAPPING;
use portico_api::names::HostName;
use serde_json::Value;

use crate::facts::ExposedPort;
use crate::findings::{Findings, annotation_field, shown};

/// Gives each port the host name that `annotation` maps it to.
pub(crate) fn apply(annotation: Option<&str>, ports: &mut [ExposedPort], findings: &mut Findings) {
    let Some(text) = annotation else {
        findings.error(
            "mapping-missing",
            annotation_field(PORT_MAPPING),
            "SNI is asked for, but no port is mapped to a host name",
            "set it to a JSON object such as {\"secure\":\"name.example.com\"}, \
             or take SNI out of the expose annotation",
        );
        return;
    };
    match serde_json::from_str::<BTreeMap<String, Value>>(text) {
        Ok(mapping) if mapping.is_empty() => apply(None, ports, findings),
        Ok(mapping) => mapping.iter().for_each(|(name, host)| entry(name, host, ports, findings)),
        Err(error) => findings.error(
            "bad-mapping",
            annotation_field(PORT_MAPPING),
            format!("{} is no JSON object: {error}", shown(text)),
            r#"write it as {"port name":"host name"}"#,
        ),
    }
}

fn entry(name: &str, host: &Value, ports: &mut [ExposedPort], findings: &mut Findings) {
    let field = || annotation_field(PORT_MAPPING);
    let Some(port) = ports.iter_mut().find(|port| *port.name == *name) else {
        let message = format!("the Service has no TCP port named {}", shown(name));
        return findings.error(
            "bad-mapping",
            field(),
            message,
            "use a name from spec.ports, or remove the entry",
        );
    };
    let Some(text) = host.as_str() else {
        let message =
            format!("port {} is mapped to {}, which is no text", shown(name), shown(&host.to_string()));
        return findings.error("bad-mapping", field(), message, "put the host name in quotes");
    };
    if text.trim_end_matches('.').parse::<IpAddr>().is_ok() {
        let message = format!(
            "port {} is mapped to {}, which is an IP address: clients never send one as server name",
            shown(name),
            shown(text)
        );
        let remedy = "use a full DNS name; by its address a Service is reached by NodePort only";
        return findings.error("bad-host", field(), message, remedy);
    }
    match HostName::parse_pattern(text) {
        Ok(host) => port.host = Some(host),
        Err(error) => {
            let message =
                format!("port {} is mapped to {}, which is no host name: {error}", shown(name), shown(text));
            findings.error("bad-host", field(), message, "use a full DNS name, or *. and one");
        }
    }
}
