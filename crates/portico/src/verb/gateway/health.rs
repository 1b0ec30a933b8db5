//! `/readyz`: whether this gateway serves. With `?verbose` it lists the obstacles, and the problems of
//! objects.
//!
//! Not ready means: send me no new connections. A broken manifest, or a NodePort that cannot be bound, is
//! shown and does not make the gateway unready. Every other cluster is served, and a restart would not help.

use jiff::Timestamp;
use portico_admin::readiness::Readiness;
use portico_gateway::Listener;
use portico_source::kubernetes::{ClustersFrom, KubernetesStatus, WatchState};
use portico_tunnel::RevocationList;

use super::status::Status;
use super::tunnel_files;

/// Problems shown in a verbose answer. The metric has the full number.
const MOST_PROBLEMS: usize = 200;

/// Looks at what a gateway needs to serve.
pub(super) fn readiness(status: &Status, verbose: bool) -> Readiness {
    let gateway = status.gateway();
    let (accepting, how) = match gateway {
        None => (false, "no listener is open yet"),
        Some(_) if status.is_stopping() => (false, "stopping: open connections may finish"),
        Some(_) => (true, "new connections are welcome"),
    };
    let read = match gateway {
        None => "waiting for the first complete reading of all objects",
        Some(_) => "every object has been read",
    };
    let mut readiness = Readiness::new(verbose);
    readiness.check("source", gateway.is_some(), read);
    readiness.check("accepting", accepting, how);
    if readiness.is_verbose() {
        details(&mut readiness, status);
    }
    readiness
}

fn details(readiness: &mut Readiness, status: &Status) {
    if let Some(source) = status.watches() {
        watches(readiness, &source);
    }
    if let Some(gateway) = status.gateway() {
        // Not a reason to be unready: it passes with the next connection that ends, and other replicas may
        // fare no better.
        if gateway.shared().totals().accept_rests_now {
            readiness.warn(format_args!(
                "accepting: rests until file descriptors are free; clients wait; raise the limit (ulimit -n)"
            ));
        }
        for (listener, address) in gateway.listen_addresses() {
            if !matches!(listener, Listener::NodePort(_)) {
                readiness.fine(format_args!("listener {listener}: {address}"));
            }
        }
    }
    let now = Timestamp::now();
    for (ca, list) in status.gateway().map(|it| tunnel_files::revocation_lists(it)).unwrap_or_default() {
        let RevocationList { issuer, this_update, next_update, .. } = list;
        if next_update < now {
            readiness.warn(format_args!(
                "revocation list of {issuer} ({ca}): past its next update, {next_update}; what the CA \
                 revoked since is not known; give its newest list"
            ));
        } else {
            readiness.fine(format_args!(
                "revocation list of {issuer} ({ca}): in force, of {this_update}, next update {next_update}"
            ));
        }
    }
    for (file, error) in status.tunnel_files() {
        let file = file.as_str();
        readiness.warn(format_args!(
            "file of the tunnel listener ({file}): {error}; what was read before stays in force"
        ));
    }
    let manifest = status.manifest_problems();
    let objects = status.object_problems();
    let shown = manifest.iter().map(ToString::to_string).chain(objects.iter().map(ToString::to_string));
    for problem in shown.take(MOST_PROBLEMS) {
        readiness.warn(format_args!("{problem}"));
    }
    let more = (manifest.len() + objects.len()).saturating_sub(MOST_PROBLEMS);
    if more > 0 {
        readiness.warn(format_args!("and {more} more"));
    }
}

/// While a watch fails, objects stay as they were last seen.
fn watches(readiness: &mut Readiness, source: &KubernetesStatus) {
    for (kind, watch) in &source.watches {
        let age = watch.age().as_secs();
        match (&watch.error, watch.state) {
            (Some(error), _) => readiness.warn(format_args!(
                "watch of {kind}: {error}; last heard of {age} s ago; what was known stays; trying again"
            )),
            (None, WatchState::Listing) => {
                readiness.missing(format_args!("watch of {kind}: not listed yet, for {age} s"));
            }
            (None, _) => {
                readiness.fine(format_args!("watch of {kind}: listed, and watched; heard of {age} s ago"));
            }
        }
    }
    let from = source.clusters_from;
    match from {
        ClustersFrom::Auto => readiness.missing("what clusters allow comes from: not known yet"),
        _ => readiness.fine(format_args!("what clusters allow comes from: {}", from.as_str())),
    }
    if let Some(lacking) = source.lacks {
        readiness.missing(lacking.remedy());
    }
    if let Some(error) = &source.discovery_error {
        readiness.warn(format_args!("discovery: cannot ask which kinds are served: {error}; trying again"));
    }
}
