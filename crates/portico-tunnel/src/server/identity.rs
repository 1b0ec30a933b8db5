//! The tenant that a client certificate names.
//!
//! Two spellings, which common issuers can write: organisation `portico:cluster:NAME` in the subject (what a
//! Kubernetes CertificateSigningRequest can ask for) and URI SAN `spiffe://DOMAIN/cluster/NAME` (SPIFFE-ID).
//! For a namespace that is of no cluster the word is `namespace`. The chain is verified elsewhere.
//! Certificates are untrusted input: one that does not parse names nobody.

use portico_api::names::Tenant;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

/// The one tenant that a certificate in DER names. `None` if it names none, or several.
pub(crate) fn tenant_of(der: &[u8]) -> Option<Tenant> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let organisations = certificate
        .subject()
        .iter_organization()
        .filter_map(|attribute| of_words(attribute.as_str().ok()?.strip_prefix("portico:")?, ':'));
    let alternative = certificate.subject_alternative_name().ok().flatten();
    let names = alternative.iter().flat_map(|extension| &extension.value.general_names);
    let uris = names.filter_map(|name| match name {
        GeneralName::URI(uri) => {
            let (domain, path) = uri.strip_prefix("spiffe://")?.split_once('/')?;
            of_words(path, '/').filter(|_| !domain.is_empty())
        }
        _ => None,
    });
    let mut tenants = organisations.chain(uris);
    let first = tenants.next()?;
    tenants.all(|other| other == first).then_some(first)
}

/// The tenant of `cluster:NAME` or `namespace:NAME`, with this separator; nothing before, between or after.
fn of_words(text: &str, separator: char) -> Option<Tenant> {
    match text.split_once(separator)? {
        (_, name) if name.contains(':') => None,
        ("cluster", name) => Tenant::parse(name),
        ("namespace", name) => Tenant::parse(&format!("namespace:{name}")),
        _ => None,
    }
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

    fn named(organisation: Option<&str>, uris: &[&str]) -> Option<String> {
        tenant_of(&certificate(organisation, uris)).map(|tenant| tenant.to_string())
    }

    #[test]
    fn an_organisation_or_a_spiffe_id_names_the_cluster() {
        assert_eq!(named(Some("portico:cluster:abc"), &[]).as_deref(), Some("abc"));
        assert_eq!(named(None, &["spiffe://kkp.example.com/cluster/abc"]).as_deref(), Some("abc"));
        assert_eq!(named(Some("portico:cluster:abc"), &["spiffe://d/cluster/abc"]).as_deref(), Some("abc"));
    }

    #[test]
    fn a_namespace_is_named_by_its_own_word_and_is_no_cluster() {
        let namespace = Some("namespace:abc");
        assert_eq!(named(Some("portico:namespace:abc"), &[]).as_deref(), namespace);
        assert_eq!(named(None, &["spiffe://d/namespace/abc"]).as_deref(), namespace);
        assert_eq!(named(Some("portico:namespace:abc"), &["spiffe://d/cluster/abc"]), None);
        let of_namespace = tenant_of(&certificate(Some("portico:namespace:abc"), &[])).unwrap();
        assert_eq!(of_namespace, Tenant::of_namespace("abc"));
        let of_prefixed = tenant_of(&certificate(Some("portico:namespace:cluster-abc"), &[])).unwrap();
        assert_ne!(of_prefixed, Tenant::of_namespace("cluster-abc"), "the cluster is named by its own word");
    }

    #[test]
    fn two_names_are_no_identity() {
        assert_eq!(named(Some("portico:cluster:abc"), &["spiffe://d/cluster/xyz"]), None);
        assert_eq!(named(None, &["spiffe://d/cluster/abc", "spiffe://d/cluster/xyz"]), None);
    }

    #[test]
    fn near_misses_are_no_identity() {
        for organisation in [
            "portico:cluster:",
            "portico:cluster:A",
            "portico:clusters:abc",
            "cluster:abc",
            "portico:cluster:a b",
            "portico:cluster:namespace:abc",
            "portico:namespace:",
            "portico:namespace:namespace:abc",
            "namespace:abc",
        ] {
            assert_eq!(named(Some(organisation), &[]), None, "{organisation}");
        }
        for uri in [
            "spiffe://d/cluster/",
            "spiffe://d/cluster/a/b",
            "spiffe:///cluster/a",
            "spiffe://d/clusters/a",
            "spiffe://d/cluster/namespace:a",
            "spiffe://d/namespace/a/b",
            "https://d/cluster/a",
        ] {
            assert_eq!(named(None, &[uri]), None, "{uri}");
        }
        assert_eq!(named(None, &[]), None);
    }

    #[test]
    fn a_certificate_cut_anywhere_is_no_identity() {
        let der = certificate(Some("portico:cluster:abc"), &[]);
        for end in 0..der.len() {
            assert_eq!(tenant_of(&der[..end]), None, "cut at {end}");
        }
    }
}
