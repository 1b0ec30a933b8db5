use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::pending;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::StreamBody;
use hyper::body::Frame;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tower::service_fn;

use super::*;
use crate::page::MAX_BYTES;

/// What the API server does with a request.
enum Answer {
    Json(u16, Value),
    /// Lines of a watch, which then ends.
    Ends(Vec<Value>),
    /// Lines of a watch, which then stays silent.
    Silent(Vec<Value>),
    /// Accepts the request, and nothing else.
    Mute,
}

use Answer::{Ends, Json, Mute, Silent as Hangs};

/// An API server that follows a script, and is mute once it has ended. Returns the requests made too.
fn api(script: Vec<Answer>) -> (Api<ConfigMap>, Arc<Mutex<Vec<String>>>) {
    let script = Arc::new(Mutex::new(VecDeque::from(script)));
    let requests = Arc::<Mutex<Vec<String>>>::default();
    let seen = requests.clone();
    let service = service_fn(move |request: Request<Body>| {
        seen.lock().unwrap().push(request.uri().query().unwrap_or_default().to_owned());
        let answer = script.lock().unwrap().pop_front().unwrap_or(Mute);
        async move {
            let (status, lines, ends) = match answer {
                Json(status, body) => (status, vec![body], true),
                Ends(lines) => (200, lines, true),
                Hangs(lines) => (200, lines, false),
                Mute => pending().await,
            };
            let lines = lines.into_iter().map(|line| format!("{line}\n"));
            let frames = stream::iter(lines.map(|line| Ok(Frame::data(Bytes::from(line)))));
            let rest = if ends { stream::empty().boxed() } else { stream::pending().boxed() };
            let body: BoxStream<'_, Result<Frame<Bytes>, Infallible>> = frames.chain(rest).boxed();
            Ok::<_, Infallible>(Response::builder().status(status).body(StreamBody::new(body)).unwrap())
        }
    });
    (Api::all(Client::new(service, "default")), requests)
}

fn config_map(name: &str, version: &str) -> Value {
    json!({"metadata": {"name": name, "resourceVersion": version}})
}

fn list(version: &str, names: &[&str]) -> Answer {
    let items: Vec<_> = names.iter().map(|name| config_map(name, "1")).collect();
    Json(200, json!({"metadata": {"resourceVersion": version}, "items": items}))
}

fn added(name: &str, version: &str) -> Value {
    json!({"type": "ADDED", "object": config_map(name, version)})
}

fn status(code: u16) -> Value {
    json!({"kind": "Status", "status": "Failure", "code": code, "reason": "X", "message": "no"})
}

/// What the watch reports, as text, with the seconds since the start, until `count` signs were seen.
async fn said(api: Api<ConfigMap>, count: usize) -> Vec<String> {
    let begin = Instant::now();
    let signs = progress(api, None).take(count).map(|sign| {
        let text = match sign {
            Ok(Progress::Alive) => "alive".to_owned(),
            Ok(Progress::Event(Event::Init)) => "init".to_owned(),
            Ok(Progress::Event(Event::InitDone)) => "done".to_owned(),
            Ok(Progress::Event(Event::InitApply(object) | Event::Apply(object))) => object.name_any(),
            Ok(Progress::Event(Event::Delete(object))) => format!("no {}", object.name_any()),
            Err(error) => crate::error::describe(&error),
        };
        format!("{} {text}", begin.elapsed().as_secs())
    });
    signs.collect().await
}

#[tokio::test(start_paused = true)]
async fn a_list_that_is_accepted_and_never_answered_is_given_up_and_asked_again() {
    let (api, _) = api(vec![Mute, list("5", &["a"])]);
    let said = said(api, 6).await;
    assert!(said[1].starts_with("60 ") && said[1].contains("sent no answer within 60s"), "{said:?}");
    assert!(said[2].ends_with(" init") && said[4].ends_with(" a") && said[5].ends_with(" done"), "{said:?}");
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_is_accepted_and_never_answered_is_given_up_and_what_it_missed_arrives() {
    let (api, requests) = api(vec![list("5", &[]), Mute, Hangs(vec![added("late", "6")])]);
    let said = said(api, 6).await;
    assert!(said[3].starts_with("30 ") && said[3].contains("sent no answer within 30s"), "{said:?}");
    assert!(said[5].ends_with(" late"), "{said:?}");
    assert!(requests.lock().unwrap()[2].contains("resourceVersion=5"));
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_falls_silent_is_lost_after_its_time() {
    let (api, requests) = api(vec![list("5", &[]), Hangs(vec![added("a", "6")]), Hangs(vec![])]);
    let said = said(api, 6).await;
    assert!(said[5].starts_with("70 ") && said[5].contains("sent nothing for 70s"), "{said:?}");
    assert!(requests.lock().unwrap()[1].contains("timeoutSeconds=60"));
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_ends_at_once_is_tried_with_longer_and_longer_pauses() {
    let mut script = vec![list("5", &[])];
    for _ in 0..3 {
        script.extend([Ends(vec![]), Ends(vec![]), Ends(vec![]), list("5", &[])]);
    }
    let (api, requests) = api(script);
    let begin = Instant::now();
    let mut signs = std::pin::pin!(progress(api, None));
    let mut failures = 0;
    while failures < 8 {
        failures += usize::from(signs.next().await.unwrap().is_err());
    }
    // 1 + 2 + 4 + 8 + 16 + 30 + 30 s, less a quarter.
    assert!(begin.elapsed() >= Duration::from_secs(68), "{:?}", begin.elapsed());
    assert!(requests.lock().unwrap().len() <= 12);
}

#[tokio::test(start_paused = true)]
async fn what_is_gone_is_listed_anew_whether_an_event_or_a_status_says_so() {
    for gone in [Json(410, status(410)), Ends(vec![json!({"type": "ERROR", "object": status(410)})])] {
        let (api, _) = api(vec![list("5", &["a"]), gone, list("9", &["b"])]);
        let mut said = said(api, 9).await;
        said.retain(|line| !line.ends_with("alive"));
        let failed = said.iter().position(|line| line.contains(": no")).unwrap();
        let anew: Vec<_> = said[failed + 1..].iter().map(|line| &line[2..]).collect();
        assert_eq!(anew[..2], ["init", "b"], "{said:?}");
    }
}

/// As after etcd was restored: the API server waits for a version that will not come.
#[tokio::test(start_paused = true)]
async fn a_version_that_is_refused_again_and_again_is_given_up() {
    let refused = || Json(500, status(500));
    let (api, requests) = api(vec![
        list("900", &["a", "b"]),
        refused(),
        refused(),
        refused(),
        list("7", &["a"]),
        list("7", &["a"]),
    ]);
    let said = said(api, 16).await;
    assert!(said.last().unwrap().ends_with(" done"), "{said:?}");
    let requests = requests.lock().unwrap();
    assert!(requests[1..4].iter().all(|query| query.contains("resourceVersion=900")), "{requests:?}");
    assert!(!requests[4].contains("watch"), "{requests:?}");
}

#[tokio::test(start_paused = true)]
async fn a_list_that_lost_most_objects_or_is_older_is_believed_only_when_repeated() {
    let many: Vec<String> = (0..20).map(|number| format!("o{number}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let gone = || Json(410, status(410));
    for (lie, doubt) in
        [(list("60", &["a"]), "a list has 1 objects where 20"), (list("7", &many), "older than 50")]
    {
        // The lie is followed by the truth.
        let (api, _) = api(vec![list("50", &many), gone(), lie, list("60", &many), Hangs(vec![])]);
        let said = said(api, 71).await;
        let doubted = said.iter().position(|line| line.contains(doubt)).expect("doubted");
        let done = said.iter().filter(|line| line.ends_with(" done")).count();
        assert_eq!(done, 2, "{said:?}");
        assert!(!said[..doubted].iter().skip(26).any(|line| line.ends_with(" done")), "{said:?}");
    }
    // What two lists agree on is true.
    let truth = || list("7", &["a"]);
    let (api, _) = api(vec![list("50", &many), gone(), truth(), truth(), Hangs(vec![])]);
    assert!(said(api, 32).await.iter().filter(|line| line.ends_with(" done")).count() == 2);
}

#[tokio::test(start_paused = true)]
async fn one_object_is_watched_by_its_name() {
    let (api, requests) = api(vec![list("5", &["a"]), Hangs(vec![])]);
    let signs: Vec<_> = progress(api, Some("a")).take(5).collect().await;
    assert!(signs.iter().all(Result::is_ok));
    assert!(requests.lock().unwrap().iter().all(|query| query.contains("metadata.name%3Da")));
}

/// Few objects with megabytes each, as the author of one namespace can make them.
#[tokio::test(start_paused = true)]
async fn a_page_that_takes_too_much_memory_is_asked_for_in_smaller_ones() {
    let huge = |token: &str| {
        let fill = "x".repeat(MAX_BYTES);
        Json(200, json!({"metadata": {"continue": token, "fill": fill}, "items": []}))
    };
    let part = |token: &str, name: &str| {
        Json(200, json!({"metadata": {"continue": token}, "items": [config_map(name, "1")]}))
    };
    let (api, requests) =
        api(vec![huge("1"), part("1", "a"), huge("2"), part("2", "b"), list("5", &["c"]), Hangs(vec![])]);
    let mut said = said(api, 11).await;
    said.retain(|line| !line.ends_with("alive"));
    assert_eq!(said, ["0 init", "0 a", "0 b", "0 c", "0 done"]);
    let asked: Vec<_> = requests
        .lock()
        .unwrap()
        .iter()
        .take(5)
        .map(|query| {
            ["limit=500", "limit=250", "limit=125"].into_iter().find(|limit| query.contains(limit)).unwrap()
        })
        .collect();
    assert_eq!(asked, ["limit=500", "limit=250", "limit=250", "limit=125", "limit=125"]);
}
