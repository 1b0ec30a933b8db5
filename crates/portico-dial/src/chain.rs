//! How much work a peer's chain of certificates may be.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::VerifierBuilderError;
use rustls::{CertificateError, DigitallySignedStruct, OtherError, RootCertStore, SignatureScheme};
use thiserror::Error;
use webpki::EndEntityCert;

use crate::provider;

/// CA certificates that a peer may send behind its own. A peer can make them up without any key, and the
/// thread that searches them for a path serves nobody else meanwhile.
const MAX_INTERMEDIATES: usize = 5;

/// CA certificates among them whose name an earlier one has. Certificates of one name are each tried as the
/// issuer of each: five have 326 paths, and webpki stops only after 100 signature checks. A single path needs
/// no name twice. One is left for a CA that another one has signed too, or that got a new key under its name.
const MAX_REPEATED_NAMES: usize = 1;

#[derive(Error)]
enum Refusal {
    #[error(
        "{0} CA certificates came behind it, and at most {MAX_INTERMEDIATES} are looked at; \
         send only its issuers"
    )]
    TooLong(usize),
    #[error(
        "{0} of the CA certificates behind it have the name of another one, and at most \
         {MAX_REPEATED_NAMES} may; send each of its issuers once"
    )]
    RepeatedNames(usize),
}

/// That is how rustls shows it to people.
impl fmt::Debug for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Refuses a chain that costs too much to be searched. The certificates may come in any order, and some may
/// belong to no path.
///
/// What is let through has 11 paths at most, or 6 if no name is repeated. A path is verified from a trusted
/// CA down to the first signature that is wrong. So a chain that is made up costs 11 signature checks, times
/// the trusted CAs of one name. Genuine CA certificates in it add one check each to a path.
pub fn check_chain(intermediates: &[CertificateDer<'_>]) -> Result<(), rustls::Error> {
    let refusal = if intermediates.len() > MAX_INTERMEDIATES {
        Refusal::TooLong(intermediates.len())
    } else {
        match repeated_names(intermediates) {
            0..=MAX_REPEATED_NAMES => return Ok(()),
            repeated => Refusal::RepeatedNames(repeated),
        }
    };
    Err(rustls::Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(refusal)))))
}

/// How many certificates have the name of an earlier one. One that webpki cannot read is on no path.
fn repeated_names(certificates: &[CertificateDer<'_>]) -> usize {
    let certificates =
        certificates.iter().filter_map(|certificate| EndEntityCert::try_from(certificate).ok());
    let read: Vec<_> = certificates.collect();
    let names: HashSet<_> = read.iter().map(|certificate| certificate.subject()).collect();
    read.len() - names.len()
}

/// Verifies servers as rustls does with these roots, unless [`check_chain`] refuses their chain.
/// Fails without any root.
pub fn server_verifier(
    roots: impl Into<Arc<RootCertStore>>,
) -> Result<Arc<dyn ServerCertVerifier>, VerifierBuilderError> {
    let verifier = WebPkiServerVerifier::builder_with_provider(roots.into(), provider()).build()?;
    Ok(Arc::new(ShortChains(verifier)))
}

#[derive(Debug)]
struct ShortChains(Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for ShortChains {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        check_chain(intermediates)?;
        self.0.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use portico_lab::pki::{Authority, Certificate};
    use rustls::pki_types::{
        AlgorithmIdentifier, InvalidSignature, SignatureVerificationAlgorithm, TrustAnchor, alg_id,
    };
    use webpki::KeyUsage;

    use super::*;

    fn certificate(authority: &Authority) -> CertificateDer<'static> {
        authority.identity().certificate().unwrap()
    }

    fn intermediate(issuer: &Authority, name: &str) -> Authority {
        issuer.intermediate(Certificate::authority(name)).unwrap()
    }

    fn server(issuer: &Authority) -> CertificateDer<'static> {
        issuer.issue(Certificate::server(&["a.test"])).unwrap().certificate().unwrap()
    }

    /// What a peer that trusts `roots` says to the server's chain.
    fn verdict(
        roots: &[&Authority],
        leaf: &CertificateDer<'_>,
        cas: &[CertificateDer<'_>],
    ) -> Result<(), String> {
        let mut store = RootCertStore::empty();
        roots.iter().for_each(|root| store.add(certificate(root)).unwrap());
        let name = ServerName::try_from("a.test").unwrap();
        let verified =
            server_verifier(store).unwrap().verify_server_cert(leaf, cas, &name, &[], UnixTime::now());
        verified.map(drop).map_err(|error| error.to_string())
    }

    #[test]
    fn a_server_with_more_than_five_cas_in_its_chain_is_refused() {
        let ca = Authority::new("ca").unwrap();
        let leaf = server(&ca);
        let others: Vec<_> = (0..6).map(|i| certificate(&Authority::new(&format!("{i}")).unwrap())).collect();
        assert_eq!(verdict(&[&ca], &leaf, &others[..5]), Ok(()));
        let refused = verdict(&[&ca], &leaf, &others).unwrap_err();
        assert!(refused.contains("6 CA certificates came behind it"), "{refused}");
    }

    #[test]
    fn made_up_cas_of_the_trusted_name_are_refused_unsearched() {
        let ca = Authority::new("ca").unwrap();
        let forged: Vec<_> = (0..5).map(|_| Authority::new("ca").unwrap()).collect();
        let leaf = server(&forged[0]);
        let forged: Vec<_> = forged.iter().map(certificate).collect();
        let refused = verdict(&[&ca], &leaf, &forged).unwrap_err();
        assert!(refused.contains("4 of the CA certificates behind it have the name of another"), "{refused}");
        let refused = verdict(&[&ca], &leaf, &forged[..2]).unwrap_err();
        assert!(refused.contains("BadSignature"), "two of one name are looked at: {refused}");
    }

    #[test]
    fn a_chain_is_accepted_in_any_order() {
        let root = Authority::new("root").unwrap();
        let upper = intermediate(&root, "upper");
        let lower = intermediate(&upper, "lower");
        let (leaf, unrelated) = (server(&lower), Authority::new("unrelated").unwrap());
        let chain = [&lower, &upper, &root, &unrelated].map(certificate);
        for at in 0..chain.len() {
            let mut chain = chain.clone();
            chain.rotate_left(at);
            assert_eq!(verdict(&[&root], &leaf, &chain), Ok(()));
            chain.reverse();
            assert_eq!(verdict(&[&root], &leaf, &chain), Ok(()));
        }
    }

    #[test]
    fn a_ca_with_a_new_key_under_its_old_name_is_trusted_beside_the_old_one() {
        let [old, new] = [(), ()].map(|()| Authority::new("ca").unwrap());
        for issuer in [&old, &new] {
            let below = intermediate(issuer, "below");
            let bundle = [&below, &old, &new].map(certificate);
            assert_eq!(verdict(&[&old, &new], &server(issuer), &[]), Ok(()));
            assert_eq!(verdict(&[&old, &new], &server(&below), &bundle), Ok(()), "with both in its chain");
        }
    }

    /// Counts the signatures that it is asked to check, and calls them wrong.
    #[derive(Debug, Default)]
    struct Counter(AtomicUsize);

    impl SignatureVerificationAlgorithm for Counter {
        fn verify_signature(&self, _: &[u8], _: &[u8], _: &[u8]) -> Result<(), InvalidSignature> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Err(InvalidSignature)
        }

        fn public_key_alg_id(&self) -> AlgorithmIdentifier {
            alg_id::ECDSA_P256
        }

        fn signature_alg_id(&self) -> AlgorithmIdentifier {
            alg_id::ECDSA_SHA256
        }
    }

    /// The signature checks that `leaf` with these CA certificates costs.
    fn checks(anchors: &[TrustAnchor<'_>], leaf: &CertificateDer<'_>, cas: &[CertificateDer<'_>]) -> usize {
        let counter = Counter::default();
        let leaf = EndEntityCert::try_from(leaf).unwrap();
        let usage = KeyUsage::client_auth();
        let verified = leaf.verify_for_usage(&[&counter], anchors, cas, UnixTime::now(), usage, None, None);
        assert!(verified.is_err());
        counter.0.into_inner()
    }

    /// Every name is that of a trusted CA, and every signature is wrong.
    #[test]
    fn what_is_let_through_costs_eleven_signature_checks_at_most() {
        let roots: Vec<_> = (0..5).map(|name| Authority::new(&format!("{name}")).unwrap()).collect();
        let trusted: Vec<_> = roots.iter().map(certificate).collect();
        let anchors: Vec<_> =
            trusted.iter().map(|ca| webpki::anchor_from_trusted_cert(ca).unwrap()).collect();
        let client = |root: &Authority| root.issue(Certificate::client("a")).unwrap().certificate().unwrap();
        let leaves: Vec<_> = roots.iter().map(client).collect();
        let digits = |number: usize| [1, 5, 25, 125, 625].map(|unit| number / unit % 5);
        // One for each name, issuer and place in the chain, so that all keys differ.
        let made_up = |index: usize| {
            let [name, issuer, ..] = digits(index);
            certificate(&intermediate(&roots[issuer], &format!("{name}")))
        };
        let made_up: Vec<_> = (0..125).map(made_up).collect();
        let chain = |names: [usize; 5], issuers: [usize; 5]| -> Vec<_> {
            let index = |place: usize| names[place] + 5 * issuers[place] + 25 * place;
            (0..5).map(|place| made_up[index(place)].clone()).collect()
        };

        let worst = chain([0, 0, 1, 2, 3], [0, 1, 2, 3, 0]);
        check_chain(&worst).unwrap();
        assert_eq!(checks(&anchors, &leaves[0], &worst), 11);
        let refused = chain([0; 5], [0; 5]);
        check_chain(&refused).unwrap_err();
        assert_eq!(checks(&anchors, &leaves[0], &refused), 100, "the most that webpki does");

        // A walk through the shapes of chains: the step has no factor in common with their number.
        let shapes = 5_usize.pow(10);
        let walk = (0..20_000).map(|step| step * 1_234_567 % shapes);
        let chains = walk.map(|shape| chain(digits(shape), digits(shape / 3125)));
        let mut looked_at = 0;
        for chain in chains.filter(|chain| check_chain(chain).is_ok()) {
            assert!(checks(&anchors, &leaves[looked_at % 5], &chain) <= 11);
            looked_at += 1;
        }
        assert!(looked_at > 2000, "{looked_at}");
    }
}
