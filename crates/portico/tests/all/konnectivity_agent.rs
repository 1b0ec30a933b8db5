//! `portico konnectivity agent` as a process: probes, metrics, signals. What it does on the wire is tested in
//! `portico-konnectivity`.

use portico_lab::metrics::names;

use crate::common::*;

/// An agent whose server is not there, its health port and its admin port.
fn agent(more: &[&str]) -> (Process, u16, u16) {
    let [server, health, admin] = [(); 3].map(|()| free_port());
    let (server, health_port) =
        (format!("--proxy-server-port={server}"), format!("--health-server-port={health}"));
    let admin_port = format!("--admin-server-port={admin}");
    let arguments = ["konnectivity", "agent", "--health-server-host=127.0.0.1", "--logtostderr=true"];
    let mut process = Process::start(&[&arguments[..], &[&server, &health_port, &admin_port], more].concat());
    process.wait_for("listener=admin");
    (process, health, admin)
}

#[test]
fn probes_answer_in_upstreams_words_and_an_idle_agent_ends_with_the_first_signal() {
    let (mut process, health, admin) = agent(&["--drain-idle=0s"]);
    assert!(process.said().contains("--logtostderr"), "a flag without effect is named: {}", process.said());
    assert_eq!(get(health, "/healthz"), (200, "ok".to_owned()));
    for path in ["/readyz", "/ready"] {
        let (status, body) = get(health, path);
        assert_eq!(status, 503);
        assert!(body.starts_with("[+]ping ok\n[-]server-connected failed: no servers connected\n"), "{body}");
    }
    assert_eq!(get(admin, "/connections"), (200, "[]\n".to_owned()));
    assert_eq!(get(admin, "/servers"), (200, "[]\n".to_owned()));
    assert_eq!(get(admin, "/metrics").0, 301);
    process.signal("TERM");
    assert!(process.wait().success());
    assert!(process.said().contains("drained"), "{}", process.said());
}

#[test]
fn a_second_signal_ends_an_agent_that_drains() {
    let (mut process, _, _) = agent(&["--drain-idle=1h"]);
    process.signal("TERM");
    process.wait_for("draining");
    process.signal("TERM");
    assert!(process.wait().success());
    assert!(process.said().contains("told to stop again"), "{}", process.said());
}

#[test]
fn wrong_usage_names_the_flag_and_ends_with_2() {
    for (wrong, named) in [
        (&["--agent-identifiers=hots=a"][..], "--agent-identifiers"),
        (&["--agent-cert=missing.crt"], "--agent-cert"),
        (&["--health-server-host=nowhere"], "--health-server-host"),
    ] {
        let output = run(&[&["konnectivity", "agent", "--proxy-server-host=127.0.0.1"], wrong].concat());
        assert_eq!(output.status.code(), Some(2));
        assert!(stderr(&output).contains(named), "{}", stderr(&output));
    }
}

#[test]
fn every_metric_and_every_reason_is_in_the_manual() {
    let (_process, health, _) = agent(&[]);
    let (_, metrics) = get(health, "/metrics");
    let manual = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/konnectivity-agent.md"));
    for name in names(&metrics) {
        assert!(manual.contains(&format!("`{name}`")), "{name} is not in the manual");
    }
    let ends = "portico_konnectivity_agent_ended_connections_total{reason=\"";
    let reasons = metrics.lines().filter_map(|line| line.strip_prefix(ends)?.split('"').next());
    for reason in reasons {
        assert!(manual.contains(&format!("| `{reason}` |")), "{reason} is not in the manual");
    }
    for name in ["open_server_connections", "known_server_count", "open_endpoint_connections"] {
        assert!(metrics.contains(&format!("\nkonnectivity_network_proxy_agent_{name} ")), "{name}");
    }
}
