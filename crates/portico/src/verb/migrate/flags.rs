//! The flags of `portico migrate`.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args, value_parser};
use portico_admin::listing::OutputFormat;
use portico_api::duration::GoDuration;
use portico_api::strategy::ExposeStrategy;
use portico_expose::front::SNI_PORT;
use portico_migrate::plans::LiveSeed;

use crate::args::{client_of_person, duration, positive_duration};
use crate::verb::kubeconfig::label;

/// How long `--finish` waits, `--wait` without a time, and `--to` with `--selector`.
pub(super) const LONG: Duration = Duration::from_hours(1);

// `portico migrate`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("which").required(true).args(["cluster", "selector"]))]
#[command(group = ArgGroup::new("order").required(true).args(["to", "rollback", "finish"]))]
pub(crate) struct Flags {
    /// Name of the Cluster
    #[arg(value_name = "CLUSTER", value_parser = label)]
    pub(super) cluster: Option<String>,
    /// All Clusters with these labels, some at a time; with --to this waits until they are through
    #[arg(short = 'l', long, value_name = "LABELS", value_parser = labels)]
    pub(super) selector: Option<String>,
    /// How many of the selected Clusters migrate at the same time; the next begins once one is through
    #[arg(long, value_name = "NUMBER", default_value = "5")]
    #[arg(conflicts_with_all = ["cluster", "plan", "rollback", "finish"])]
    pub(super) max_parallel: NonZeroUsize,
    #[arg(long, value_name = "STRATEGY")]
    #[arg(help = format!("The strategy to migrate to: {}", ExposeStrategy::one_of(ExposeStrategy::ALL)))]
    pub(super) to: Option<ExposeStrategy>,
    /// Go back: to the way in that is not wanted now, from any step; the same again goes on
    #[arg(long)]
    pub(super) rollback: bool,
    /// Close the old way in, although nodes and users may still use it, and wait until that is done
    #[arg(long)]
    pub(super) finish: bool,
    /// Only say what would happen, and write nothing; exit code 1 if something stands in the way
    #[arg(long, requires = "to", conflicts_with_all = ["rollback", "finish"])]
    pub(super) plan: bool,
    /// Say each change until it is done, or that time is over [default without TIME: 1h]; with --selector the
    /// time is that of all together
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, conflicts_with = "plan")]
    #[arg(default_missing_value = "1h", value_parser = positive_duration)]
    pub(super) wait: Option<Duration>,
    /// The old way in closes by itself only after nobody used it for this long [default: 10m]
    #[arg(long, value_name = "TIME", requires = "to", value_parser = quiet)]
    #[arg(conflicts_with_all = ["plan", "rollback", "finish"])]
    pub(super) quiet: Option<String>,
    /// How kubelets come to the new address: in-place, by a pod on each node; drained, the same after the
    /// node was emptied; or by-hand [default: in-place]
    #[arg(long, value_name = "HOW", requires = "to", value_parser = ["in-place", "drained", "by-hand"])]
    #[arg(conflicts_with_all = ["plan", "rollback", "finish"])]
    pub(super) nodes: Option<String>,
    /// How many nodes are moved at the same time [default: 1]
    #[arg(long, value_name = "NUMBER", requires = "to", value_parser = value_parser!(u16).range(1..=9_999))]
    #[arg(conflicts_with_all = ["plan", "rollback", "finish"])]
    pub(super) parallel: Option<u16>,
    /// How to reach the seed [default: as kubectl does: $KUBECONFIG, ~/.kube/config, or the pod's own]
    #[arg(long, value_name = "FILE")]
    pub(super) kubeconfig: Option<PathBuf>,
    /// Plan from a directory of manifests, or from a copy of a seed's objects, instead of a live seed
    #[arg(long, value_name = "DIR", requires = "plan")]
    #[arg(conflicts_with_all = ["kubeconfig", "rollback", "finish", "selector"])]
    pub(super) manifests: Option<PathBuf>,
    /// Port at which clients find the listener that routes by server name
    #[arg(long, value_name = "PORT", default_value_t = SNI_PORT)]
    pub(super) sni_port: u16,
    /// How long reading the seed may take, all together
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = duration)]
    pub(super) timeout: Duration,
    /// How the plan is printed
    #[arg(short, long, value_name = "FORMAT", default_value = "table", requires = "plan")]
    #[arg(conflicts_with_all = ["rollback", "finish"])]
    pub(super) output: OutputFormat,
}

/// A time as the annotation of a Cluster takes it.
fn quiet(text: &str) -> Result<String, String> {
    let time: GoDuration = text.parse().map_err(|error| format!("{error}"))?;
    time.get().map(|_| text.to_owned()).ok_or_else(|| "give a time that is not negative".to_owned())
}

/// Labels to select by. Nothing at all would select every Cluster, as an empty variable of a script does.
fn labels(text: &str) -> Result<String, String> {
    if text.trim().is_empty() {
        return Err("give labels of Clusters, such as team=a or 'stage in (test,dev)'".to_owned());
    }
    Ok(text.to_owned())
}

/// The seed, as the flags say.
pub(super) async fn connect(flags: &Flags) -> anyhow::Result<LiveSeed> {
    let client = client_of_person(flags.kubeconfig.as_deref()).await?;
    Ok(LiveSeed { client, timeout: flags.timeout, sni_port: flags.sni_port })
}
