//! The cluster that a client certificate names.
//!
//! Two spellings, which common issuers can write: organisation `portico:cluster:NAME` in the subject (what a
//! Kubernetes CertificateSigningRequest can ask for) and URI SAN `spiffe://DOMAIN/cluster/NAME` (SPIFFE-ID).
//! The chain is verified elsewhere. Certificates are untrusted input: one that does not parse names no
//! cluster.

use std::fmt;
use std::sync::Arc;

use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

/// Prefix of an organisation that names a cluster.
const ORGANISATION: &str = "portico:cluster:";

/// The cluster a client belongs to. It opens that cluster's authorities and no other.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity(Arc<str>);

impl Identity {
    /// Name of the cluster.
    #[must_use]
    pub fn cluster(&self) -> &str {
        &self.0
    }

    /// Whether `name` can name a cluster: a DNS label, as every name of a Cluster or a namespace is.
    #[must_use]
    pub fn is_name(name: &str) -> bool {
        let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        (1..=63).contains(&name.len())
            && name.bytes().all(inner)
            && !name.starts_with('-')
            && !name.ends_with('-')
    }

    /// The one cluster that a certificate in DER names. `None` if it names none, or several.
    #[must_use]
    pub fn from_certificate(der: &[u8]) -> Option<Self> {
        let (_, certificate) = X509Certificate::from_der(der).ok()?;
        let organisations = certificate.subject().iter_organization().filter_map(|attribute| {
            attribute.as_str().ok()?.strip_prefix(ORGANISATION).filter(|name| Self::is_name(name))
        });
        let alternative = certificate.subject_alternative_name().ok().flatten();
        let uris =
            alternative.iter().flat_map(|extension| &extension.value.general_names).filter_map(|name| {
                match name {
                    GeneralName::URI(uri) => cluster_of_uri(uri),
                    _ => None,
                }
            });
        let mut names = organisations.chain(uris);
        let first = names.next()?;
        names.all(|other| other == first).then(|| Self(first.into()))
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cluster {}", self.0)
    }
}

/// NAME of `spiffe://DOMAIN/cluster/NAME`, nothing before, between or after.
fn cluster_of_uri(uri: &str) -> Option<&str> {
    let (domain, path) = uri.strip_prefix("spiffe://")?.split_once('/')?;
    let name = path.strip_prefix("cluster/")?;
    (!domain.is_empty() && Identity::is_name(name)).then_some(name)
}

#[cfg(test)]
mod tests {
    use portico_lab::pki::{Authority, Certificate};
    use rustls::pki_types::CertificateDer;

    use super::*;

    fn certificate(organisation: Option<&str>, uris: &[&str]) -> CertificateDer<'static> {
        let client = Certificate::client("agent");
        let client = organisation.into_iter().fold(client, Certificate::organisation);
        let client = uris.iter().fold(client, |client, uri| client.uri(uri));
        Authority::new("CA").unwrap().issue(client).unwrap().certificate().unwrap()
    }

    fn cluster(organisation: Option<&str>, uris: &[&str]) -> Option<String> {
        Identity::from_certificate(&certificate(organisation, uris))
            .map(|identity| identity.cluster().to_owned())
    }

    #[test]
    fn an_organisation_or_a_spiffe_id_names_the_cluster() {
        assert_eq!(cluster(Some("portico:cluster:abc"), &[]).as_deref(), Some("abc"));
        assert_eq!(cluster(None, &["spiffe://kkp.example.com/cluster/abc"]).as_deref(), Some("abc"));
        assert_eq!(cluster(Some("portico:cluster:abc"), &["spiffe://d/cluster/abc"]).as_deref(), Some("abc"));
    }

    #[test]
    fn two_names_are_no_identity() {
        assert_eq!(cluster(Some("portico:cluster:abc"), &["spiffe://d/cluster/xyz"]), None);
        assert_eq!(cluster(None, &["spiffe://d/cluster/abc", "spiffe://d/cluster/xyz"]), None);
    }

    #[test]
    fn near_misses_are_no_identity() {
        for organisation in [
            "portico:cluster:",
            "portico:cluster:A",
            "portico:clusters:abc",
            "cluster:abc",
            "portico:cluster:a b",
        ] {
            assert_eq!(cluster(Some(organisation), &[]), None, "{organisation}");
        }
        for uri in [
            "spiffe://d/cluster/",
            "spiffe://d/cluster/a/b",
            "spiffe:///cluster/a",
            "spiffe://d/clusters/a",
            "https://d/cluster/a",
        ] {
            assert_eq!(cluster(None, &[uri]), None, "{uri}");
        }
        assert_eq!(cluster(None, &[]), None);
    }

    #[test]
    fn a_certificate_cut_anywhere_is_no_identity() {
        let der = certificate(Some("portico:cluster:abc"), &[]);
        for end in 0..der.len() {
            assert_eq!(Identity::from_certificate(&der[..end]), None, "cut at {end}");
        }
    }
}
