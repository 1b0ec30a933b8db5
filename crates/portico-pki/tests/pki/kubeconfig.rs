//! Kubeconfigs, written and read back.

use portico_pki::{BadKubeconfig, Credential, KeyKind, Kubeconfig, Usage};

use crate::{authority, now, profile};

fn with(credential: Credential) -> Kubeconfig {
    let (ca, _) = authority("root-ca.a.example.com");
    Kubeconfig {
        cluster: "p4k2m7xzq9".to_owned(),
        server: "https://p4k2m7xzq9.north.example.com:6443".to_owned(),
        authority: ca.certificate,
        credential,
    }
}

#[test]
fn a_kubeconfig_has_kkps_names_and_reads_back_the_same() {
    let token = with(Credential::Token("bcdfgh.jklmnpqrstvwxz24".to_owned()));
    let text = token.to_yaml();
    for line in [
        "current-context: p4k2m7xzq9\n",
        "  name: p4k2m7xzq9\n",
        "- name: default\n",
        "    user: default\n",
        "    server: \"https://p4k2m7xzq9.north.example.com:6443\"\n",
        "    token: bcdfgh.jklmnpqrstvwxz24\n",
    ] {
        assert!(text.contains(line), "no {line:?} in {text}");
    }
    assert_eq!(Kubeconfig::parse(&text).unwrap(), token);
    let (_, authority) = authority("client-ca");
    let pair = authority.issue(&profile(Usage::Client), KeyKind::EcdsaP256, now()).unwrap();
    let certificate = with(Credential::Certificate(pair));
    assert_eq!(Kubeconfig::parse(&certificate.to_yaml()).unwrap(), certificate);
    for shown in [format!("{certificate:?}"), format!("{token:?}")] {
        assert!(!shown.contains("PRIVATE KEY") && !shown.contains("bcdfgh"), "{shown}");
    }
}

#[test]
fn what_is_wrong_with_a_file_is_said_without_what_stands_in_it() {
    let good = with(Credential::Token("s3cret".to_owned())).to_yaml();
    let files = [
        "czNjcmV0".to_owned(),
        "s3cret: [".to_owned(),
        good.replace("token: s3cret", "token: [s3cret]"),
        good.replace("token: s3cret", "token: 53"),
        good.replace("users:", "users: s3cret\nothers:"),
    ];
    for file in files {
        let error = Kubeconfig::parse(&file).unwrap_err().to_string();
        for part in ["s3cret", "czNj", "53"] {
            assert!(!error.contains(part), "{error}");
        }
    }
}

#[test]
fn a_token_that_no_header_can_hold_is_refused() {
    for token in ["a\nb", "a\n", "a b", "\u{1b}[2J", "t\u{f6}ken"] {
        let file = with(Credential::Token(token.to_owned())).to_yaml();
        assert_eq!(Kubeconfig::parse(&file).unwrap_err(), BadKubeconfig::Token, "{token:?}");
    }
}

#[test]
fn a_file_of_kkp_is_read() {
    let text = "
apiVersion: v1
kind: Config
preferences: {}
current-context: a
clusters: [{name: a, cluster: {server: 'https://a:1', certificate-authority-data: Q0E=}}]
contexts: [{name: a, context: {cluster: a, user: default}}]
users: [{name: default, user: {token: x}}]
";
    let read = Kubeconfig::parse(text).unwrap();
    assert_eq!((&*read.server, &*read.authority), ("https://a:1", "CA"));
}

#[test]
fn what_would_get_lost_or_is_missing_is_refused_by_its_name() {
    let good = with(Credential::Token("t".to_owned())).to_yaml();
    let error = |from: &str, to: &str| {
        assert!(good.contains(from), "no {from:?} in {good}");
        Kubeconfig::parse(&good.replace(from, to)).unwrap_err().to_string()
    };
    assert!(error("token: t", "exec: {command: login}").contains("unknown field `exec`"));
    assert!(error("    server:", "    insecure-skip-tls-verify: true\n    server:").contains("insecure"));
    assert_eq!(error("    user: default", "    user: nobody"), "it has no user named \"nobody\"");
    assert_eq!(error("current-context: p4k2m7xzq9", "current-context: b"), "it has no context named \"b\"");
    assert!(error("token: t", "client-key-data: AAAA").contains("neither a token nor a certificate"));
    assert_eq!(
        error("certificate-authority-data: ", "certificate-authority-data: '%' #"),
        "certificate-authority-data is no base64 of PEM"
    );
    assert!(Kubeconfig::parse("").unwrap_err().to_string().contains("empty"));
    let twice = "
current-context: a
clusters: []
contexts: [{name: a, context: {cluster: a, user: b}}, {name: b, context: {cluster: a, user: b}}]
users: []
";
    assert_eq!(Kubeconfig::parse(twice).unwrap_err(), BadKubeconfig::Contexts(2));
}

#[test]
fn cluster_info_says_where_and_whom_to_trust_and_nothing_secret() {
    let text = portico_pki::cluster_info("https://a.example.com:6443", "CA");
    let file: serde_json::Value =
        portico_yaml::Documents::new(&text).next().unwrap().unwrap().typed().unwrap();
    let cluster =
        serde_json::json!({"certificate-authority-data": "Q0E=", "server": "https://a.example.com:6443"});
    assert_eq!(file["clusters"], serde_json::json!([{"name": "", "cluster": cluster}]));
    assert_eq!(file["users"], serde_json::json!([]));
}

#[test]
fn what_leads_to_programs_files_and_proxies_is_refused() {
    let good = with(Credential::Token("t".to_owned())).to_yaml();
    assert!(Kubeconfig::parse(&good).is_ok());
    for (place, further) in [
        ("    token:", "    exec: {command: /bin/true}\n    token:"),
        ("    token:", "    auth-provider: {name: oidc}\n    token:"),
        ("    token:", "    tokenFile: /var/run/secrets/token\n    token:"),
        ("    token:", "    client-key: /etc/key\n    token:"),
        ("    token:", "    as: root\n    token:"),
        ("    server:", "    proxy-url: http://192.0.2.1:3128\n    server:"),
        ("    server:", "    insecure-skip-tls-verify: true\n    server:"),
        ("    server:", "    tls-server-name: other\n    server:"),
        ("    server:", "    certificate-authority: /etc/ca\n    server:"),
    ] {
        assert!(good.contains(place), "{good}");
        let bad = good.replacen(place, further, 1);
        let refused = Kubeconfig::parse(&bad);
        assert!(matches!(refused, Err(BadKubeconfig::Fields(_))), "{further}: {refused:?}");
    }
}

#[test]
fn cluster_info_is_read_again_also_as_kubeadm_writes_it() {
    let ours = portico_pki::cluster_info("https://a.example.com:6443", "CA");
    assert_eq!(portico_pki::read_cluster_info(&ours).as_deref(), Ok("CA"));
    let kubeadm = ours.replace("contexts: []", "contexts: null").replace("users: []", "users: null");
    assert_eq!(portico_pki::read_cluster_info(&kubeadm).as_deref(), Ok("CA"));
    let none = portico_pki::read_cluster_info("clusters: []");
    assert_eq!(none, Err(BadKubeconfig::Clusters(0)));
    let wrong = "clusters: [{name: '', cluster: {certificate-authority-data: '?', server: a}}]";
    assert!(matches!(portico_pki::read_cluster_info(wrong), Err(BadKubeconfig::Data(_))));
}
