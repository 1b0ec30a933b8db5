use http::StatusCode;
use portico_api::meta::ObjectKey;
use serde_json::Value;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::*;
use crate::testing::FakeApi;

fn state() -> (State, Instant) {
    (State::new(Debounce::new(DEFAULT_QUIET, DEFAULT_MAX_WAIT)), Instant::now())
}

fn version(version: &str) -> Option<String> {
    Some(version.to_owned())
}

#[test]
fn a_change_of_the_front_service_is_reconciled_after_a_pause_and_once() {
    let (mut state, start) = state();
    assert_eq!(state.start(version("1"), start), Some(Action::requeue(DEFAULT_QUIET)));
    let later = start + DEFAULT_QUIET / 2;
    assert_eq!(state.start(version("1"), later), Some(Action::requeue(DEFAULT_QUIET / 2)));
    assert_eq!(state.start(version("1"), start + DEFAULT_QUIET), None);
    assert_eq!(state.start(version("1"), start + DEFAULT_QUIET), Some(Action::await_change()));
}

#[test]
fn a_version_that_was_written_over_is_not_planned_from_again() {
    let (mut state, start) = state();
    state.start(version("1"), start);
    state.replaced = version("1");
    state.debounce.changed(start);
    assert_eq!(state.start(version("1"), start + DEFAULT_MAX_WAIT), Some(Action::await_change()));
    assert_eq!(state.start(version("2"), start + DEFAULT_MAX_WAIT), None);
}

#[test]
fn a_burst_that_becomes_due_meanwhile_is_reconciled_at_once() {
    let (mut state, start) = state();
    state.debounce.changed(start);
    assert_eq!(state.next(start + DEFAULT_MAX_WAIT), Action::requeue(Duration::ZERO));
}

/// Far beyond anything that happens when all is well; passes in no time on a paused clock.
const NEVER: Duration = Duration::from_secs(300);

/// A controller beside an API server in memory.
struct World {
    api: FakeApi,
    status: StatusHandle,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), FrontError>>,
}

impl World {
    /// A controller that leads at once.
    fn start(api: &FakeApi) -> Self {
        let plan = FrontSettings {
            front: ObjectKey::new("portico", "portico"),
            sni_port: Some(6_443),
            tunnel_port: None,
            listener_limit: Some(3),
            expose_annotation: portico_api::annotations::EXPOSE.into(),
        };
        let front = Front::new(api.client(), Settings::new(plan, "this"));
        let (stop, stopped) = oneshot::channel();
        let status = front.status();
        let task = tokio::spawn(front.run(async move { drop(stopped.await) }));
        Self { api: api.clone(), status, stop, task }
    }

    /// Names of the ports of the front Service.
    fn ports(&self) -> Vec<String> {
        let front = self.api.service("portico/portico");
        let ports = front["spec"]["ports"].as_array().unwrap();
        ports.iter().map(|port| port["name"].as_str().unwrap().to_owned()).collect()
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
    assert_eq!((world.api.writes(), world.status.get().failed_writes), (2, 0));
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
    assert!(world.status.get().complete && world.status.get().found);
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_does_not_lead_plans_and_writes_nothing_until_the_leader_is_gone() {
    let api = api([front(), exposed("a", 30_001)]);
    api.hold_lease("other");
    let world = World::start(&api);
    world.until("a plan", |world| world.status.get().used == 2).await;
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
    assert!(!world.status.get().found);
    world.api.put(front());
    world.until("the first write", |world| world.ports().len() == 2).await;
    assert!(world.status.get().found);
    world.api.delete("portico/portico");
    world.until("its absence", |world| !world.status.get().found).await;
    world.api.put(front());
    world.until("the second write", |world| world.ports().len() == 2).await;
}

#[tokio::test(start_paused = true)]
async fn ports_written_by_another_client_are_put_back() {
    let world = World::start(&api([front(), exposed("a", 30_001)]));
    world.until("the first write", |world| world.ports().len() == 2).await;
    world.api.put(front());
    world.until("the second write", |world| world.ports().len() == 2).await;
    assert_eq!(world.status.get().failed_writes, 0);
}

#[tokio::test(start_paused = true)]
async fn a_write_that_is_refused_is_tried_again_and_says_why() {
    let world = World::start(&api([front()]));
    world.until("the first write", |world| world.ports().len() == 1).await;
    world.api.put(exposed("a", 30_001));
    // After the watch has the change, and before it is written.
    sleep(DEFAULT_QUIET / 2).await;
    world.api.refuse(Some(StatusCode::FORBIDDEN));
    world.until("a refusal", |world| world.status.get().error.is_some()).await;
    let error = world.status.get().error.unwrap();
    assert!(error.contains("403") && error.contains("grant it"), "{error}");
    world.api.refuse(None);
    world.until("the second write", |world| world.ports().len() == 2).await;
    assert!(world.status.get().error.is_none() && world.status.get().failed_writes > 0);
}

#[tokio::test(start_paused = true)]
async fn what_waits_is_in_the_status_and_on_the_front_service() {
    let world = World::start(&api([front(), exposed("a", 30_001), exposed("b", 30_002)]));
    world.until("two ports", |world| world.ports().len() == 3).await;
    world.api.put(exposed("c", 30_003));
    world.until("the Event", |world| world.api.reasons() == ["ListenerLimitReached"]).await;
    assert_eq!(world.status.get().waiting[0].service.to_string(), "c/c");
    world.api.delete("c/a");
    world.until("the Event", |world| world.api.reasons().last().unwrap() == "ListenerLimitLeft").await;
    assert!(world.status.get().waiting.is_empty());
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
    assert!(stopping.elapsed() < RELEASE_TIMEOUT);
}
