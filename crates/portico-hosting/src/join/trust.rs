//! The authority that a machine trusts. Its public key has the hash that the administrator's command pins.
//!
//! The hash is that of kubeadm's `--discovery-token-ca-cert-hash`. A machine reads `cluster-info` over a
//! connection that it cannot verify yet. From the answer it keeps only certificates with a pinned key.
//! kubeadm keeps the others too if one of them fits. What is kept is written anew: of a text that was made to
//! deceive, another parser may read other certificates.

use std::fmt;
use std::str::FromStr;

use aws_lc_rs::digest::{SHA256, digest};
use pem::{EncodeConfig, LineEnding, Pem};
use portico_pki::read_cluster_info;
use serde_json::Value;
use thiserror::Error;
use x509_parser::parse_x509_certificate;

const CERTIFICATE: &str = "CERTIFICATE";
const PREFIX: &str = "sha256:";
const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";
/// More certificates than any cluster has, of which one is parsed after the other.
const MOST: usize = 16;

/// The hash of an authority's public key, `sha256:` and 64 digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CaHash([u8; 32]);

/// Why `cluster-info` leads nowhere.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Untrusted {
    /// Not what the operator, or kubeadm, writes.
    #[error("ConfigMap kube-public/cluster-info cannot be read: {0}")]
    Unreadable(String),
    /// No certificate in it has a pinned key.
    #[error(
        "the authority of the cluster has another key ({found}) than --ca-hash says: if the hash was copied \
         whole and from `portico join token`, another server answers at this address"
    )]
    OtherKey {
        /// The hashes that it has.
        found: String,
    },
}

impl CaHash {
    /// The hashes of the authorities in this PEM.
    pub fn all(pem: &str) -> Vec<Self> {
        certificates(pem).map(|(hash, _)| hash).collect()
    }

    /// That of a certificate in DER.
    fn of(certificate: &[u8]) -> Option<Self> {
        let (rest, certificate) = parse_x509_certificate(certificate).ok()?;
        let hash = digest(&SHA256, certificate.public_key().raw).as_ref().try_into().ok().map(Self);
        hash.filter(|_| rest.is_empty())
    }
}

impl fmt::Display for CaHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(PREFIX)?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for CaHash {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "give sha256: and 64 hexadecimal digits, as `portico join token` prints it".to_owned();
        let digits = text.strip_prefix(PREFIX).ok_or_else(wrong)?;
        let is_hash = digits.len() == 64 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        let mut hash = [0; 32];
        for (byte, pair) in hash.iter_mut().zip(0..) {
            let pair = digits.get(2 * pair..2 * pair + 2).filter(|_| is_hash).ok_or_else(wrong)?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| wrong())?;
        }
        Ok(Self(hash))
    }
}

/// The authorities of the ConfigMap `cluster-info` that have a pinned key, in PEM.
///
/// # Errors
/// It cannot be read, or has no such authority.
pub fn pinned(cluster_info: &Value, pins: &[CaHash]) -> Result<String, Untrusted> {
    let unreadable = |why: &str| Untrusted::Unreadable(why.to_owned());
    let text = cluster_info.pointer("/data/kubeconfig").and_then(Value::as_str);
    let text = text.ok_or_else(|| unreadable("it has no kubeconfig"))?;
    let authority = read_cluster_info(text).map_err(|error| unreadable(&error.to_string()))?;
    let kept = certificates(&authority).filter(|(hash, _)| pins.contains(hash));
    let kept: String = kept.map(|(_, certificate)| written(CERTIFICATE, certificate)).collect();
    if kept.is_empty() {
        let found: Vec<String> = CaHash::all(&authority).iter().map(ToString::to_string).collect();
        return Err(Untrusted::OtherKey { found: found.join(", ") });
    }
    Ok(kept)
}

/// The name of the node that a client certificate of a kubelet, in PEM, belongs to.
pub fn node_of(certificate: &str) -> Option<String> {
    let pem = pem::parse(certificate).ok()?;
    let (_, certificate) = parse_x509_certificate(pem.contents()).ok()?;
    let name = certificate.subject().iter_common_name().next()?.as_str().ok()?;
    name.strip_prefix("system:node:").map(str::to_owned)
}

/// DER in PEM, as every parser reads it.
pub(crate) fn written(label: &str, der: Vec<u8>) -> String {
    pem::encode_config(&Pem::new(label, der), EncodeConfig::new().set_line_ending(LineEnding::LF))
}

/// The certificates of a PEM in DER, each with its hash. One that cannot be read costs no other.
fn certificates(pem: &str) -> impl Iterator<Item = (CaHash, Vec<u8>)> {
    let certificate = |text: &str| {
        let block = text.get(text.rfind(BEGIN)?..)?;
        // The parser takes what stands before an empty line for headers.
        let lines: Vec<&str> = block.lines().filter(|line| !line.trim().is_empty()).collect();
        let certificate = pem::parse(lines.join("\n")).ok()?.into_contents();
        Some((CaHash::of(&certificate)?, certificate))
    };
    pem.split_inclusive(END).take(MOST).filter_map(certificate)
}

#[cfg(test)]
mod tests {
    use portico_lab::pki::Authority;
    use serde_json::json;

    use super::*;

    fn authority(name: &str) -> String {
        Authority::new(name).unwrap().cert()
    }

    fn info(authority: &str) -> Value {
        json!({"data": {"kubeconfig": portico_pki::cluster_info("https://a.example.com:6443", authority)}})
    }

    #[test]
    fn a_hash_is_that_of_openssl_and_is_read_again() {
        // openssl x509 -pubkey -noout | openssl pkey -pubin -outform der | sha256sum
        let pem = include_str!("../../tests/all/ca.crt");
        let hash = CaHash::all(pem)[0];
        let openssl = include_str!("../../tests/all/ca.hash").trim();
        assert_eq!(hash.to_string(), openssl);
        assert_eq!(openssl.parse(), Ok(hash));
        for bad in ["", "sha256:", "md5:00", &openssl[..70], &format!("{openssl}0"), &"sha256:ää".repeat(8)]
        {
            assert!(bad.parse::<CaHash>().is_err(), "{bad}");
        }
    }

    #[test]
    fn only_authorities_with_a_pinned_key_are_trusted() {
        let [ours, next, theirs] = ["ours", "next", "theirs"].map(authority);
        let pins = CaHash::all(&format!("{ours}{next}"));
        assert_eq!(pins.len(), 2);
        let kept = pinned(&info(&format!("{theirs}\n{ours}")), &pins).unwrap();
        assert_eq!(CaHash::all(&kept), CaHash::all(&ours));
        let refused = pinned(&info(&theirs), &pins).unwrap_err();
        assert!(refused.to_string().contains(&CaHash::all(&theirs)[0].to_string()), "{refused}");
    }

    /// One parser ignores what stands behind BEGIN on its line, another takes it for the certificate.
    #[test]
    fn nobody_but_a_pinned_authority_is_trusted_by_any_parser() {
        let [ours, theirs] = ["ours", "theirs"].map(authority);
        let pins = CaHash::all(&ours);
        let body =
            |pem: &str| pem.lines().filter(|line| !line.starts_with('-')).collect::<Vec<_>>().join("\n");
        let [our_body, their_body] = [&ours, &theirs].map(|pem| body(pem));
        let cut = their_body.replace('\n', "").trim_end_matches('=').to_owned();
        let other = "-----BEGIN X-----\n-----END X-----";
        for text in [
            format!("{BEGIN}{}\n{our_body}\n{END}", &cut[..cut.len() / 4 * 4]),
            format!("{BEGIN}\n{our_body}\n-----END X-----\n{other}\n{BEGIN}\n{their_body}\n{END}"),
            format!("{BEGIN}x\n{our_body}\n{END}\n{theirs}"),
            format!("{BEGIN}{our_body}{END}{BEGIN}{their_body}{END}"),
        ] {
            match pinned(&info(&text), &pins) {
                Ok(kept) => assert!(kept.lines().eq(ours.lines()), "{kept}"),
                Err(Untrusted::OtherKey { .. }) => {}
                Err(other) => panic!("{other}: {text}"),
            }
        }
    }

    #[test]
    fn an_empty_line_or_another_block_before_it_hides_no_authority() {
        let ours = authority("ours");
        let key = "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n";
        for text in
            [ours.replace(END, &format!("\n{END}")), format!("{key}{ours}"), format!("a: b\n\n{ours}")]
        {
            assert_eq!(CaHash::all(&text), CaHash::all(&ours), "{text}");
        }
    }

    #[test]
    fn what_is_no_cluster_info_is_refused_with_what_is_wrong() {
        for bad in [json!({}), json!({"data": {"kubeconfig": "a: ["}}), json!({"data": {"kubeconfig": ""}})] {
            assert!(matches!(pinned(&bad, &[]), Err(Untrusted::Unreadable(_))), "{bad}");
        }
        let cut = "-----BEGIN CERTIFICATE-----\nAAAA";
        for bad in ["", cut, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"] {
            assert!(matches!(pinned(&info(bad), &[]), Err(Untrusted::OtherKey { .. })), "{bad}");
        }
    }

    #[test]
    fn a_certificate_says_which_node_it_is_of() {
        assert_eq!(node_of(&authority("system:node:worker-1")).as_deref(), Some("worker-1"));
        assert_eq!(node_of(&authority("somebody")), None);
        assert_eq!(node_of("nothing"), None);
    }
}
