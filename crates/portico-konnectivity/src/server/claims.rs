//! Which identifiers an agent may claim: those that its identity is bound to (`--bind-identifiers`).
//!
//! A dial goes to an agent that claims the dialled host. Without bindings any agent that is admitted may
//! claim any host, as upstream. So it can get the dials of another. With bindings, an identity claims what
//! one of its bindings names, and an agent that claims more is refused. Somebody else has vouched for an
//! identity. It is the common name or an alternative name of a certificate, the service account of a token,
//! or the node that the token's pod runs on.

use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;
use portico_wire::konnectivity::Identifiers;
use portico_wire::konnectivity::identifiers::IdentifiersError;
use thiserror::Error;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

/// Stands for any text in an identity, and for the same text in identifiers.
const ANY: char = '*';

/// `IDENTITY=IDENTIFIERS`: what an identity may claim. One `*` in the identity stands for any text, which
/// each `*` in the identifiers repeats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binding {
    identity: String,
    identifiers: Identifiers,
}

/// Why a text is no binding.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BindingError {
    /// There is no identity.
    #[error("give IDENTITY=IDENTIFIERS, such as agent-1=host=node-1 or node:*=host=*")]
    Identity,
    /// An identity is found by one `*` at most.
    #[error("an identity has one * at most, and identifiers have * only if it has one")]
    Star,
    /// The identifiers cannot be read.
    #[error("the identifiers: {0}")]
    Identifiers(#[from] IdentifiersError),
    /// One is unknown.
    #[error("{0:?} is no identifier; give ipv4, ipv6, host, cidr or default-route, joined by &")]
    Unknown(String),
    /// A network is none.
    #[error("cidr={0} is no network; write cidr=10.0.0.0/8")]
    Network(String),
}

impl FromStr for Binding {
    type Err = BindingError;

    fn from_str(text: &str) -> Result<Self, BindingError> {
        let (identity, query) = text.split_once('=').ok_or(BindingError::Identity)?;
        if identity.is_empty() || query.is_empty() {
            return Err(BindingError::Identity);
        }
        let stars = identity.matches(ANY).count();
        if stars > 1 || stars == 0 && query.contains(ANY) {
            return Err(BindingError::Star);
        }
        let identifiers = Identifiers::parse(query)?;
        if let Some(unknown) = identifiers.unknown.first() {
            return Err(BindingError::Unknown(unknown.clone()));
        }
        let is_network = |text: &&String| text.contains(ANY) || text.parse::<IpNet>().is_ok();
        if let Some(wrong) = identifiers.cidr.iter().find(|text| !is_network(text)) {
            return Err(BindingError::Network(wrong.clone()));
        }
        Ok(Self { identity: identity.to_owned(), identifiers })
    }
}

impl Binding {
    /// What `identity` may claim by this binding.
    fn of(&self, identity: &str) -> Option<Identifiers> {
        let Some((before, behind)) = self.identity.split_once(ANY) else {
            return (self.identity == identity).then(|| self.identifiers.clone());
        };
        let text = identity.strip_prefix(before)?.strip_suffix(behind)?;
        let named = |values: &[String]| values.iter().map(|value| value.replace(ANY, text)).collect();
        let Identifiers { ipv4, ipv6, host, cidr, default_route, unknown: _ } = &self.identifiers;
        Some(Identifiers {
            ipv4: named(ipv4),
            ipv6: named(ipv6),
            host: named(host),
            cidr: named(cidr),
            default_route: *default_route,
            unknown: Vec::new(),
        })
    }
}

/// The first claim that none of the bindings of these identities allows, as an agent writes it. Without
/// bindings, everything is allowed.
pub(crate) fn forbidden(
    bindings: &[Binding],
    identities: &[String],
    claimed: &Identifiers,
) -> Option<String> {
    if bindings.is_empty() {
        return None;
    }
    let granted: Vec<Identifiers> = bindings
        .iter()
        .flat_map(|binding| identities.iter().filter_map(|identity| binding.of(identity)))
        .collect();
    // A dialled host is compared with all of these alike.
    let may_be = |host: &String| {
        let address: Option<IpAddr> = host.parse().ok();
        granted.iter().any(|granted| {
            granted.hosts().any(|known| known == host)
                || address.is_some_and(|address| granted.networks().any(|known| known.contains(&address)))
        })
    };
    let of_key = |key: &str, values: &[String]| {
        values.iter().find(|value| !may_be(value)).map(|value| format!("{key}={value}"))
    };
    let network = || {
        let may_be = |claimed: &IpNet| {
            granted.iter().any(|granted| granted.networks().any(|known| known.contains(claimed)))
        };
        claimed.networks().find(|network| !may_be(network)).map(|network| format!("cidr={network}"))
    };
    let route = || {
        let may_route = !claimed.default_route || granted.iter().any(|granted| granted.default_route);
        (!may_route).then(|| "default-route=true".to_owned())
    };
    of_key("ipv4", &claimed.ipv4)
        .or_else(|| of_key("ipv6", &claimed.ipv6))
        .or_else(|| of_key("host", &claimed.host))
        .or_else(network)
        .or_else(route)
}

/// The identities in a certificate that TLS has verified: common names, DNS names and URIs.
pub(crate) fn identities_of(certificate: &[u8]) -> Vec<String> {
    let Ok((_, certificate)) = X509Certificate::from_der(certificate) else { return Vec::new() };
    let common = certificate.subject().iter_common_name().filter_map(|name| name.as_str().ok());
    let alternative = certificate.subject_alternative_name().ok().flatten();
    let names = alternative.iter().flat_map(|extension| &extension.value.general_names);
    let names = names.filter_map(|name| match name {
        GeneralName::DNSName(name) | GeneralName::URI(name) => Some(*name),
        _ => None,
    });
    common.chain(names).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use portico_lab::pki::{Authority, Certificate};

    use super::*;

    fn verdict(bindings: &[&str], identities: &[&str], claimed: &str) -> Option<String> {
        let bindings: Vec<Binding> = bindings.iter().map(|text| text.parse().unwrap()).collect();
        let identities: Vec<String> = identities.iter().map(|&name| name.to_owned()).collect();
        forbidden(&bindings, &identities, &Identifiers::parse(claimed).unwrap())
    }

    fn is_allowed(bindings: &[&str], identity: &str, claimed: &str) -> bool {
        verdict(bindings, &[identity], claimed).is_none()
    }

    #[test]
    fn an_identity_claims_what_it_is_bound_to_and_nothing_else() {
        let bound = ["a=host=node-1&ipv4=10.0.0.1&default-route=true", "b=host=node-2"];
        assert!(is_allowed(&bound, "a", "host=node-1&ipv4=10.0.0.1&default-route=true"));
        assert!(is_allowed(&bound, "b", "host=node-2") && is_allowed(&bound, "b", ""));
        for (identity, claimed, forbidden) in [
            ("a", "host=node-1&host=node-2", "host=node-2"),
            ("b", "default-route=true", "default-route=true"),
            ("b", "ipv4=10.0.0.1", "ipv4=10.0.0.1"),
            ("b", "ipv6=fd00::1", "ipv6=fd00::1"),
            ("b", "cidr=10.0.0.0/8", "cidr=10.0.0.0/8"),
            ("b", "host=NODE-2", "host=NODE-2"),
            ("c", "host=node-1", "host=node-1"),
            ("", "host=node-1", "host=node-1"),
        ] {
            assert_eq!(verdict(&bound, &[identity], claimed).as_deref(), Some(forbidden), "{identity}");
        }
        assert_eq!(verdict(&bound, &["a", "b"], "host=node-1&host=node-2"), None, "two names, two bindings");
        assert!(is_allowed(&[], "c", "host=node-1&cidr=0.0.0.0/0"), "as upstream, without bindings");
    }

    #[test]
    fn a_host_is_the_same_host_whatever_key_it_is_claimed_by() {
        let bound = ["a=ipv4=10.0.0.1&cidr=10.1.0.0/16"];
        assert!(is_allowed(&bound, "a", "host=10.0.0.1"));
        assert!(!is_allowed(&bound, "a", "host=10.0.0.2"));
        assert!(is_allowed(&bound, "a", "ipv4=10.1.2.3&host=10.1.2.4"), "addresses in a bound network");
        assert!(!is_allowed(&bound, "a", "ipv4=node-2"));
    }

    #[test]
    fn a_network_within_a_bound_network_may_be_claimed() {
        let bound = ["a=cidr=10.1.0.0/16&cidr=fd00::/8"];
        assert!(is_allowed(&bound, "a", "cidr=10.1.2.0/24&cidr=10.1.0.0/16&cidr=fd12::/16"));
        assert!(!is_allowed(&bound, "a", "cidr=10.0.0.0/8") && !is_allowed(&bound, "a", "cidr=0.0.0.0/0"));
        assert!(is_allowed(&bound, "a", "cidr=nonsense"), "it routes nothing");
    }

    #[test]
    fn a_star_is_the_same_text_on_both_sides() {
        let bound = ["node:*=host=*&host=*.example.com"];
        assert!(is_allowed(&bound, "node:node-1", "host=node-1&host=node-1.example.com"));
        assert!(
            !is_allowed(&bound, "node:node-1", "host=node-2") && !is_allowed(&bound, "node-1", "host=node-1")
        );
        assert!(
            !is_allowed(&bound, "node:x&default-route=true", "default-route=true"),
            "an identity is a value, never syntax"
        );
        assert!(is_allowed(&["*=cidr=*/32"], "10.0.0.7", "ipv4=10.0.0.7"));
    }

    #[test]
    fn what_is_no_binding_says_why() {
        for (text, why) in [
            ("", BindingError::Identity),
            ("a", BindingError::Identity),
            ("a=", BindingError::Identity),
            ("=host=a", BindingError::Identity),
            ("a*b*=host=*", BindingError::Star),
            ("a=host=*", BindingError::Star),
            ("a=hots=b", BindingError::Unknown("hots".into())),
            ("a=cidr=10.0.0.0/33", BindingError::Network("10.0.0.0/33".into())),
            ("a=host=b;c", BindingError::Identifiers(IdentifiersError::Semicolon)),
        ] {
            assert_eq!(text.parse::<Binding>(), Err(why), "{text}");
        }
    }

    #[test]
    fn a_certificate_has_its_common_name_and_its_alternative_names() {
        let certificate =
            Certificate::server(&["node-1.example.com"]).common_name("node-1").uri("spiffe://a/b");
        let issued = Authority::new("CA").unwrap().issue(certificate).unwrap().certificate().unwrap();
        assert_eq!(identities_of(&issued), ["node-1", "node-1.example.com", "spiffe://a/b"]);
        assert_eq!(identities_of(&issued[..issued.len() / 2]), [""; 0]);
    }
}
