use clap::Parser;

use super::*;

#[derive(Debug, Parser)]
#[command(args_override_self = true)]
struct Command {
    #[command(flatten)]
    flags: Flags,
}

fn flags(arguments: &[&str]) -> Flags {
    Command::try_parse_from(["agent"].iter().chain(arguments)).unwrap().flags
}

async fn settings(arguments: &[&str]) -> anyhow::Result<Settings> {
    flags(arguments).settings().await
}

#[tokio::test]
async fn the_defaults_are_upstreams() {
    let settings = settings(&[]).await.unwrap();
    assert_eq!(settings.servers[0].to_string(), "127.0.0.1:8091");
    assert_eq!(settings.sync_interval, Duration::from_secs(1));
    assert_eq!(settings.sync_interval_cap, Duration::from_secs(10));
    assert_eq!(settings.keepalive_time, Duration::from_secs(3600));
    assert!(!settings.sync_forever);
    assert!(settings.token.is_none());
    assert!(settings.policy.allows("192.0.2.1:22".parse().unwrap()));
    assert!(matches!(settings.count, CountSource::Responses));
    assert_eq!(settings.agent_id.len(), 36, "a UUID");
    let listens = flags(&[]).listens().await.unwrap();
    assert_eq!(listens.health.unwrap().port(), 8093);
    assert_eq!(listens.admin.unwrap().to_string(), "127.0.0.1:8094");
}

#[tokio::test]
async fn a_server_whose_machine_is_gone_is_found_by_tcp() {
    let settings = settings(&[]).await.unwrap();
    // The use of it by a dialler is tested beside the dialler. From here its sockets cannot be seen.
    let dialer = format!("{:?}", settings.to_servers);
    assert!(dialer.contains(&format!("{KEEP_ALIVE:?}")), "{dialer}");
}

/// As upstream's own tests start the agent, and as manifests do.
#[tokio::test]
async fn every_flag_of_the_upstream_agent_is_taken() {
    let given = flags(&[
        "--agent-cert=",
        "--agent-key=",
        "--ca-cert=",
        "--proxy-server-host=konnectivity.example.com",
        "--proxy-server-port=6443",
        "--alpn-proto=[]",
        "--health-server-host=localhost",
        "--health-server-port=0",
        "--admin-server-port=8133",
        "--admin-bind-address=",
        "--enable-profiling=false",
        "--enable-contention-profiling=false",
        "--agent-id=agent",
        "--agent-identifiers=host=node-1&ipv4=192.0.2.1&default-route=true",
        "--sync-interval=100ms",
        "--sync-interval-cap=1m30s",
        "--probe-interval=100ms",
        "--sync-forever",
        "--sync-forever=true",
        "--keepalive-time=1h",
        "--service-account-token-path=",
        "--warn-on-channel-limit=true",
        "--xfr-channel-size=150",
        "--count-server-leases=false",
        "--lease-namespace=kube-system",
        "--lease-label=k8s-app=konnectivity-server",
        "--lease-label-selector=k8s-app in (a,b)",
        "--server-count-source=",
        "--kubeconfig=",
        "--kube-api-content-type=application/vnd.kubernetes.protobuf",
        "--logtostderr=true",
        "--alsologtostderr",
        "--log-file=/var/log/konnectivity-agent.log",
        "--log-file-max-size=0",
        "--log-dir=",
        "--one-output=false",
        "--skip-headers=false",
        "--skip-log-headers=false",
        "--add-dir-header=false",
        "--stderrthreshold=2",
        "--vmodule=",
        "--log-backtrace-at=:0",
        "--v",
        "4",
        "-v=5",
    ]);
    let settings = given.settings().await.unwrap();
    assert_eq!(settings.servers[0].to_string(), "konnectivity.example.com:6443");
    assert_eq!(settings.agent_id, "agent");
    assert_eq!(settings.sync_interval_cap, Duration::from_secs(90));
    assert!(settings.sync_forever);
    assert!(given.listens().await.unwrap().health.is_none());
    assert_eq!(given.count.lease_label_selector, "k8s-app in (a,b)");
}

#[tokio::test]
async fn several_hosts_and_destinations_may_be_named() {
    let settings = settings(&[
        "--proxy-server-host=one.example.com,2001:db8::1",
        "--proxy-server-host=two.example.com",
        "--allow-destination=10.0.0.0/8:10250,fd00::/8",
    ])
    .await
    .unwrap();
    let servers: Vec<String> = settings.servers.iter().map(ToString::to_string).collect();
    assert_eq!(servers, ["one.example.com:8091", "[2001:db8::1]:8091", "two.example.com:8091"]);
    assert!(settings.policy.allows("10.0.0.1:10250".parse().unwrap()));
    assert!(!settings.policy.allows("10.0.0.1:22".parse().unwrap()));
}

#[tokio::test]
async fn what_cannot_work_is_refused_with_its_flag() {
    for (arguments, flag) in [
        (&["--agent-identifiers=hots=node-1"][..], "--agent-identifiers"),
        (&["--agent-identifiers=host=a;host=b"], "--agent-identifiers"),
        (&["--proxy-server-host=two words"], "--proxy-server-host"),
        (&["--sync-interval=20s"], "--sync-interval-cap"),
        (&["--agent-cert=missing.crt"], "--agent-cert"),
        (&["--service-account-token-path=missing"], "--service-account-token-path"),
    ] {
        let error = format!("{:#}", settings(arguments).await.unwrap_err());
        assert!(error.contains(flag), "{error}");
    }
    for wrong in ["--connection-buffer=1Ki", "--sync-forever=yes", "--allow-destination=example.com"] {
        assert!(Command::try_parse_from(["agent", wrong]).is_err(), "{wrong}");
    }
}
