use portico_lab::pki::Certificate;
use rcgen::{CertificateParams, DistinguishedName, DnType, SanType};

use super::*;

const USER: &str = "system:node:worker-1";

fn groups() -> Vec<String> {
    vec![NODES.to_owned(), "system:authenticated".to_owned()]
}

fn usages() -> Vec<String> {
    vec!["digital signature".to_owned(), "server auth".to_owned()]
}

/// A request with this subject and these names; addresses become addresses.
fn request(subject: &[(DnType, &str)], names: &[&str]) -> String {
    let names = names.iter().map(|name| match name.parse() {
        Ok(ip) => SanType::IpAddress(ip),
        Err(_) if name.contains('@') => SanType::Rfc822Name((*name).try_into().unwrap()),
        Err(_) if name.contains("//") => SanType::URI((*name).try_into().unwrap()),
        Err(_) => SanType::DnsName((*name).try_into().unwrap()),
    });
    let asked = Certificate::client("").with(|params| {
        *params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        for (kind, value) in subject {
            params.distinguished_name.push(kind.clone(), *value);
        }
        params.subject_alt_names = names.collect();
    });
    asked.request().unwrap()
}

fn own(names: &[&str]) -> String {
    request(&[(DnType::OrganizationName, NODES), (DnType::CommonName, USER)], names)
}

fn addresses() -> Vec<NodeAddress> {
    let name = |name: &str| NodeAddress::Name(name.to_owned());
    let ip = |ip: &str| NodeAddress::Ip(ip.parse().unwrap());
    vec![
        ip("192.0.2.7"),
        ip("2001:db8::7"),
        name("worker-1"),
        name("a.north.example.com"),
        ip("10.240.16.1"),
        ip("::ffff:10.240.16.1"),
        ip("127.0.0.1"),
        ip("::ffff:127.0.0.1"),
        name("kubernetes.default.svc"),
        name("api.cluster.local"),
        name("*.example.org"),
        name("abcdefghij.south.example.org"),
        name("abcdefghij"),
    ]
}

fn reserved() -> Reserved {
    Reserved {
        cluster: "abcdefghij".to_owned(),
        names: vec!["a.north.example.com".to_owned(), String::new()],
        networks: vec!["10.240.16.0/20".parse().unwrap()],
    }
}

fn judged(request: &str) -> Result<(), Unapproved> {
    let (groups, usages) = (groups(), usages());
    let asked =
        Asked { signer: SIGNER, user: USER, groups: &groups, usages: &usages, request: request.as_bytes() };
    judge(&asked, &addresses(), &reserved())
}

#[test]
fn a_node_gets_a_certificate_for_its_own_addresses() {
    for names in [&["worker-1", "192.0.2.7", "2001:db8::7"][..], &["192.0.2.7"], &["WORKER-1"]] {
        assert_eq!(judged(&own(names)), Ok(()), "{names:?}");
    }
}

/// As the library of Go writes it, which kubelets ask by.
#[test]
fn a_request_of_a_real_kubelet_is_understood() {
    let request = "-----BEGIN CERTIFICATE REQUEST-----
MIIBLjCB1gIBADA2MRUwEwYDVQQKEwxzeXN0ZW06bm9kZXMxHTAbBgNVBAMTFHN5
c3RlbTpub2RlOndvcmtlci0xMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEG5Zx
Il/ghkzqSvaqmEYSgFHi6D7aj50gYRv3TpDWmXkfCUqYUqOU9eu3y8caZZxJH2xV
6T6RPtmxZkSOLhHujKA+MDwGCSqGSIb3DQEJDjEvMC0wKwYDVR0RBCQwIoIId29y
a2VyLTGHBMAAAgeHECABDbgAAAAAAAAAAAAAAAcwCgYIKoZIzj0EAwIDRwAwRAIg
Z+oMku4ECkpKDTv08MaTWweO/dlYty8cT1Xr+g0MfckCIAPkDW2sInogYevDGlQV
uZ1Q6kwx07H20ogpChAgIcmg
-----END CERTIFICATE REQUEST-----
";
    assert_eq!(judged(request), Ok(()));
}

#[test]
fn names_and_addresses_of_others_are_not_its_own() {
    for (names, why) in [
        (&["worker-1", "192.0.2.8"][..], Unapproved::Address),
        (&["worker-2"], Unapproved::Address),
        (&[], Unapproved::Names),
        (&["worker-1", "root@worker-1"], Unapproved::Names),
        (&["worker-1", "https://worker-1"], Unapproved::Names),
    ] {
        assert_eq!(judged(&own(names)), Err(why), "{names:?}");
    }
}

#[test]
fn a_node_that_says_it_is_the_control_plane_does_not_become_it() {
    for name in [
        "a.north.example.com",
        "A.north.example.com",
        "konnectivity-server.a.north.example.com",
        "10.240.16.1",
        "::ffff:10.240.16.1",
        "127.0.0.1",
        "::ffff:127.0.0.1",
        "kubernetes",
        "kubernetes.default.svc",
        "api.cluster.local",
        "*.example.org",
        "abcdefghij.south.example.org",
        "konnectivity-server.Abcdefghij.example.org",
    ] {
        assert_eq!(judged(&own(&["worker-1", name])), Err(Unapproved::Reserved), "{name}");
    }
    assert_eq!(judged(&own(&["abcdefghij"])), Ok(()), "a machine may be called as its cluster");
}

/// Go skips a block that does not please it, and takes the next one.
#[test]
fn a_text_in_which_the_signer_may_find_another_request_is_refused() {
    let [own, other] = [&["worker-1"][..], &["kubernetes"]].map(own);
    let begin = "-----BEGIN CERTIFICATE REQUEST-----";
    for text in [
        format!("{}{other}", own.replace(begin, &format!("{begin}x"))),
        format!("{own}{other}"),
        format!("{other}{own}"),
        format!("{own}x"),
        format!("x{own}"),
        own.replace("CERTIFICATE REQUEST", "CERTIFICATE"),
        own.replace("END CERTIFICATE REQUEST", "END X"),
        own.replace(begin, &format!("{begin}\nkind: x\n")),
    ] {
        assert_eq!(judged(&text), Err(Unapproved::Unreadable), "{text}");
    }
}

#[test]
fn the_subject_is_the_node_that_asks_and_nothing_else() {
    let node = (DnType::OrganizationName, NODES);
    for subject in [
        vec![node.clone(), (DnType::CommonName, "system:node:worker-2")],
        vec![(DnType::CommonName, USER)],
        vec![(DnType::OrganizationName, "system:masters"), (DnType::CommonName, USER)],
        vec![node.clone(), (DnType::CommonName, USER), (DnType::OrganizationalUnitName, "x")],
        vec![node],
    ] {
        let request = request(&subject, &["worker-1"]);
        assert_eq!(judged(&request), Err(Unapproved::Subject), "{subject:?}");
    }
}

#[test]
fn only_nodes_ask_and_only_to_serve() {
    let request = own(&["worker-1"]);
    let with = |signer: &str, user: &str, groups: &[&str], usages: &[&str]| {
        let text = |list: &[&str]| list.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
        let (groups, usages) = (text(groups), text(usages));
        let asked = Asked { signer, user, groups: &groups, usages: &usages, request: request.as_bytes() };
        judge(&asked, &addresses(), &reserved())
    };
    let (nodes, serving) = (&[NODES][..], &["digital signature", "key encipherment", "server auth"][..]);
    assert_eq!(with(SIGNER, USER, nodes, serving), Ok(()));
    let client = "kubernetes.io/kube-apiserver-client-kubelet";
    assert_eq!(with(client, USER, nodes, serving), Err(Unapproved::Signer));
    assert_eq!(with(SIGNER, "worker-1", nodes, serving), Err(Unapproved::NoNode));
    assert_eq!(with(SIGNER, "system:node:", nodes, serving), Err(Unapproved::NoNode));
    assert_eq!(with(SIGNER, USER, &["system:authenticated"], serving), Err(Unapproved::NoNode));
    for usages in [
        &["digital signature", "server auth", "client auth"][..],
        &["digital signature"],
        &["server auth"],
        &[],
    ] {
        assert_eq!(with(SIGNER, USER, nodes, usages), Err(Unapproved::Usages), "{usages:?}");
    }
}

#[test]
fn more_names_than_a_kubelet_has_are_not_compared() {
    assert_eq!(judged(&own(&["worker-1"; 64])), Ok(()));
    assert_eq!(judged(&own(&["worker-1"; 65])), Err(Unapproved::Names));
}

#[test]
fn what_is_no_request_of_a_kubelet_is_refused() {
    let ca = Certificate::authority(USER).organisation(NODES).request().unwrap();
    let garbage = "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n";
    for text in ["", "x", garbage, &ca] {
        assert_eq!(judged(text), Err(Unapproved::Unreadable), "{text}");
    }
}
