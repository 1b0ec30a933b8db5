//! Starting and stopping the kubelet: by systemd, or as a child of this process.

use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context, anyhow, ensure};
use portico_hosting::join::machine::{Places, UNIT};
use portico_hosting::join::options::NodeName;
use portico_hosting::join::trust::node_of;
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::time::{sleep, timeout};

/// Between two looks for the certificate: the kubelet tells nobody that it has one.
const LOOK: Duration = Duration::from_millis(200);

/// Starts the unit, or starts it anew with the files that it has now.
pub(super) async fn start_unit() -> anyhow::Result<()> {
    reload().await?;
    systemctl(&["enable", UNIT]).await?;
    systemctl(&["restart", UNIT]).await
}

/// Stops the unit, also for the next start of the machine.
pub(super) async fn stop() -> anyhow::Result<()> {
    systemctl(&["disable", "--now", UNIT]).await
}

/// Has systemd read its units again.
pub(super) async fn reload() -> anyhow::Result<()> {
    systemctl(&["daemon-reload"]).await
}

async fn systemctl(arguments: &[&str]) -> anyhow::Result<()> {
    let what = || format!("systemctl {}", arguments.join(" "));
    let output = Command::new("systemctl").args(arguments).output().await.with_context(what)?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {}: {}", what(), output.status, said.trim());
    Ok(())
}

/// Starts the kubelet itself. It ends with this process.
pub(super) fn start(program: &Path, arguments: &[String]) -> anyhow::Result<Child> {
    let cannot = || format!("cannot start {}", program.display());
    Command::new(program).args(arguments).kill_on_drop(true).spawn().with_context(cannot)
}

/// Waits until the kubelet has a certificate for this node.
pub(super) async fn joined(places: &Places, name: &NodeName, limit: Duration) -> anyhow::Result<()> {
    let path = places.certificate();
    let has_one = || {
        let certificate = std::fs::read_to_string(&path).ok();
        certificate.and_then(|text| node_of(&text)).is_some_and(|node| node == name.as_str())
    };
    let issued = async {
        while !has_one() {
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

/// Asks the kubelet to end, and waits until it has.
pub(super) async fn end(child: &mut Child) -> anyhow::Result<()> {
    if let Some(pid) = child.id().and_then(|id| Pid::from_raw(id.cast_signed())) {
        kill_process(pid, Signal::TERM).context("cannot ask the kubelet to end")?;
    }
    child.wait().await?;
    Ok(())
}

/// That the kubelet ended by itself, which it never should.
pub(super) fn ended(status: ExitStatus) -> String {
    format!("the kubelet ended ({status}); what it wrote above says why")
}
