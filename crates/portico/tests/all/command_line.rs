//! The command line contract: exit codes, version, help.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

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
    let verbs = verbs_of(&stdout(&run(&["--help"])));
    assert!(verbs.len() > 20 && verbs.contains_key("gateway"), "the list has another form now: {verbs:?}");
    for verb in verbs.keys() {
        let output = run(&[verb, "--help"]);
        assert!(output.status.success(), "{verb}");
        let text = stdout(&output);
        assert!(text.contains("Example"), "{verb}: {text}");
        assert!(text.contains(&format!("portico {verb}")), "{verb}: {text}");
    }
}

#[test]
fn help_of_a_verb_begins_with_what_the_list_of_verbs_says_of_it() {
    let mut left = vec![Vec::new()];
    let mut count = 0;
    while let Some(path) = left.pop() {
        let help = |path: &[String]| {
            let words: Vec<&str> = path.iter().map(|word| &**word).chain(["--help"]).collect();
            stdout(&run(&words))
        };
        for (verb, says) in verbs_of(&help(&path)) {
            let path = [&path[..], &[verb]].concat();
            let first = help(&path).split("\n\n").next().map(joined);
            assert_eq!(first, Some(says), "portico {}", path.join(" "));
            left.push(path);
            count += 1;
        }
    }
    assert!(count > 30, "only {count} verbs were found");
}

/// The verbs that a help text lists, and what it says of each.
fn verbs_of(help: &str) -> BTreeMap<String, String> {
    let Some((_, list)) = help.split_once("Commands:\n") else { return BTreeMap::new() };
    let list = list.split("\n\n").next().unwrap();
    let mut verbs: Vec<String> = Vec::new();
    for line in list.lines() {
        match line.strip_prefix("  ") {
            // What stands further to the right goes on with a description.
            Some(line) if !line.starts_with(' ') => verbs.push(line.to_owned()),
            _ => verbs.last_mut().unwrap().push_str(line),
        }
    }
    let verbs = verbs.iter().map(|line| line.split_once(' ').unwrap());
    let verbs = verbs.filter(|(verb, _)| *verb != "help");
    verbs.map(|(verb, says)| (verb.to_owned(), joined(says))).collect()
}

fn joined(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Commands of pages, as people paste them. After `--help` nothing is looked at; what is before must exist.
#[test]
fn every_command_of_the_pages_has_verbs_and_flags_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut pages: Vec<PathBuf> =
        fs::read_dir(root.join("docs")).unwrap().map(|page| page.unwrap().path()).collect();
    pages.push(root.join("README.md"));
    let mut commands = Vec::new();
    for page in pages.iter().filter(|page| page.extension().is_some_and(|end| end == "md")) {
        let text = fs::read_to_string(page).unwrap().replace("\\\n", " ");
        let text = text.replace("TOKEN", "abcdef.0123456789abcdef").replace("HASH", &"0".repeat(64));
        let blocks = text.split("```").skip(1).step_by(2);
        for line in blocks.flat_map(str::lines).filter_map(|line| line.strip_prefix("portico ")) {
            let words = line.split_whitespace();
            let words = words.take_while(|word| !word.starts_with(['#', '|', '>', '&']));
            let words: Vec<&str> = words.chain(["--help"]).collect();
            let output = run(&words);
            assert!(output.status.success(), "{}: {words:?}: {}", page.display(), stderr(&output));
            commands.push(page);
        }
    }
    assert!(commands.len() > 40, "only {} commands were found", commands.len());
    assert_eq!(commands.last(), pages.last().as_ref(), "none was found in README.md");
}

#[test]
fn the_objects_of_the_first_cluster_are_valid() {
    let page = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/first-cluster.md"));
    let blocks = page.split("<<'END'\n").skip(1).filter_map(|rest| rest.split("\nEND\n").next());
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("all.yaml"), blocks.collect::<Vec<_>>().join("\n---\n")).unwrap();
    let output = run(&["check", folder.path().to_str().unwrap()]);
    assert_eq!(stdout(&output), "3 objects: 0 errors, 0 warnings\n");
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
        // Each way out is named.
        (&["check"], "<DIR|--kubeconfig <FILE>>"),
        (&["routes"], "<DIR|--kubeconfig <FILE>>"),
        (&["nodes"], "<CLUSTER|--cluster-kubeconfig <FILE>>"),
        (&["join", "token"], "<CLUSTER|--cluster-kubeconfig <FILE>>"),
        (&["join"], "<--token <TOKEN>|--token-file <FILE>>"),
        (&["preflight"], "<--inventory <FILE>|--mesh>"),
        (&["unknown"], "unrecognized subcommand"),
        (&[], "Usage"),
    ] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(stderr(&output).contains(hint), "{arguments:?}: {}", stderr(&output));
    }
}

#[test]
fn who_has_no_kubeconfig_is_told_of_flags_and_variables_that_count() {
    let asked = |arguments: &[&str]| {
        let mut portico = Command::new(env!("CARGO_BIN_EXE_portico"));
        portico.env_remove("KUBECONFIG").env_remove("KUBERNETES_SERVICE_HOST").env("HOME", "/nowhere");
        let output = portico.args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        stderr(&output)
    };
    for arguments in [
        &["status"][..],
        &["why", "a"],
        &["nodes", "a"],
        &["kubeconfig", "a"],
        &["join", "token", "a"],
        &["migrate", "a", "--to", "Tunneling"],
    ] {
        let said = asked(arguments);
        assert!(said.contains("by --kubeconfig or $KUBECONFIG"), "{arguments:?}: {said}");
        assert!(!said.contains("--manifests"), "{arguments:?}: {said}");
    }
    let said = asked(&["front", "--admin-listen", "off"]);
    assert!(said.contains("--kubeconfig") && !said.contains("--manifests"), "{said}");
    let said = asked(&["gateway", "--sni-listen", "off", "--admin-listen", "off"]);
    assert!(said.contains("--kubeconfig") && said.contains("--manifests"), "{said}");
}
