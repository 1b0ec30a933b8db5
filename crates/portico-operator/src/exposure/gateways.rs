//! Whether every gateway routes a door: each is asked by its admin listener.
//!
//! A listing has every key that is claimed, also where something keeps it from being served.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use futures_util::stream::{self, StreamExt};
use hyper::StatusCode;
use portico_api::strategy::AnsweredBy;
use portico_expose::front::ADMIN_PORT;
use portico_expose::migration::Fact;
use portico_expose::services::Entry;
use portico_routes::route::RouteKey;
use serde_json::{Value, json};

use crate::ask;

/// Gateways that are asked at the same time.
const CONCURRENCY: usize = 16;

/// Longest answer read: the routes of one cluster.
const MAX_ANSWER: usize = 256 * 1_024;

/// Whether every one of `gateways` serves what `entries` of `cluster` are reached by.
pub(super) async fn routed(
    gateways: &BTreeSet<IpAddr>,
    cluster: &str,
    entries: &[Entry],
    answered_by: AnsweredBy,
) -> Fact {
    if gateways.is_empty() {
        return Fact::NotSo("no gateway is ready behind the front Service".to_owned());
    }
    let keys: Vec<RouteKey> = entries.iter().flat_map(|entry| keys(entry, answered_by)).collect();
    let path = format!("/routes?cluster={cluster}");
    let path = &path;
    let answers = stream::iter(gateways.iter().copied())
        .map(|gateway| async move {
            (gateway, ask::get(SocketAddr::new(gateway, ADMIN_PORT), path, MAX_ANSWER).await)
        })
        .buffered(CONCURRENCY);
    let lacking = answers.filter_map(|(gateway, answer)| {
        let why = match answer {
            Ok((StatusCode::OK, body)) => lacks(&body, &keys),
            // It knows the cluster not at all yet.
            Ok((StatusCode::NOT_FOUND, _)) => keys.first().map(|key| format!("lacks {key}")),
            Ok((status, _)) => Some(format!("answers /routes with {status}")),
            Err(why) => Some(format!("port {ADMIN_PORT}: {why}")),
        };
        std::future::ready(why.map(|why| (gateway, why)))
    });
    let lacking: Vec<_> = lacking.collect().await;
    match lacking.first() {
        None => Fact::So,
        Some((gateway, why)) => {
            let (some, all) = (lacking.len(), gateways.len());
            Fact::NotSo(format!("{some} of {all} gateways do not have them: {gateway} {why}"))
        }
    }
}

/// What an entry is reached by at a gateway. NodePorts may be those of the seed's nodes instead.
fn keys(entry: &Entry, answered_by: AnsweredBy) -> impl Iterator<Item = RouteKey> + use<> {
    let by_port = entry.node_port.filter(|_| answered_by != AnsweredBy::SeedNodes).map(RouteKey::Port);
    let by_host = entry.host.clone().map(RouteKey::Host);
    let by_authority = entry.authority.clone().map(RouteKey::Authority);
    [by_port, by_host, by_authority].into_iter().flatten()
}

/// The first of `keys` that is not served, by a listing of routes.
fn lacks(listing: &[u8], keys: &[RouteKey]) -> Option<String> {
    let Ok(listing) = serde_json::from_slice::<Value>(listing) else {
        return Some("answers /routes with something else".to_owned());
    };
    keys.iter().find_map(|key| {
        let (wanted, routes) = (json!(key), listing["routes"].as_array());
        let mut of_key = routes.into_iter().flatten().filter(|route| route["key"] == wanted).peekable();
        if of_key.peek().is_none() {
            return Some(format!("lacks {key}"));
        }
        // That endpoints are ready is told by an answer of the API server.
        let is_served = |route: &Value| route["state"] == "ready" || route["state"] == "notReady";
        (!of_key.any(is_served)).then(|| format!("does not serve {key}; portico why says what is in the way"))
    })
}

#[cfg(test)]
mod tests {
    use portico_api::names::HostName;

    use super::*;

    #[test]
    fn the_first_key_that_a_gateway_lacks_is_named() {
        let (port, host) = (RouteKey::Port, RouteKey::Host(HostName::parse("a.example.com").unwrap()));
        let listing = json!({"routes": [
            {"key": {"port": 31_234}, "state": "ready"},
            {"key": {"host": "a.example.com"}, "state": "notReady"},
        ]});
        let listing = listing.to_string();
        assert_eq!(lacks(listing.as_bytes(), &[port(31_234), host.clone()]), None);
        let lacking = lacks(listing.as_bytes(), &[host, port(31_235), port(31_236)]);
        assert_eq!(lacking.as_deref(), Some("lacks port 31235"));
        assert!(lacks(b"no", &[]).is_some());
        assert!(lacks(b"{}", &[port(1)]).is_some());
    }

    #[test]
    fn a_key_that_is_claimed_and_not_served_is_lacking() {
        for state in [
            json!("listenersOff"),
            json!({"listenerFailed": {"error": "in use"}}),
            json!({"kept": {"tenant": "b"}}),
            json!({"conflict": {"winner": {}}}),
        ] {
            let listing = json!({"routes": [{"key": {"port": 31_234}, "state": state}]}).to_string();
            let lacking = lacks(listing.as_bytes(), &[RouteKey::Port(31_234)]).unwrap();
            assert!(lacking.starts_with("does not serve port 31234"), "{lacking}");
        }
    }

    #[test]
    fn node_ports_of_the_seeds_own_nodes_are_asked_of_no_gateway() {
        let host = HostName::parse("a.example.com").unwrap();
        let (service, node_port) = ("apiserver-external", Some(31_234));
        let entry = Entry { service, port: 6_443, node_port, host: Some(host.clone()), authority: None };
        let asked = |by| keys(&entry, by).collect::<Vec<_>>();
        assert_eq!(asked(AnsweredBy::SeedNodes), [RouteKey::Host(host.clone())]);
        assert_eq!(asked(AnsweredBy::Gateway), [RouteKey::Port(31_234), RouteKey::Host(host)]);
    }

    #[tokio::test]
    async fn without_a_gateway_nothing_is_routed() {
        let fact = routed(&BTreeSet::new(), "a", &[], AnsweredBy::Gateway).await;
        assert_eq!(fact, Fact::NotSo("no gateway is ready behind the front Service".to_owned()));
    }
}
