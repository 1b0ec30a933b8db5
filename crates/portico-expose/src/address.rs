//! `status.address` of a Cluster, from the endpoint that its strategy gives it. The fields are those of KKP.

use portico_api::cluster::Address;
use portico_api::service::ServiceType;

use crate::hosts::bracketed;
use crate::inputs::Inputs;
use crate::services::APISERVER;
use crate::strategy::Endpoint;

/// `status.address`.
pub(crate) fn address(inputs: &Inputs<'_>, endpoint: &Endpoint) -> Address {
    // Without a domain there is no name; the address is then all there is to give to users.
    let external_name = match (&endpoint.name, endpoint.ip) {
        (Some(name), _) => name.clone(),
        (None, Some(ip)) => ip.to_string(),
        (None, None) => String::new(),
    };
    let url = match endpoint.port {
        Some(port) if !external_name.is_empty() => format!("https://{}:{port}", bracketed(&external_name)),
        _ => String::new(),
    };
    let namespace = inputs.scope.cluster.name().namespace();
    Address {
        url: url.into(),
        port: endpoint.port,
        external_name: external_name.into(),
        internal_url: format!("{APISERVER}.{namespace}.svc.cluster.local.").into(),
        ip: endpoint.ip,
        api_server_external_address: api_server_load_balancer(inputs).into(),
    }
}

/// The address of `apiserver-external`, where a datacenter makes it a load balancer; empty otherwise.
fn api_server_load_balancer(inputs: &Inputs<'_>) -> String {
    if inputs.scope.api_server_type() != Some(ServiceType::LoadBalancer) {
        return String::new();
    }
    let ingress = &inputs.known.apiserver;
    let hostname = ingress.iter().map(|ingress| &*ingress.hostname).find(|name| !name.is_empty());
    let ip = ingress.iter().find_map(|ingress| ingress.ip).map(|ip| ip.to_string());
    hostname
        .map(str::to_owned)
        .or(ip)
        .map_or_else(String::new, |host| format!("https://{}", bracketed(&host)))
}
