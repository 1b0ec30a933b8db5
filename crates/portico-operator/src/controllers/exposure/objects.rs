//! What Services and EndpointSlices say: ports and addresses.

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
