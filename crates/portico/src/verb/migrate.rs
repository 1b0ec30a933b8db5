//! `portico migrate CLUSTER`: to another expose strategy, while the address that users know stays.
//!
//! With `--plan` it only says what would happen. Else it writes what a person wants, as one change of the
//! Cluster; the operator carries it out, and says how far it is in the condition `PorticoMigration`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::{ArgGroup, Args};
use portico_admin::listing::OutputFormat;
use portico_api::cluster::Cluster;
use portico_api::duration::GoDuration;
use portico_api::exposed_cluster::ExposedClusterSpec;
use portico_api::strategy::ExposeStrategy;
use portico_expose::front::SNI_PORT;
use portico_expose::migration::Now;
use portico_expose::migration::plan::{MigrationPlan, has_two_doors};
use portico_kube::patch::{Patched, merge};
use portico_kube::{Client, read};
use serde_json::Value;

use crate::args::{duration, kubeconfig, positive_duration};
use crate::daemon;
use crate::outcome::{Outcome, print};
use crate::reach::doors::record;
use crate::verb::kubeconfig::label;

mod change;
mod site;
mod wait;

use change::{Change, Order, change};

/// How often the change is tried if somebody else writes the Cluster at the same time.
const ATTEMPTS: usize = 5;

/// Who writes, in the managed fields of the Cluster: a person, by this verb. The operator is another.
const MANAGER: &str = "portico-migrate";

/// How long `--finish` waits, and `--wait` without a time.
const LONG: &str = "1h";

/// `portico migrate`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("order").required(true).args(["to", "rollback", "finish"]))]
pub(crate) struct Flags {
    /// Name of the Cluster
    #[arg(value_name = "CLUSTER", value_parser = label)]
    cluster: String,
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
    /// Say each change until it is done, or that time is over [default without TIME: 1h]
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, conflicts_with = "plan")]
    #[arg(default_missing_value = LONG, value_parser = positive_duration)]
    wait: Option<Duration>,
    /// The old way in closes by itself only after nobody used it for this long [default: 10m]
    #[arg(long, value_name = "TIME", requires = "to", value_parser = quiet)]
    #[arg(conflicts_with_all = ["plan", "rollback", "finish"])]
    quiet: Option<String>,
    /// How to reach the seed [default: as kubectl does: $KUBECONFIG, the pod's own, or ~/.kube/config]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Plan from a directory of manifests, or from a copy of a seed's objects, instead of a live seed
    #[arg(long, value_name = "DIR", requires = "plan")]
    #[arg(conflicts_with_all = ["kubeconfig", "rollback", "finish"])]
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

/// Prints the plan, or does what is asked for.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    let order = match (flags.to, flags.rollback) {
        (Some(strategy), _) if flags.plan => return plan(flags, strategy),
        (Some(strategy), _) => Order::To { strategy, quiet: flags.quiet.clone() },
        (None, true) => Order::Rollback,
        (None, false) => Order::Finish,
    };
    daemon::runtime()?.block_on(carry_out(flags, &order))
}

/// Prints the plan. The answer is "no" if something stands in the way.
fn plan(flags: &Flags, to: ExposeStrategy) -> anyhow::Result<Outcome> {
    let plan = match &flags.manifests {
        Some(directory) => site::of_manifests(directory, &flags.cluster, to, flags.sni_port)?,
        None => daemon::runtime()?.block_on(async {
            let client = connect(flags).await?;
            site::live(&client, flags, to).await
        })?,
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
async fn carry_out(flags: &Flags, order: &Order) -> anyhow::Result<Outcome> {
    let client = connect(flags).await?;
    let name = &*flags.cluster;
    let (_, cluster) = read_cluster(&client, name).await?;
    let Some(found) = record(&client, &cluster).await? else { return refused(name, NOBODY) };
    let begins = match order {
        // To the door that users know, there is nothing to plan, and nothing is in the way.
        Order::To { strategy, .. } => Some(*strategy).filter(|&strategy| strategy != found.expose_strategy),
        Order::Rollback | Order::Finish => None,
    };
    let second = found.migration.as_ref().map(|migration| migration.second.expose_strategy);
    let to = begins.or(second).unwrap_or(found.expose_strategy);
    let plan = site::live(&client, flags, to).await?;
    if !has_two_doors(plan.keeper) || begins.is_some() && !plan.blockers.is_empty() {
        print(&format!("{plan}\n"))?;
        return refused(name, &why_not(&plan));
    }
    let Some(change) = write(&client, name, order).await? else { return Ok(Outcome::No) };
    print(&format!("Cluster {name}: {}\n", change.said))?;
    let limit = flags.wait.or_else(|| flags.finish.then(|| positive_duration(LONG).ok()).flatten());
    match limit {
        Some(limit) => wait::until(&client, name, &change.until, limit).await,
        None => Ok(Outcome::Done),
    }
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

fn refused(name: &str, why: &str) -> anyhow::Result<Outcome> {
    print(&format!("Cluster {name}: nothing was changed: {why}\n"))?;
    Ok(Outcome::No)
}

/// Writes the change, as long as nobody else writes the Cluster in between. `None` if it is refused, which is
/// said.
async fn write(client: &Client, name: &str, order: &Order) -> anyhow::Result<Option<Change>> {
    for _ in 0..ATTEMPTS {
        let (object, cluster) = read_cluster(client, name).await?;
        let record: Option<ExposedClusterSpec> = record(client, &cluster).await?;
        let decided = match &record {
            Some(record) => change(order, &cluster, record),
            None => Err(NOBODY.to_owned()),
        };
        let decided = match decided {
            Ok(change) => change,
            Err(why) => return refused(name, &why).map(|_| None),
        };
        let Some(mut patch) = decided.patch.clone() else { return Ok(Some(decided)) };
        patch["metadata"]["resourceVersion"] = object["metadata"]["resourceVersion"].clone();
        match merge(client, &path(name), MANAGER, &patch, &format!("Cluster {name}")).await? {
            Patched::Written(_) => return Ok(Some(decided)),
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

/// What is recorded, in short.
fn now(record: &ExposedClusterSpec) -> Now {
    Now::of(record)
}
