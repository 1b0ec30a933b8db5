//! What would keep this machine out of the cluster, or would trouble it there: found before anything is
//! written, all at once.

use std::fmt::Write as _;
use std::fs;
use std::net::{Ipv6Addr, TcpListener};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

/// Certificates begin at most this much before they are issued, and tokens end by the minute.
const CLOCK: SignedDuration = SignedDuration::from_secs(60);
/// A kubelet may be this many minor versions older than the API server (the version skew policy).
const OLDER: u32 = 3;
/// The port of the kubelet, where its configuration names no other.
const PORT: u64 = 10_250;

/// What was found.
#[derive(Debug, Default)]
pub(super) struct Findings {
    failures: Vec<String>,
    warnings: Vec<String>,
}

impl Findings {
    /// Notes what keeps the machine out.
    pub(super) fn fail(&mut self, what: String) {
        self.failures.push(what);
    }

    /// Whether something keeps it out.
    pub(super) fn keep_out(&self) -> bool {
        !self.failures.is_empty()
    }

    /// A line each.
    pub(super) fn lines(&self) -> String {
        let mut lines = String::new();
        for (word, found) in [("FAIL", &self.failures), ("WARN", &self.warnings)] {
            for text in found {
                // Writing to a String cannot fail.
                let _ = writeln!(lines, "{word} {text}");
            }
        }
        lines
    }

    /// Looks at what no answer of the cluster is needed for.
    pub(super) fn machine(&mut self, time: Option<Timestamp>) {
        if !rustix::process::geteuid().is_root() {
            self.fail("only root may write the files of a kubelet and start it: use sudo".to_owned());
        }
        if let Some(why) = time.and_then(|theirs| clock(theirs, Timestamp::now())) {
            self.fail(why);
        }
        for (file, name) in [
            ("/proc/sys/net/ipv4/ip_forward", "net.ipv4.ip_forward"),
            ("/proc/sys/net/bridge/bridge-nf-call-iptables", "net.bridge.bridge-nf-call-iptables"),
        ] {
            if fs::read_to_string(file).is_ok_and(|text| text.trim() == "1") {
                continue;
            }
            self.warnings.push(format!(
                "{name} is not 1: most pod networks need it (modprobe br_netfilter; sysctl -w {name}=1)"
            ));
        }
    }

    /// Looks at what the configuration of the kubelet asks of the machine.
    pub(super) fn configuration(&mut self, config: &Value) {
        let socket = config["containerRuntimeEndpoint"].as_str().unwrap_or_default();
        if let Err(error) = UnixStream::connect(socket.trim_start_matches("unix://")) {
            self.fail(format!(
                "no container runtime answers at {socket}: {error}; start containerd, or name its socket as \
                 containerRuntimeEndpoint in the file of --kubelet-config"
            ));
        }
        let has_v2 = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
        if config["failCgroupV1"] != false && !has_v2 {
            self.fail(
                "the machine has cgroup v1 at /sys/fs/cgroup, which kubelets refuse from 1.35 on: start the \
                 kernel with systemd.unified_cgroup_hierarchy=1, or set failCgroupV1: false in the file of \
                 --kubelet-config"
                    .to_owned(),
            );
        }
        let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
        if config["failSwapOn"] != false && has_swap(&swaps) {
            self.fail(
                "swap is on, and the kubelet does not start with it: swapoff -a, and remove it from \
                 /etc/fstab; or set failSwapOn: false in the file of --kubelet-config"
                    .to_owned(),
            );
        }
        let port = config["port"].as_u64().unwrap_or(PORT);
        let bound = u16::try_from(port).map(|port| TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)));
        if !matches!(bound, Ok(Ok(_))) {
            self.fail(format!(
                "port {port} of the kubelet is not free: `ss -ltnp 'sport = :{port}'` says who has it; a \
                 kubelet that runs already is stopped by systemctl stop kubelet"
            ));
        }
    }

    /// Looks at the program, for an API server of this version.
    pub(super) fn kubelet(&mut self, program: &Path, server: &str) {
        let shown = program.display();
        let output = match Command::new(program).arg("--version").output() {
            Ok(output) => output,
            Err(error) => {
                return self.fail(format!(
                    "no kubelet at {shown}: {error}; install one of version {server}, or name it by --kubelet"
                ));
            }
        };
        let text = String::from_utf8_lossy(&output.stdout);
        let version = text.trim().trim_start_matches("Kubernetes ");
        if let Some(why) = skew(version, server) {
            self.fail(format!("the kubelet at {shown} {why}"));
        }
    }
}

/// What is wrong with the clock here.
fn clock(theirs: Timestamp, ours: Timestamp) -> Option<String> {
    let off = ours.duration_since(theirs);
    (off.abs() > CLOCK).then(|| {
        let which = if off.is_positive() { "ahead of" } else { "behind" };
        format!(
            "the clock of this machine is {} s {which} that of the API server: certificates would not be \
             valid. Set it, for example by chrony",
            off.abs().as_secs()
        )
    })
}

/// Below the headline of /proc/swaps is a line each.
fn has_swap(swaps: &str) -> bool {
    swaps.lines().nth(1).is_some()
}

/// Why a kubelet of this version does not go with the API server.
fn skew(kubelet: &str, server: &str) -> Option<String> {
    let (Some((major, minor)), Some((server_major, server_minor))) = (numbers(kubelet), numbers(server))
    else {
        return Some(format!("has no version that can be compared ({kubelet:?}, API server {server:?})"));
    };
    let fits = major == server_major && minor <= server_minor && minor.saturating_add(OLDER) >= server_minor;
    (!fits).then(|| {
        format!(
            "has version {kubelet}, which does not go with the API server's {server}: it may not be newer, \
             and at most {OLDER} minor versions older"
        )
    })
}

/// Major and minor of `v1.34.4`.
fn numbers(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.strip_prefix('v')?.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kubelet_is_not_newer_than_the_api_server_and_not_much_older() {
        for fits in ["v1.35.8", "v1.35.0", "v1.34.1", "v1.32.0"] {
            assert_eq!(skew(fits, "v1.35.8"), None, "{fits}");
        }
        for not in ["v1.36.0", "v1.31.9", "v2.35.0", "", "1.35.8", "v1", "v1.4294967295.0", "no version"] {
            assert!(skew(not, "v1.35.8").is_some(), "{not}");
        }
        assert!(skew("v1.35.8", "").is_some());
    }

    #[test]
    fn a_clock_that_is_off_is_told_with_how_much() {
        let at = |seconds: i64| Timestamp::from_second(1_800_000_000 + seconds).unwrap();
        assert_eq!(clock(at(0), at(60)), None);
        assert!(clock(at(0), at(90)).unwrap().contains("90 s ahead of"));
        assert!(clock(at(3_600), at(0)).unwrap().contains("3600 s behind"));
    }

    #[test]
    fn swap_is_on_if_a_device_is_listed() {
        assert!(!has_swap("Filename Type Size Used Priority\n"));
        assert!(!has_swap(""));
        assert!(has_swap("Filename Type Size Used Priority\n/swap file 1 0 -2\n"));
    }
}
