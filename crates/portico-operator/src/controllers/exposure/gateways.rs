//! The reports of gateways about a door: whether each routes it, and the connections that came by it. Each is
//! asked by its admin listener.
//!
//! A listing of routes has every key that is claimed, also where something keeps it from being served.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{self, StreamExt};
use hyper::StatusCode;
use portico_api::listener::ListenerKind;
use portico_api::strategy::AnsweredBy;
use portico_expose::front::ADMIN_PORT;
use portico_expose::migration::Fact;
use portico_expose::migration::last_use::Counted;
use portico_expose::services::Entry;
use portico_routes::route::RouteKey;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::ask;

/// Gateways that are asked at the same time.
const CONCURRENCY: usize = 16;

/// Longest answer read: the routes of one cluster, or its doors.
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
    let answers = ask_each(gateways, &format!("/routes?cluster={cluster}")).await;
    let lacking = answers.into_iter().filter_map(|(gateway, answer)| {
        let why = match answer {
            Ok((StatusCode::OK, body)) => lacks(&body, &keys),
            // It knows the cluster not at all yet.
            Ok((StatusCode::NOT_FOUND, _)) => keys.first().map(|key| format!("lacks {key}")),
            Ok((status, _)) => Some(format!("answers /routes with {status}")),
            Err(why) => Some(why),
        };
        why.map(|why| (gateway, why))
    });
    let lacking: Vec<_> = lacking.collect();
    match lacking.first() {
        None => Fact::So,
        Some((gateway, why)) => {
            let (some, all) = (lacking.len(), gateways.len());
            Fact::NotSo(format!("{some} of {all} gateways do not have them: {gateway} {why}"))
        }
    }
}

/// The report of each of `gateways` about the connections to `cluster` by listeners of `kinds`.
///
/// # Errors
/// The reason if one of them cannot tell: the gateway, and the remedy.
pub(super) async fn counted(
    gateways: &BTreeSet<IpAddr>,
    cluster: &str,
    kinds: &BTreeSet<ListenerKind>,
) -> Result<BTreeMap<IpAddr, Counted>, String> {
    if gateways.is_empty() {
        return Err("no gateway is there that could tell".to_owned());
    }
    let answers = ask_each(gateways, &format!("/doors?cluster={cluster}")).await;
    let counts = answers.into_iter().map(|(gateway, answer)| {
        let counted = match answer {
            Ok((StatusCode::OK, body)) => of_doors(&body, cluster, kinds),
            Ok((StatusCode::NOT_FOUND, _)) => Err("it is of a version that does not count".to_owned()),
            Ok((status, _)) => Err(format!("it answers /doors with {status}")),
            Err(why) => Err(why),
        };
        counted.map(|counted| (gateway, counted)).map_err(|why| {
            format!("whether it is used is unknown while the gateway {gateway} does not say: {why}")
        })
    });
    counts.collect()
}

/// Asks each gateway for `path`.
async fn ask_each(
    gateways: &BTreeSet<IpAddr>,
    path: &str,
) -> Vec<(IpAddr, Result<(StatusCode, Bytes), String>)> {
    let ask = |gateway| async move {
        let answer = ask::get(SocketAddr::new(gateway, ADMIN_PORT), path, MAX_ANSWER).await;
        (gateway, answer.map_err(|why| format!("port {ADMIN_PORT}: {why}")))
    };
    stream::iter(gateways.iter().copied()).map(ask).buffered(CONCURRENCY).collect().await
}

/// What a gateway counts for one cluster. Kinds of listeners that are not known here are none of a door.
#[derive(Debug, Deserialize)]
struct Doors {
    cluster: Box<str>,
    since: Box<str>,
    doors: Vec<Value>,
}

#[derive(Debug, Deserialize)]
struct Door {
    open: u64,
    used: u64,
    clients: Vec<Client>,
}

#[derive(Debug, Deserialize)]
struct Client {
    address: IpAddr,
    unused_seconds: u64,
}

/// What a listing says of the doors by `kinds`. A kind that is not in it was never used.
fn of_doors(listing: &[u8], cluster: &str, kinds: &BTreeSet<ListenerKind>) -> Result<Counted, String> {
    let other = |_| "it answers /doors with something else".to_owned();
    let listing: Vec<Doors> = serde_json::from_slice(listing).map_err(other)?;
    let of_cluster = listing.into_iter().find(|doors| *doors.cluster == *cluster);
    let of_cluster = of_cluster.ok_or("it does not know the cluster yet")?;
    let mut counted = Counted { since: of_cluster.since, ..Counted::default() };
    for door in of_cluster.doors {
        let is_of_door = |kind: &ListenerKind| door["listener"] == kind.as_str();
        if !kinds.iter().any(is_of_door) {
            continue;
        }
        let door: Door = serde_json::from_value(door).map_err(other)?;
        counted.used = counted.used.saturating_add(door.used);
        counted.open = counted.open.saturating_add(door.open);
        let clients = door.clients.into_iter();
        let ago = |client: Client| (client.address, Duration::from_secs(client.unused_seconds));
        counted.clients.extend(clients.map(ago));
    }
    Ok(counted)
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
        // An answer of the API server says that endpoints are ready.
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

    #[test]
    fn what_a_gateway_counts_is_read_for_the_kinds_of_one_door_and_anything_else_is_no_answer() {
        let kinds = BTreeSet::from([ListenerKind::Sni, ListenerKind::Tunnel]);
        let door = |listener: &str, open: u64, used: u64, client: &str| {
            json!({"listener": listener, "open": open, "opened": 9, "used": used, "unused_seconds": 3,
                "clients": [{"address": client, "open": open, "unused_seconds": 3}]})
        };
        let of_a = |doors: Value| json!([{"cluster": "a", "since": "t", "doors": doors}]).to_string();
        let all = of_a(json!([
            door("sni", 1, 2, "192.0.2.1"),
            door("tunnel", 0, 3, "192.0.2.2"),
            door("node_port", 7, 7, "192.0.2.3"),
            {"listener": "of a newer version"},
        ]));
        let clients = ["192.0.2.1", "192.0.2.2"].map(|text| (text.parse().unwrap(), Duration::from_secs(3)));
        let expected = Counted { since: "t".into(), used: 5, open: 1, clients: clients.to_vec() };
        assert_eq!(of_doors(all.as_bytes(), "a", &kinds), Ok(expected));
        let never = Counted { since: "t".into(), ..Counted::default() };
        assert_eq!(of_doors(of_a(json!([])).as_bytes(), "a", &kinds), Ok(never));
        let broken = of_a(json!([{"listener": "sni", "open": "many"}]));
        for (listing, cluster) in [("[]", "a"), (&*all, "b"), ("{}", "a"), ("no", "a"), (&*broken, "a")] {
            assert!(of_doors(listing.as_bytes(), cluster, &kinds).is_err(), "{listing}");
        }
    }

    #[tokio::test]
    async fn without_a_gateway_nothing_is_routed() {
        let fact = routed(&BTreeSet::new(), "a", &[], AnsweredBy::Gateway).await;
        assert_eq!(fact, Fact::NotSo("no gateway is ready behind the front Service".to_owned()));
        assert!(counted(&BTreeSet::new(), "a", &BTreeSet::new()).await.is_err(), "and no silence is a proof");
    }
}
