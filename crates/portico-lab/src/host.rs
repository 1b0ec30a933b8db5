//! A host: a network namespace with an address, and a view of the file system of its own.
//!
//! The view is a mount namespace in which `/etc/hosts` and `/etc/resolv.conf` are the lab's, and the
//! places that container programs share machine-wide (`/run/containerd`, `/var/lib/cni`, ...) are
//! empty and private. Everything else is the machine's. One sleeping process, the *mount holder*, holds
//! that namespace; other programs enter it with `nsenter`. When the last process of the host dies
//! the kernel undoes every mount the kubelet and containerd ever made, so teardown has none to find.
//!
//! `nsenter` and not `ip netns exec`: the latter remounts `/sys` and hides the control groups that
//! containers need.

use std::ffi::OsStr;
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::cgroup::Cgroup;
use crate::lab::{Lab, ip};
use crate::process::Process;
use crate::{programs, wait};

/// A command that answers takes seconds at most on a loaded machine; more than this is a hang.
const COMMAND_LIMIT: &str = "60";

/// Machine-wide places of container programs, and of what joining and agents write: each host gets its own.
const PRIVATE: &[&str] = &[
    "/run/containerd",
    "/var/lib/cni",
    "/etc/kubernetes",
    "/var/lib/kubelet",
    "/var/lib/portico",
    "/var/log/containers",
    "/run/portico-agent",
];

/// A host of a lab. Clones are handles to the same host.
#[derive(Clone)]
pub struct Host {
    inner: Arc<Inner>,
}

struct Inner {
    name: String,
    address: Ipv4Addr,
    /// The file that names the mount namespace.
    mounts: PathBuf,
    _mount_holder: Process,
    lab: Lab,
}

impl Host {
    /// Makes the host and plugs it into the lab's switch.
    pub(crate) fn plug_in(lab: &Lab, name: &str, address: Ipv4Addr) -> Result<Host> {
        let fits = !name.is_empty() && name.len() <= 30;
        ensure!(
            fits && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'),
            "host name {name:?}: use 1 to 30 of a-z, 0-9 and -"
        );
        let (namespace, switch) = (lab.namespace(name), lab.namespace("switch"));
        // Ports of the switch are numbered like the addresses: host names may be longer than the
        // 15 bytes of an interface name.
        let port = format!("port{}", address.octets()[3]);
        ip(["netns", "add", &namespace])?;
        ip([
            "-n", &switch, "link", "add", &port, "type", "veth", "peer", "name", "eth0", "netns", &namespace,
        ])?;
        ip(["-n", &switch, "link", "set", &port, "master", "br0", "up"])?;
        ip(["-n", &namespace, "link", "set", "lo", "up"])?;
        ip(["-n", &namespace, "addr", "add", &format!("{address}/24"), "dev", "eth0"])?;
        ip(["-n", &namespace, "link", "set", "eth0", "up"])?;
        ip(["-n", &namespace, "route", "add", "default", "via", &lab.default_gateway().to_string()])?;

        let cgroup = lab.cgroup().child(name).child("system");
        cgroup.make()?;
        fs::create_dir_all(lab.dir().join(name))?;
        let mount_holder = hold_mounts(lab, name, &cgroup)?;
        let mounts = PathBuf::from(format!("/proc/{}/ns/mnt", mount_holder.pid()));
        let inner =
            Inner { name: name.to_owned(), address, mounts, _mount_holder: mount_holder, lab: lab.clone() };
        Ok(Host { inner: Arc::new(inner) })
    }

    /// Its name in the lab.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Its address on the lab's network.
    pub fn address(&self) -> Ipv4Addr {
        self.inner.address
    }

    /// The lab it belongs to.
    pub fn lab(&self) -> &Lab {
        &self.inner.lab
    }

    /// Its directory for state, removed with the lab.
    pub fn dir(&self) -> PathBuf {
        self.lab().dir().join(self.name())
    }

    /// Its network namespace, as `ip netns` knows it.
    pub fn namespace(&self) -> String {
        self.lab().namespace(self.name())
    }

    /// The control group of everything on this host; programs are in `system` below it.
    pub fn cgroup(&self) -> Cgroup {
        self.lab().cgroup().child(self.name())
    }

    /// A command that will run on this host; add arguments as to any other. Its working directory
    /// is `/`.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Result<Command> {
        let mut command = contained(&self.cgroup().child("system"))?;
        command
            .arg("nsenter")
            .arg(format!("--net=/run/netns/{}", self.namespace()))
            .arg(format!("--mount={}", self.inner.mounts.display()))
            .arg("--")
            .arg(program);
        Ok(command)
    }

    /// Runs a short command on this host and returns what it prints.
    pub fn run(&self, args: &[&str]) -> Result<String> {
        self.run_with_input(args, "")
    }

    /// As [`run`](Host::run), with `input` to read.
    pub fn run_with_input(&self, args: &[&str], input: &str) -> Result<String> {
        let output = self.output(args, input)?;
        ensure!(
            output.status.success(),
            "{}: `{}` failed ({}): {}",
            self.name(),
            args.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs a short command on this host to its end, well or badly; one that hangs ends with
    /// status 124.
    pub fn output(&self, args: &[&str], input: &str) -> Result<Output> {
        let mut command = self.command("timeout")?;
        command.args(["-k", "2", COMMAND_LIMIT]).args(args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("starting {args:?}"))?;
        let mut stdin = child.stdin.take().context("a piped child has stdin")?;
        std::thread::scope(|scope| {
            // Beside the reading, or a large input and a large answer would wait for each other.
            scope.spawn(move || {
                // A program that does not read its input is not wrong.
                let _ = std::io::Write::write_all(&mut stdin, input.as_bytes());
            });
            child.wait_with_output().with_context(|| format!("waiting for {args:?}"))
        })
    }

    /// Starts a program that stays. Its log is named `HOST-NAME.log`.
    pub fn spawn<S: AsRef<OsStr>>(
        &self,
        name: &str,
        program: impl AsRef<OsStr>,
        args: impl IntoIterator<Item = S>,
    ) -> Result<Process> {
        let mut command = self.command(program)?;
        command.args(args);
        self.spawn_command(name, command)
    }

    /// Starts a [`command`](Host::command) that stays.
    pub fn spawn_command(&self, name: &str, command: Command) -> Result<Process> {
        Process::start(self.lab(), &format!("{}-{name}", self.name()), command)
    }

    /// A script that runs the command it is given, or a shell, on this host in `folder`, with these variables
    /// (`NAME=VALUE`). What it starts is the lab's, and ends with it.
    pub fn shell(&self, folder: &Path, variables: &[&str]) -> Result<String> {
        let exports: String = variables.iter().map(|variable| format!("export \"{variable}\"\n")).collect();
        Ok(format!(
            "#!/bin/sh\n\
             echo $$ >{} || exit\n\
             {exports}\
             [ $# -gt 0 ] || set -- \"${{SHELL:-/bin/sh}}\"\n\
             exec nsenter --net=/run/netns/{} --mount={} -- sh -c 'cd \"$0\" && exec \"$@\"' {} \"$@\"\n",
            self.cgroup().child("system").procs()?.display(),
            self.namespace(),
            self.inner.mounts.display(),
            folder.display(),
        ))
    }

    /// Gives the host a further address: the lab plays the cloud that sends a load balancer's
    /// traffic here.
    pub fn add_address(&self, address: Ipv4Addr) -> Result<()> {
        ip(["-n", &self.namespace(), "addr", "add", &format!("{address}/32"), "dev", "eth0"])
    }

    /// Takes a further address away again.
    pub fn remove_address(&self, address: Ipv4Addr) -> Result<()> {
        ip(["-n", &self.namespace(), "addr", "del", &format!("{address}/32"), "dev", "eth0"])
    }

    /// Pulls the network plug: nothing gets in or out, without a notice.
    pub fn unplug(&self) -> Result<()> {
        let port = format!("port{}", self.address().octets()[3]);
        ip(["-n", &self.lab().namespace("switch"), "link", "set", &port, "down"])
    }

    /// Puts the network plug back in.
    pub fn plug(&self) -> Result<()> {
        let port = format!("port{}", self.address().octets()[3]);
        ip(["-n", &self.lab().namespace("switch"), "link", "set", &port, "up"])
    }
}

/// A command that starts inside a control group and dies with the thread that starts it.
fn contained(cgroup: &Cgroup) -> Result<Command> {
    let mut command = Command::new(programs::find("setpriv")?);
    command
        .args(["--pdeathsig", "SIGKILL", "--", "sh", "-c", "echo $$ >\"$0\" && exec \"$@\""])
        .arg(cgroup.procs()?);
    Ok(command)
}

/// Starts the process that holds a host's mounts, and waits until they are in place.
fn hold_mounts(lab: &Lab, name: &str, cgroup: &Cgroup) -> Result<Process> {
    for place in PRIVATE {
        fs::create_dir_all(place).with_context(|| format!("making {place}"))?;
    }
    let (hosts, resolver) = (lab.hosts_file(), lab.dir().join("resolv.conf"));
    // Shared among themselves, as systemd leaves them on a machine. Else the kubelet mounts its directory
    // over itself while it renames a socket there, and the renaming may fail.
    let mut script = format!(
        "mount --make-rshared / && mount --bind {} /etc/hosts && mount --bind {} /etc/resolv.conf",
        hosts.display(),
        resolver.display()
    );
    for place in PRIVATE {
        script.push_str(&format!(" && mount -t tmpfs lab {place}"));
    }
    script.push_str(" && exec sleep infinity");
    let mut command = contained(cgroup)?;
    command.arg("nsenter").arg(format!("--net=/run/netns/{}", lab.namespace(name))).args([
        "--",
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
    ]);
    command.arg(script);
    let mount_holder = Process::start(lab, &format!("{name}-mounts"), command)?;
    let program = Path::new("/proc").join(mount_holder.pid().to_string()).join("comm");
    wait::until(&format!("the mounts of host {name}"), Duration::from_secs(20), || {
        mount_holder.check()?;
        match fs::read_to_string(&program)?.trim() {
            "sleep" => Ok(()),
            other => bail!("still at {other}"),
        }
    })?;
    Ok(mount_holder)
}
