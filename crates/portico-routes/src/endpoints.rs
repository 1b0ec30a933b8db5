//! EndpointSlices to upstream addresses.
//!
//! A Service may have several slices (one per address family, more for many pods). Only endpoints whose
//! `ready` is exactly `true` count: `null` means that their state is not known yet. `serving` and
//! `terminating` are ignored, as in KKP.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use portico_api::endpoint_slice::EndpointSlice;
use portico_api::intern::Interner;
use portico_api::meta::{Kind, ObjectRef};
use portico_api::service::Protocol;
use smallvec::SmallVec;

use crate::endpoint_rules::EndpointRules;
use crate::facts::{RareSliceFacts, SliceFacts, boxed};
use crate::findings::{Findings, shown};
use crate::route::Endpoints;

/// `addressType` of slices that hold names instead of addresses.
const FQDN: &str = "FQDN";

/// Most endpoints of one Service port. A control plane has three, or five; one EndpointSlice may hold a
/// thousand addresses and twenty thousand ports.
pub(crate) const MAX_ENDPOINTS: usize = 128;

/// Most endpoints, of all ports together, for which the [allow list](crate::allow_lists) of a Service holds
/// everywhere.
pub(crate) const MAX_LISTED: usize = 4_096;

/// Reads what routes need from `slice`.
pub(crate) fn read(slice: &EndpointSlice, rules: &EndpointRules, names: &mut Interner) -> SliceFacts {
    let mut findings = Findings::of(ObjectRef::new(Kind::EndpointSlice, &slice.metadata));
    let (mut ready, mut not_ready) = (SmallVec::new(), Vec::new());
    let has_names = &*slice.address_type == FQDN;
    let mut refused = 0;
    if has_names {
        refused = u32::try_from(slice.endpoints.len()).unwrap_or(u32::MAX);
        findings.error(
            "fqdn-endpoints",
            "addressType",
            "endpoints are addresses; names are not looked up, so no connection goes there",
            "write a slice of addressType IPv4 or IPv6",
        );
    }
    for (index, endpoint) in slice.endpoints.iter().enumerate().filter(|_| !has_names) {
        let Some(text) = endpoint.addresses.first() else { continue };
        let address = text.parse::<IpAddr>();
        if let Some(why) = address.as_ref().ok().and_then(|&address| rules.refusal(address)) {
            refused += 1;
            findings.error(
                "endpoint-refused",
                format!("endpoints[{index}].addresses[0]"),
                format!("{} is {why}; no connection goes there", shown(text)),
                "write the address of the control plane, or remove the endpoint",
            );
            continue;
        }
        match address {
            Ok(address) if endpoint.conditions.ready == Some(true) => ready.push(address.to_canonical()),
            Ok(address) => not_ready.push(address.to_canonical()),
            Err(_) => findings.error(
                "bad-address",
                format!("endpoints[{index}].addresses[0]"),
                format!("{} is no IP address", shown(text)),
                "write an IPv4 or IPv6 address",
            ),
        }
    }
    let ports = slice.ports.iter().filter(|port| port.protocol.unwrap_or_default() == Protocol::TCP);
    let ports = ports.filter_map(|port| {
        let number = port.port.filter(|&number| number != 0)?;
        Some((names.get(port.name.as_deref().unwrap_or_default()), number))
    });
    SliceFacts {
        name: Arc::clone(&slice.metadata.name),
        ready,
        ports: ports.collect(),
        rare: boxed(RareSliceFacts {
            not_ready: not_ready.into(),
            refused,
            problems: findings.into_problems(),
        }),
    }
}

/// The ready endpoints of the Service port named `port_name`, but for addresses that are refused: sorted,
/// without repetition. An unnamed Service port takes any port of its slices: it is the only one. If there are
/// too many, the first as written count, by slice.
pub(crate) fn ready(
    slices: &[SliceFacts],
    port_name: &str,
    is_refused: impl Fn(IpAddr) -> bool,
) -> Endpoints {
    let written = slices.iter().flat_map(|slice| {
        let of_port = move |port| slice.ready.iter().map(move |&address| SocketAddr::new(address, port));
        ports(slice, port_name).flat_map(of_port)
    });
    let mut endpoints: Endpoints =
        written.take(MAX_ENDPOINTS).filter(|endpoint| !is_refused(endpoint.ip())).collect();
    endpoints.sort_unstable();
    endpoints.dedup();
    endpoints.shrink_to_fit();
    endpoints
}

/// How many endpoints of the Service port named `port_name` are not ready.
pub(crate) fn not_ready(slices: &[SliceFacts], port_name: &str) -> usize {
    slices.iter().filter(|slice| serves(slice, port_name)).map(|slice| slice.not_ready().len()).sum()
}

/// Whether `slice` has a port that the Service port named `port_name` leads to.
pub(crate) fn serves(slice: &SliceFacts, port_name: &str) -> bool {
    ports(slice, port_name).next().is_some()
}

/// Whether the Service port named `port_name` has more ready endpoints than are used.
pub(crate) fn are_too_many(slices: &[SliceFacts], port_name: &str) -> bool {
    let count = |slice: &SliceFacts| slice.ready.len() * ports(slice, port_name).count();
    slices.iter().map(count).sum::<usize>() > MAX_ENDPOINTS
}

/// How many endpoints there are, of every port, ready or not.
pub(crate) fn count(slices: &[SliceFacts]) -> usize {
    slices.iter().map(|slice| (slice.ready.len() + slice.not_ready().len()) * slice.ports.len()).sum()
}

/// The ports of `slice` that the Service port named `port_name` leads to.
fn ports<'a>(slice: &'a SliceFacts, port_name: &'a str) -> impl Iterator<Item = u16> {
    let fits = move |name: &str| port_name.is_empty() || *name == *port_name;
    slice.ports.iter().filter(move |(name, _)| fits(name)).map(|(_, port)| *port)
}

/// Every endpoint of every port, ready or not.
pub(crate) fn all(slices: &[SliceFacts]) -> impl Iterator<Item = SocketAddr> {
    slices.iter().flat_map(|slice| {
        let ports = slice.ports.iter().map(|(_, port)| *port);
        ports.flat_map(|port| slice.addresses().map(move |address| SocketAddr::new(address, port)))
    })
}
