//! `--cipher-suites`: a list of what TLS 1.2 may use, by the names that Go has for them. TLS 1.3 has its own
//! suites, whatever the list says, as in Go.

use std::sync::Arc;

use anyhow::ensure;
use rustls::SupportedCipherSuite;
use rustls::crypto::CryptoProvider;

/// Suites that upstream's server takes and the TLS library does not have. Of `TLS_RSA_` that is so in builds
/// with Go before 1.22.
const WITHOUT_EFFECT: [&str; 8] = [
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA",
    "TLS_RSA_WITH_AES_256_CBC_SHA",
    "TLS_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_RSA_WITH_AES_256_GCM_SHA384",
];

/// What a list leaves.
pub(super) struct Choice<'a> {
    pub(super) provider: Arc<CryptoProvider>,
    /// Names that are known and choose nothing.
    pub(super) left_out: Vec<&'a str>,
    /// Whether a peer without TLS 1.3 can still connect.
    pub(super) has_tls12: bool,
}

/// Chooses the suites that `list` names. `None`: it names none.
pub(super) fn choose<'a>(list: &'a [String], all: &CryptoProvider) -> anyhow::Result<Option<Choice<'a>>> {
    let names: Vec<&str> =
        list.iter().map(String::as_str).filter(|name| !matches!(*name, "" | "[]")).collect();
    if names.is_empty() {
        return Ok(None);
    }
    let left_out: Vec<&str> = names.iter().copied().filter(|name| WITHOUT_EFFECT.contains(name)).collect();
    for name in &names {
        let is_known = left_out.contains(name) || all.cipher_suites.iter().any(|suite| is_named(suite, name));
        ensure!(is_known, "--cipher-suites {name}: it is not known, or not safe");
    }
    let mut provider = all.clone();
    provider
        .cipher_suites
        .retain(|suite| suite.tls13().is_some() || names.iter().any(|name| is_named(suite, name)));
    let has_tls12 = provider.cipher_suites.iter().any(|suite| suite.tls13().is_none());
    Ok(Some(Choice { provider: Arc::new(provider), left_out, has_tls12 }))
}

/// Whether Go calls the suite so. Of TLS 1.3 the library has a prefix of its own.
fn is_named(suite: &SupportedCipherSuite, name: &str) -> bool {
    let ours = suite.suite().as_str().unwrap_or_default();
    match suite.tls13() {
        Some(_) => ours.strip_prefix("TLS13_") == name.strip_prefix("TLS_"),
        None => ours == name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GCM: &str = "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256";
    const CBC: &str = "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA";
    const TLS13: &str = "TLS_AES_128_GCM_SHA256";

    /// How many suites of TLS 1.2 and of TLS 1.3 are left, and which names are left out.
    fn chosen(names: &[&str]) -> anyhow::Result<(usize, usize, Vec<String>)> {
        let list: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let choice = choose(&list, &portico_dial::provider())?.expect("there are names");
        let suites = &choice.provider.cipher_suites;
        let tls13 = suites.iter().filter(|suite| suite.tls13().is_some()).count();
        assert_eq!(choice.has_tls12, suites.len() > tls13);
        let left_out = choice.left_out.iter().map(|&name| name.to_owned()).collect();
        Ok((suites.len() - tls13, tls13, left_out))
    }

    #[test]
    fn a_list_chooses_of_tls12_and_leaves_tls13_as_it_is() {
        assert_eq!(chosen(&[GCM]).unwrap(), (1, 3, vec![]));
        assert_eq!(chosen(&[TLS13, GCM]).unwrap(), (1, 3, vec![]));
        assert_eq!(chosen(&[TLS13]).unwrap(), (0, 3, vec![]));
    }

    #[test]
    fn a_list_without_names_chooses_nothing() {
        for list in [&[][..], &[String::new()], &["[]".to_owned()]] {
            assert!(choose(list, &portico_dial::provider()).unwrap().is_none(), "{list:?}");
        }
    }

    #[test]
    fn names_that_only_upstream_has_a_suite_for_are_left_out() {
        assert_eq!(chosen(&[CBC, GCM]).unwrap(), (1, 3, vec![CBC.to_owned()]));
        assert_eq!(chosen(&[CBC]).unwrap(), (0, 3, vec![CBC.to_owned()]));
        assert_eq!(chosen(&WITHOUT_EFFECT).unwrap().2, WITHOUT_EFFECT);
    }

    #[test]
    fn names_that_upstream_refuses_are_refused() {
        for name in ["TLS_RSA_WITH_RC4_128_SHA", "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256", "TLS13", "gcm"] {
            let refusal = chosen(&[GCM, name]).unwrap_err().to_string();
            assert!(refusal.contains(name), "{refusal}");
        }
    }
}
