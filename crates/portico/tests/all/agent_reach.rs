//! `portico agent reach` beside servers with TLS, of which one is not as it should be.

use portico_lab::hostile_api::HostileApi;
use portico_lab::pki::Authority;
use portico_lab::refusing::Refusing;
use tempfile::TempDir;

use crate::common::{Process, run, stderr, stdout};

const READY: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

/// A file with the certificate of an authority.
fn ca_file(authority: &Authority) -> (TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ca.crt");
    std::fs::write(&path, authority.cert()).unwrap();
    let path = path.to_str().unwrap().to_owned();
    (folder, path)
}

fn reach(urls: &[&str], ca: &str) -> (Option<i32>, String) {
    let output = run(&[&["agent", "reach", "--ca-file", ca][..], urls].concat());
    (output.status.code(), stdout(&output))
}

#[test]
fn a_server_with_the_certificate_is_reached_whether_or_not_it_lets_anybody_in() {
    let refused = |status: &str| {
        &*format!("HTTP/1.1 {status}\r\ncontent-length: 18\r\n\r\n{{\"message\": \"none\"}}").leak()
    };
    for (answer, reached) in [
        (READY, true),
        (refused("401 Unauthorized"), true),
        (refused("403 Forbidden"), true),
        (refused("404 Not Found"), false),
        (refused("500 Internal Server Error"), false),
        ("220 mail.example.com ESMTP\r\n", false),
    ] {
        let api = HostileApi::start(answer, false).unwrap();
        let (_folder, ca) = ca_file(api.authority());
        let url = api.url("localhost");
        let (code, said) = reach(&[&url], &ca);
        assert_eq!(code, Some(if reached { 0 } else { 1 }), "{answer}: {said}");
        let expected =
            if reached { format!("{url}: reached\n") } else { format!("{url}: not reached: GET ") };
        assert!(said.starts_with(&expected), "{said}");
    }
}

#[test]
fn a_server_by_another_authority_or_name_or_without_tls_is_not_reached() {
    let api = HostileApi::start(READY, false).unwrap();
    let (_folder, ca) = ca_file(api.authority());
    let (_other_folder, other) = ca_file(&Authority::new("other").unwrap());
    let (code, said) = reach(&[&api.url("localhost")], &other);
    assert!(code == Some(1) && said.contains("certificate"), "{said}");
    // Its certificate has the names 127.0.0.1 and localhost.
    let (code, said) = reach(&[&api.url("127.0.0.2")], &ca);
    assert!(code == Some(1) && said.contains("not reached"), "{said}");
    let refusing = Refusing::start().unwrap();
    let closed = refusing.address();
    let (code, said) = reach(&[&format!("https://{closed}")], &ca);
    assert!(code == Some(1) && said.contains("refused"), "{said}");
}

#[test]
fn of_several_servers_each_must_be_reached_and_each_is_reported() {
    let api = HostileApi::start(READY, false).unwrap();
    let (_folder, ca) = ca_file(api.authority());
    let refusing = Refusing::start().unwrap();
    let closed = format!("https://{}", refusing.address());
    let (code, said) = reach(&[&api.url("localhost"), &closed], &ca);
    assert_eq!(code, Some(1));
    assert!(said.contains(": reached\n") && said.contains(&format!("{closed}: not reached: ")), "{said}");
}

#[test]
fn what_cannot_be_tried_is_wrong_usage() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().join("empty");
    std::fs::write(&empty, "none\n").unwrap();
    for arguments in [
        &["https://localhost:1", "--ca-file", "/nowhere"][..],
        &["https://localhost:1", "--ca-file", empty.to_str().unwrap()],
        &["http://localhost:1", "--ca-file", "/nowhere"],
        &["https://localhost:1"],
        &["--ca-file", "/nowhere"],
    ] {
        let output = run(&[&["agent", "reach"], arguments].concat());
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stderr(&output));
    }
}

#[test]
fn with_every_it_goes_on_and_tells_of_changes_alone() {
    let api = HostileApi::start(READY, false).unwrap();
    let (_folder, ca) = ca_file(&Authority::new("other").unwrap());
    let url = api.url("localhost");
    let mut process = Process::start(&["agent", "reach", &url, "--ca-file", &ca, "--every", "10ms"]);
    process.wait_for("not reached: GET /readyz: ");
    // As kubelets bring a new one: complete, or not at all.
    let new = format!("{ca}.new");
    std::fs::write(&new, api.authority().cert()).unwrap();
    std::fs::rename(&new, &ca).unwrap();
    process.wait_for(&format!("{url}: reached"));
    process.signal("TERM");
    assert_eq!(process.wait().code(), Some(0));
    assert_eq!(process.said().lines().count(), 2, "{}", process.said());
}
