//! `portico migrate --selector`: many clusters, some at a time.
//!
//! [`Waves`] says whose turn it is. An order is for one cluster, with every obstacle that one may have.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use portico_admin::listing::OutputFormat;
use portico_admin::table;
use portico_api::migration::SETTLED;
use portico_api::strategy::ExposeStrategy;
use portico_expose::migration::order::{Order, Until};
use portico_expose::migration::plan::has_two_doors;
use portico_expose::migration::waves::{AllProgress, Progress, Tried, Waves};
use portico_migrate::order::{why_not, write_order};
use portico_migrate::plans::LiveSeed;
use portico_migrate::selection::{Found, Selection, list_selected, progress_of_all};
use serde_json::json;
use tokio::time::{Instant, sleep_until};

use super::flags::{Flags, LONG, connect};
use super::wait::{Awaited, Reported, SILENCE, line, waits_for_people};
use crate::outcome::{Outcome, print};
use crate::shell;

/// How often the seed is asked: each look lists all that are selected.
const PAUSE: Duration = Duration::from_secs(2);

/// What the operator says of it.
fn describe(found: &Found) -> String {
    line(&found.cluster).filter(|line| !line.starts_with(SETTLED)).unwrap_or_else(|| SILENCE.to_owned())
}

fn nobody(flags: &Flags, selector: &str) -> anyhow::Result<Outcome> {
    let said = format!(
        "no Cluster has the labels {selector}, and nothing was changed: `kubectl get clusters --show-labels` \
         lists them"
    );
    match flags.output {
        OutputFormat::Json => {
            tracing::warn!("{said}");
            print("[]\n")?;
        }
        OutputFormat::Table => print(&format!("{said}\n"))?,
    }
    Ok(Outcome::No)
}

// === The plan ===

/// Prints on one line for each what would become of it. The answer is "no" if one of them cannot.
pub(super) async fn plan(flags: &Flags, selector: &str, to: ExposeStrategy) -> anyhow::Result<Outcome> {
    let seed = connect(flags).await?;
    let selection = list_selected(&seed, selector).await?;
    if selection.is_empty() {
        return nobody(flags, selector);
    }
    let plans = seed.plans(None).await?;
    let (mut printed, mut rows, mut cannot) = (Vec::new(), Vec::new(), 0_usize);
    for (name, found) in &selection {
        let progress = found.progress(to);
        let mut row = |doors: String, address: &str, begins: &str, why: String| {
            rows.push([name.clone(), doors, address.to_owned(), begins.to_owned(), why]);
        };
        if progress == Progress::There {
            row(to.to_string(), &found.cluster.status.address.url, "is there", String::new());
            continue;
        }
        let plan = match plans.plan_of(name, to).await {
            Ok(plan) => plan,
            Err(error) => {
                let error = format!("{error:#}");
                tracing::warn!("Cluster {name}: there is no plan: {error}");
                printed.push(json!({"cluster": name, "error": error}));
                row(format!("? -> {to}"), "", "cannot", error);
                cannot += 1;
                continue;
            }
        };
        let doors = format!("{} -> {to}", plan.from.strategy);
        let address = &plan.to.address.url;
        let is_possible = has_two_doors(plan.managed_by) && plan.blockers.is_empty();
        if progress == Progress::UnderWay || progress == Progress::Elsewhere && is_possible {
            row(doors, address, "is under way", describe(found));
        } else if is_possible {
            row(doors, address, "can", String::new());
        } else {
            cannot += 1;
            row(doors, address, "cannot", why_not(&plan));
        }
        printed.push(serde_json::to_value(plan)?);
    }
    match flags.output {
        OutputFormat::Json => print(&format!("{}\n", serde_json::to_string_pretty(&printed)?))?,
        OutputFormat::Table => {
            let table = table::render(["CLUSTER", "STRATEGY", "ADDRESS", "BEGINS", "WHY"], &rows);
            print(&format!("{table}\n{} Clusters, {cannot} of them cannot\n", selection.len()))?;
        }
    }
    Ok(if cannot == 0 { Outcome::Done } else { Outcome::No })
}

// === Orders ===

/// A run over what is selected.
struct Run<'a> {
    seed: LiveSeed,
    flags: &'a Flags,
    selector: &'a str,
    order: &'a Order,
    limit: Duration,
    deadline: Instant,
}

/// Name, what became of it, and why.
type Row = [String; 3];

/// Does what is asked for with each that is selected. The answer is "no" if it is not done with all of them.
pub(super) async fn carry_out(flags: &Flags, selector: &str, order: &Order) -> anyhow::Result<Outcome> {
    let seed = connect(flags).await?;
    let limit = flags.wait.unwrap_or(LONG);
    let run = Run { seed, flags, selector, order, limit, deadline: Instant::now() + limit };
    let selection = list_selected(&run.seed, selector).await?;
    if selection.is_empty() {
        return nobody(flags, selector);
    }
    match order {
        Order::To { strategy, .. } => run.waves(*strategy, selection).await,
        Order::Rollback | Order::Finish => run.each(selection).await,
    }
}

impl Run<'_> {
    fn is_late(&self) -> bool {
        Instant::now() >= self.deadline
    }

    /// The next look, a little later. An API server that is away for a moment is asked again; `None` if that
    /// lasts until time is over.
    async fn look_again(&self) -> anyhow::Result<Option<Selection>> {
        let mut reported = Reported::default();
        loop {
            sleep_until(self.deadline.min(Instant::now() + PAUSE)).await;
            match list_selected(&self.seed, self.selector).await {
                Ok(found) => return Ok(Some(found)),
                Err(error) => reported.not_seen("the seed", &error)?,
            }
            if self.is_late() {
                return Ok(None);
            }
        }
    }

    /// Orders it of one cluster, and says so; or why not.
    async fn give(&self, name: &str) -> anyhow::Result<Result<Until, Tried>> {
        match write_order(&self.seed, name, self.order).await {
            Ok(Ok(change)) => {
                print(&format!("{name}  {}\n", change.said))?;
                Ok(Ok(change.until))
            }
            Ok(Err(refusal)) => {
                print(&format!("{name}  is skipped: {}\n", refusal.why))?;
                Ok(Err(Tried::Skipped(refusal.why)))
            }
            Err(error) => {
                print(&format!("{name}  cannot be ordered: {error:#}\n"))?;
                Ok(Err(Tried::Failed(format!("{error:#}"))))
            }
        }
    }

    /// Some at a time, until all are through.
    async fn waves(&self, target: ExposeStrategy, mut selection: Selection) -> anyhow::Result<Outcome> {
        let most = self.flags.max_parallel.get();
        let mut waves = Waves::new(most);
        let mut reported: BTreeMap<String, Reported> = BTreeMap::new();
        let mut seen = progress_of_all(&selection, target);
        let mut settled = settled_of(&seen);
        print(&introduction(&seen, target, most))?;
        loop {
            for (name, found) in &selection {
                let was_ordered = waves.tried(name) == Some(&Tried::Ordered) && !settled.contains(name);
                if was_ordered || seen.get(name) == Some(&Progress::UnderWay) {
                    let reported = reported.entry(name.clone()).or_default();
                    reported.see(name, Until::Settled(target), &found.cluster, found.record.as_ref())?;
                }
                if seen.get(name) == Some(&Progress::There) && settled.insert(name.clone()) {
                    print(&format!("{} of {} settled\n", settled_of(&seen).len(), selection.len()))?;
                }
            }
            for name in waves.observe(&seen) {
                print(&format!("{name}  went back: no other one begins after it\n"))?;
            }
            while let Some(name) = waves.next(&seen).filter(|_| !self.is_late()) {
                let tried = self.give(name).await?.err().unwrap_or(Tried::Ordered);
                if matches!(tried, Tried::Failed(_)) {
                    print("no other one begins after that; those under way are waited for\n")?;
                }
                waves.note(name, tried);
            }
            if waves.is_over(&seen) || self.is_late() {
                break;
            }
            let Some(found) = self.look_again().await? else { break };
            selection = found;
            seen = progress_of_all(&selection, target);
        }
        let gone = waves.ordered().filter(|name| !selection.contains_key(*name)).map(gone);
        let left = selection.iter().map(|(name, found)| row(name, &EndState::of(found, target), &waves));
        let rows: Vec<Row> = left.chain(gone).collect();
        self.report(&rows, settled_of(&seen).len(), waves.is_over(&seen))
    }

    /// All at once: what is under way is to be closed, in this or in the other direction.
    async fn each(&self, selection: Selection) -> anyhow::Result<Outcome> {
        let mut rows: BTreeMap<String, Row> = BTreeMap::new();
        let mut waits: BTreeMap<String, (Until, Reported)> = BTreeMap::new();
        let mut done = 0;
        let under_way: Vec<&String> =
            selection.iter().filter(|(_, found)| found.is_under_way()).map(|(name, _)| name).collect();
        let (all, orders) = (selection.len(), under_way.len());
        print(&format!("{orders} of {all} Clusters are under way; the others are left alone\n"))?;
        let mut goes_wrong = false;
        for name in under_way {
            if goes_wrong || self.is_late() {
                let why = if goes_wrong { WENT_WRONG } else { NO_TURN };
                rows.insert(name.clone(), [name, "not ordered", why].map(str::to_owned));
                continue;
            }
            match self.give(name).await? {
                Ok(until) => drop(waits.insert(name.clone(), (until, Reported::default()))),
                Err(tried) => {
                    goes_wrong = matches!(tried, Tried::Failed(_));
                    rows.insert(name.clone(), said(name, &tried));
                }
            }
        }
        let is_waited_for = self.flags.wait.is_some() || self.flags.finish;
        while is_waited_for && !waits.is_empty() && !self.is_late() {
            let Some(selection) = self.look_again().await? else { break };
            for (name, (until, mut reported)) in std::mem::take(&mut waits) {
                let Some(found) = selection.get(&name) else {
                    rows.insert(name.clone(), gone(&name));
                    continue;
                };
                match reported.see(&name, until, &found.cluster, found.record.as_ref())? {
                    Awaited::NotYet => drop(waits.insert(name, (until, reported))),
                    Awaited::Other(other) => {
                        let row = [name.clone(), "changed".to_owned(), written(other)];
                        rows.insert(name, row);
                    }
                    Awaited::Done => {
                        done += 1;
                        print(&format!("{done} of {orders} settled\n"))?;
                        let row = [name.clone(), "settled".to_owned(), String::new()];
                        rows.insert(name, row);
                    }
                }
            }
        }
        let is_over = !is_waited_for || waits.is_empty();
        for (name, (_, reported)) in &waits {
            let (what, why) = if is_waited_for { (WAITING, reported.last()) } else { ("ordered", "") };
            done += usize::from(!is_waited_for);
            rows.insert(name.clone(), [name, what, why].map(str::to_owned));
        }
        self.report(&rows.into_values().collect::<Vec<_>>(), done, is_over)
    }

    /// Prints what became of each. The answer is "yes" if it is done with all of them.
    fn report(&self, rows: &[Row], done: usize, is_over: bool) -> anyhow::Result<Outcome> {
        if !rows.is_empty() {
            print(&format!("\n{}", table::render(["CLUSTER", "RESULT", "WHY"], rows)))?;
        }
        if !is_over {
            let limit = self.limit;
            let finish = if rows.iter().any(|[_, what, why]| what == WAITING && waits_for_people(why)) {
                let selector = shell::word(self.selector);
                format!("; portico migrate --selector {selector} --finish waits for no node and no user")
            } else {
                String::new()
            };
            print(&format!("\nnot done within {limit:?}: the same command goes on from here{finish}\n"))?;
        }
        Ok(if done == rows.len() { Outcome::Done } else { Outcome::No })
    }
}

const WAITING: &str = "waiting";

/// Why a cluster had no order.
const WENT_WRONG: &str = "one before it went wrong";
const NO_TURN: &str = "its turn had not come when time was over";

fn settled_of(seen: &AllProgress) -> BTreeSet<String> {
    let there = seen.iter().filter(|(_, progress)| **progress == Progress::There);
    there.map(|(name, _)| name.clone()).collect()
}

fn introduction(seen: &AllProgress, target: ExposeStrategy, most: usize) -> String {
    let count = |wanted: &[Progress]| seen.values().filter(|progress| wanted.contains(progress)).count();
    let (all, there) = (seen.len(), count(&[Progress::There]));
    let under_way = count(&[Progress::UnderWay, Progress::Elsewhere]);
    let wait = count(&[Progress::Waits, Progress::Unknown]);
    format!(
        "{all} Clusters to {target}, {most} at a time: {there} settled, {under_way} under way, {wait} to \
         begin\n"
    )
}

/// How a cluster stands towards the strategy when the waves are over.
struct EndState {
    progress: Progress,
    /// What its Cluster asks for.
    wanted: Option<ExposeStrategy>,
    /// What the operator says.
    says: String,
}

impl EndState {
    fn of(found: &Found, target: ExposeStrategy) -> Self {
        let wanted = found.now().map(|now| found.wanted(now));
        Self { progress: found.progress(target), wanted, says: describe(found) }
    }
}

/// What became of a cluster in waves.
fn row(name: &str, end: &EndState, waves: &Waves) -> Row {
    let row = |what: &str, why: String| [name.to_owned(), what.to_owned(), why];
    let says = &end.says;
    match (end.progress, waves.tried(name)) {
        (Progress::There, _) => row("settled", String::new()),
        (_, Some(Tried::Ordered)) => row(WAITING, says.clone()),
        (_, Some(Tried::WentBack)) => row("went back", end.wanted.map(written).unwrap_or_default()),
        (_, Some(tried)) => said(name, tried),
        (Progress::Elsewhere, None) => row(WAITING, format!("another change: {says}")),
        (_, None) if waves.is_stopped() => row("not begun", WENT_WRONG.to_owned()),
        (_, None) => row("not begun", NO_TURN.to_owned()),
    }
}

fn gone(name: &str) -> Row {
    [name, "gone", "it is not selected any more"].map(str::to_owned)
}

fn written(other: ExposeStrategy) -> String {
    format!("somebody else has written {other}")
}

/// What became of a cluster, where that says it all.
fn said(name: &str, tried: &Tried) -> Row {
    let (what, why) = match tried {
        Tried::Ordered => (WAITING, ""),
        Tried::Skipped(why) => ("skipped", &**why),
        Tried::Failed(why) => ("failed", &**why),
        Tried::WentBack => ("went back", ""),
    };
    [name, what, why].map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use portico_api::strategy::ExposeStrategy::{NodePort, Tunneling};

    use super::*;

    #[test]
    fn the_result_of_each_says_why() {
        let mut waves = Waves::new(1);
        waves.note("ordered", Tried::Ordered);
        waves.note("skipped", Tried::Skipped("it is paused".to_owned()));
        let row = |name: &str, progress: Progress, wanted: ExposeStrategy, waves: &Waves| {
            let end = EndState { progress, wanted: Some(wanted), says: "Opening      text".to_owned() };
            let [_, what, why] = row(name, &end, waves);
            format!("{what}: {why}")
        };
        assert_eq!(row("ordered", Progress::UnderWay, Tunneling, &waves), "waiting: Opening      text");
        assert_eq!(row("skipped", Progress::Waits, NodePort, &waves), "skipped: it is paused");
        let other = "waiting: another change: Opening      text";
        assert_eq!(row("other", Progress::Elsewhere, NodePort, &waves), other);
        let none = "not begun: its turn had not come when time was over";
        assert_eq!(row("other", Progress::Waits, NodePort, &waves), none);
        waves.note("back", Tried::WentBack);
        let back = "went back: somebody else has written NodePort";
        assert_eq!(row("back", Progress::Waits, NodePort, &waves), back);
        let wrong = "not begun: one before it went wrong";
        assert_eq!(row("other", Progress::Waits, NodePort, &waves), wrong);
        assert_eq!(row("back", Progress::There, Tunneling, &waves), "settled: ");
    }
}
