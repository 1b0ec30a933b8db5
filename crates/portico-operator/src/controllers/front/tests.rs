use http::StatusCode;
use portico_api::meta::ObjectKey;
use portico_lab::log_lines::LogLines;
use serde_json::Value;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tracing::Level;

use super::*;
use crate::testing::{FakeApi, Fate, plan};
use crate::{ExposureSettings, Operator, OperatorError};

/// Far beyond anything that happens when all is well; passes in no time on a paused clock.
const NEVER: Duration = Duration::from_secs(300);

/// A controller beside an API server in memory.
struct World {
    api: FakeApi,
    status: StatusHandle,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), OperatorError>>,
}

impl World {
    /// A controller that leads at once.
    fn start(api: &FakeApi) -> Self {
        let plan = FrontSettings { listener_limit: Some(3), ..plan() };
        let settings =
            Settings { cluster_service: Some("front-loadbalancer".into()), ..Settings::new(plan, "this") };
        Self::with(api, settings)
    }

    fn with(api: &FakeApi, settings: Settings) -> Self {
        Self::run(api, Operator::front(api.client(), settings))
    }

    /// The controller in an operator, which makes no gateway.
    fn of_operator(api: &FakeApi) -> Self {
        let exposure = ExposureSettings {
            front: plan().front,
            sni_port: 6_443,
            node_ips: Vec::new(),
            name_servers: Vec::new(),
        };
        Self::run(api, Operator::new(api.client(), Settings::new(plan(), "this"), exposure))
    }

    fn run(api: &FakeApi, front: Operator) -> Self {
        let (stop, stopped) = oneshot::channel();
        let status = front.status();
        let task = tokio::spawn(front.run(async move { drop(stopped.await) }));
        Self { api: api.clone(), status, stop, task }
    }

    /// Names of the ports of the front Service.
    fn ports(&self) -> Vec<String> {
        self.ports_of("portico/portico")
    }

    fn ports_of(&self, name: &str) -> Vec<String> {
        let front = self.api.service(name);
        let ports = front["spec"]["ports"].as_array().unwrap();
        ports.iter().map(|port| port["name"].as_str().unwrap().to_owned()).collect()
    }

    /// The status of the front Service of the seed.
    fn front(&self) -> ServiceStatus {
        let front = ObjectKey::new("portico", "portico");
        self.status.get().services.get(&front).cloned().unwrap_or_default()
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

fn front() -> Value {
    json!({"apiVersion": "v1", "kind": "Service",
        "metadata": {"namespace": "portico", "name": "portico", "uid": "front"},
        "spec": {"type": "LoadBalancer", "clusterIP": "10.0.0.1",
            "ports": [{"name": "placeholder", "port": 1, "protocol": "TCP"}]}})
}

fn exposed(name: &str, node_port: u16) -> Value {
    json!({"apiVersion": "v1", "kind": "Service",
        "metadata": {"namespace": "c", "name": name,
            "annotations": {"nodeport-proxy.k8s.io/expose": "NodePort"}},
        "spec": {"type": "NodePort", "clusterIP": "10.0.0.2",
            "ports": [{"name": "https", "port": 443, "protocol": "TCP", "nodePort": node_port}]}})
}

/// The front Service after KKP's updater has written it.
fn foreign_front() -> Value {
    let mut foreign = front();
    foreign["metadata"]["managedFields"] = json!([{"manager": "lb-updater", "operation": "Update",
        "time": "2026-01-01T00:00:00Z", "fieldsV1": {"f:spec": {"f:ports": {}}}}]);
    foreign["spec"]["ports"] = json!([{"name": "sni-listener", "port": 6_443, "protocol": "TCP"}]);
    foreign
}

/// The load balancer of a cluster, as KKP makes it.
fn cluster_front(cluster: &str) -> Value {
    let mut service = front();
    service["metadata"] =
        json!({"namespace": format!("cluster-{cluster}"), "name": "front-loadbalancer", "uid": cluster});
    service
}

/// A Service of a cluster with the strategy LoadBalancer.
fn namespaced(cluster: &str, name: &str, node_port: u16) -> Value {
    let mut service = exposed(name, node_port);
    service["metadata"]["namespace"] = format!("cluster-{cluster}").into();
    service["metadata"]["annotations"] = json!({"nodeport-proxy.k8s.io/expose-namespaced": "true"});
    service
}

fn seed(name: &str, ranges: Value) -> Value {
    json!({"apiVersion": "kubermatic.k8c.io/v1", "kind": "Seed",
        "metadata": {"namespace": "kubermatic", "name": name},
        "spec": {"nodeportProxy": {"ipFamilyPolicy": "PreferDualStack",
            "envoy": {"loadBalancerService": {"annotations": {"of/seed": "1"}, "sourceRanges": ranges}}}}})
}

fn api(services: impl IntoIterator<Item = Value>) -> FakeApi {
    let api = FakeApi::default();
    services.into_iter().for_each(|service| api.put(service));
    api
}

#[tokio::test(start_paused = true)]
async fn a_burst_of_services_is_one_write_and_rest_is_none() {
    let world = World::start(&api([front(), exposed("a", 30_001)]));
    world.until("the first write", |world| world.ports() == ["c-a-30001", "sni-listener"]).await;
    assert_eq!(world.api.writes(), 1);
    for tenth in 0..5 {
        world.api.put(exposed("b", 30_002 + tenth));
        sleep(Duration::from_millis(100)).await;
    }
    world.until("the second write", |world| world.ports().contains(&"c-b-30006".into())).await;
    assert_eq!(world.api.writes(), 2);
    world.api.put(exposed("b", 30_006));
    sleep(NEVER).await;
    assert_eq!((world.api.writes(), world.front().failed_writes), (2, 0));
}

#[tokio::test(start_paused = true)]
async fn a_burst_without_end_is_written_all_the_same() {
    let world = World::start(&api([front()]));
    world.until("the first write", |world| world.ports() == ["sni-listener"]).await;
    for half_second in 0..60 {
        world.api.put(exposed("a", 30_000 + half_second));
        sleep(Duration::from_millis(500)).await;
    }
    assert!((3..=5).contains(&world.api.writes()), "{}", world.api.writes());
}

#[tokio::test(start_paused = true)]
async fn nothing_is_written_before_every_service_is_known() {
    let api = api([front(), exposed("a", 30_001)]);
    api.refuse(Some(StatusCode::FORBIDDEN));
    let world = World::start(&api);
    world.until("leadership", |world| world.status.get().leader).await;
    sleep(Duration::from_secs(30)).await;
    assert_eq!((world.api.writes(), world.status.get().complete), (0, false));
    world.api.refuse(None);
    world.until("the first write", |world| world.ports() == ["c-a-30001", "sni-listener"]).await;
    assert!(world.status.get().complete && world.front().found);
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_does_not_lead_plans_and_writes_nothing_until_the_leader_is_gone() {
    let api = api([front(), exposed("a", 30_001)]);
    api.give_lease_to("other");
    let world = World::start(&api);
    world.until("a plan", |world| world.front().used == 2).await;
    assert!(world.status.get().complete && !world.status.get().leader);
    assert_eq!(world.api.writes(), 0);
    world.until("the first write", |world| world.api.writes() == 1).await;
    assert_eq!(world.api.holder().as_deref(), Some("this"));
}

#[tokio::test(start_paused = true)]
async fn a_service_that_vanished_while_the_watch_was_broken_is_unpublished() {
    let world = World::start(&api([front(), exposed("a", 30_001)]));
    world.until("the first write", |world| world.ports().len() == 2).await;
    world.api.delete_unseen("c/a");
    world.until("the second write", |world| world.ports() == ["sni-listener"]).await;
}

#[tokio::test(start_paused = true)]
async fn a_service_that_cannot_be_read_keeps_its_port_through_a_relist() {
    let world = World::start(&api([front(), exposed("a", 30_001), exposed("b", 30_002)]));
    world.until("the first write", |world| world.ports().len() == 3).await;
    let mut unreadable = exposed("a", 30_001);
    unreadable["spec"]["ports"] = "nonsense".into();
    world.api.put(unreadable);
    world.api.delete_unseen("c/b");
    world.until("the second write", |world| !world.ports().contains(&"c-b-30002".into())).await;
    assert_eq!(world.ports(), ["c-a-30001", "sni-listener"]);
}

#[tokio::test(start_paused = true)]
async fn a_service_that_loses_the_annotation_is_unpublished_and_others_do_not_count() {
    let world = World::start(&api([front(), exposed("a", 30_001)]));
    world.until("the first write", |world| world.ports().len() == 2).await;
    let mut plain = exposed("a", 30_001);
    plain["metadata"]["annotations"] = json!({});
    world.api.put(plain.clone());
    world.until("the second write", |world| world.ports() == ["sni-listener"]).await;
    plain["metadata"]["labels"] = json!({"touched": "yes"});
    world.api.put(plain);
    world.api.delete("c/a");
    sleep(NEVER).await;
    assert_eq!(world.api.writes(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_front_service_that_goes_and_comes_back_is_noticed() {
    let world = World::start(&api([exposed("a", 30_001)]));
    world.until("the initial sync", |world| world.status.get().complete).await;
    assert!(!world.front().found);
    world.api.put(front());
    world.until("the first write", |world| world.ports().len() == 2).await;
    assert!(world.front().found);
    world.api.delete("portico/portico");
    world.until("its absence", |world| !world.front().found).await;
    world.api.put(front());
    world.until("the second write", |world| world.ports().len() == 2).await;
}

#[tokio::test(start_paused = true)]
async fn beside_an_operator_the_front_service_is_missed_while_a_seed_asks_for_a_gateway_alone() {
    let (warnings, _collected) = LogLines::collect(|metadata| *metadata.level() == Level::WARN);
    let missing = "the front Service does not exist";
    let times = || warnings.messages().iter().filter(|line| line.contains(missing)).count();
    let api = FakeApi::default();
    for plural in ["seeds", "namespaces", "endpointslices", "exposedclusters", "deployments"] {
        api.install(plural);
    }
    let world = World::of_operator(&api);
    let shown = |world: &World| world.status.get().services.values().map(|front| front.found).next();
    world.until("the initial sync", |world| world.status.get().complete).await;
    sleep(NEVER).await;
    assert_eq!((shown(&world), times()), (None, 0), "there is no Seed yet");
    let asks = |disable: bool| {
        let mut seed = seed("north", json!([]));
        seed["spec"]["nodeportProxy"]["disable"] = disable.into();
        world.api.put_seed(seed);
    };
    asks(true);
    sleep(NEVER).await;
    assert_eq!((shown(&world), times()), (None, 0), "the Seed has no gateway");
    asks(false);
    world.until("its absence", |world| shown(world) == Some(false)).await;
    sleep(NEVER).await;
    assert_eq!(times(), 1);
    asks(true);
    world.until("that it need not be", |world| shown(world).is_none()).await;
    world.api.put(front());
    world.until("the first write", |world| world.ports() == ["sni-listener"]).await;
    assert_eq!(shown(&world), Some(true));
    world.api.delete("portico/portico");
    world.until("its end", |world| shown(world).is_none()).await;
    assert_eq!(times(), 1);
}

#[tokio::test(start_paused = true)]
async fn ports_written_by_another_client_are_put_back() {
    let world = World::start(&api([front(), exposed("a", 30_001)]));
    world.until("the first write", |world| world.ports().len() == 2).await;
    world.api.put(front());
    world.until("the second write", |world| world.ports().len() == 2).await;
    assert_eq!(world.front().failed_writes, 0);
}

#[tokio::test(start_paused = true)]
async fn a_writer_that_keeps_reverting_is_yielded_to_and_a_try_that_stands_ends_that() {
    let world = World::start(&api([front(), exposed("a", 30_001)]));
    world.until("the first write", |world| world.ports().len() == 2).await;
    // The other client writes its own ports as soon as it sees others, as KKP's updater does.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(120) {
        if world.ports().len() == 2 {
            world.api.put(foreign_front());
        }
        sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(world.api.writes(), 3, "one write, and two that put back what was reverted");
    let status = world.front();
    assert_eq!(status.yielded_to.as_deref(), Some("\"lb-updater\""));
    assert_eq!((status.used, status.published, status.unpublished()), (2, 1, 1));
    assert_eq!(world.api.reasons(), ["ForeignWriter"]);
    assert_eq!(world.api.condition("portico/portico"), ("False".into(), "ForeignWriter".into()));

    sleep(Duration::from_secs(450)).await;
    // Still there: one more write, and it is yielded to again.
    world.until("the next try", |world| world.api.writes() == 4).await;
    world.api.put(foreign_front());
    sleep(Duration::from_secs(120)).await;
    assert_eq!((world.api.writes(), world.ports().len()), (4, 1));

    sleep(Duration::from_secs(450)).await;
    // Gone: the next write stands, and that is the end of it.
    world.until("the last try", |world| world.api.writes() == 5).await;
    sleep(Duration::from_secs(450)).await;
    world.until("the Event", |world| world.api.reasons() == ["ForeignWriter", "ForeignWriterGone"]).await;
    assert_eq!(world.front().yielded_to, None);
    assert_eq!(world.api.condition("portico/portico").0, "True");
    assert_eq!((world.api.writes(), world.ports().len()), (5, 2));
}

#[test]
fn the_try_after_yielding_is_made_after_the_quiet_period_however_often_it_is_looked_at() {
    let settings = Settings::new(plan(), "this");
    let (mut state, start) = (State::new(&settings), Instant::now());
    while state.contention.may_write(start) {
        state.contention.reverted("lb-updater".into(), start);
    }
    let due = state.contention.due().unwrap();
    for now in [due, due + settings.quiet / 2] {
        let wait = Action::requeue(due + settings.quiet - now);
        assert_eq!(state.start(now), Some(wait));
    }
    assert_eq!(state.start(due + settings.quiet), None);
}

#[tokio::test(start_paused = true)]
async fn a_write_whose_answer_is_lost_is_nobodys_revert() {
    let world = World::start(&api([front()]));
    world.until("the first write", |world| world.ports() == ["sni-listener"]).await;
    world.api.decide([Fate::Unknown]);
    world.api.put(exposed("a", 30_001));
    world.until("the lost answer", |world| world.front().error.is_some()).await;
    world.until("the next pass", |world| world.front().error.is_none()).await;
    assert_eq!((world.ports().len(), world.front().reverts), (2, 0));
}

#[tokio::test(start_paused = true)]
async fn settings_that_were_written_before_a_conflict_are_nobodys_revert() {
    let api = api([front()]);
    api.put_seed(seed("north", json!(["203.0.113.0/24"])));
    let world = World::start(&api);
    world.until("the first writes", |world| world.ports() == ["sni-listener"]).await;
    world.api.decide([Fate::Done, Fate::Conflict]);
    world.api.put_seed(seed("north", json!(["198.51.100.0/24"])));
    world.api.put(exposed("a", 30_001));
    world.until("the next writes", |world| world.ports().len() == 2).await;
    let ranges = &world.api.service("portico/portico")["spec"]["loadBalancerSourceRanges"];
    assert_eq!((ranges, world.front().reverts), (&json!(["198.51.100.0/24"]), 0));
}

#[tokio::test(start_paused = true)]
async fn ports_that_a_webhook_changes_are_not_written_for_ever() {
    let api = api([front(), exposed("a", 30_001)]);
    api.alter(|service| {
        let ports = service["spec"]["ports"].as_array_mut().unwrap();
        ports.retain(|port| port["port"] != 30_001);
    });
    let world = World::start(&api);
    world.until("yielding", |world| world.front().yielded_to.is_some()).await;
    sleep(NEVER).await;
    assert_eq!(world.api.writes(), 3);
    assert_eq!(world.front().unpublished(), 1);
    assert!(world.front().yielded_to.unwrap().contains("webhook"));
}

#[tokio::test(start_paused = true)]
async fn a_new_leader_writes_no_event_of_what_the_condition_of_the_service_says() {
    let api = api([front(), exposed("a", 30_001), exposed("b", 30_002), exposed("c", 30_003)]);
    for _ in 0..2 {
        let World { stop, task, .. } = World::start(&api);
        sleep(NEVER).await;
        assert_eq!(api.condition("portico/portico"), ("False".into(), "ListenerLimitReached".into()));
        drop(stop);
        task.await.unwrap().unwrap();
    }
    assert_eq!(api.reasons(), ["ListenerLimitReached"]);
}

#[tokio::test(start_paused = true)]
async fn with_nothing_to_publish_the_ports_stay_and_that_is_said() {
    let world = World::start(&api([front(), cluster_front("a"), namespaced("a", "api", 30_001)]));
    let name = "cluster-a/front-loadbalancer";
    world.until("the first write", |world| world.ports_of(name) == ["cluster-a-api-30001"]).await;
    let writes = world.api.writes();
    world.api.delete("cluster-a/api");
    world.until("the Event", |world| world.api.reasons() == ["NothingToPublish"]).await;
    assert_eq!(world.ports_of(name), ["cluster-a-api-30001"]);
    assert_eq!(world.api.condition(name), ("False".into(), "NothingToPublish".into()));
    world.api.put(namespaced("a", "api", 30_002));
    world.until("the next write", |world| world.ports_of(name) == ["cluster-a-api-30002"]).await;
    world.until("the Event", |world| world.api.reasons().last().unwrap() == "PortsToPublish").await;
    assert_eq!(world.api.writes(), writes + 1);
}

#[tokio::test(start_paused = true)]
async fn the_load_balancer_of_a_cluster_has_the_ports_of_that_cluster() {
    let objects = [
        front(),
        cluster_front("a"),
        cluster_front("b"),
        namespaced("a", "api", 30_001),
        namespaced("b", "api", 30_002),
        exposed("c", 30_003),
    ];
    let world = World::start(&api(objects));
    let a = |world: &World| world.ports_of("cluster-a/front-loadbalancer");
    let b = |world: &World| world.ports_of("cluster-b/front-loadbalancer");
    world.until("a's", |world| a(world) == ["cluster-a-api-30001"]).await;
    world.until("b's", |world| b(world) == ["cluster-b-api-30002"]).await;
    world.until("the seed's", |world| world.ports() == ["c-c-30003", "sni-listener"]).await;
    let writes = world.api.writes();
    world.api.put(namespaced("a", "konnectivity", 30_004));
    world.until("a's", |world| a(world).len() == 2).await;
    world.api.delete("cluster-b/front-loadbalancer");
    world.until("b's end", |world| world.status.get().services.len() == 2).await;
    sleep(NEVER).await;
    assert_eq!(world.api.writes(), writes + 1);

    // A Service of the same name in a namespace that is no cluster's is not Portico's, nor is one of another
    // type.
    let mut stranger = cluster_front("x");
    stranger["metadata"]["namespace"] = "x".into();
    world.api.put(stranger);
    let mut plain = cluster_front("b");
    plain["spec"]["type"] = "ClusterIP".into();
    world.api.put(plain);
    sleep(NEVER).await;
    assert_eq!((world.api.writes(), world.status.get().services.len()), (writes + 1, 2));
}

#[tokio::test(start_paused = true)]
async fn the_settings_of_the_seed_are_on_the_front_service_before_its_ports() {
    let api = api([front()]);
    api.put_seed(seed("north", json!(["203.0.113.0/24"])));
    let world = World::start(&api);
    world.until("the ports", |world| world.ports() == ["sni-listener"]).await;
    let spec = |world: &World| world.api.service("portico/portico")["spec"].clone();
    assert_eq!(spec(&world)["loadBalancerSourceRanges"], json!(["203.0.113.0/24"]));
    assert_eq!(spec(&world)["ipFamilyPolicy"], "PreferDualStack");
    assert_eq!(world.api.service("portico/portico")["metadata"]["annotations"], json!({"of/seed": "1"}));
    let writes = world.api.writes();
    sleep(NEVER).await;
    assert_eq!(world.api.writes(), writes);

    world.api.put_seed(seed("north", json!(["198.51.100.0/24"])));
    let ranges = |world: &World| spec(world)["loadBalancerSourceRanges"].clone();
    world.until("the new range", |world| ranges(world) == json!(["198.51.100.0/24"])).await;

    // A range that cannot be read, and a second Seed. Everything stays, and that is reported.
    world.api.put_seed(seed("north", json!(["nonsense"])));
    world.until("the Event", |world| world.api.reasons() == ["SettingsNotCarried"]).await;
    world.api.put_seed(seed("south", json!([])));
    world.api.put_seed(seed("north", json!([])));
    sleep(NEVER).await;
    assert!(world.front().troubles["SettingsNotCarried"].contains("--seed"));
    assert_eq!(ranges(&world), json!(["198.51.100.0/24"]));
}

#[tokio::test(start_paused = true)]
async fn a_refused_write_shows_as_not_published() {
    let world = World::start(&api([front()]));
    world.until("the first write", |world| world.ports().len() == 1).await;
    world.until("the condition", |world| world.api.condition("portico/portico").0 == "True").await;
    world.api.refuse_writes(Some(StatusCode::FORBIDDEN));
    world.api.put(exposed("a", 30_001));
    world.until("the Event", |world| world.api.reasons() == ["WriteRefused"]).await;
    assert_eq!(world.api.condition("portico/portico"), ("False".into(), "WriteRefused".into()));
    let status = world.front();
    assert_eq!((status.used, status.published, status.unpublished()), (2, 1, 1));
    assert!(status.error.unwrap().contains("403"));
    sleep(NEVER).await;
    assert_eq!(world.api.reasons(), ["WriteRefused"], "said once");
    assert!(world.front().failed_writes < 15, "{:?}", world.front());
    world.api.refuse_writes(None);
    world.until("the Event", |world| world.api.reasons() == ["WriteRefused", "WriteAccepted"]).await;
    assert_eq!(world.front().unpublished(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_write_that_is_refused_is_tried_again_and_says_why() {
    let world = World::start(&api([front()]));
    world.until("the first write", |world| world.ports().len() == 1).await;
    world.api.put(exposed("a", 30_001));
    // After the watch has the change, and before it is written.
    sleep(DEFAULT_QUIET / 2).await;
    world.api.refuse(Some(StatusCode::FORBIDDEN));
    world.until("a refusal", |world| world.front().error.is_some()).await;
    let error = world.front().error.unwrap();
    assert!(error.contains("403") && error.contains("grant it"), "{error}");
    world.api.refuse(None);
    world.until("the second write", |world| world.ports().len() == 2).await;
    assert!(world.front().error.is_none() && world.front().failed_writes > 0);
}

#[tokio::test(start_paused = true)]
async fn what_waits_is_in_the_status_and_on_the_front_service() {
    let world = World::start(&api([front(), exposed("a", 30_001), exposed("b", 30_002)]));
    world.until("two ports", |world| world.ports().len() == 3).await;
    world.api.put(exposed("c", 30_003));
    world.until("the Event", |world| world.api.reasons() == ["ListenerLimitReached"]).await;
    assert_eq!(world.front().waiting[0].service.to_string(), "c/c");
    world.api.delete("c/a");
    world.until("the Event", |world| world.api.reasons().last().unwrap() == "ListenerLimitLeft").await;
    assert!(world.front().waiting.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_stops_releases_the_lease() {
    let world = World::start(&api([front()]));
    world.until("leadership", |world| world.status.get().leader).await;
    assert_eq!(world.api.holder().as_deref(), Some("this"));
    world.stop.send(()).unwrap();
    let stopping = Instant::now();
    world.task.await.unwrap().unwrap();
    assert_eq!(world.api.holder(), None);
    assert!(stopping.elapsed() < crate::controllers::RELEASE_TIMEOUT);
}
