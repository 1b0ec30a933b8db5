//! The order of a person for one cluster: written into it, unless something stands in the way.

use anyhow::bail;
use portico_api::exposed_cluster::ExposedClusterSpec;
use portico_expose::migration::order::{Order, OrderedChange, change};
use portico_expose::migration::plan::{MigrationPlan, has_two_doors};
use portico_kube::Client;
use portico_kube::patch::{Patched, merge};
use portico_reach::cluster::{cluster_path, read_cluster};
use portico_reach::doors::record;

use crate::plans::LiveSeed;

/// How often the change is tried if somebody else writes the Cluster at the same time.
const ATTEMPTS: usize = 5;

/// This verb, by which a person writes, in the managed fields of the Cluster. The operator has another name.
const MANAGER: &str = "portico-migrate";

/// Why an order was not written.
pub struct Refusal {
    /// The reason.
    pub why: String,
    /// The plan, where it was looked at: it says what would have to be done.
    pub plan: Option<Box<MigrationPlan>>,
}

impl From<String> for Refusal {
    fn from(why: String) -> Self {
        Self { why, plan: None }
    }
}

/// Writes the order for one cluster, or returns what stands in the way.
///
/// # Errors
/// The seed cannot be read or written, or somebody else writes the Cluster all the time.
pub async fn write_order(
    seed: &LiveSeed,
    name: &str,
    order: &Order,
) -> anyhow::Result<Result<OrderedChange, Refusal>> {
    let client = &seed.client;
    let (_, cluster) = read_cluster(client, name).await?;
    let Some(found) = record(client, &cluster).await? else { return Ok(Err(NOBODY.to_owned().into())) };
    let begins = match order {
        // To the door that users know, there is nothing to plan, and nothing is in the way.
        Order::To { strategy, .. } => Some(*strategy).filter(|&strategy| strategy != found.expose_strategy),
        Order::Rollback | Order::Finish => None,
    };
    let second = found.migration.as_ref().map(|migration| migration.second.expose_strategy);
    let to = begins.or(second).unwrap_or(found.expose_strategy);
    let plan = seed.plan(name, to).await?;
    if !has_two_doors(plan.managed_by) || begins.is_some() && !plan.blockers.is_empty() {
        return Ok(Err(Refusal { why: why_not(&plan), plan: Some(Box::new(plan)) }));
    }
    Ok(write(client, name, order).await?.map_err(Refusal::from))
}

const NOBODY: &str = "nothing is recorded of its doors (there is no ExposedCluster of it), so no operator of \
                      Portico is at work that could carry this out: see deploy/operator.yaml and its log";

/// Why a cluster cannot be led along this plan.
pub fn why_not(plan: &MigrationPlan) -> String {
    let first = plan.blockers.first().map(|blocker| format!("{}; {}", blocker.what, blocker.remedy));
    if has_two_doors(plan.managed_by) {
        first.unwrap_or_default()
    } else {
        format!("{}, so it cannot have two doors at once: the steps above are yours", plan.managed_by)
    }
}

/// Writes the change, as long as nobody else writes the Cluster in between; or why it is refused.
async fn write(client: &Client, name: &str, order: &Order) -> anyhow::Result<Result<OrderedChange, String>> {
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
        match merge(client, &cluster_path(name), MANAGER, &patch, &format!("Cluster {name}")).await? {
            Patched::Written(_) => return Ok(Ok(decided)),
            Patched::Conflict => {}
        }
    }
    bail!(
        "Cluster {name} was changed by somebody else {ATTEMPTS} times while this was to be written: try again"
    )
}
