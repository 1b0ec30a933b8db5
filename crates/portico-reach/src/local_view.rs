//! The view of a cluster's address from this machine: name, handshake, clock.

use std::net::IpAddr;

use portico_api::cluster::Cluster;
use portico_dial::{Dialer, ProxyFiles, ProxySetting, Target};
use portico_preflight::check::{Limits, dns, tls};
use portico_preflight::{Observation, TlsSession};

use crate::chain::Chain;
use crate::links::Link;

/// A clock may differ by that much before a warning is due, in milliseconds.
const CLOCK_SKEW: i64 = 60_000;

/// Name and handshake.
pub(crate) async fn try_address(chain: &mut Chain, cluster: &Cluster) {
    let address = &cluster.status.address;
    let (name, Some(port)) = (&address.external_name, address.port) else {
        return chain.push(Link::broken("address", "the Cluster has no address yet", "see its condition"));
    };
    let dialer = match Dialer::new(ProxySetting::Env, ProxyFiles::default()) {
        Ok(dialer) => dialer,
        Err(error) => return chain.push(Link::unknown("name", error.to_string(), "")),
    };
    if name.parse::<IpAddr>().is_err() {
        let seen = dns::resolve(&dialer, name).await;
        chain.push(resolved(name, &seen, &chain.front));
    }
    if chain.broken().is_some() {
        return;
    }
    let target = Target { host: name.clone(), port };
    let (trust, alpn) = (tls::Trust::Any, vec!["http/1.1".into()]);
    let server = tls::Server { target, name: name.clone(), trust, alpn };
    let handshake = tls::check(&dialer, &server, Limits::default()).await;
    chain.push(answered(&address.url, name, &handshake.seen));
    if let Some(ahead) = handshake.ahead_millis.filter(|ahead| ahead.abs() > CLOCK_SKEW) {
        let text = format!("the API server's clock differs from the one here by {} s", ahead / 1_000);
        chain.push(Link::unknown("clock", text, "certificates and tokens depend on it: see NTP on both"));
    }
}

/// Where the name leads.
fn resolved(name: &str, seen: &Observation, front: &[String]) -> Link {
    const LINK: &str = "name";
    let Observation::Resolved { addresses } = seen else {
        let remedy = format!("let it lead to {}", front.join(", "));
        return Link::broken(LINK, format!("{name}: {seen}"), remedy);
    };
    let shown: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    let text = format!("{name} leads to {}", shown.join(", "));
    if shown.iter().any(|address| front.contains(address)) {
        return Link::holds(LINK, text);
    }
    let remedy = format!("fine if something there forwards to {}; else correct DNS", front.join(", "));
    Link::unknown(LINK, text, remedy)
}

/// What answers at the address.
fn answered(url: &str, name: &str, seen: &Observation) -> Link {
    const LINK: &str = "TLS";
    let Observation::Tls(session) = seen else {
        let remedy = "tried from here; a client elsewhere may fare better. See firewalls on the way, and the \
                      source ranges of the load balancer";
        return Link::broken(LINK, format!("{url}: {seen}"), remedy);
    };
    let TlsSession { names, issuer, .. } = &**session;
    if names.iter().any(|found| **found == *name) {
        return Link::holds(LINK, format!("{url} answers with a certificate of {issuer} for this name"));
    }
    let names: Vec<&str> = names.iter().map(|name| &**name).collect();
    let text = format!("{url}: the certificate, of {issuer}, is for {}", names.join(", "));
    Link::broken(LINK, text, "another server answers there, or the API server's certificate lacks the name")
}
