//! Finds everything that would keep this machine out of the cluster, or would trouble it there, before
//! anything is written.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Read as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use jiff::{SignedDuration, Timestamp};
use portico_api::text::one_line;
use serde_json::Value;

/// Certificates begin at most this much before they are issued, and tokens end by the minute.
const CLOCK: SignedDuration = SignedDuration::from_secs(60);
/// A kubelet may be this many minor versions older than the API server (the version skew policy).
const OLDER: u32 = 3;
/// The port of the kubelet, where its configuration names no other.
const PORT: u64 = 10_250;
/// What a kubelet limits pods by.
const CONTROLLERS: [&str; 4] = ["cpu", "cpuset", "memory", "pids"];
/// Where containerd reads its settings.
const CONTAINERD_CONFIG: &str = "/etc/containerd/config.toml";
/// The name servers that pods get, where the kubelet's configuration names no other file.
const RESOLV_CONF: &str = "/etc/resolv.conf";

/// Bytes that are read of a file with name servers.
const LONGEST_FILE: u64 = 64 << 10;
/// Folders of the kernel's files. A read of such a file may consume its events, or wait for more.
const OF_THE_KERNEL: [&str; 2] = ["/proc", "/sys"];
/// Characters that are shown of a finding.
const LONGEST_FINDING: usize = 1_000;

/// What was found.
#[derive(Debug, Default)]
pub struct Findings {
    failures: Vec<String>,
    warnings: Vec<String>,
}

impl Findings {
    /// Notes what keeps the machine out.
    pub fn fail(&mut self, what: String) {
        self.failures.push(what);
    }

    /// Notes what would trouble it.
    pub fn warn(&mut self, what: String) {
        self.warnings.push(what);
    }

    /// Whether something keeps it out.
    pub fn keep_out(&self) -> bool {
        !self.failures.is_empty()
    }

    /// A line each: much of it is text of the cluster.
    pub fn lines(&self) -> String {
        let mut lines = String::new();
        for (word, found) in [("FAIL", &self.failures), ("WARN", &self.warnings)] {
            for text in found {
                // Writing to a String cannot fail.
                let _ = writeln!(lines, "{word} {}", one_line(text, LONGEST_FINDING));
            }
        }
        lines
    }

    /// Looks at what no answer of the cluster is needed for.
    pub fn machine(&mut self, time: Option<Timestamp>) {
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
            self.warn(format!(
                "{name} is not 1: most pod networks need it (modprobe br_netfilter; sysctl -w {name}=1)"
            ));
        }
    }

    /// Looks at what the configuration of the kubelet asks of the machine.
    pub fn configuration(&mut self, config: &Value) {
        let socket = config["containerRuntimeEndpoint"].as_str().unwrap_or_default();
        if let Err(error) = UnixStream::connect(socket.trim_start_matches("unix://")) {
            self.fail(format!(
                "no container runtime answers at {socket}: {error}; start containerd, or name its socket as \
                 containerRuntimeEndpoint in the file of --kubelet-config"
            ));
        }
        let controllers = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers");
        if let Some(missing) = controllers.as_deref().ok().and_then(missing_controllers) {
            self.fail(format!(
                "the kernel has no cgroup controller {missing}, by which kubelets limit pods: enable it, as \
                 by cgroup_enable=memory on the command line of the kernel"
            ));
        }
        if config["cgroupDriver"] == "systemd" {
            let containerd = fs::read_to_string(CONTAINERD_CONFIG).ok();
            let has_systemd = Path::new("/run/systemd/system").exists();
            self.warnings.extend(driver(has_systemd, containerd.as_deref()).map(str::to_owned));
        }
        let resolv_conf = config["resolvConf"].as_str().unwrap_or(RESOLV_CONF);
        // An empty one means that pods get none.
        if !resolv_conf.is_empty() {
            self.warnings.extend(name_servers(resolv_conf, &beginning(resolv_conf)));
        }
        if config["failCgroupV1"] != false && controllers.is_err() {
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
        if u16::try_from(port).map_or(true, is_taken) {
            self.fail(format!(
                "port {port} of the kubelet is not free: `ss -ltnp 'sport = :{port}'` says which process \
                 has it; a kubelet that runs already is stopped by systemctl stop kubelet"
            ));
        }
    }

    /// Looks at the program, for an API server of this version.
    pub fn kubelet(&mut self, program: &Path, server: &str) {
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

/// The beginning of a file that the cluster may have named. It may be a device without an end, a pipe without
/// a writer, or a file of the kernel that blocks. Those are not opened, and count as empty.
fn beginning(path: &str) -> String {
    let mut text = String::new();
    let Ok(path) = fs::canonicalize(path) else { return text };
    let is_of_the_kernel = OF_THE_KERNEL.iter().any(|folder| path.starts_with(folder));
    if !is_of_the_kernel && fs::metadata(&path).is_ok_and(|file| file.is_file()) {
        // What is no text has no name server.
        let _ = fs::File::open(path).and_then(|file| file.take(LONGEST_FILE).read_to_string(&mut text));
    }
    text
}

/// Whether something listens at a port. A kernel without IPv6 has IPv4 alone.
fn is_taken(port: u16) -> bool {
    let in_use =
        |bound: io::Result<TcpListener>| bound.is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse);
    in_use(TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)))
        || in_use(TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))
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

/// A controller without which kubelets do not start.
fn missing_controllers(there: &str) -> Option<String> {
    let there: Vec<&str> = there.split_whitespace().collect();
    let missing: Vec<&str> = CONTROLLERS.into_iter().filter(|name| !there.contains(name)).collect();
    (!missing.is_empty()).then(|| missing.join(", "))
}

/// Why pods may be started in cgroups that the kubelet does not know: it leaves them to systemd.
fn driver(has_systemd: bool, containerd: Option<&str>) -> Option<&'static str> {
    if !has_systemd {
        return Some(
            "the kubelet is to leave cgroups to systemd, which this machine has not: set cgroupDriver: \
             cgroupfs in the file of --kubelet-config, unless the container runtime tells its driver \
             (containerd from 2.0 on does)",
        );
    }
    // Without a file, or from version 3 of it on, containerd decides by itself, or tells its driver.
    let is_systemds = |text: &str| {
        text.lines().any(|line| line.replace(char::is_whitespace, "").starts_with("SystemdCgroup=true"))
    };
    let is_old =
        containerd.is_some_and(|text| text.contains("io.containerd.grpc.v1.cri") && !is_systemds(text));
    is_old.then_some(
        "containerd makes cgroups by itself, and the kubelet leaves them to systemd: pods would end for no \
         visible reason. Set SystemdCgroup = true in /etc/containerd/config.toml and restart containerd",
    )
}

/// Why pods that ask the machine's name server, as CoreDNS does, would ask themselves or nobody.
fn name_servers(path: &str, text: &str) -> Option<String> {
    let servers = text.lines().filter_map(|line| line.trim().strip_prefix("nameserver")?.trim().parse().ok());
    let servers: Vec<IpAddr> = servers.collect();
    if servers.is_empty() {
        return Some(format!("{path} has no name server: pods would find no name outside the cluster"));
    }
    let own = servers.iter().all(IpAddr::is_loopback);
    own.then(|| {
        format!(
            "the name server in {path} is this machine itself, which in a pod is the pod: CoreDNS would ask \
             itself. Name a file with others as resolvConf in the file of --kubelet-config; with \
             systemd-resolved that is /run/systemd/resolve/resolv.conf"
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
    use serde_json::json;

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
    fn a_clock_that_is_off_is_reported_with_how_much() {
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

    #[test]
    fn cgroups_that_two_would_make_and_controllers_that_lack_are_reported() {
        assert_eq!(missing_controllers("cpuset cpu io memory hugetlb pids\n"), None);
        assert_eq!(missing_controllers("cpuset cpu io pids\n").as_deref(), Some("memory"));
        let old = "[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc.options]\n";
        let right = format!("{old}  SystemdCgroup = true\n");
        assert_eq!(driver(true, None), None);
        assert_eq!(driver(true, Some("version = 3\n")), None);
        assert_eq!(driver(true, Some(&right)), None);
        for wrong in [old.to_owned(), format!("{old}SystemdCgroup = false\n")] {
            assert!(driver(true, Some(&wrong)).unwrap().contains("SystemdCgroup = true"), "{wrong}");
        }
        assert!(driver(false, Some(&right)).unwrap().contains("cgroupfs"));
    }

    #[test]
    fn name_servers_that_are_the_machine_itself_are_reported() {
        let finding = |text: &str| name_servers("/etc/resolv.conf", text);
        assert_eq!(finding("nameserver 192.0.2.53\n"), None);
        assert_eq!(finding("nameserver 127.0.0.53\nnameserver 2001:db8::53\n"), None);
        assert!(finding("# nameserver 192.0.2.53\n").unwrap().contains("no name server"));
        assert!(finding("search a\nnameserver 127.0.0.53\n").unwrap().contains("systemd-resolved"));
    }

    #[test]
    fn a_file_without_an_end_is_not_read() {
        assert_eq!(beginning("/dev/zero"), "");
        assert_eq!(beginning("/no/such/file"), "");
        assert!(!beginning("/etc/passwd").is_empty());
    }

    #[test]
    fn files_of_the_kernel_are_not_read_under_any_name() {
        let folder = tempfile::tempdir().unwrap();
        for (number, path) in
            ["/proc/version", "/proc/self/status", "/sys/kernel/mm/transparent_hugepage/enabled"]
                .into_iter()
                .enumerate()
        {
            let link = folder.path().join(number.to_string());
            std::os::unix::fs::symlink(path, &link).unwrap();
            for path in [path, link.to_str().unwrap(), &format!("/etc/..{path}")] {
                assert_eq!(beginning(path), "", "{path}");
            }
        }
        let link = folder.path().join("resolv.conf");
        std::os::unix::fs::symlink("/etc/passwd", &link).unwrap();
        assert!(!beginning(link.to_str().unwrap()).is_empty());
    }

    #[test]
    fn what_the_cluster_says_stays_on_the_line_of_its_finding() {
        let mut findings = Findings::default();
        let config = json!({"containerRuntimeEndpoint": "unix:///no\nFAIL such\u{1b}[2J",
            "resolvConf": format!("/none\r\nWARN {}", "a".repeat(2_000)),
            "failSwapOn": false, "failCgroupV1": false, "port": 0});
        findings.configuration(&config);
        let lines = findings.lines();
        assert!(lines.contains("answers at unix:///no FAIL such [2J: "), "{lines}");
        assert!(lines.lines().any(|line| line.starts_with("WARN /none  WARN a")), "{lines}");
        let is_of_a_finding = |line: &str| {
            line.starts_with("FAIL no ")
                || line.starts_with("WARN /none")
                || line.starts_with("FAIL the kernel")
        };
        assert!(lines.lines().all(|line| is_of_a_finding(line) && line.chars().count() < 1_010), "{lines}");
    }
}
