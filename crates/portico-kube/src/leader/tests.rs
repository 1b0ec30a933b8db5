use std::convert::Infallible;
use std::future::pending;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use http::{Request, Response};
use http_body_util::BodyExt;
use kube::client::Body;
use tower::service_fn;

use super::*;

fn settings(identity: &str) -> LeaseSettings {
    let says = Some(("example.com/of", format!("{identity}'s")));
    LeaseSettings { namespace: "n".into(), name: "l".into(), identity: identity.into(), says }
}

fn candidate(identity: &str) -> Candidate {
    Candidate { identity: identity.into(), seen: None, own: None, other: None }
}

fn lease(holder: &str, version: &str) -> Lease {
    Lease {
        metadata: ObjectMeta { resource_version: Some(version.into()), ..ObjectMeta::default() },
        spec: Some(LeaseSpec {
            holder_identity: (!holder.is_empty()).then(|| holder.into()),
            lease_duration_seconds: Some(15),
            lease_transitions: Some(3),
            // Long past by the clock of its writer, which proves nothing.
            renew_time: Some(MicroTime(Timestamp::UNIX_EPOCH)),
            ..LeaseSpec::default()
        }),
    }
}

#[test]
fn a_free_lease_is_taken_at_once() {
    let now = Instant::now();
    assert_eq!(candidate("a").next_step(None, now), NextStep::Create);
    assert_eq!(candidate("a").next_step(Some(&lease("", "1")), now), NextStep::Take);
    assert_eq!(candidate("a").next_step(Some(&lease("a", "1")), now), NextStep::Renew);
}

#[test]
fn a_lease_is_taken_over_only_after_it_was_seen_unchanged_for_its_whole_duration() {
    let (mut waiting, start) = (candidate("a"), Instant::now());
    assert_eq!(waiting.next_step(Some(&lease("b", "1")), start), NextStep::Wait);
    assert_eq!(waiting.next_step(Some(&lease("b", "1")), start + Duration::from_secs(14)), NextStep::Wait);
    assert_eq!(waiting.next_step(Some(&lease("b", "2")), start + Duration::from_secs(14)), NextStep::Wait);
    assert_eq!(waiting.next_step(Some(&lease("b", "2")), start + Duration::from_secs(28)), NextStep::Wait);
    assert_eq!(waiting.next_step(Some(&lease("b", "2")), start + Duration::from_secs(29)), NextStep::Take);
}

#[test]
fn a_claim_carries_the_version_that_was_read_and_counts_transitions() {
    let settings = settings("a");
    let taken = candidate("a").claim(Some(lease("b", "7")), &settings, Timestamp::UNIX_EPOCH);
    assert_eq!(taken.metadata.resource_version.as_deref(), Some("7"));
    let spec = taken.spec.unwrap();
    assert_eq!((spec.holder_identity.as_deref(), spec.lease_transitions), (Some("a"), Some(4)));
    let renewed = candidate("b").claim(Some(lease("b", "7")), &settings, Timestamp::UNIX_EPOCH);
    assert_eq!(renewed.spec.unwrap().lease_transitions, Some(3));
}

#[test]
fn a_clock_that_is_off_by_an_hour_neither_takes_nor_keeps_a_lease() {
    let hour = jiff::SignedDuration::from_hours(1);
    for written in [Timestamp::now() - hour, Timestamp::now() + hour] {
        let (mut waiting, start) = (candidate("a"), Instant::now());
        let mut held = lease("b", "1");
        held.spec.as_mut().unwrap().renew_time = Some(MicroTime(written));
        assert_eq!(waiting.next_step(Some(&held), start), NextStep::Wait);
        assert_eq!(waiting.next_step(Some(&held), start + DURATION - RETRY), NextStep::Wait);
        assert_eq!(waiting.next_step(Some(&held), start + DURATION), NextStep::Take);
    }
}

#[test]
fn a_holder_stops_before_another_may_begin() {
    assert!(RENEW_DEADLINE + REQUEST_TIMEOUT < DURATION);
}

/// An API server with one Lease, and what is wrong with the way of each replica to it.
#[derive(Default)]
struct Server {
    lease: Mutex<Option<serde_json::Value>>,
    requests: AtomicU64,
}

/// The way of one replica: how long an answer takes, and whether none comes.
#[derive(Default)]
struct Way {
    slow: Mutex<Duration>,
    mute: AtomicBool,
}

impl Way {
    fn client(self: &Arc<Self>, server: &Arc<Server>) -> Client {
        let (way, server) = (Arc::clone(self), Arc::clone(server));
        let service = service_fn(move |request: Request<Body>| {
            let (way, server) = (Arc::clone(&way), Arc::clone(&server));
            async move {
                let slow = *way.slow.lock().unwrap();
                sleep(slow / 2).await;
                if way.mute.load(Ordering::Relaxed) {
                    pending::<()>().await;
                }
                let body = request.into_body().collect().await.unwrap().to_bytes();
                let answer = server.answer(serde_json::from_slice(&body).ok());
                sleep(slow / 2).await;
                Ok::<_, Infallible>(answer)
            }
        });
        Client::new(service, "default")
    }
}

impl Server {
    fn answer(&self, written: Option<serde_json::Value>) -> Response<Body> {
        let mut lease = self.lease.lock().unwrap();
        let version = |lease: &serde_json::Value| lease["metadata"]["resourceVersion"].clone();
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        let (code, answer) = match (written, &*lease) {
            (None, None) => (404, failure(404, "NotFound")),
            (None, Some(lease)) => (200, lease.clone()),
            (Some(written), now) if now.as_ref().is_some_and(|now| version(now) != version(&written)) => {
                (409, failure(409, "Conflict"))
            }
            (Some(mut written), _) => {
                written["metadata"]["resourceVersion"] = number.to_string().into();
                *lease = Some(written.clone());
                (200, written)
            }
        };
        let answer = Response::builder().status(code).body(Body::from(answer.to_string().into_bytes()));
        answer.unwrap()
    }
}

fn failure(code: u16, reason: &str) -> serde_json::Value {
    serde_json::json!({"kind": "Status", "status": "Failure", "code": code, "reason": reason,
        "message": "no"})
}

/// Begins to elect.
fn replica(server: &Arc<Server>, way: &Arc<Way>, identity: &str) -> watch::Receiver<Leads> {
    telling(server, way, identity).0
}

/// Begins to elect. Returns also what is known of the other holder.
fn telling(
    server: &Arc<Server>,
    way: &Arc<Way>,
    identity: &str,
) -> (watch::Receiver<Leads>, watch::Receiver<Option<Holder>>) {
    let ((leading, leads), (other, others)) = (watch::channel(Leads::default()), watch::channel(None));
    tokio::spawn(elect(way.client(server), settings(identity), leading, other));
    (leads, others)
}

/// Whether each of the two leads after so many seconds. Both together never do.
async fn for_seconds(seconds: u64, a: &watch::Receiver<Leads>, b: &watch::Receiver<Leads>) -> (bool, bool) {
    for _ in 0..seconds * 10 {
        sleep(Duration::from_millis(100)).await;
        assert!(!(a.borrow().now() && b.borrow().now()), "two leaders");
    }
    (a.borrow().now(), b.borrow().now())
}

#[tokio::test(start_paused = true)]
async fn a_replica_leads_at_a_slow_api_server_and_no_two_do_when_it_goes_mute_for_one() {
    let (server, ours, theirs) = (Arc::default(), Arc::<Way>::default(), Arc::<Way>::default());
    for way in [&ours, &theirs] {
        *way.slow.lock().unwrap() = Duration::from_millis(2_500);
    }
    let a = replica(&server, &ours, "a");
    sleep(Duration::from_secs(6)).await;
    assert!(a.borrow().now(), "a read and a write take five seconds");
    let b = replica(&server, &theirs, "b");
    for _ in 0..60 {
        assert_eq!(for_seconds(5, &a, &b).await, (true, false));
    }
    ours.mute.store(true, Ordering::Relaxed);
    assert_eq!(for_seconds(30, &a, &b).await, (false, true));
    ours.mute.store(false, Ordering::Relaxed);
    for _ in 0..12 {
        assert_eq!(for_seconds(5, &a, &b).await, (false, true));
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_was_over_and_is_renewed_is_news_for_what_ended_meanwhile() {
    let (server, way) = (Arc::default(), Arc::<Way>::default());
    let mut leads = replica(&server, &way, "a");
    sleep(Duration::from_millis(100)).await;
    assert!(leads.borrow_and_update().now());
    // The attempt that begins two seconds before the deadline takes a read and a write, nearly three seconds.
    way.mute.store(true, Ordering::Relaxed);
    sleep(Duration::from_secs(7)).await;
    way.mute.store(false, Ordering::Relaxed);
    *way.slow.lock().unwrap() = Duration::from_millis(1_400);
    sleep(Duration::from_millis(3_400)).await;
    assert!(!leads.borrow().now(), "it is over by itself");
    timeout(Duration::from_secs(4), leads.changed()).await.unwrap().unwrap();
    assert!(leads.borrow().now());
}

#[tokio::test(start_paused = true)]
async fn a_holder_renews_by_one_request_and_reads_again_once_somebody_else_wrote() {
    let (server, way) = (Arc::<Server>::default(), Arc::<Way>::default());
    let a = replica(&server, &way, "a");
    sleep(Duration::from_secs(1)).await;
    let before = server.requests.load(Ordering::Relaxed);
    sleep(Duration::from_secs(60)).await;
    let requests = server.requests.load(Ordering::Relaxed) - before;
    assert!((29..=31).contains(&requests), "{requests} in a minute");
    // As `kubectl annotate` does.
    server.lease.lock().unwrap().as_mut().unwrap()["metadata"]["resourceVersion"] = "other".into();
    for _ in 0..60 {
        sleep(Duration::from_secs(1)).await;
        assert!(a.borrow().now());
    }
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_waits_knows_the_holder_and_what_that_one_says_until_it_holds_itself() {
    let (server, way) = (Arc::<Server>::default(), Arc::<Way>::default());
    let (a, of_a) = telling(&server, &way, "a");
    sleep(Duration::from_secs(1)).await;
    let (b, of_b) = telling(&server, &way, "b");
    assert_eq!(for_seconds(5, &a, &b).await, (true, false));
    let holder = Holder { identity: "a".into(), says: Some("a's".into()) };
    assert_eq!((of_a.borrow().clone(), of_b.borrow().clone()), (None, Some(holder)));
    drop(a);
    sleep(Duration::from_secs(5)).await;
    assert!(b.borrow().now() && of_b.borrow().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_replica_has_a_lease_only_while_it_may_hold_it_and_takes_one_of_a_dead_holder_at_once() {
    let (server, way) = (Arc::<Server>::default(), Arc::<Way>::default());
    let (allow, may) = watch::channel(Leads::default());
    let (leading, mut leads) = watch::channel(Leads::default());
    let other = watch::Sender::new(None);
    tokio::spawn(elect_while(way.client(&server), settings("a"), Some(may), leading, other));
    sleep(Duration::from_secs(5)).await;
    assert!(server.lease.lock().unwrap().is_none() && !leads.borrow().now());
    *server.lease.lock().unwrap() = Some(serde_json::to_value(lease("dead", "1")).unwrap());
    sleep(Duration::from_secs(20)).await;
    let hour = Duration::from_secs(3_600);
    allow.send_replace(Leads { until: Some(Instant::now() + hour) });
    timeout(Duration::from_secs(1), leads.wait_for(|leads| leads.now())).await.unwrap().unwrap();
    way.mute.store(true, Ordering::Relaxed);
    sleep(Duration::from_secs(3)).await;
    allow.send_replace(Leads::default());
    timeout(Duration::from_millis(1), leads.wait_for(|leads| !leads.now())).await.unwrap().unwrap();
    way.mute.store(false, Ordering::Relaxed);
    sleep(Duration::from_secs(15)).await;
    let holder = server.lease.lock().unwrap().as_ref().unwrap()["spec"]["holderIdentity"].clone();
    assert!(holder.is_null(), "{holder}");
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_did_not_renew_in_time_writes_nothing_before_it_hears_of_it() {
    let leads = watch::Sender::new(Leads { until: Some(Instant::now() + RENEW_DEADLINE) });
    let mut writes = 0;
    let pass = async {
        // As a process that is stopped between two writes.
        for pause in [1, 60, 1] {
            sleep(Duration::from_secs(pause)).await;
            writes += 1;
        }
    };
    assert_eq!(while_leading(leads.subscribe(), pass).await, None);
    assert_eq!(writes, 1);
}
