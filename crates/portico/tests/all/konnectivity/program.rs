//! A server, an agent or a helper as a process, and what its health port says.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::PATIENCE;

/// Between two looks at a condition in another process, which tells nobody when it changes.
const BETWEEN_LOOKS: Duration = Duration::from_millis(10);

/// Looks again until it is so. What the test serves itself goes on meanwhile.
pub(crate) async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        tokio::time::sleep(BETWEEN_LOOKS).await;
    }
}

/// A running program with its log. Killed when dropped; a test that fails shows the end of the log.
pub(crate) struct Program {
    child: Child,
    log: PathBuf,
    /// Where `/healthz`, `/readyz` and `/metrics` are, on loopback. 0 if there is none.
    health: u16,
}

impl Program {
    /// Starts `command`; what it says goes to `NAME.log` in `folder`.
    pub(crate) fn start(folder: &Path, name: &str, mut command: Command, health: u16) -> Self {
        let log = folder.join(format!("{name}.log"));
        let file = File::options().create(true).append(true).open(&log).unwrap();
        let copy = file.try_clone().unwrap();
        command.stdin(Stdio::null()).stdout(file).stderr(copy);
        let child = command.spawn().unwrap_or_else(|error| panic!("{command:?} cannot be started: {error}"));
        Self { child, log, health }
    }

    /// Everything it logged.
    pub(crate) fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Waits until `GET path` of its health port answers with this status.
    pub(crate) async fn wait_for(&mut self, path: &str, status: u16) {
        until(&format!("{path} is {status} ({})", self.log.display()), || {
            assert!(self.child.try_wait().unwrap().is_none(), "it ended:\n{}", tail(&self.log()));
            self.get(path).is_some_and(|(answer, _)| answer == status)
        })
        .await;
    }

    /// Waits for a line that contains `text`, and returns it.
    pub(crate) async fn wait_for_line(&self, text: &str) -> String {
        let find = || self.log().lines().find(|line| line.contains(text)).map(str::to_owned);
        until(&format!("{} says {text:?}", self.log.display()), || find().is_some()).await;
        find().unwrap()
    }

    /// `GET path` of its health port: status and body. `None` while nobody answers there.
    pub(crate) fn get(&self, path: &str) -> Option<(u16, String)> {
        get(self.health, path)
    }

    /// The sum of the metric's samples whose labels contain `labels`. 0 if there is none: upstream shows no
    /// sample of what has not happened yet.
    pub(crate) fn metric(&self, name: &str, labels: &str) -> f64 {
        let (_, page) = self.get("/metrics").expect("the health port answers");
        let samples = page.lines().filter_map(|line| line.strip_prefix(name));
        let samples = samples.filter(|rest| rest.starts_with([' ', '{']) && rest.contains(labels));
        samples.filter_map(|rest| rest.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    /// Waits until the metric has this value.
    pub(crate) async fn wait_for_metric(&self, name: &str, labels: &str, value: f64) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let now = self.metric(name, labels);
            if (now - value).abs() < 0.5 {
                return;
            }
            assert!(Instant::now() < deadline, "{name}{{{labels}}} stays {now}, not {value}");
            tokio::time::sleep(BETWEEN_LOOKS).await;
        }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends the signal, such as `TERM`.
    pub(crate) fn signal(&self, name: &str) {
        let status = Command::new("kill").arg(format!("-{name}")).arg(self.id().to_string()).status();
        assert!(status.expect("kill(1) can be started").success());
    }

    /// SIGKILL, and waits for its end.
    pub(crate) fn kill(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            let log = tail(&self.log());
            #[allow(clippy::print_stderr, reason = "a test that fails tells why")]
            {
                eprintln!("--- {}\n{log}", self.log.display());
            }
        }
    }
}

/// `GET path` of a port on loopback: status and body. `None` while nobody answers there.
pub(crate) fn get(port: u16, path: &str) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    // HTTP/1.0: the body is what follows until the end.
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
}

/// The last lines of a log.
fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(25)..].join("\n")
}
