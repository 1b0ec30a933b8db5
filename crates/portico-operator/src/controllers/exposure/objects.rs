//! What Services and EndpointSlices say: ports and addresses.

use std::collections::BTreeSet;
use std::net::IpAddr;

use portico_expose::exposure::NodePorts;
use serde_json::Value;

/// The NodePorts of a Service, by its name and those of its ports.
pub(super) fn node_ports_of(name: &str, service: &Value) -> NodePorts {
    let ports = service.pointer("/spec/ports").and_then(Value::as_array).into_iter().flatten();
    ports
        .filter_map(|port| {
            let number = u16::try_from(port["nodePort"].as_u64()?).ok().filter(|&number| number != 0)?;
            Some(((name.into(), port["name"].as_str().unwrap_or_default().into()), number))
        })
        .collect()
}

/// The ports at which a Service is reached by its own addresses.
pub(super) fn ports_of(service: &Value) -> BTreeSet<u16> {
    let ports = service.pointer("/spec/ports").and_then(Value::as_array).into_iter().flatten();
    ports.filter_map(|port| u16::try_from(port["port"].as_u64()?).ok()).collect()
}

/// The addresses of an EndpointSlice that are ready.
pub(crate) fn addresses_of(slice: &Value) -> Vec<IpAddr> {
    let is_ready = |endpoint: &Value| endpoint.pointer("/conditions/ready") != Some(&Value::Bool(false));
    addresses(slice, is_ready).collect()
}

/// All of them: also what is about to end, and serves what was opened before.
pub(super) fn all_addresses_of(slice: &Value) -> Vec<IpAddr> {
    addresses(slice, |_| true).collect()
}

fn addresses(slice: &Value, which: impl Fn(&Value) -> bool) -> impl Iterator<Item = IpAddr> {
    let endpoints = slice["endpoints"].as_array().into_iter().flatten();
    endpoints
        .filter(move |endpoint| which(endpoint))
        .flat_map(|endpoint| endpoint["addresses"].as_array().into_iter().flatten())
        .filter_map(|address| address.as_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_service_has_the_ports_of_its_address_and_not_those_of_nodes() {
        let ports = json!([{"port": 6_443, "nodePort": 31_001}, {"port": 31_002, "targetPort": 8_132}]);
        assert_eq!(ports_of(&json!({"spec": {"ports": ports}})), [6_443, 31_002].into());
        assert_eq!(ports_of(&json!({"spec": {}})), [].into());
    }
}
