//! Tries whether agents of this machine will reach their servers: names resolve, and something accepts.
//!
//! The cluster names these addresses, and what is tried is bounded: its administrator may be anybody. What
//! they need is tried without the corporate proxy that the environment may name, as pods know nothing of it.

use std::net::{IpAddr, SocketAddr};

use futures_util::future::join_all;
use portico_dial::{Dialer, ProxyFiles, ProxySetting, Target};
use portico_hosting::join::machine::KubeletConfig;
use portico_hosting::join::reach::{Purpose, Way};
use portico_preflight::Observation;
use portico_preflight::check::{Limits, dns, tcp};

use crate::checks::Findings;

/// Most addresses of a name that are tried, of each family: a machine may have one of them alone.
const MOST: usize = 4;

/// What came of trying one.
struct Tried<'a> {
    way: &'a Way,
    target: Target,
    /// By address, or of the name.
    seen: Vec<(Option<SocketAddr>, Observation)>,
}

/// Tries all at once.
pub async fn look(kubelet: &KubeletConfig, findings: &mut Findings) {
    let ways = match kubelet.ways() {
        Ok(ways) => ways,
        Err(why) => {
            return findings.warn(format!(
                "where the agents of a node go was not tried: ConfigMap kube-system/kubelet-config has a key \
                 reach that this version cannot read: {why}. Use `portico` of the operator's version"
            ));
        }
    };
    // The environment's proxy is that of this shell. If it cannot be used, there is none.
    let dialer = Dialer::new(ProxySetting::Env, ProxyFiles::default()).unwrap_or_else(|_| Dialer::direct());
    let mut targets = Vec::new();
    for way in &ways {
        match way.address.parse::<Target>() {
            Ok(target) => targets.push((way, target)),
            Err(error) => findings.warn(format!("{}: not tried: {error}", way.address)),
        }
    }
    let trying = targets.into_iter().map(|(way, target)| attempt(way, target));
    let tried = join_all(trying).await;
    for purpose in Purpose::ALL {
        let of_this = || tried.iter().filter(move |one| one.way.purpose == purpose);
        let one_answers = of_this().any(Tried::answers);
        for one in of_this().filter(|one| !one.answers()) {
            let text = one.describe();
            let by_proxy = dialer.via(&one.target).is_some();
            if purpose == Purpose::Tunnel && !one_answers && !by_proxy {
                findings.fail(text);
            } else {
                findings.warn(text);
            }
        }
    }
}

async fn attempt(way: &Way, target: Target) -> Tried<'_> {
    let resolved = dns::resolve(&Dialer::direct(), &target.host).await;
    let Observation::Resolved { addresses } = resolved else {
        return Tried { way, target, seen: vec![(None, resolved)] };
    };
    let (v4, v6): (Vec<IpAddr>, Vec<IpAddr>) = addresses.into_iter().partition(IpAddr::is_ipv4);
    let tried = v4.into_iter().take(MOST).chain(v6.into_iter().take(MOST));
    let connects = tried
        .map(|address| SocketAddr::new(address, target.port))
        .map(|to| async move { (Some(to), tcp::check(to, Limits::default()).await.seen) });
    let seen = join_all(connects).await;
    Tried { way, target, seen }
}

impl Tried<'_> {
    fn answers(&self) -> bool {
        self.seen.iter().any(|(_, seen)| matches!(seen, Observation::Answered { .. }))
    }

    /// What is missing, for what, and who can help.
    fn describe(&self) -> String {
        let Self { way, target, seen } = self;
        let what = match way.purpose {
            Purpose::Tunnel => "a gateway of the seed, by which pods of this machine reach the API server",
            Purpose::Konnectivity => {
                "the Konnectivity server, by which logs, exec and webhooks work once its agent runs on this \
                 machine"
            }
        };
        let each = seen.iter().map(|(address, seen)| match address {
            Some(address) => format!("{}: {seen}", address.ip()),
            None => seen.to_string(),
        });
        let port = target.port;
        let remedy = match seen.first() {
            Some((None, _)) => "have the name put into the DNS that this machine asks".to_owned(),
            Some((_, Observation::Refused { .. } | Observation::Reset)) => format!(
                "the seed's administrator sees whether tcp/{port} is served there, and the owner of a \
                 firewall on the way, whether it refuses"
            ),
            _ => format!(
                "the owner of the firewalls between has to let this machine through to tcp/{port} there; \
                 `portico firewall` prints the rules"
            ),
        };
        let each = each.collect::<Vec<_>>().join(", ");
        format!("no answer at {}, {what}: {each}; {remedy}", way.address)
    }
}

#[cfg(test)]
mod tests {
    use portico_lab::refusing::Refusing;
    use std::net::TcpListener;

    use serde_json::json;

    use super::*;

    async fn lines(reach: &str) -> String {
        let kubelet = "kind: KubeletConfiguration\napiVersion: kubelet.config.k8s.io/v1beta1\n";
        let object = json!({"data": {"kubelet": kubelet, "reach": reach,
            "client-ca.crt": "-----BEGIN CERTIFICATE-----"}});
        let mut findings = Findings::default();
        look(&KubeletConfig::read(&object).unwrap(), &mut findings).await;
        findings.lines()
    }

    #[tokio::test]
    async fn one_gateway_of_several_is_enough_and_another_node_may_reach_konnectivity() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let open = listener.local_addr().unwrap();
        let refusing = Refusing::start().unwrap();
        let closed = refusing.address();
        assert_eq!(lines(&format!("konnectivity {open}\ntunnel {open}\n")).await, "");
        let found = lines(&format!("tunnel {open}\ntunnel {closed}\n")).await;
        assert!(found.starts_with(&format!("WARN no answer at {closed}, a gateway")), "{found}");
        assert_eq!(found.lines().count(), 1, "{found}");
        let found = lines(&format!("konnectivity {closed}\ntunnel {closed}\n")).await;
        assert!(found.contains(&format!("FAIL no answer at {closed}, a gateway")), "{found}");
        assert!(found.contains(&format!("WARN no answer at {closed}, the Konnectivity server")), "{found}");
        assert!(found.contains("127.0.0.1: refused (reset); the seed's administrator"), "{found}");
        assert!(found.contains(&format!("tcp/{} is served", closed.port())), "{found}");
    }

    #[tokio::test]
    async fn names_that_do_not_resolve_and_lines_that_are_not_known_are_reported() {
        let found = lines("tunnel a_b.invalid:8088\n").await;
        assert!(
            found.starts_with("FAIL no answer at a_b.invalid:8088") && found.contains("DNS that"),
            "{found}"
        );
        let found = lines("tunnel a:b:8088\n").await;
        assert!(found.starts_with("WARN a:b:8088: not tried: the host is neither"), "{found}");
        let found = lines("mesh 192.0.2.1:8088\n").await;
        assert!(
            found.starts_with("WARN") && found.contains("its line 1") && found.contains("version"),
            "{found}"
        );
    }
}
