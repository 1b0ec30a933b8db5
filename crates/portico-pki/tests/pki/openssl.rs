//! What is made here is accepted by OpenSSL, and what OpenSSL made is accepted here.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use jiff::Timestamp;
use portico_pki::inventory::{KUBECONFIG, LEAVES, NamesOf, Signer, Stored, etcd};
use portico_pki::{Authority, Credential, KeyKind, Kubeconfig, Pair, Reason, Unusable, Usage, wants_renewal};

use crate::cluster::{RSA, made, pki};
use crate::{days, names, now, profile};

/// Runs openssl in `dir` and returns what it prints; panics with its complaint if it fails.
fn openssl(dir: &Path, words: &str) -> String {
    let output = Command::new("openssl").args(words.split_whitespace()).current_dir(dir).output();
    let output = output.expect("openssl is installed (Debian package openssl)");
    assert!(output.status.success(), "openssl {words}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn write(dir: &Path, name: &str, pair: &Pair) {
    std::fs::write(dir.join(format!("{name}.crt")), &pair.certificate).unwrap();
    std::fs::write(dir.join(format!("{name}.key")), &pair.key).unwrap();
}

fn read(dir: &Path, name: &str) -> Pair {
    let file = |end| std::fs::read_to_string(dir.join(format!("{name}.{end}"))).unwrap();
    Pair { certificate: file("crt"), key: file("key") }
}

#[test]
fn openssl_verifies_every_kind_of_certificate_under_authorities_of_both_kinds() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for kind in [KeyKind::EcdsaP256, KeyKind::Rsa2048] {
        let pair = Authority::create("root-ca.a.example.com", kind, now()).unwrap();
        write(dir, "ca", &pair);
        let text = openssl(dir, "x509 -in ca.crt -noout -text");
        assert!(text.contains("CA:TRUE") && text.contains("Certificate Sign, CRL Sign"), "{text}");
        let authority = Authority::read(&pair, now()).unwrap();
        for (usage, purposes) in [
            (Usage::Server, &["sslserver"][..]),
            (Usage::Client, &["sslclient"]),
            (Usage::ServerAndClient, &["sslserver", "sslclient"]),
        ] {
            let leaf = authority.issue(&profile(usage), kind, now()).unwrap();
            write(dir, "leaf", &leaf);
            openssl(dir, "pkey -in leaf.key -check -noout");
            let at = now().as_second();
            for purpose in purposes {
                let verify = format!("verify -x509_strict -attime {at} -purpose {purpose} -CAfile ca.crt");
                openssl(dir, &format!("{verify} leaf.crt"));
                if *purpose == "sslserver" {
                    openssl(dir, &format!("{verify} -verify_hostname api.example.com leaf.crt"));
                    openssl(dir, &format!("{verify} -verify_ip 2001:db8::7 leaf.crt"));
                }
            }
        }
    }
}

/// Those of `certificates` that `openssl verify` accepts with these arguments.
fn accepted(dir: &Path, words: &str, certificates: &[&str]) -> BTreeSet<String> {
    let at = format!("verify -x509_strict -attime {}", now().as_second());
    let files = certificates.iter().map(|name| format!("{name}.crt"));
    let mut command = Command::new("openssl");
    command.args(at.split(' ')).args(words.split(' ')).args(files).current_dir(dir);
    let output = command.output().expect("openssl is installed (Debian package openssl)");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    said.lines().filter_map(|line| Some(line.strip_suffix(".crt: OK")?.to_owned())).collect()
}

#[test]
fn openssl_verifies_every_certificate_of_a_cluster_by_its_authority_and_by_no_other() {
    let of_cluster = || LEAVES.iter().filter(|leaf| Signer::OF_A_CLUSTER.contains(&leaf.signer));
    let all: Vec<&str> = of_cluster().map(|leaf| leaf.secret).collect();
    for secrets in [&made(&pki()), &*RSA] {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        for leaf in of_cluster() {
            let data = &secrets[leaf.secret];
            let certificate = match leaf.stored {
                Stored::Pair(certificate, _) => data[certificate].clone(),
                Stored::Kubeconfig(_) => {
                    let kubeconfig = Kubeconfig::parse(&data[KUBECONFIG]).unwrap();
                    // By which the API server is trusted.
                    assert_eq!(kubeconfig.authority, secrets["ca"]["ca.crt"], "{}", leaf.secret);
                    let Credential::Certificate(pair) = kubeconfig.credential else { panic!("{leaf:?}") };
                    pair.certificate
                }
            };
            std::fs::write(dir.join(format!("{}.crt", leaf.secret)), certificate).unwrap();
        }
        for signer in Signer::OF_A_CLUSTER {
            let name = signer.secret();
            std::fs::write(dir.join(format!("{name}.crt")), &secrets[name]["ca.crt"]).unwrap();
            for (purpose, other) in [("sslserver", Usage::Client), ("sslclient", Usage::Server)] {
                let fits = of_cluster().filter(|leaf| leaf.signer == signer && leaf.usage != other);
                let expected: BTreeSet<String> = fits.map(|leaf| leaf.secret.to_owned()).collect();
                let words = format!("-purpose {purpose} -CAfile {name}.crt");
                assert_eq!(accepted(dir, &words, &all), expected, "{words}");
            }
        }
        for leaf in of_cluster() {
            let names = match leaf.names {
                NamesOf::ApiServer => pki().api_server,
                NamesOf::Konnectivity => pki().konnectivity,
                NamesOf::Etcd => etcd(&pki().namespace),
                NamesOf::Client => continue,
                seed => panic!("{}: {seed:?}", leaf.secret),
            };
            let verify = |name: String| {
                let words = format!("{name} -purpose sslserver -CAfile {}.crt", leaf.signer.secret());
                !accepted(dir, &words, &[leaf.secret]).is_empty()
            };
            for name in &names.dns {
                assert!(verify(format!("-verify_hostname {name}")), "{}: {name}", leaf.secret);
            }
            for ip in &names.ips {
                assert!(verify(format!("-verify_ip {ip}")), "{}: {ip}", leaf.secret);
            }
            assert!(!verify("-verify_hostname else.example.com".to_owned()), "{}", leaf.secret);
        }
    }
}

#[test]
fn openssl_shows_names_usages_and_a_validity_that_begins_two_hours_ago() {
    let dir = tempfile::tempdir().unwrap();
    let (_, authority) = crate::authority("ca");
    write(
        dir.path(),
        "server",
        &authority.issue(&profile(Usage::Server), KeyKind::EcdsaP256, now()).unwrap(),
    );
    let text = openssl(dir.path(), "x509 -in server.crt -noout -text -nameopt RFC2253");
    for expected in [
        "Subject: CN=subject\n",
        "Issuer: CN=ca\n",
        "Not Before: Nov 22 10:30:00 2026 GMT",
        "Not After : Nov 22 12:30:00 2027 GMT",
        "DNS:api.example.com, DNS:kubernetes, IP Address:192.0.2.7, IP Address:2001:DB8:0:0:0:0:0:7",
        "TLS Web Server Authentication\n",
        "CA:FALSE",
        "Digital Signature",
    ] {
        assert!(text.contains(expected), "no {expected:?} in {text}");
    }
    assert!(!text.contains("TLS Web Client Authentication"), "{text}");
    let client = authority.issue(&profile(Usage::Client), KeyKind::EcdsaP256, now()).unwrap();
    write(dir.path(), "client", &client);
    let subject = openssl(dir.path(), "x509 -in client.crt -noout -subject -nameopt RFC2253,-dn_rev");
    assert!(subject.contains("O=system:masters") && subject.contains("CN=subject"), "{subject}");
}

/// KKP's authorities are RSA in the old format of OpenSSL, with a subject of another string type.
#[test]
fn an_authority_that_openssl_made_signs_what_openssl_verifies() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let subject = "-subj /O=Kubermatic/CN=root-ca.p4k2m7xzq9.example.com";
    openssl(
        dir,
        &format!("req -x509 -newkey rsa:2048 -nodes -days 30 -keyout new.key -out ca.crt {subject}"),
    );
    openssl(dir, "rsa -in new.key -traditional -out ca.key");
    let pair = read(dir, "ca");
    assert!(pair.key.starts_with("-----BEGIN RSA PRIVATE KEY-----"), "{}", pair.key);
    let now = Timestamp::now();
    let authority = Authority::read(&pair, now).unwrap();
    let leaf = authority.issue(&profile(Usage::Server), KeyKind::EcdsaP256, now).unwrap();
    write(dir, "leaf", &leaf);
    openssl(dir, "verify -purpose sslserver -CAfile ca.crt leaf.crt");
    assert_eq!(wants_renewal(&leaf, &profile(Usage::Server), &authority, now), None);
    let later = now.checked_add(days(31)).unwrap();
    assert!(matches!(Authority::read(&pair, later), Err(Unusable::Expired(_))));

    // As the manual says: with another end it is the same authority.
    openssl(dir, "x509 -in ca.crt -signkey ca.key -days 3650 -out again.crt");
    let pair = Pair { certificate: std::fs::read_to_string(dir.join("again.crt")).unwrap(), ..pair };
    let again = Authority::read(&pair, later).unwrap();
    assert_eq!(wants_renewal(&leaf, &profile(Usage::Server), &again, now), None);
    openssl(dir, "verify -purpose sslserver -CAfile again.crt leaf.crt");

    // And a certificate that openssl signed for the same subject is known for what it lacks.
    openssl(dir, "req -newkey rsa:2048 -nodes -keyout by.key -out by.csr -subj /CN=subject");
    openssl(dir, "x509 -req -in by.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -out by.crt");
    let reason = wants_renewal(&read(dir, "by"), &profile(Usage::Server), &authority, now).unwrap();
    let lacking = ["192.0.2.7", "2001:db8::7", "api.example.com", "kubernetes"].map(String::from);
    assert_eq!(reason, Reason::NamesDiffer { lacking: lacking.into(), surplus: Vec::new() });
    let mut nameless = profile(Usage::Server);
    nameless.names = names(&[], &[]);
    assert_eq!(wants_renewal(&read(dir, "by"), &nameless, &authority, now), Some(Reason::UsageDiffers));
}

#[test]
fn an_authority_with_any_kind_of_key_is_refused_or_signs_what_can_stay() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for (key, refused) in [
        ("ec -pkeyopt ec_paramgen_curve:P-256", None),
        ("ec -pkeyopt ec_paramgen_curve:P-384", None),
        ("ec -pkeyopt ec_paramgen_curve:P-521", Some(Unusable::UnsupportedKey)),
        ("ed25519", None),
        ("rsa:2048", None),
    ] {
        let request = format!("req -x509 -newkey {key} -nodes -days 30 -subj /CN=ca");
        openssl(dir, &format!("{request} -keyout ca.key -out ca.crt"));
        // Not before: a key may take seconds.
        let now = Timestamp::now();
        match Authority::read(&read(dir, "ca"), now) {
            Ok(authority) => {
                assert_eq!(refused, None, "{key}");
                let profile = profile(Usage::Server);
                let leaf = authority.issue(&profile, KeyKind::EcdsaP256, now).unwrap();
                assert_eq!(wants_renewal(&leaf, &profile, &authority, now), None, "{key}");
            }
            Err(error) => assert_eq!(Some(error), refused, "{key}"),
        }
    }
}
