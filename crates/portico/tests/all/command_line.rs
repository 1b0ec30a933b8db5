//! The command line contract: exit codes, version, help.

use crate::common::{run, stderr, stdout};

#[test]
fn the_version_names_a_release() {
    let output = run(&["--version"]);
    assert!(output.status.success());
    assert!(
        stdout(&output).starts_with(concat!("portico ", env!("CARGO_PKG_VERSION"))),
        "{}",
        stdout(&output)
    );
}

#[test]
fn every_verb_has_help_with_an_example() {
    let verbs = ["gateway", "front", "check", "routes", "ports", "firewall", "capacity", "preflight", "demo"];
    for verb in verbs.into_iter().chain(["kubeconfig", "control-plane", "migrate"]) {
        let output = run(&[verb, "--help"]);
        assert!(output.status.success(), "{verb}");
        let text = stdout(&output);
        assert!(text.contains("Example"), "{verb}: {text}");
        assert!(text.contains(&format!("portico {verb}")), "{verb}: {text}");
    }
}

#[test]
fn help_of_a_verb_is_found_in_every_way_it_is_asked_for() {
    let help = stdout(&run(&["gateway", "--help"]));
    let asked = run(&["help", "gateway"]);
    assert!(asked.status.success());
    assert_eq!(stdout(&asked), help);
    for arguments in [&["help"][..], &["help", "--help"]] {
        let output = run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
        assert!(stdout(&output).contains("Usage: portico"), "{arguments:?}");
    }
    assert_eq!(run(&["help", "nothing"]).status.code(), Some(2));
}

#[test]
fn the_last_words_are_json_if_the_log_is() {
    let output = run(&["check", "/nowhere", "--log-format", "json"]);
    assert_eq!(output.status.code(), Some(2));
    let line: serde_json::Value = serde_json::from_str(&stderr(&output)).unwrap();
    assert_eq!(line["level"], "ERROR");
    assert!(line["message"].as_str().unwrap().contains("/nowhere"), "{line}");
}

#[test]
fn wrong_usage_ends_with_2_and_says_what_to_do() {
    for (arguments, hint) in [
        (&["gateway", "--sni-listen", "6443"][..], "give an address and port such as 0.0.0.0:6443"),
        (
            &["gateway", "--manifests", ".", "--tunnel-listen", "off", "--tunnel-plaintext"],
            "--tunnel-listen is off",
        ),
        (
            &["gateway", "--manifests", ".", "--tunnel-tls-cert", "/nowhere", "--tunnel-tls-key", "/nowhere"],
            "/nowhere",
        ),
        (&["check", "/nowhere"], "/nowhere"),
        (&["front", "--service", "front"], "give NAMESPACE/NAME"),
        (&["front", "--service", "a/b", "--kubeconfig", "/nowhere"], "/nowhere"),
        (&["unknown"], "unrecognized subcommand"),
        (&[], "Usage"),
    ] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(stderr(&output).contains(hint), "{arguments:?}: {}", stderr(&output));
    }
}
