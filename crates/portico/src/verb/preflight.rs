//! `portico preflight`: every required flow of this machine's roles, tried from here and back.
//!
//! [`flags`] holds what is asked, [`report`] how the answer is printed, [`listen`] the other end, [`mesh`]
//! the DaemonSet that does both for ever. `portico-preflight` defines the checks and the meaning of their
//! results. `portico-ports` has the flows.

pub(crate) mod flags;
mod listen;
mod mesh;
mod progress;
mod report;

use portico_preflight::plan::Plan;
use portico_preflight::responder::{Bounds, Opened, Responder, Settings};
use portico_preflight::runner::{self, What};
use portico_preflight::verdict::{Expectations, Status, judge};

use self::flags::Flags;
use self::progress::Progress;
use crate::daemon;
use crate::outcome::{Outcome, print};

/// Tries everything, or answers others.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    if flags.mesh.mesh {
        return daemon::run(mesh::run(flags)).map(|()| Outcome::Done);
    }
    let plan = flags.plan()?;
    if flags.listen {
        return daemon::run(async { listen::listen(respond(flags, &plan)).await }).map(|()| Outcome::Done);
    }
    let findings = daemon::run(check(flags, &plan))?;
    print(&report::render(flags.output, &findings)?)?;
    let is_no = |status| matches!(status, Status::Failed | Status::Inconclusive);
    Ok(if findings.iter().any(|finding| is_no(finding.status)) { Outcome::No } else { Outcome::Done })
}

async fn check(flags: &Flags, plan: &Plan) -> anyhow::Result<Vec<portico_preflight::verdict::Finding>> {
    let tools = flags.tools()?;
    let (local, checks): (Vec<_>, Vec<_>) =
        plan.checks.iter().cloned().partition(|planned| matches!(planned.what, What::LocalPort { .. }));
    let what = |checks: &[portico_preflight::plan::Planned]| -> Vec<What> {
        checks.iter().map(|planned| planned.what.clone()).collect()
    };
    // Before our own responder takes the ports.
    let mut outcomes = runner::run(&what(&local), &tools, flags.pace(), |_, _| {}).await;
    let responder = respond(flags, plan);
    let silent_here = responder
        .opened()
        .iter()
        .filter(|(_, _, how)| matches!(how, Opened::Silent { .. }))
        .map(|(_, transport, _)| *transport)
        .collect();
    let expected = Expectations {
        is_new_machine: flags.new_machine,
        pod_mtu: flags.pod_mtu,
        peers_listen: flags.peers_listen,
        silent_here,
    };
    let mut progress = Progress::new(checks.len());
    let others = what(&checks);
    let running = runner::run(&others, &tools, flags.pace(), |_, outcome| progress.note(outcome));
    outcomes.extend(tokio::select! {
        outcomes = running => outcomes,
        error = responder.serve() => {
            return Err(anyhow::Error::new(error).context("the responder of this machine"));
        }
    });
    progress.end();
    Ok(judge(&[local, checks].concat(), &outcomes, &expected))
}

/// The responder of this machine. Peers ask it for the way back, and it is asked by them.
fn respond(flags: &Flags, plan: &Plan) -> Responder {
    let settings = Settings {
        addresses: plan.addresses.clone(),
        transports: plan.accepts.clone(),
        peers: plan.peers.clone(),
        may_try: plan.opens.clone(),
        limits: flags.limits(),
    };
    Responder::open(settings, Bounds::default())
}
