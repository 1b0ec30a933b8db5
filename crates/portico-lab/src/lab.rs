//! One lab: its number, its directory, its switch, and the end of it all.
//!
//! Everything a lab makes on the machine is named after its number N, taken by locking
//! `/var/lib/portico-lab/N/lock` for as long as the lab lives:
//!
//! | what | name |
//! |---|---|
//! | directory (state, logs) | `/var/lib/portico-lab/N` |
//! | network namespaces | `porticoN-HOST`, and `porticoN-switch` with the bridge |
//! | link of the machine itself | `porticoN`, 198.18.N.1 |
//! | addresses | 198.18.N.0/24 (RFC 2544: set aside for tests, in use nowhere) |
//! | control group | `/portico-lab-N` |
//!
//! A directory without a held lock is a lab whose process was killed: [`clean_up_dead`] takes it down, and so
//! does the next lab that comes across its number.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, bail, ensure};

use crate::cgroup::Cgroup;
use crate::host::Host;
use crate::process::tail;
use crate::programs;
use crate::steps::say;

/// Where all labs of this machine keep their state. Short, since sockets live below it and a
/// socket's path has at most 107 bytes.
const STATE: &str = "/var/lib/portico-lab";

/// Labs at a time. More would not fit into the memory of a machine anyway.
const LABS: u8 = 250;

/// The machine itself on the lab's network.
const MACHINE: u8 = 1;
/// The first host's last byte.
const FIRST_HOST: u8 = 10;
/// The first address for load balancers, given out by [`Lab::free_address`].
const FIRST_SPARE: u8 = 200;
/// The switch, where packets for elsewhere end.
const SWITCH: u8 = 254;

/// Lines of each log shown when a test fails, and how much of each line: the whole is kept in a file.
const LINES_SHOWN: usize = 8;
const WIDTH_SHOWN: usize = 300;

/// A network of hosts on this machine. Clones are handles; the last one to go takes the lab down.
#[derive(Clone)]
pub struct Lab {
    inner: Arc<Inner>,
}

struct Inner {
    name: String,
    number: u8,
    addresses: Mutex<Addresses>,
    // Held for as long as the lab lives; released by the kernel if we are killed.
    _lock: File,
}

struct Addresses {
    next_host: u8,
    next_spare: u8,
}

impl Lab {
    /// A new lab. `name` is for people: it names the directory of logs kept after a failure.
    pub fn start(name: &str) -> Result<Lab> {
        programs::check_host_tools()?;
        let (number, lock) = take_number()?;
        let addresses = Mutex::new(Addresses { next_host: FIRST_HOST, next_spare: FIRST_SPARE });
        // From here on dropping the lab cleans up, also when the next steps fail.
        let lab = Lab { inner: Arc::new(Inner { name: name.to_owned(), number, addresses, _lock: lock }) };
        fs::create_dir(lab.dir().join("logs"))?;
        fs::write(lab.hosts_file(), "127.0.0.1 localhost\n::1 localhost\n")?;
        // No name server: names are in the hosts file or they do not exist.
        fs::write(lab.dir().join("resolv.conf"), "nameserver 127.0.0.1\noptions attempts:1 timeout:1\n")?;
        lab.cgroup().make()?;
        lab.plug_in_switch()?;
        Ok(lab)
    }

    /// A new host of this lab. `name` is short and unique in the lab, such as `worker-1`.
    pub fn host(&self, name: &str) -> Result<Host> {
        let last = {
            let mut addresses = self.addresses();
            ensure!(
                addresses.next_host < FIRST_SPARE,
                "a lab has at most {} hosts",
                FIRST_SPARE - FIRST_HOST
            );
            addresses.next_host += 1;
            addresses.next_host - 1
        };
        Host::plug_in(self, name, self.address(last))
    }

    /// An address of the lab's network that nobody has: the lab plays the cloud that gives it to a
    /// load balancer. [`Host::add_address`] makes it reach a host.
    pub fn free_address(&self) -> Result<Ipv4Addr> {
        let mut addresses = self.addresses();
        ensure!(addresses.next_spare < SWITCH, "a lab has at most {} spare addresses", SWITCH - FIRST_SPARE);
        addresses.next_spare += 1;
        Ok(self.address(addresses.next_spare - 1))
    }

    /// Makes `name` resolve to `address` on every host of the lab, from now on.
    pub fn name_resolves(&self, name: &str, address: Ipv4Addr) -> Result<()> {
        let _one_writer = self.addresses();
        let old = fs::read_to_string(self.hosts_file())?;
        let others = old.lines().filter(|line| !line.split_whitespace().skip(1).any(|known| known == name));
        let mut new: Vec<String> = others.map(str::to_owned).collect();
        new.push(format!("{address} {name}\n"));
        // Written in place: the hosts have this very file mounted.
        fs::write(self.hosts_file(), new.join("\n")).context("writing the lab's hosts file")
    }

    /// The lab's number: part of every name it makes.
    pub fn number(&self) -> u8 {
        self.inner.number
    }

    /// The lab's directory, removed with the lab.
    pub fn dir(&self) -> PathBuf {
        dir_of(self.number())
    }

    /// This machine's own address on the lab's network: tests reach hosts from here.
    pub fn machine_address(&self) -> Ipv4Addr {
        self.address(MACHINE)
    }

    /// Shows how each log ends and keeps all of them, to explain a failure that is no panic.
    pub fn keep_logs(&self) {
        self.inner.keep_logs();
    }

    pub(crate) fn default_gateway(&self) -> Ipv4Addr {
        self.address(SWITCH)
    }

    pub(crate) fn cgroup(&self) -> Cgroup {
        cgroup_of(self.number())
    }

    pub(crate) fn hosts_file(&self) -> PathBuf {
        self.dir().join("hosts")
    }

    pub(crate) fn log_file(&self, process: &str) -> PathBuf {
        self.dir().join("logs").join(format!("{process}.log"))
    }

    /// The network namespace of a host of this name.
    pub(crate) fn namespace(&self, host: &str) -> String {
        format!("{}{host}", namespace_prefix(self.number()))
    }

    fn address(&self, last: u8) -> Ipv4Addr {
        Ipv4Addr::new(198, 18, self.number(), last)
    }

    fn addresses(&self) -> std::sync::MutexGuard<'_, Addresses> {
        // Counters stay valid whatever the holder ran into.
        self.inner.addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The bridge in a namespace of its own, and the machine's link to it.
    fn plug_in_switch(&self) -> Result<()> {
        let switch = self.namespace("switch");
        let uplink = uplink_of(self.number());
        ip(["netns", "add", &switch])?;
        ip(["-n", &switch, "link", "set", "lo", "up"])?;
        ip(["-n", &switch, "link", "add", "br0", "type", "bridge"])?;
        ip(["-n", &switch, "addr", "add", &format!("{}/24", self.default_gateway()), "dev", "br0"])?;
        ip(["-n", &switch, "link", "set", "br0", "up"])?;
        ip(["link", "add", &uplink, "type", "veth", "peer", "name", "machine", "netns", &switch])?;
        ip(["-n", &switch, "link", "set", "machine", "master", "br0", "up"])?;
        ip(["addr", "add", &format!("{}/24", self.machine_address()), "dev", &uplink])?;
        ip(["link", "set", &uplink, "up"])
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.keep_logs();
        }
        if let Err(error) = take_down(self.number) {
            say(format_args!(
                "lab {} could not be taken down: {error:#}; `portico-lab down` tries again",
                self.number
            ));
        }
    }
}

impl Inner {
    /// Shows how each log ends and keeps all of them to explain the failure.
    fn keep_logs(&self) {
        let logs = dir_of(self.number).join("logs");
        let mut files: Vec<PathBuf> =
            fs::read_dir(&logs).map(|dir| dir.flatten().map(|e| e.path()).collect()).unwrap_or_default();
        files.sort();
        for file in files.iter().filter(|file| file.is_file()) {
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            say(format_args!("--- end of {name}"));
            for line in tail(file, LINES_SHOWN).lines() {
                say(line.chars().take(WIDTH_SHOWN).collect::<String>());
            }
        }
        let kept = programs::cache_dir().join("failed").join(&self.name);
        // A second failure of the same story replaces the first: the disk is not an archive.
        let _ = fs::remove_dir_all(&kept);
        let copied = fs::create_dir_all(&kept).is_ok()
            && Command::new("cp")
                .arg("-r")
                .arg(&logs)
                .arg(&kept)
                .status()
                .is_ok_and(|status| status.success());
        // What ran in pods has its logs beside its node.
        for host in fs::read_dir(dir_of(self.number)).into_iter().flatten().flatten() {
            let pods = host.path().join("node/pods");
            if pods.is_dir() {
                let to = kept.join(format!("pods-of-{}", host.file_name().to_string_lossy()));
                // The rest is kept also without them.
                let _ = Command::new("cp").arg("-rL").arg(&pods).arg(&to).status();
            }
        }
        if copied {
            say(format_args!("all logs are kept in {}", kept.display()));
        }
    }
}

/// Takes down what labs left whose process was killed. Returns their numbers.
pub fn clean_up_dead() -> Result<Vec<u8>> {
    programs::check_root()?;
    let _one_at_a_time = numbers_lock()?;
    let mut cleaned = Vec::new();
    for number in 0..LABS {
        if dir_of(number).exists() && lock_number(number)?.is_some() {
            say(format_args!("lab {number} was left behind by a killed process: taking it down"));
            take_down(number)?;
            cleaned.push(number);
        }
    }
    Ok(cleaned)
}

/// A free number and the lock that makes it ours. Numbers go round, so that one that was just given
/// back rests: what a person or a test finds under it is the old lab's.
fn take_number() -> Result<(u8, File)> {
    let mut numbers = numbers_lock()?;
    let mut last = String::new();
    numbers.read_to_string(&mut last)?;
    let first = last.trim().parse::<u8>().map_or(0, |last| last.wrapping_add(1));
    for number in (0..LABS).map(|step| ((u16::from(first) + u16::from(step)) % u16::from(LABS)) as u8) {
        if dir_of(number).exists() {
            if lock_number(number)?.is_none() {
                continue;
            }
            say(format_args!("lab {number} was left behind by a killed process: taking it down"));
            take_down(number)?;
        }
        fs::create_dir(dir_of(number)).with_context(|| format!("making {}", dir_of(number).display()))?;
        let lock = lock_number(number)?.context("a directory just made is locked by another process")?;
        numbers.set_len(0)?;
        numbers.rewind()?;
        writeln!(numbers, "{number}")?;
        return Ok((number, lock));
    }
    bail!("all {LABS} labs of this machine are in use: see {STATE}")
}

/// Guards taking and freeing of numbers on this machine; holds the number given out last.
fn numbers_lock() -> Result<File> {
    fs::create_dir_all(STATE).with_context(|| format!("making {STATE}"))?;
    let path = Path::new(STATE).join("numbers.lock");
    let mut options = File::options();
    let options = options.read(true).write(true).create(true).truncate(false);
    let file = options.open(&path).with_context(|| format!("opening {}", path.display()))?;
    file.lock().with_context(|| format!("locking {}", path.display()))?;
    Ok(file)
}

/// The lock of a lab if nobody alive holds it.
fn lock_number(number: u8) -> Result<Option<File>> {
    let path = dir_of(number).join("lock");
    let file = match File::create(&path) {
        Ok(file) => file,
        // Its owner is just removing it.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("opening {}", path.display())),
    };
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(fs::TryLockError::WouldBlock) => Ok(None),
        Err(fs::TryLockError::Error(error)) => {
            Err(error).with_context(|| format!("locking {}", path.display()))
        }
    }
}

/// Ends everything that carries this number. Each step works on what is there, so a second call
/// finishes what a first one could not.
///
/// Processes go first: pods and shims are in the lab's control group as well, and with the last
/// process of a host its mounts go too (see [`crate::host`]).
///
/// A process that got out of the control group would be a mistake of the lab's. It is reported rather than
/// killed, since only the group proves that a process is the lab's.
fn take_down(number: u8) -> Result<()> {
    cgroup_of(number).kill()?;
    let escaped = users_of(&dir_of(number))?;
    ensure!(escaped.is_empty(), "processes outside of its control group use its files: {escaped:?}");
    for namespace in namespaces_of(number)? {
        ip(["netns", "del", &namespace])?;
    }
    // It goes with the namespace of the switch, which the kernel takes down in its own time.
    let uplink = Path::new("/sys/class/net").join(uplink_of(number));
    if uplink.exists()
        && let Err(error) = ip(["link", "del", &uplink_of(number)])
        && uplink.exists()
    {
        return Err(error);
    }
    cgroup_of(number).remove()?;
    let dir = dir_of(number);
    fs::remove_dir_all(&dir).with_context(|| format!("removing {}", dir.display()))
}

/// What is there under this number, in words; empty when a lab left nothing. For tests of the lab.
pub fn remains_of(number: u8) -> Result<Vec<String>> {
    let mut remains = Vec::new();
    remains.extend(namespaces_of(number)?.iter().map(|name| format!("namespace {name}")));
    remains.extend(cgroup_of(number).pids()?.iter().map(|pid| format!("process {pid}")));
    remains.extend(users_of(&dir_of(number))?.iter().map(|pid| format!("process {pid} with its mounts")));
    remains.extend(cgroup_of(number).dirs()?.iter().map(|dir| format!("control group {}", dir.display())));
    let link = Path::new("/sys/class/net").join(uplink_of(number));
    remains.extend([dir_of(number), link].iter().filter(|p| p.exists()).map(|p| p.display().to_string()));
    Ok(remains)
}

/// Processes, this one included, that have something mounted from below `dir`: containers do.
fn users_of(dir: &Path) -> Result<Vec<String>> {
    let below = format!("{}/", dir.display());
    let mut users = Vec::new();
    for entry in fs::read_dir("/proc").context("reading /proc")? {
        let path = entry?.path();
        let Some(pid) = path.file_name().and_then(OsStr::to_str).filter(|name| name.parse::<u32>().is_ok())
        else {
            continue;
        };
        // A process that ended meanwhile uses nothing.
        if fs::read_to_string(path.join("mountinfo")).is_ok_and(|mounts| mounts.contains(&below)) {
            users.push(pid.to_owned());
        }
    }
    Ok(users)
}

/// The network namespaces that exist for this number.
fn namespaces_of(number: u8) -> Result<Vec<String>> {
    let Ok(entries) = fs::read_dir("/run/netns") else { return Ok(Vec::new()) };
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    Ok(names.filter(|name| name.starts_with(&namespace_prefix(number))).collect())
}

/// The control group of this number.
fn cgroup_of(number: u8) -> Cgroup {
    Cgroup::at(format!("/portico-lab-{number}"))
}

/// The directory of this number.
fn dir_of(number: u8) -> PathBuf {
    Path::new(STATE).join(number.to_string())
}

/// The machine's link to the switch of this number (at most 15 bytes, as Linux allows).
fn uplink_of(number: u8) -> String {
    format!("portico{number}")
}

fn namespace_prefix(number: u8) -> String {
    format!("portico{number}-")
}

/// Runs `ip` and says what it was asked for when it fails.
pub(crate) fn ip<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Result<()> {
    let mut command = Command::new(programs::find("ip")?);
    command.args(args);
    let output = command.output().with_context(|| format!("starting {command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?} failed: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}
