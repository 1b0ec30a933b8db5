use serde_json::json;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use super::*;
use crate::testing::{FakeApi, plan};
use crate::{Operator, OperatorError, Settings, WorkStatus};

/// Far beyond anything that happens when all is well; passes in no time on a paused clock.
const NEVER: Duration = Duration::from_secs(300);

/// The controllers beside an API server in memory.
struct World {
    api: FakeApi,
    status: StatusHandle,
    task: JoinHandle<Result<(), OperatorError>>,
}

impl World {
    fn start(api: &FakeApi) -> Self {
        let settings = Settings { exposed_clusters: true, ..Settings::new(plan(), "this") };
        let front = Operator::front(api.client(), settings);
        let status = front.status();
        let task = tokio::spawn(front.run(std::future::pending()));
        Self { api: api.clone(), status, task }
    }

    fn report(&self) -> ExposedClustersStatus {
        self.status.get().exposed_clusters
    }

    fn work(&self) -> WorkStatus {
        self.status.get().controllers[CONTROLLER].clone()
    }

    fn spec(&self, name: &str) -> Value {
        let all = self.api.all_of("exposedclusters");
        let found = all.into_iter().find(|object| object["metadata"]["name"] == name);
        found.map(|object| object["spec"].clone()).unwrap_or_default()
    }

    /// Waits until `holds`.
    async fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let give_up = Instant::now() + NEVER;
        while !holds(self) {
            assert!(Instant::now() < give_up, "{what}: {:?}", self.status.get());
            sleep(Duration::from_millis(10)).await;
        }
    }
}

fn cluster(name: &str, spec: Value) -> Value {
    json!({"apiVersion": "kubermatic.k8c.io/v1", "kind": "Cluster",
        "metadata": {"name": name, "uid": format!("uid-of-{name}"), "labels": {"project-id": "p"}},
        "spec": spec,
        "status": {"address": {"adminToken": "s3cret", "port": 30_001}}})
}

fn allowing(range: &str) -> Value {
    json!({"exposeStrategy": "LoadBalancer", "cloud": {"dc": "lab-1"},
        "apiServerAllowedIPRanges": {"cidrBlocks": [range]}})
}

fn seed(name: &str, datacenter: &str) -> Value {
    json!({"metadata": {"namespace": "kubermatic", "name": name},
        "spec": {"datacenters": {datacenter: {}}}})
}

/// A seed with these Clusters.
fn api(clusters: &[&str]) -> FakeApi {
    let api = FakeApi::default();
    api.put_seed(seed("north", "lab-1"));
    api.put_of(
        "kubermaticconfigurations",
        json!({"metadata": {"namespace": "kubermatic", "name": "kkp"},
            "spec": {"ingress": {"domain": "example.com"}}}),
    );
    api.install("exposedclusters");
    api.install("clusters");
    for name in clusters {
        api.put_of("clusters", cluster(name, allowing("203.0.113.0/24")));
    }
    api
}

#[tokio::test(start_paused = true)]
async fn each_cluster_has_an_exposed_cluster_of_its_own_without_secrets() {
    let world = World::start(&api(&["a", "b"]));
    world.until("two", |world| world.report().written == 2).await;
    assert_eq!(world.spec("a")["allowedIPRanges"], json!(["203.0.113.0/24"]));
    assert_eq!(world.spec("a")["address"]["port"], 30_001);
    for object in world.api.all_of("exposedclusters") {
        assert!(!object.to_string().contains("s3cret"), "{object}");
        let (owner, name) = (&object["metadata"]["ownerReferences"][0], &object["metadata"]["name"]);
        assert_eq!((&owner["kind"], &owner["name"]), (&json!("Cluster"), name));
        assert_eq!(owner["uid"], format!("uid-of-{}", name.as_str().unwrap()));
        assert_eq!(object["metadata"]["labels"], json!({"project-id": "p"}));
    }
    let writes = world.api.writes();
    sleep(NEVER).await;
    assert_eq!(
        (world.api.writes(), world.work().writes["ExposedCluster"]),
        (writes, 2),
        "nothing is written at rest"
    );
}

#[tokio::test(start_paused = true)]
async fn a_change_of_the_cluster_is_written_and_what_somebody_deleted_comes_back() {
    let world = World::start(&api(&["a"]));
    world.until("the first", |world| world.report().written == 1).await;
    world.api.put_of("clusters", cluster("a", allowing("198.51.100.0/24")));
    let ranges = |world: &World| world.spec("a")["allowedIPRanges"].clone();
    world.until("the new list", |world| ranges(world) == json!(["198.51.100.0/24"])).await;
    let mut open = allowing("");
    open.as_object_mut().unwrap().remove("apiServerAllowedIPRanges");
    world.api.put_of("clusters", cluster("a", open));
    world.until("no list", |world| ranges(world).is_null()).await;
    world.api.delete_of("exposedclusters", "a");
    world.until("a new one", |world| !world.spec("a").is_null()).await;
    // A Cluster made anew under the same name owns it.
    let mut anew = cluster("a", allowing("198.51.100.0/24"));
    anew["metadata"]["uid"] = "another".into();
    world.api.put_of("clusters", anew);
    world
        .until("the new owner", |world| {
            let object = &world.api.all_of("exposedclusters")[0];
            object["metadata"]["ownerReferences"][0]["uid"] == "another"
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn a_cluster_that_cannot_be_read_is_told_of_and_keeps_what_it_has_of_its_last_reading() {
    let api = api(&["a"]);
    let misfit = |name| {
        let mut cluster = cluster(name, allowing("203.0.113.0/24"));
        cluster["spec"]["auditLogging"] = "yes".into();
        cluster
    };
    api.put_of("clusters", misfit("never-read"));
    let world = World::start(&api);
    world.until("the first", |world| world.report().written == 1 && world.report().refused == 1).await;
    world.api.put_of("clusters", misfit("a"));
    world.until("both", |world| world.report().refused == 2).await;
    for (name, trouble) in world.report().troubles {
        assert!(trouble.contains(&format!("Cluster {name}: spec.auditLogging cannot be read")), "{trouble}");
    }
    world.api.delete_of("exposedclusters", "a");
    world.until("a new one", |world| !world.spec("a").is_null()).await;
    assert!(world.spec("never-read").is_null());
}

#[tokio::test(start_paused = true)]
async fn a_process_that_is_killed_between_two_writes_leaves_the_rest_to_the_next() {
    let api = api(&["a", "b", "c", "d", "e"]);
    api.refuse_writes_after(2);
    let first = World::start(&api);
    first.until("two of five", |world| world.report().written == 2 && world.report().failed == 3).await;
    first.task.abort();
    assert!(first.task.await.is_err_and(|ended| ended.is_cancelled()));
    api.refuse_writes_after(100);
    let before = api.writes();
    let second = World::start(&api);
    second.until("all five", |world| world.report().written == 5).await;
    assert_eq!(api.writes() - before, 3, "what was written is not written again");
}

#[tokio::test(start_paused = true)]
async fn a_refused_write_is_reported_and_tried_again_until_it_is_accepted() {
    let api = api(&["a"]);
    api.refuse_writes_after(0);
    let world = World::start(&api);
    world.until("the Event", |world| world.api.reasons() == ["WriteRefused"]).await;
    sleep(NEVER).await;
    let report = world.report();
    assert!(report.failed == 1 && report.troubles["a"].contains("403"), "{report:?}");
    let errors = world.work().errors;
    assert!((2..15).contains(&errors["WriteRefused"]), "{errors:?}");
    assert_eq!(world.api.reasons(), ["WriteRefused"], "said once");
    world.api.refuse_writes_after(100);
    world.until("the write", |world| world.report().written == 1).await;
    assert_eq!(world.api.reasons(), ["WriteRefused", "ExposedClusterWritten"]);
}

#[tokio::test(start_paused = true)]
async fn a_cluster_that_must_not_be_used_keeps_what_was_written_before() {
    let world = World::start(&api(&["a"]));
    world.until("the first", |world| world.report().written == 1).await;
    world.api.put_of("clusters", cluster("a", allowing("nonsense")));
    world.until("the Event", |world| world.api.reasons() == ["ClusterNotUsable"]).await;
    assert_eq!(world.spec("a")["allowedIPRanges"], json!(["203.0.113.0/24"]));
    assert_eq!((world.report().refused, world.report().written), (1, 0));
    world.api.put_of("clusters", cluster("a", allowing("198.51.100.0/24")));
    world.until("the next", |world| world.report().written == 1).await;
}

#[tokio::test(start_paused = true)]
async fn the_record_of_a_migration_stays_until_the_operator_has_settled_it() {
    let api = api(&["migrates", "waits", "alone", "anew"]);
    let condition = json!({"status": "True", "reason": "Exposed"});
    let mut waits = cluster("waits", allowing("203.0.113.0/24"));
    waits["status"]["conditions"] = json!({EXPOSED: condition});
    api.put_of("clusters", waits);
    let record = |name: &str, strategy: &str, uid: &str| {
        json!({"metadata": {"name": name, "ownerReferences": [{"kind": "Cluster", "name": name, "uid": uid}]},
            "spec": {"exposeStrategy": strategy, "seed": "north"}})
    };
    let migrating = |uid: &str, name: &str| {
        let mut migrating = record(name, "LoadBalancer", uid);
        migrating["spec"]["migration"] = json!({"state": "Quieting", "since": "2026-01-01T00:00:00Z",
            "second": {"exposeStrategy": "NodePort"}});
        migrating
    };
    api.put_of("exposedclusters", migrating("uid-of-migrates", "migrates"));
    // Its operator waits with the migration.
    api.put_of("exposedclusters", record("waits", "NodePort", "uid-of-waits"));
    // There never was an operator.
    api.put_of("exposedclusters", record("alone", "NodePort", "uid-of-alone"));
    // The record of an earlier Cluster of the same name.
    api.put_of("exposedclusters", migrating("uid-of-another", "anew"));
    let world = World::start(&api);
    world.until("all four", |world| (world.report().written, world.report().refused) == (2, 2)).await;
    sleep(NEVER).await;
    assert_eq!(world.api.writes(), 2);
    assert_eq!(world.spec("migrates"), migrating("", "")["spec"]);
    assert_eq!(world.spec("waits")["exposeStrategy"], "NodePort");
    assert_eq!(world.spec("alone")["exposeStrategy"], "LoadBalancer");
    assert_eq!(world.spec("anew")["migration"], Value::Null);
    assert_eq!(world.api.reasons(), ["MigrationRecorded"; 2]);
    assert!(world.report().troubles["waits"].contains("portico operator"), "{:?}", world.report());
    world.api.put_of("exposedclusters", record("migrates", "LoadBalancer", "uid-of-migrates"));
    world.until("the settled one", |world| world.report().written == 3).await;
    assert_eq!(world.spec("migrates")["allowedIPRanges"], json!(["203.0.113.0/24"]));
}

#[test]
fn the_report_has_each_cluster_as_it_is_now() {
    let (mut report, text) = (ExposedClustersStatus::default(), String::from);
    let states = [State::Written, State::Refused(NOT_USABLE, text("r")), State::Failed(1, text("f"))];
    let counts = |report: &ExposedClustersStatus| {
        [report.written, report.refused, report.failed, report.troubles.len()]
    };
    update(&mut report, "other", None, Some(&State::Failed(1, text("other"))));
    let mut before = None;
    for (now, expected) in states.iter().zip([[1, 0, 1, 1], [0, 1, 1, 2], [0, 0, 2, 2]]) {
        update(&mut report, "a", before, Some(now));
        assert_eq!(counts(&report), expected, "{now:?}");
        before = Some(now);
    }
    assert_eq!(report.troubles["a"], "f");
    update(&mut report, "a", before, None);
    assert_eq!((counts(&report), &*report.troubles["other"]), ([0, 0, 1, 1], "other"));
}

#[tokio::test(start_paused = true)]
async fn nothing_is_written_while_a_seed_or_the_configuration_is_not_known() {
    let api = FakeApi::default();
    api.install("exposedclusters");
    api.put_of("clusters", cluster("a", allowing("203.0.113.0/24")));
    api.put_seed(seed("north", "lab-2"));
    let mut unreadable = seed("south", "lab-1");
    unreadable["spec"]["datacenters"] = "nonsense".into();
    api.put_seed(unreadable);
    let world = World::start(&api);
    sleep(NEVER).await;
    assert_eq!(world.api.writes(), 0, "the configuration is not known");
    world.api.put_of("kubermaticconfigurations", json!({"metadata": {"namespace": "k", "name": "kkp"}}));
    sleep(NEVER).await;
    assert_eq!(world.api.writes(), 0, "the Seed of the Cluster cannot be read, and the other one is not its");
    let why = world.status.get().watches["Seed"].unreadable.clone().unwrap();
    assert!(why.contains("south") && why.ends_with("correct it"), "{why}");
    world.api.put_seed(seed("south", "lab-1"));
    world.until("the first", |world| world.report().written == 1).await;
    assert_eq!(world.spec("a")["seed"], "south");
    assert_eq!(world.status.get().watches["Seed"].unreadable, None);
}

#[tokio::test(start_paused = true)]
async fn a_kind_that_is_installed_later_is_written_then() {
    let api = FakeApi::default();
    let world = World::start(&api);
    world.until("leadership", |world| world.status.get().leader).await;
    sleep(NEVER).await;
    assert!(world.status.get().watches.values().all(|watch| watch.error.is_none()));
    for (plural, object) in [
        ("seeds", seed("north", "lab-1")),
        ("kubermaticconfigurations", json!({"metadata": {"namespace": "k", "name": "kkp"}})),
        ("clusters", cluster("a", allowing("203.0.113.0/24"))),
    ] {
        world.api.put_of(plural, object);
    }
    world.api.install("exposedclusters");
    world.until("the first", |world| world.report().written == 1).await;
}
