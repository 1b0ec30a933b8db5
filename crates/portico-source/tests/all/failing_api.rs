//! The Kubernetes source beside a real API server, behind a proxy that goes mute, refuses, denies or lies.
//!
//! Needs what the lab needs (`cargo run -p portico-lab -- install`), and root.

use std::future::pending;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join;
use futures_util::stream::{self, BoxStream};
use futures_util::{StreamExt, TryStreamExt};
use http::{Request, Response};
use http_body_util::{BodyDataStream, StreamBody};
use hyper::body::{Bytes, Frame};
use kube::Client;
use kube::client::Body;
use portico_api::meta::Kind;
use portico_kube::client;
use portico_source::kubernetes::{ClustersFrom, WatchState};
use portico_source::{KubernetesSettings, KubernetesSource};
use tower::service_fn;

use crate::kubernetes::{Observer, World};

/// So many Services that losing them all at once is doubted.
const SERVICES: [&str; 12] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"];

type ResponseBody = StreamBody<BoxStream<'static, Result<Frame<Bytes>, <Body as hyper::body::Body>::Error>>>;

/// What the proxy does with requests.
#[derive(Debug, Clone, Default)]
struct Rules {
    /// Accepts requests and answers none; open watches fall silent, for ever.
    mute: bool,
    /// Requests whose URL has this text get this answer, so many times.
    answers: Vec<(&'static str, Answer, usize)>,
}

#[derive(Debug, Clone, Copy)]
enum Answer {
    Status(u16),
    /// A list without objects, of a version that is yet to come.
    Empty,
}

/// A proxy before an API server.
#[derive(Debug, Clone, Default)]
struct Proxy(Arc<Mutex<Rules>>);

impl Proxy {
    fn rules(&self, change: impl FnOnce(&mut Rules)) {
        change(&mut self.0.lock().unwrap());
    }

    /// A client whose requests pass here on their way to the API server of `direct`.
    fn client(&self, direct: &Client) -> Client {
        let (proxy, direct) = (self.clone(), direct.clone());
        let service = service_fn(move |request: Request<Body>| {
            let (proxy, direct) = (proxy.clone(), direct.clone());
            async move {
                let url = request.uri().to_string();
                if let Some(answer) = proxy.answer(&url).await {
                    return Ok(answer);
                }
                let response = direct.send(request).await?;
                Ok::<_, kube::Error>(response.map(|body| proxy.gated(body)))
            }
        });
        Client::new(service, "default")
    }

    async fn answer(&self, url: &str) -> Option<Response<ResponseBody>> {
        if self.0.lock().unwrap().mute {
            pending::<()>().await;
        }
        let mut rules = self.0.lock().unwrap();
        let (_, answer, left) =
            rules.answers.iter_mut().find(|(text, _, left)| *left > 0 && url.contains(text))?;
        *left -= 1;
        let (status, body) = match answer {
            Answer::Status(code) => {
                let body = format!(
                    r#"{{"kind": "Status", "status": "Failure", "code": {code},
                        "reason": "X", "message": "no"}}"#
                );
                (*code, body)
            }
            Answer::Empty => (200, r#"{"metadata": {"resourceVersion": "999999"}, "items": []}"#.to_owned()),
        };
        let body = stream::once(async { Ok(Frame::data(Bytes::from(body))) }).boxed();
        Some(Response::builder().status(status).body(StreamBody::new(body)).unwrap())
    }

    /// A body that stops while the proxy is mute, and never goes on.
    fn gated(&self, body: Body) -> ResponseBody {
        let proxy = self.clone();
        let frames = BodyDataStream::new(body).then(move |data| {
            let mute = proxy.0.lock().unwrap().mute;
            async move {
                if mute {
                    pending::<()>().await;
                }
                data
            }
        });
        StreamBody::new(frames.map_ok(Frame::data).boxed())
    }
}

fn exposed(name: &str) -> String {
    format!(
        "apiVersion: portico.k8c.io/v1alpha1\nkind: ExposedCluster\nmetadata: {{name: {name}}}\n\
         spec: {{exposeStrategy: NodePort, seed: north, allowedIPRanges: [192.0.2.0/24]}}\n"
    )
}

fn settings() -> KubernetesSettings {
    KubernetesSettings { discovery_period: Duration::from_millis(100), ..KubernetesSettings::default() }
}

fn deployed(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(file);
    std::fs::read_to_string(path).unwrap()
}

#[tokio::test]
async fn an_api_server_that_fails_or_lies_opens_nothing_and_loses_nothing() {
    let world = World::start("failing-api").await;
    world.kubectl.apply(&deployed("crds.yaml")).unwrap();
    world
        .kubectl
        .run(&["wait", "--for=condition=Established", "crd/exposedclusters.portico.k8c.io"])
        .unwrap();
    world.kubectl.run(&["create", "namespace", "cluster-a"]).unwrap();
    world.services(&SERVICES);
    for name in ["a", "b"] {
        world.kubectl.apply(&exposed(name)).unwrap();
    }

    the_schema_refuses_what_would_be_misread(&world);
    with_the_deployed_role_everything_needed_is_read_and_clusters_are_not(&world).await;
    with_rights_for_one_cluster_that_one_is_read(&world).await;
    a_kind_that_is_denied_at_the_start_is_not_believed_to_be_missing(&world).await;
    a_right_that_is_missing_keeps_the_source_waiting(&world).await;
    // Both wait until a watch is renewed, or lost.
    join(a_list_that_lies_once_takes_nothing_away(&world), after_silence_what_was_missed_arrives(&world))
        .await;
}

fn the_schema_refuses_what_would_be_misread(world: &World) {
    for wrong in [
        exposed("wrong").replace("[192.0.2.0/24]", "[]"),
        exposed("wrong").replace("192.0.2.0/24", "192.0.2.0"),
        exposed("wrong").replace("NodePort", "Nodeport"),
        exposed("wrong").replace("NodePort", "Tunneling"),
        exposed("wrong").replace("seed: north", "tunnel: {agentIP: 100.64.30.10}"),
    ] {
        assert!(world.kubectl.apply(&wrong).is_err(), "{wrong}");
    }
}

async fn with_the_deployed_role_everything_needed_is_read_and_clusters_are_not(world: &World) {
    world.kubectl.apply(&deployed("gateway.yaml")).unwrap();
    let user = "system:serviceaccount:portico:portico-gateway";
    let kubeconfig = world.control_plane.access().kubeconfig(user, None).unwrap();
    let source = KubernetesSource::start(client(Some(&kubeconfig)).await.unwrap(), settings());
    let mut gateway = Observer::of(source);
    gateway.until("ExposedCluster a", true).await;
    assert!(gateway.last.policies_required);
    let may =
        world.kubectl.run(&["auth", "can-i", "list", "clusters.kubermatic.k8c.io", &format!("--as={user}")]);
    assert!(!may.is_ok_and(|answer| answer.starts_with("yes")));
}

async fn with_rights_for_one_cluster_that_one_is_read(world: &World) {
    let rights = "apiVersion: rbac.authorization.k8s.io/v1\nkind: Role\n\
        metadata: {name: of-a, namespace: cluster-a}\nrules:\n\
        - {apiGroups: ['', discovery.k8s.io], resources: [services, endpointslices], verbs: [list, watch]}\n\
        ---\napiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRole\nmetadata: {name: of-a}\nrules:\n\
        - apiGroups: [portico.k8c.io]\n  resources: [exposedclusters]\n  resourceNames: [a]\n\
        \x20 verbs: [list, watch]\n";
    world.kubectl.apply(rights).unwrap();
    for binding in ["rolebinding", "clusterrolebinding"] {
        let role = if binding == "rolebinding" { "--role=of-a" } else { "--clusterrole=of-a" };
        world
            .kubectl
            .run(&["create", binding, "of-a", role, "--user=gateway-of-a", "--namespace=cluster-a"])
            .unwrap();
    }
    let kubeconfig = world.control_plane.access().kubeconfig("gateway-of-a", None).unwrap();
    let settings = KubernetesSettings { namespace: Some("cluster-a".into()), ..settings() };
    let source = KubernetesSource::start(client(Some(&kubeconfig)).await.unwrap(), settings);
    let mut gateway = Observer::of(source);
    gateway.until("ExposedCluster a", true).await;
    assert!(gateway.last.policies_required && !gateway.objects.contains("ExposedCluster b"));
}

async fn a_kind_that_is_denied_at_the_start_is_not_believed_to_be_missing(world: &World) {
    let proxy = Proxy::default();
    // One more and it would be believed; both groups are asked for in each discovery.
    let denied = |group| (group, Answer::Status(404), 2);
    proxy.rules(|rules| {
        rules.answers = vec![denied("/apis/portico.k8c.io/v1alpha1"), denied("/apis/kubermatic.k8c.io/v1")];
    });
    let mut gateway = Observer::of(KubernetesSource::start(proxy.client(&world.client), settings()));
    while !gateway.last.complete {
        gateway.step().await;
    }
    assert!(gateway.last.policies_required && gateway.objects.contains("ExposedCluster a"));
    // Later it is not believed at all.
    proxy.rules(|rules| rules.answers = vec![("exposedclusters", Answer::Status(404), usize::MAX)]);
    assert_eq!(gateway.source.status()().clusters_from, ClustersFrom::ExposedClusters);
    assert!(gateway.deleted.is_empty());
}

async fn a_right_that_is_missing_keeps_the_source_waiting(world: &World) {
    let proxy = Proxy::default();
    proxy.rules(|rules| rules.answers = vec![("exposedclusters", Answer::Status(403), usize::MAX)]);
    let mut gateway = Observer::of(KubernetesSource::start(proxy.client(&world.client), settings()));
    let status = gateway.source.status();
    let refused = || {
        let watch = status().watches.get(&Kind::ExposedCluster).cloned();
        watch.and_then(|watch| watch.error).is_some_and(|error| error.contains("grant it"))
    };
    gateway.until_it_is_so("the missing right is named", refused).await;
    assert!(!status().complete);
    proxy.rules(|rules| rules.answers.clear());
    gateway.until("ExposedCluster a", true).await;
    assert!(gateway.last.policies_required && status().complete);
}

async fn a_list_that_lies_once_takes_nothing_away(world: &World) {
    let proxy = Proxy::default();
    let mut gateway = Observer::of(KubernetesSource::start(proxy.client(&world.client), settings()));
    gateway.until("Service default/a", true).await;
    // The next watch of Services is gone, the list after it says that there are none.
    proxy.rules(|rules| {
        rules.answers = vec![
            ("/api/v1/services?&watch", Answer::Status(410), 1),
            ("/api/v1/services?&limit", Answer::Empty, 1),
        ];
    });
    let lied = || proxy.0.lock().unwrap().answers.iter().all(|(_, _, left)| *left == 0);
    gateway.until_it_is_so("the list has lied", lied).await;
    world.services(&["after-the-lie"]);
    gateway.until("Service default/after-the-lie", true).await;
    assert!(gateway.deleted.is_empty(), "{:?}", gateway.deleted);
}

async fn after_silence_what_was_missed_arrives(world: &World) {
    let proxy = Proxy::default();
    let mut gateway = Observer::of(KubernetesSource::start(proxy.client(&world.client), settings()));
    gateway.until("Service default/a", true).await;
    proxy.rules(|rules| rules.mute = true);
    world.services(&["missed"]);
    let status = gateway.source.status();
    let is_silent = || status().watches[&Kind::Service].state == WatchState::Failing;
    gateway.until_it_is_so("the silence is noticed", is_silent).await;
    assert!(gateway.deleted.is_empty() && !gateway.objects.contains("Service default/missed"));
    proxy.rules(|rules| rules.mute = false);
    gateway.until("Service default/missed", true).await;
    assert!(gateway.deleted.is_empty(), "{:?}", gateway.deleted);
}
