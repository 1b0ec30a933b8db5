//! The metrics that are kept. `deploy/control-plane-rules.yaml` and KKP's dashboards ask for nearly all of
//! them. At rest none has a series for each kind of object, of which a tenant can define thousands.

use super::Source;

/// Metrics that are kept of every program.
const COMMON: [&str; 8] = [
    "go_goroutines",
    "kubernetes_build_info",
    "process_cpu_seconds_total",
    "process_max_fds",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "rest_client_requests_total",
];

const API_SERVER: [&str; 9] = [
    "apiserver_admission_webhook_fail_open_count",
    "apiserver_admission_webhook_rejection_count",
    "apiserver_current_inflight_requests",
    "apiserver_egress_dialer_dial_failure_count",
    "apiserver_flowcontrol_rejected_requests_total",
    "apiserver_request_terminations_total",
    "apiserver_request_total",
    "apiserver_storage_size_bytes",
    "apiserver_tls_handshake_errors_total",
];

const CONTROLLER_MANAGER: [&str; 5] = [
    "leader_election_master_status",
    "node_collector_evictions_total",
    "node_collector_unhealthy_nodes_in_zone",
    "node_collector_zone_size",
    "workqueue_depth",
];

const SCHEDULER: [&str; 3] =
    ["leader_election_master_status", "scheduler_pending_pods", "scheduler_schedule_attempts_total"];

const ETCD: [&str; 31] = [
    "etcd_debugging_mvcc_keys_total",
    "etcd_debugging_mvcc_watcher_total",
    "etcd_debugging_store_expires_total",
    "etcd_debugging_store_reads_total",
    "etcd_debugging_store_writes_total",
    "etcd_disk_backend_commit_duration_seconds",
    "etcd_disk_wal_fsync_duration_seconds",
    "etcd_mvcc_db_total_size_in_bytes",
    "etcd_mvcc_db_total_size_in_use_in_bytes",
    "etcd_mvcc_delete_total",
    "etcd_mvcc_put_total",
    "etcd_mvcc_range_total",
    "etcd_mvcc_txn_total",
    "etcd_network_client_grpc_received_bytes_total",
    "etcd_network_client_grpc_sent_bytes_total",
    "etcd_network_peer_received_bytes_total",
    "etcd_network_peer_round_trip_time_seconds",
    "etcd_network_peer_sent_bytes_total",
    "etcd_server_has_leader",
    "etcd_server_id",
    "etcd_server_is_leader",
    "etcd_server_is_learner",
    "etcd_server_leader_changes_seen_total",
    "etcd_server_proposals_applied_total",
    "etcd_server_proposals_committed_total",
    "etcd_server_proposals_failed_total",
    "etcd_server_proposals_pending",
    "etcd_server_quota_backend_bytes",
    "etcd_server_slow_apply_total",
    "etcd_server_slow_read_indexes_total",
    "etcd_server_version",
];

/// All metrics of the Konnectivity server are kept: it is Portico's own, and has few.
const KONNECTIVITY: [&str; 2] = ["konnectivity_", "portico_"];

/// Only failed requests to an API server are kept: all requests would be some thousand series.
const FAILED: (&[u8], &[u8]) = (b"apiserver_request_total{", b"code=\"5");

const fn own(source: Source) -> &'static [&'static str] {
    match source {
        Source::ApiServer => &API_SERVER,
        Source::ControllerManager => &CONTROLLER_MANAGER,
        Source::Scheduler => &SCHEDULER,
        Source::Etcd => &ETCD,
        Source::Konnectivity => &[],
    }
}

/// Whether a line of an answer is kept. A line is a sample, or says the type of a metric.
pub(super) fn is_kept(source: Source, line: &[u8]) -> bool {
    if let Some(line) = line.strip_prefix(b"# TYPE ") {
        return is_known(source, name(line));
    }
    let known = is_known(source, name(line));
    known && (!line.starts_with(FAILED.0) || contains(line, FAILED.1))
}

/// The name that a line begins with. If the line is a comment, the result is no name.
fn name(line: &[u8]) -> &[u8] {
    let end = line.iter().position(|byte| matches!(byte, b'{' | b' ' | b'\n'));
    &line[..end.unwrap_or(line.len())]
}

fn is_known(source: Source, name: &[u8]) -> bool {
    if source == Source::Konnectivity && KONNECTIVITY.iter().any(|begin| name.starts_with(begin.as_bytes())) {
        return true;
    }
    let parts: [&[u8]; 3] = [b"_bucket", b"_sum", b"_count"];
    let family = parts.iter().find_map(|part| name.strip_suffix(*part));
    let is_one = |name: &[u8]| own(source).iter().chain(&COMMON).any(|known| known.as_bytes() == name);
    is_one(name) || family.is_some_and(is_one)
}

fn contains(line: &[u8], text: &[u8]) -> bool {
    line.windows(text.len()).any(|window| window == text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_rules_ask_for_is_kept() {
        let rules = include_str!("../../../../deploy/control-plane-rules.yaml");
        let words = rules.split(|c: char| !c.is_ascii_alphanumeric() && !matches!(c, '_' | ':'));
        let prefixes = ["apiserver_", "etcd_", "konnectivity_", "node_collector_", "process_", "scheduler_"];
        let asked: Vec<_> =
            words.filter(|word| prefixes.iter().any(|prefix| word.starts_with(prefix))).collect();
        assert!(asked.len() > 40, "{asked:?}");
        for metric in asked {
            let line = format!("{metric}{{code=\"500\"}} 1\n");
            assert!(Source::ALL.into_iter().any(|source| is_kept(source, line.as_bytes())), "{metric}");
        }
    }
}
