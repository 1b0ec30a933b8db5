//! `portico demo`: it starts, what it prints works when pasted, and Ctrl-C leaves nothing behind.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::{Process, get, portico, run, stderr, stdout, wait_until};

/// Fails with instructions where a program is missing: a test that passes because nothing was tried proves
/// nothing.
fn require(program: &str) {
    let found = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    // `openssl --version` is an error in old versions, and still a sign of life.
    assert!(found.is_ok(), "{program} is missing: apt-get install {program}, or scripts/setup test");
}

/// Runs a printed line as it stands, in a shell, with a bound on its time. Returns its output.
fn paste(line: &str) -> String {
    let output =
        Command::new("timeout").args(["30", "sh", "-c", line]).output().expect("a shell can be started");
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn the_three_clusters_answer_and_ctrl_c_cleans_up() {
    require("curl");
    require("openssl");
    let parent = tempfile::Builder::new().prefix("a folder").tempdir().unwrap();
    let mut demo = Process::of(portico().env("TMPDIR", parent.path()).args([
        "demo",
        "--sni-port",
        "26443",
        "--tunnel-port",
        "28088",
        "--admin-port",
        "28002",
        "--agent-port",
        "26643",
        "--agent-admin-port",
        "28004",
        "--konnectivity-port",
        "28132",
    ]));
    demo.wait_for("Ctrl-C stops the demo");
    let said = demo.said();
    let lines: Vec<&str> = said.lines().map(str::trim).collect();
    let starting_with = |prefix: &str, containing: &str| -> Vec<&str> {
        lines.iter().filter(|line| line.starts_with(prefix) && line.contains(containing)).copied().collect()
    };

    let versions = starting_with("curl", "/version");
    assert_eq!(
        versions.len(),
        6,
        "three clusters, one of them also through two tunnels and an agent:\n{said}"
    );
    for line in versions {
        let answer = paste(line);
        assert!(answer.contains("\"gitVersion\":\"v1."), "{line}\n{answer}");
    }

    let handshakes = starting_with("openssl", "-servername");
    assert_eq!(handshakes.len(), 2, "{said}");
    let known = paste(handshakes[0]);
    assert!(known.contains("Verification: OK"), "{known}");
    let unknown = paste(handshakes[1]);
    assert!(unknown.contains("unrecognized name"), "{unknown}");

    let routes = starting_with("curl", "/routes");
    let table = paste(routes[0]);
    for cluster in ["by-port", "by-balancer", "by-name"] {
        assert!(table.contains(&format!("cluster-{cluster}/apiserver-external-secure")), "{table}");
    }

    let tunnels = paste(starting_with("curl", "/tunnels")[0]);
    assert_eq!(tunnels.matches(" accepted ").count(), 2, "{tunnels}");

    let logs = starting_with("curl", "/pods/web/log")[0];
    wait_until("the API server reaches the kubelet", || paste(logs).contains("line 3 of the log"));
    let direct = paste(starting_with("curl", "/containerLogs/")[0]);
    assert!(direct.contains("curl: (") && !direct.contains("line 1"), "only the agent reaches it: {direct}");
    let agents = starting_with("curl", ":28133/connections")[0].replace("connections", "agents");
    let agents = paste(&agents);
    assert!(agents.contains(env!("CARGO_PKG_VERSION")), "{agents}");

    let check = lines.iter().find(|line| line.contains(" check ")).unwrap();
    let answer = paste(check);
    assert!(answer.contains("0 errors"), "{check}\n{answer}");

    let folder = fs::read_dir(parent.path()).unwrap().next().unwrap().unwrap().path();
    assert!(said.contains(folder.join("by-name.kubeconfig").to_str().unwrap()), "{said}");
    assert!(folder.join("manifests").is_dir());
    // Keys and tokens are for their owner only.
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&folder), 0o700);
    for name in ["by-name.key", "tunnel.key", "by-name.kubeconfig"] {
        assert_eq!(mode(&folder.join(name)), 0o600, "{name}");
    }
    demo.signal("INT");
    assert!(demo.wait().success(), "{}", demo.said());
    assert!(!folder.exists(), "{} is still there", folder.display());
}

#[test]
fn a_watch_brings_an_event_a_second_through_each_strategy() {
    require("curl");
    let mut demo = Process::start(&[
        "demo",
        "--sni-port",
        "29443",
        "--tunnel-port",
        "29088",
        "--admin-port",
        "29002",
        "--agent-port",
        "29643",
        "--agent-admin-port",
        "29004",
        "--konnectivity-port",
        "29132",
        "--node-port",
        "31500",
    ]);
    demo.wait_for("Ctrl-C stops the demo");
    let said = demo.said();
    let lines =
        said.lines().map(str::trim).filter(|line| line.starts_with("curl") && line.contains("/version"));
    for line in lines {
        let cluster =
            ["by-port", "by-balancer", "by-name"].into_iter().find(|name| line.contains(name)).unwrap();
        // The first two events of a watch that ends by itself.
        let path = "/api/v1/namespaces?watch=true&timeoutSeconds=2";
        let line = line.replace("/version", path);
        let url = line.split_whitespace().last().unwrap().to_owned();
        let line = line.replace(&url, &format!("-H 'Authorization: Bearer demo-token-{cluster}' '{url}'"));
        let events = paste(&line);
        assert_eq!(events.matches("\"type\":\"ADDED\"").count(), 3, "{line}\n{events}");
        assert_eq!(events.matches("\"type\":\"MODIFIED\"").count(), 2, "{line}\n{events}");
    }
    // A terminal that is closed is a Ctrl-C, too.
    let folder = said.split_whitespace().find(|word| word.ends_with("by-name.kubeconfig")).unwrap();
    let folder = Path::new(folder).parent().unwrap().to_owned();
    demo.signal("HUP");
    assert!(demo.wait().success(), "{}", demo.said());
    assert!(!folder.exists(), "{} is still there", folder.display());
}

#[test]
fn a_taken_port_is_stepped_over_and_said() {
    // Not one of those that clients get: tests beside this one have thousands in a row of them open.
    let mut below_those_of_clients = 20_000..24_000;
    let taken = below_those_of_clients.find_map(|port| std::net::TcpListener::bind(("127.0.0.1", port)).ok());
    let taken = taken.expect("a port is free");
    let port = taken.local_addr().unwrap().port().to_string();
    let mut demo = Process::start(&[
        "demo",
        "--sni-port",
        &port,
        "--tunnel-port",
        "24088",
        "--admin-port",
        "24002",
        "--agent-port",
        "24643",
        "--agent-admin-port",
        "24004",
        "--konnectivity-port",
        "24132",
        "--node-port",
        "31900",
    ]);
    let line = demo.wait_for(&format!("Port {port}"));
    assert!(line.contains("is taken; taking"), "{line}");
    demo.wait_for("Ctrl-C stops the demo");
    let admin = demo.said().lines().find_map(|line| {
        let (_, rest) = line.split_once("http://127.0.0.1:")?;
        rest.split(['/', '\'']).next()?.parse::<u16>().ok()
    });
    assert_eq!(get(admin.unwrap(), "/readyz").0, 200);
    demo.signal("INT");
    assert!(demo.wait().success(), "{}", demo.said());
}

/// `portico demo --kubernetes` in a folder of its own, and with nothing else on the PATH.
fn with_kubernetes(folder: &Path) -> Command {
    let own = folder.join("portico");
    std::fs::hard_link(env!("CARGO_BIN_EXE_portico"), &own).expect("a link beside the binary can be made");
    let mut command = Command::new(own);
    command.args(["demo", "--kubernetes"]).env_clear().stdin(Stdio::null());
    command
}

/// A folder on the file system of the binary.
fn beside_the_binary() -> tempfile::TempDir {
    let beside = Path::new(env!("CARGO_BIN_EXE_portico")).parent().expect("a binary is in a folder");
    tempfile::tempdir_in(beside).expect("a folder can be made there")
}

#[test]
fn demo_with_kubernetes_says_how_to_get_the_lab_where_there_is_none() {
    let folder = beside_the_binary();
    let output = with_kubernetes(folder.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("`scripts/demo --kubernetes` builds it"), "{}", stderr(&output));

    std::fs::remove_file(folder.path().join("portico")).unwrap();
    let output = with_kubernetes(folder.path()).env("PORTICO_LAB", "/nowhere").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("there is no file /nowhere"), "{}", stderr(&output));
}

#[test]
fn demo_with_kubernetes_is_the_lab_beside_it() {
    let folder = beside_the_binary();
    let lab = folder.path().join("portico-lab");
    std::fs::write(&lab, "#!/bin/sh\necho lab \"$@\"\nexit 7\n").unwrap();
    std::fs::set_permissions(&lab, std::fs::Permissions::from_mode(0o755)).unwrap();
    let output = with_kubernetes(folder.path()).arg("--no-workers").output().unwrap();
    assert_eq!(stdout(&output), "lab demo --no-workers\n", "{}", stderr(&output));
    assert_eq!(output.status.code(), Some(7), "its exit code is that of the lab");
}

#[test]
fn demo_with_kubernetes_takes_no_ports_and_the_demo_without_it_no_workers() {
    for (arguments, hint) in [
        (&["demo", "--kubernetes", "--sni-port", "16443"][..], "cannot be used with"),
        (&["demo", "--no-workers"], "--kubernetes"),
    ] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(stderr(&output).contains(hint), "{arguments:?}: {}", stderr(&output));
    }
}
