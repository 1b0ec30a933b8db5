//! What the tests of the binary share: starting it, waiting for what it says, ending it.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use portico_lab::process::freeze;
use rustix::process::Pid;
use tempfile::TempDir;

/// The most that anything here takes on a busy machine. Nothing waits for it when all is well.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The binary under test.
pub(crate) fn portico() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_portico"));
    command.env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// Runs `portico` to its end.
pub(crate) fn run(arguments: &[&str]) -> Output {
    portico().args(arguments).output().expect("the binary can be started")
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("standard output is UTF-8")
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("standard error is UTF-8")
}

/// A directory with these files.
pub(crate) fn directory(files: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    for (name, text) in files {
        fs::write(folder.path().join(name), text).expect("a file can be written there");
    }
    folder
}

/// `text` with the path of `folder` replaced: paths differ from run to run.
pub(crate) fn without_path(text: &str, folder: &Path) -> String {
    text.replace(&folder.display().to_string(), "DIR")
}

/// A running `portico`. Killed when dropped.
pub(crate) struct Process {
    child: Child,
    lines: Receiver<String>,
    seen: Vec<String>,
}

impl Process {
    /// Starts `portico` and listens to its standard output and error, as one stream of lines.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        Self::of(portico().args(arguments))
    }

    /// Starts a command that becomes `portico`, and listens to it.
    pub(crate) fn of(command: &mut Command) -> Self {
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary can be started");
        let (sender, lines) = channel();
        let streams: [Box<dyn Read + Send>; 2] = [
            Box::new(child.stdout.take().expect("standard output is a pipe")),
            Box::new(child.stderr.take().expect("standard error is a pipe")),
        ];
        for stream in streams {
            let sender = sender.clone();
            std::thread::spawn(move || {
                let lines = BufReader::new(stream).lines().map_while(Result::ok);
                lines.for_each(|line| drop(sender.send(line)));
            });
        }
        Self { child, lines, seen: Vec::new() }
    }

    /// Waits for a line that contains `text`, and returns it.
    pub(crate) fn wait_for(&mut self, text: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    self.seen.push(line.clone());
                    if line.contains(text) {
                        return line;
                    }
                }
                Err(RecvTimeoutError::Timeout) => panic!("no line with {text:?}; it said:\n{}", self.said()),
                Err(RecvTimeoutError::Disconnected) => {
                    panic!("it ended before {text:?}; it said:\n{}", self.said())
                }
            }
        }
    }

    /// Everything it logged that was waited over.
    pub(crate) fn said(&self) -> String {
        self.seen.join("\n")
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends the signal, `INT` or `TERM`.
    pub(crate) fn signal(&self, name: &str) {
        let status = Command::new("kill").arg(format!("-{name}")).arg(self.id().to_string()).status();
        assert!(status.expect("kill(1) can be started").success());
    }

    /// Has it stand still until it gets `CONT`.
    pub(crate) fn freeze(&self) {
        freeze(Pid::from_child(&self.child)).expect("it can be stopped");
    }

    /// Waits for its end.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        // There is no wait with a deadline in the standard library; its pipes close when it ends.
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => self.seen.push(line),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => panic!("it does not end; it said:\n{}", self.said()),
            }
        }
        self.child.wait().expect("a child can be waited for")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended, which is just as well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Asks again until the answer is yes. There is no event to wait for in another process.
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "waited in vain until {what}");
        // Between two questions, so that the answer has a core to be found on.
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

/// A port of loopback that was free a moment ago, outside the range that outgoing connections take theirs
/// from.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        // Test binaries run one after the other; tests of this one share the counter.
        let port = 20_000 + (std::process::id() % 5_000) as u16 + NEXT.fetch_add(1, Ordering::Relaxed);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// The port at the end of a line that names a listener.
pub(crate) fn port_of(line: &str) -> u16 {
    line.rsplit(':').next().and_then(|port| port.trim().parse().ok()).expect("the log names the port")
}

/// One number of `/metrics`, which must be there.
pub(crate) fn metric(admin: u16, name: &str) -> u64 {
    let (_, page) = get(admin, "/metrics");
    let line = page.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok())
        .unwrap_or_else(|| panic!("no {name} in {page}"))
}

/// `GET path` from 127.0.0.1:`port`: status and body.
pub(crate) fn get(port: u16, path: &str) -> (u16, String) {
    get_from(SocketAddr::from(([127, 0, 0, 1], port)), path)
}

/// `GET path` from an admin listener anywhere: status and body.
pub(crate) fn get_from(address: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).expect("the admin listener accepts");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        .expect("a request is taken");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer ends");
    let (head, body) = answer.split_once("\r\n\r\n").expect("an answer has a head");
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a head has a status");
    let body = if head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
        dechunk(body)
    } else {
        body.into()
    };
    (status, body)
}

fn dechunk(mut body: &str) -> String {
    let mut text = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).expect("a chunk has a size");
        if size == 0 {
            break;
        }
        text.push_str(&rest[..size]);
        body = &rest[size + 2..];
    }
    text
}
