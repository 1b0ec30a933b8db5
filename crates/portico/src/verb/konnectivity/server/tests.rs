use clap::Parser;

use portico_konnectivity::server::Strategy;
use portico_lab::log_lines::LogLines;

use super::flags::labels;
use super::*;

#[derive(Debug, Parser)]
#[command(args_override_self = true)]
struct Cli {
    #[command(flatten)]
    flags: Flags,
}

fn flags(line: &str) -> Flags {
    Cli::try_parse_from(["server"].into_iter().chain(line.split_whitespace())).unwrap().flags
}

async fn refusal(line: &str) -> String {
    flags(line).plan().await.err().unwrap().to_string()
}

/// As kubeadm-like installers and KKP pass them.
#[test]
fn the_flags_of_existing_manifests_are_taken() {
    let flags = flags(
        "--logtostderr=true --log-file-max-size=0 --uds-name=/etc/kubernetes/konnectivity-server.socket \
         --cluster-key=/k/tls.key --cluster-cert=/k/tls.crt --server-port=0 --agent-port=8132 \
         --health-port=8134 --admin-port=8133 --kubeconfig=/k/kubeconfig --mode=grpc \
         --delete-existing-uds-file=true --server-count=2 --agent-namespace=kube-system \
         --agent-service-account=konnectivity-agent --authentication-audience=system:konnectivity-server \
         --keepalive-time=1h --frontend-keepalive-time=1h -v=4 --xfr-channel-size=10 \
         --backend-dial-timeout=0 --graceful-shutdown-timeout=30s \
         --proxy-strategies=destHost,default --warn-on-channel-limit --cluster-ca-cert= --server-ca-cert= \
         --kubeconfig-qps -1 --kubeconfig-burst -1",
    );
    assert_eq!(flags.agents.proxy_strategies, [Strategy::DestHost, Strategy::Default]);
    let settings = flags.settings();
    assert_eq!((settings.count, settings.dial_timeout), (2, DIAL_TIMEOUT));
    assert!(flags.frontend.server_ca_cert.0.is_none());
    assert!(!flags.leases.enable_lease_controller);
    assert_eq!(flags.leases.lease_label, "k8s-app=konnectivity-server");
}

#[test]
fn a_silent_peer_gets_ping_after_the_time_that_is_given_whatever_it_is() {
    let given = |time: &str| flags(&format!("--keepalive-time={time} --frontend-keepalive-time={time}"));
    for (time, seconds) in [("10m", 600), ("1h", 3_600), ("1s", 1), ("10ms", 1), ("0", 7_200)] {
        let Settings { keepalive, frontend_keepalive, .. } = given(time).settings();
        assert_eq!([keepalive, frontend_keepalive], [Duration::from_secs(seconds); 2], "{time}");
    }
    let Settings { keepalive, frontend_keepalive, .. } = flags("").settings();
    assert_eq!((keepalive.as_secs(), frontend_keepalive.as_secs()), (30, 3_600));
}

#[tokio::test]
async fn flags_that_contradict_each_other_say_what_to_do() {
    let certificates = "--cluster-cert=/nowhere --cluster-key=/nowhere";
    assert!(refusal(&format!("{certificates} --tls-min-version=1.2")).await.contains("VersionTLS12"));
    assert!(refusal(certificates).await.contains("/nowhere"));
    assert!(refusal("").await.contains("--cluster-cert is missing"));
    assert!(flags("--cipher-suites=TLS_RSA_WITH_RC4_128_SHA").tls_options().is_err());
}

#[test]
fn suites_that_the_library_does_not_have_are_left_out_and_named_in_the_log() {
    let cbc = "--cipher-suites=TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA";
    let with_gcm = format!("{cbc},TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256");
    for (line, warnings) in
        [(with_gcm.as_str(), 1), (cbc, 2), (&format!("{cbc} --tls-min-version=VersionTLS13"), 1)]
    {
        let (lines, _collected) = LogLines::collect(|metadata| metadata.target().starts_with("portico::"));
        let options = flags(line).tls_options().unwrap();
        let lines = lines.messages();
        assert!(lines.iter().all(|line| line.contains("--cipher-suites")), "{lines:?}");
        assert_eq!(lines.len(), warnings, "{line}: {lines:?}");
        let builder = rustls::ServerConfig::builder_with_provider(options.provider);
        assert!(builder.with_protocol_versions(&options.versions).is_ok(), "a server starts with it");
    }
}

#[test]
fn values_that_upstream_takes_are_taken() {
    let strategies = flags("--proxy-strategies=destHost,default,,destHost").agents.proxy_strategies;
    assert_eq!(strategies, [Strategy::DestHost, Strategy::Default]);
    assert!(Cli::try_parse_from(["server", "--proxy-strategies=,"]).is_err());
    // It does not count without --enable-lease-controller.
    flags("--lease-label=");
}

#[test]
fn an_id_that_no_agent_takes_is_refused() {
    let with_id = |id: &str| Cli::try_parse_from(["server", &format!("--server-id={id}")]);
    for (id, is_fit) in [("", true), ("apiserver-0", true), ("apiserver-0\n", false), ("é", false)] {
        assert_eq!(with_id(id).is_ok(), is_fit, "{id:?}");
    }
    assert!(with_id(&"n".repeat(512)).is_ok());
    let refusal = with_id(&"n".repeat(513)).unwrap_err().to_string();
    assert!(refusal.contains("--server-id") && refusal.contains("512"), "{refusal}");
}

#[test]
fn labels_of_leases_are_pairs() {
    let flags = flags("--enable-lease-controller --lease-label=a=b,example.com/c=");
    let named = labels(&flags.leases.lease_label).unwrap();
    let named: Vec<_> = named.iter().map(|(key, value)| (&**key, &**value)).collect();
    assert_eq!(
        (flags.leases.enable_lease_controller, named),
        (true, vec![("a", "b"), ("example.com/c", "")])
    );
    for wrong in ["", "a", "=b", "a=b=c", "a=b,"] {
        assert!(labels(wrong).is_err(), "{wrong}");
    }
}
