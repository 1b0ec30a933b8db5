//! Whether every gateway routes a door: each is asked by its admin listener.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use futures_util::stream::{self, StreamExt};
use hyper::StatusCode;
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

/// Whether every one of `gateways` has all keys of `entries`, which are of `cluster`.
pub(super) async fn routed(gateways: &BTreeSet<IpAddr>, cluster: &str, entries: &[Entry]) -> Fact {
    if gateways.is_empty() {
        return Fact::NotSo("no gateway is ready behind the front Service".to_owned());
    }
    let keys: Vec<RouteKey> = entries.iter().flat_map(keys).collect();
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

fn keys(entry: &Entry) -> impl Iterator<Item = RouteKey> + use<> {
    let by_port = entry.node_port.map(RouteKey::Port);
    let by_host = entry.host.clone().map(RouteKey::Host);
    let by_authority = entry.authority.clone().map(RouteKey::Authority);
    [by_port, by_host, by_authority].into_iter().flatten()
}

/// The first of `keys` that a listing of routes lacks.
fn lacks(listing: &[u8], keys: &[RouteKey]) -> Option<String> {
    let Ok(listing) = serde_json::from_slice::<Value>(listing) else {
        return Some("answers /routes with something else".to_owned());
    };
    let has = |key: &&RouteKey| {
        let (key, routes) = (json!(key), listing["routes"].as_array());
        routes.into_iter().flatten().any(|route| route["key"] == key)
    };
    keys.iter().find(|key| !has(key)).map(|key| format!("lacks {key}"))
}

#[cfg(test)]
mod tests {
    use portico_api::names::HostName;

    use super::*;

    #[test]
    fn the_first_key_that_a_gateway_lacks_is_named() {
        let port = |number| RouteKey::Port(number);
        let host = RouteKey::Host(HostName::parse("a.example.com").unwrap());
        let listing = json!({"routes": [{"key": {"port": 31_234}}, {"key": {"host": "a.example.com"}}]});
        let listing = listing.to_string();
        assert_eq!(lacks(listing.as_bytes(), &[port(31_234), host.clone()]), None);
        let lacking = lacks(listing.as_bytes(), &[host, port(31_235), port(31_236)]);
        assert_eq!(lacking.as_deref(), Some("lacks port 31235"));
        assert!(lacks(b"no", &[]).is_some());
        assert!(lacks(b"{}", &[port(1)]).is_some());
    }

    #[tokio::test]
    async fn without_a_gateway_nothing_is_routed() {
        let fact = routed(&BTreeSet::new(), "a", &[]).await;
        assert_eq!(fact, Fact::NotSo("no gateway is ready behind the front Service".to_owned()));
    }
}
