//! `portico migrate`: to another expose strategy, while the address that users know stays.
//!
//! With `--plan` it only says what would happen. Else it writes what a person wants, as one change of the
//! Cluster; the operator carries it out, and says how far it is in the condition `PorticoMigration`. With
//! `--selector` it does so for many Clusters ([`many`]), some at a time.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::{ArgGroup, Args, value_parser};
use portico_admin::listing::OutputFormat;
use portico_api::cluster::Cluster;
use portico_api::duration::GoDuration;
use portico_api::exposed_cluster::ExposedClusterSpec;
use portico_api::strategy::ExposeStrategy;
use portico_expose::front::SNI_PORT;
use portico_expose::migration::order::{Change, Order, change};
use portico_expose::migration::plan::{MigrationPlan, has_two_doors};
use portico_kube::patch::{Patched, merge};
use portico_kube::{Client, read};
use portico_reach::doors::record;
use serde_json::Value;

use crate::args::{duration, kubeconfig, positive_duration};
use crate::daemon;
use crate::outcome::{Outcome, print};
use crate::verb::kubeconfig::label;

mod many;
mod site;
mod wait;

/// How often the change is tried if somebody else writes the Cluster at the same time.
const ATTEMPTS: usize = 5;

/// Who writes, in the managed fields of the Cluster: a person, by this verb. The operator is another.
const MANAGER: &str = "portico-migrate";

/// How long `--finish` waits, `--wait` without a time, and `--to` with `--selector`.
const LONG: Duration = Duration::from_hours(1);

/// `portico migrate`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("which").required(true).args(["cluster", "selector"]))]
#[command(group = ArgGroup::new("order").required(true).args(["to", "rollback", "finish"]))]
pub(crate) struct Flags {
    /// Name of the Cluster
    #[arg(value_name = "CLUSTER", value_parser = label)]
    cluster: Option<String>,
    /// All Clusters with these labels, some at a time; with --to this waits until they are through
    #[arg(short = 'l', long, value_name = "LABELS", value_parser = labels)]
    selector: Option<String>,
    /// How many of the selected Clusters migrate at the same time; the next begins once one is through
    #[arg(long, value_name = "NUMBER", default_value = "5")]
    #[arg(conflicts_with_all = ["cluster", "plan", "rollback", "finish"])]
    max_parallel: NonZeroUsize,
    /// The strategy to migrate to: NodePort, LoadBalancer or Tunneling
    #[arg(long, value_name = "STRATEGY")]
    to: Option<ExposeStrategy>,
    /// Go back: to the way in that is not wanted now, from any step
    #[arg(long)]
    rollback: bool,
    /// Close the old way in, although nodes and users may still use it, and wait until that is done
    #[arg(long)]
    finish: bool,
    /// Only say what would happen, and write nothing; exit code 1 if something stands in the way
    #[arg(long, requires = "to", conflicts_with_all = ["rollback", "finish"])]
    plan: bool,
    /// Say each change until it is done, or that time is over [default without TIME: 1h]; with --selector the
    /// time is that of all together
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, conflicts_with = "plan")]
    #[arg(default_missing_value = "1h", value_parser = positive_duration)]
    wait: Option<Duration>,
    /// The old way in closes by itself only after nobody used it for this long [default: 10m]
    #[arg(long, value_name = "TIME", requires = "to", value_parser = quiet)]
    #[arg(conflicts_with_all = ["plan", "rollback", "finish"])]
    quiet: Option<String>,
    /// How kubelets come to the new address: in-place, by a pod on each node; drained, the same after the
    /// node was emptied; or by-hand [default: in-place]
    #[arg(long, value_name = "HOW", requires = "to", value_parser = ["in-place", "drained", "by-hand"])]
    #[arg(conflicts_with_all = ["plan", "rollback", "finish"])]
    nodes: Option<String>,
    /// How many nodes are moved at the same time [default: 1]
    #[arg(long, value_name = "NUMBER", requires = "to", value_parser = value_parser!(u16).range(1..=9_999))]
    #[arg(conflicts_with_all = ["plan", "rollback", "finish"])]
    parallel: Option<u16>,
    /// How to reach the seed [default: as kubectl does: $KUBECONFIG, the pod's own, or ~/.kube/config]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Plan from a directory of manifests, or from a copy of a seed's objects, instead of a live seed
    #[arg(long, value_name = "DIR", requires = "plan")]
    #[arg(conflicts_with_all = ["kubeconfig", "rollback", "finish", "selector"])]
    manifests: Option<PathBuf>,
    /// Port at which clients find the listener that routes by server name
    #[arg(long, value_name = "PORT", default_value_t = SNI_PORT)]
    sni_port: u16,
    /// How long reading the seed may take, all together
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = duration)]
    timeout: Duration,
    /// How the plan is printed
    #[arg(short, long, value_name = "FORMAT", default_value = "table", requires = "plan")]
    #[arg(conflicts_with_all = ["rollback", "finish"])]
    output: OutputFormat,
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

/// Prints the plan, or does what is asked for.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    daemon::runtime()?.block_on(async {
        let order = match (flags.to, flags.rollback) {
            (Some(strategy), _) => Order::To { strategy, settings: settings(flags) },
            (None, true) => Order::Rollback,
            (None, false) => Order::Finish,
        };
        match (&flags.cluster, &flags.selector, flags.to.filter(|_| flags.plan)) {
            (Some(name), _, Some(to)) => plan(flags, name, to).await,
            (Some(name), _, None) => carry_out(flags, name, &order).await,
            (None, Some(selector), Some(to)) => many::plan(flags, selector, to).await,
            (None, Some(selector), None) => many::carry_out(flags, selector, &order).await,
            (None, None, _) => bail!("give the name of a CLUSTER, or --selector"),
        }
    })
}

/// What the annotation is to say of it.
fn settings(flags: &Flags) -> Vec<String> {
    let quiet = flags.quiet.as_ref().map(|quiet| format!("quiet={quiet}"));
    let nodes = flags.nodes.as_ref().map(|nodes| format!("nodes={nodes}"));
    let parallel = flags.parallel.map(|number| format!("parallel={number}"));
    [quiet, nodes, parallel].into_iter().flatten().collect()
}

/// Prints the plan. The answer is "no" if something stands in the way.
async fn plan(flags: &Flags, name: &str, to: ExposeStrategy) -> anyhow::Result<Outcome> {
    let plan = match &flags.manifests {
        Some(directory) => site::of_manifests(directory, name, to, flags.sni_port)?,
        None => site::live(&connect(flags).await?, flags, name, to).await?,
    };
    match flags.output {
        OutputFormat::Json => print(&format!("{}\n", serde_json::to_string_pretty(&plan)?))?,
        OutputFormat::Table => print(&plan.to_string())?,
    }
    Ok(if plan.blockers.is_empty() { Outcome::Done } else { Outcome::No })
}

async fn connect(flags: &Flags) -> anyhow::Result<Client> {
    Ok(portico_kube::client(kubeconfig(flags.kubeconfig.as_deref()).as_deref()).await?)
}

/// Writes what is wanted, and waits for it if asked to. The answer is "no" if it may not be begun, or is not
/// done in time.
async fn carry_out(flags: &Flags, name: &str, order: &Order) -> anyhow::Result<Outcome> {
    let client = connect(flags).await?;
    let change = match write_order(&client, flags, name, order).await? {
        Ok(change) => change,
        Err(Refusal { why, page }) => {
            let page = page.map(|plan| format!("{plan}\n")).unwrap_or_default();
            print(&format!("{page}Cluster {name}: nothing was changed: {why}\n"))?;
            return Ok(Outcome::No);
        }
    };
    print(&format!("Cluster {name}: {}\n", change.said))?;
    match flags.wait.or(flags.finish.then_some(LONG)) {
        Some(limit) => wait::until(&client, name, &change.until, limit).await,
        None => Ok(Outcome::Done),
    }
}

/// Why an order was not written.
struct Refusal {
    why: String,
    /// What would have to be done, where it was looked at.
    page: Option<Box<MigrationPlan>>,
}

impl From<String> for Refusal {
    fn from(why: String) -> Self {
        Self { why, page: None }
    }
}

/// Writes what is wanted of one cluster, if nothing stands in the way.
async fn write_order(
    client: &Client,
    flags: &Flags,
    name: &str,
    order: &Order,
) -> anyhow::Result<Result<Change, Refusal>> {
    let (_, cluster) = read_cluster(client, name).await?;
    let Some(found) = record(client, &cluster).await? else { return Ok(Err(NOBODY.to_owned().into())) };
    let begins = match order {
        // To the door that users know, there is nothing to plan, and nothing is in the way.
        Order::To { strategy, .. } => Some(*strategy).filter(|&strategy| strategy != found.expose_strategy),
        Order::Rollback | Order::Finish => None,
    };
    let second = found.migration.as_ref().map(|migration| migration.second.expose_strategy);
    let to = begins.or(second).unwrap_or(found.expose_strategy);
    let plan = site::live(client, flags, name, to).await?;
    if !has_two_doors(plan.keeper) || begins.is_some() && !plan.blockers.is_empty() {
        return Ok(Err(Refusal { why: why_not(&plan), page: Some(Box::new(plan)) }));
    }
    Ok(write(client, name, order).await?.map_err(Refusal::from))
}

const NOBODY: &str = "nothing is recorded of its doors (there is no ExposedCluster of it), so no operator of \
                      Portico is at work that could carry this out: see deploy/operator.yaml and its log";

fn why_not(plan: &MigrationPlan) -> String {
    let first = plan.blockers.first().map(|blocker| format!("{}; {}", blocker.what, blocker.remedy));
    if has_two_doors(plan.keeper) {
        first.unwrap_or_default()
    } else {
        format!("{}, so it cannot have two doors at once: the steps above are yours", plan.keeper)
    }
}

/// Writes the change, as long as nobody else writes the Cluster in between; or why it is refused.
async fn write(client: &Client, name: &str, order: &Order) -> anyhow::Result<Result<Change, String>> {
    for _ in 0..ATTEMPTS {
        let (object, cluster) = read_cluster(client, name).await?;
        let record: Option<ExposedClusterSpec> = record(client, &cluster).await?;
        let decided = match &record {
            Some(record) => change(order, &cluster, record),
            None => Err(NOBODY.to_owned()),
        };
        let Ok(decided) = decided else { return Ok(decided) };
        let Some(mut patch) = decided.patch.clone() else { return Ok(Ok(decided)) };
        patch["metadata"]["resourceVersion"] = object["metadata"]["resourceVersion"].clone();
        match merge(client, &path(name), MANAGER, &patch, &format!("Cluster {name}")).await? {
            Patched::Written(_) => return Ok(Ok(decided)),
            Patched::Conflict => {}
        }
    }
    bail!(
        "Cluster {name} was changed by somebody else {ATTEMPTS} times while this was to be written: try again"
    )
}

fn path(name: &str) -> String {
    format!("/apis/kubermatic.k8c.io/v1/clusters/{name}")
}

/// The Cluster as it is, and as far as it counts.
async fn read_cluster(client: &Client, name: &str) -> anyhow::Result<(Value, Cluster)> {
    let object: Option<Value> = read(client, &path(name), &format!("Cluster {name}")).await?;
    let object = object.ok_or_else(|| anyhow!(no_cluster(name)))?;
    let cluster = serde_json::from_value(object.clone()).with_context(|| format!("Cluster {name}"))?;
    Ok((object, cluster))
}

fn no_cluster(name: &str) -> String {
    format!("there is no Cluster {name}; `kubectl get clusters` lists them")
}
