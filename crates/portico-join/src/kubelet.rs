//! Starting and stopping the kubelet: by systemd, or as a child of this process.

use std::convert::Infallible;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, anyhow, ensure};
use http::header::HOST;
use http::{Request, StatusCode};
use http_body_util::Empty;
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use jiff::Timestamp;
use portico_hosting::join::machine::{Paths, UNIT};
use portico_hosting::join::options::NodeName;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::files::has_certificate;

/// Between two looks for the certificate: the kubelet tells nobody that it has one.
const LOOK: Duration = Duration::from_millis(200);

/// systemd itself ends what does not after 90 seconds, and gives what starts as many.
const LONGEST_JOB: Duration = Duration::from_secs(200);

/// Longer than a kubelet takes that only ends, and leaves its containers alone.
const LONGEST_END: Duration = Duration::from_secs(30);

/// It answers on the same machine.
const LONGEST_ANSWER: Duration = Duration::from_secs(5);

/// This program, whatever has become of its file.
const SELF: &str = "/proc/self/exe";

/// Starts the unit, or starts it anew with the files that it has now.
pub async fn start_unit() -> anyhow::Result<()> {
    reload().await?;
    systemctl(&["enable", UNIT]).await?;
    restart().await
}

/// Has systemd end the kubelet, and start it with the files that it has now.
pub(crate) async fn restart() -> anyhow::Result<()> {
    systemctl(&["restart", UNIT]).await
}

/// Ends the kubelet of this node, and waits until whatever runs it has started another.
pub(crate) async fn ended_and_started(kubeconfig: &Path, node: &str, limit: Duration) -> anyhow::Result<()> {
    // A node may run other clusters in its containers, whose kubelets have the same files there.
    let flags = [format!("--kubeconfig={}", kubeconfig.display()), format!("--hostname-override={node}")];
    let before = running_with(&flags)?;
    if let Some(pid) = before {
        match kill_process(pid, Signal::TERM) {
            // It has just ended by itself.
            Err(Errno::SRCH) => {}
            ended => ended.with_context(|| format!("cannot end the kubelet, process {pid:?}"))?,
        }
    }
    let another = async {
        while running_with(&flags)?.is_none_or(|pid| before == Some(pid)) {
            sleep(LOOK).await;
        }
        anyhow::Ok(())
    };
    timeout(limit, another).await.map_err(|_| {
        anyhow!(
            "no kubelet was started anew with {} within {limit:?}: journalctl -u {UNIT} says why, and this \
             pod has to have hostPID",
            flags.join(" ")
        )
    })?
}

/// The process with these arguments, of those that are in no container: others may call themselves so.
fn running_with(arguments: &[String]) -> anyhow::Result<Option<Pid>> {
    for process in std::fs::read_dir("/proc").context("cannot list processes")? {
        let name = process.context("cannot list processes")?.file_name();
        let pid = name.to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        let Some(pid) = pid else { continue };
        // Empty for one that has ended, and for a thread of the kernel.
        let words = std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
        let has = |argument: &String| words.split(|&byte| byte == 0).any(|word| word == argument.as_bytes());
        if arguments.iter().all(has) && !is_contained(pid) {
            return Ok(Some(pid));
        }
    }
    Ok(None)
}

/// Whether a process has another number where it lives than here (proc(5), NSpid).
fn is_contained(pid: Pid) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero()));
    let status = status.unwrap_or_default();
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
    numbers.split_whitespace().count() != 1
}

/// Stops the unit, also for the next start of the machine.
pub async fn stop() -> anyhow::Result<()> {
    systemctl(&["disable", "--now", UNIT]).await
}

/// Has systemd read its units again.
pub async fn reload() -> anyhow::Result<()> {
    systemctl(&["daemon-reload"]).await
}

async fn systemctl(arguments: &[&str]) -> anyhow::Result<()> {
    let what = || format!("systemctl {}", arguments.join(" "));
    let output = Command::new("systemctl").args(arguments).output();
    let output = timeout(LONGEST_JOB, output).await;
    let output = output.map_err(|_| anyhow!("{}: no answer within {LONGEST_JOB:?}", what()))?;
    let output = output.with_context(what)?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {}: {}", what(), output.status, said.trim());
    Ok(())
}

/// Starts the kubelet itself. It ends with the thread that calls this, however that ends.
pub(crate) fn start(program: &Path, arguments: &[String]) -> anyhow::Result<Child> {
    let parent = std::process::id().to_string();
    let mut command = Command::new(SELF);
    command.args(["join", "kubelet", &parent]).arg(program).arg("--").args(arguments).kill_on_drop(true);
    command.spawn().with_context(|| format!("cannot start {}", program.display()))
}

/// Becomes the kubelet, which ends with the process `parent`. `start` starts `portico join kubelet`, which
/// calls this. A process can register only itself for a signal when its parent ends. The registration
/// survives exec, so the kubelet has it too.
pub fn turn(parent: i32, program: &Path, arguments: &[OsString]) -> anyhow::Result<Infallible> {
    set_parent_process_death_signal(Some(Signal::TERM)).context("cannot end with the process before")?;
    // It may have ended meanwhile.
    let present = getppid().map(|parent| parent.as_raw_nonzero().get());
    ensure!(present == Some(parent), "process {parent} has ended: the kubelet is not started");
    let failed = std::process::Command::new(program).args(arguments).exec();
    Err(failed).with_context(|| format!("cannot start {}", program.display()))
}

/// Waits until the kubelet has a certificate for this node that is still good. One that has ended stays in
/// its file until there is another.
pub async fn joined(paths: &Paths, name: &NodeName, limit: Duration) -> anyhow::Result<()> {
    let issued = async {
        while !has_certificate(paths, name.as_str(), Timestamp::now()) {
            sleep(LOOK).await;
        }
    };
    timeout(limit, issued).await.map_err(|_| {
        anyhow!(
            "the kubelet has had no certificate for node {name} for {limit:?}, the time that --wait gives: \
             its log says why (journalctl -u {UNIT}). In the cluster, `kubectl get csr` shows whether it \
             asked; the controller manager signs. The files stay, and the kubelet goes on if systemd runs \
             it; `portico join remove` removes them"
        )
    })
}

/// Asks the kubelet to end, and waits until it has. One that does not is killed.
pub(crate) async fn end(child: &mut Child) -> anyhow::Result<()> {
    if let Some(pid) = child.id().and_then(|id| Pid::from_raw(id.cast_signed())) {
        kill_process(pid, Signal::TERM).context("cannot ask the kubelet to end")?;
    }
    match timeout(LONGEST_END, child.wait()).await {
        Ok(ended) => drop(ended?),
        Err(_) => child.kill().await.context("cannot kill the kubelet, which does not end")?,
    }
    Ok(())
}

/// Whether the kubelet says of itself that it is well.
pub(crate) async fn healthy(address: SocketAddr) -> anyhow::Result<()> {
    let asking = async {
        let stream = TcpStream::connect(address).await?;
        let request = Request::get("/healthz").header(HOST, address.to_string());
        let request = request.body(Empty::<Bytes>::new())?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // Ended with this future.
        let mut driver = JoinSet::new();
        driver.spawn(connection);
        anyhow::Ok(sender.send_request(request).await?.status())
    };
    let asked = timeout(LONGEST_ANSWER, asking).await;
    let status = asked.map_err(|_| anyhow!("no answer within {LONGEST_ANSWER:?}"))??;
    ensure!(status == StatusCode::OK, "it answers {status}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use portico_lab::pki::Certificate;

    use super::*;

    #[tokio::test]
    async fn a_certificate_that_has_ended_does_not_make_a_node() {
        let folder = tempfile::tempdir().unwrap();
        let (paths, name) = (Paths::below(folder.path()), "worker-1".parse().unwrap());
        std::fs::create_dir_all(paths.certificates()).unwrap();
        for (year, is_good) in [(2_001, false), (2_999, true)] {
            let node = Certificate::client("system:node:worker-1").not_after(year, 1, 1);
            std::fs::write(paths.certificate(), node.self_signed().unwrap().cert).unwrap();
            assert_eq!(joined(&paths, &name, Duration::ZERO).await.is_ok(), is_good, "{year}");
        }
    }

    #[tokio::test]
    async fn the_kubelet_of_a_node_is_ended_and_waited_for_until_another_runs_in_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let kubeconfig = folder.path().join("kubelet.conf");
        // As a unit with Restart=always, until its input ends.
        let script = "for i in 1 2; do sh -c 'read line' sh --kubeconfig=\"$0\" --hostname-override=a; done";
        let mut unit = Command::new("sh");
        let unit = unit.args(["-c", script]).arg(&kubeconfig).stdin(Stdio::piped()).kill_on_drop(true);
        let mut unit = unit.spawn().unwrap();
        let flags = [format!("--kubeconfig={}", kubeconfig.display()), "--hostname-override=a".to_owned()];
        let first = loop {
            match running_with(&flags).unwrap() {
                Some(pid) => break pid,
                None => tokio::task::yield_now().await,
            }
        };
        let (limit, at_once) = (Duration::from_secs(60), Duration::ZERO);
        let other = ended_and_started(&kubeconfig, "b", at_once).await.unwrap_err().to_string();
        assert!(other.starts_with("no kubelet was started anew with --kubeconfig="), "{other}");
        assert_eq!(running_with(&flags).unwrap(), Some(first), "that of another node is left alone");
        ended_and_started(&kubeconfig, "a", limit).await.unwrap();
        assert_ne!(running_with(&flags).unwrap(), Some(first));
        drop(unit.stdin.take());
        unit.wait().await.unwrap();
        assert_eq!(running_with(&flags).unwrap(), None);
    }
}
