//! `portico migrate`: to another expose strategy, while the address that users know stays.
//!
//! With `--plan` it only says what would happen. Else it writes the order of a person, as one change of the
//! Cluster. The operator carries it out, and says how far it is in the condition `PorticoMigration`. With
//! `--selector` it does so for many Clusters ([`many`]), some at a time.

use anyhow::bail;
use portico_admin::listing::OutputFormat;
use portico_api::strategy::ExposeStrategy;
use portico_expose::migration::order::Order;
use portico_migrate::order::{Refusal, write_order};
use portico_migrate::plans::plan_of_site;

use crate::outcome::{Outcome, print};
use crate::{daemon, offline};

mod flags;
mod many;
mod wait;

pub(crate) use self::flags::Flags;
use self::flags::{LONG, connect};

/// Prints the plan, or does what is asked for.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    daemon::run(async {
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
        Some(directory) => plan_of_site(&offline::read(directory)?, name, to, flags.sni_port)?,
        None => connect(flags).await?.plan(name, to).await?,
    };
    match flags.output {
        OutputFormat::Json => print(&format!("{}\n", serde_json::to_string_pretty(&plan)?))?,
        OutputFormat::Table => print(&plan.to_string())?,
    }
    Ok(if plan.blockers.is_empty() { Outcome::Done } else { Outcome::No })
}

/// Writes what is wanted, and waits for it if asked to. The answer is "no" if it may not be begun, or is not
/// done in time.
async fn carry_out(flags: &Flags, name: &str, order: &Order) -> anyhow::Result<Outcome> {
    let seed = connect(flags).await?;
    let change = match write_order(&seed, name, order).await? {
        Ok(change) => change,
        Err(Refusal { why, plan }) => {
            let plan = plan.map(|plan| format!("{plan}\n")).unwrap_or_default();
            print(&format!("{plan}Cluster {name}: nothing was changed: {why}\n"))?;
            return Ok(Outcome::No);
        }
    };
    print(&format!("Cluster {name}: {}\n", change.said))?;
    match flags.wait.or(flags.finish.then_some(LONG)) {
        Some(limit) => wait::until(&seed.client, name, &change.until, limit).await,
        None => Ok(Outcome::Done),
    }
}
