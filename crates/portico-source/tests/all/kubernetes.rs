//! The Kubernetes source beside a real API server: first sync in pages, absence, kinds that come and go.
//!
//! Needs what the lab needs (`cargo run -p portico-lab -- install`), and root.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::{FutureExt, StreamExt, stream};
use k8s_openapi::api::discovery::v1 as discovery;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use portico_api::change::Change;
use portico_kube::client;
use portico_lab::{ApiServer, Kubectl, kkp};
use portico_source::kubernetes::{ClustersFrom, WatchState};
use portico_source::{KubernetesSettings, KubernetesSource, Step};

/// Far beyond anything that happens when all is well, a silently lost connection included.
const NEVER: Duration = Duration::from_secs(180);

/// More than two pages of a listing.
const SLICES: usize = 1_200;

/// An API server, and a client of it.
pub(crate) struct World {
    pub(crate) client: Client,
    pub(crate) api: ApiServer,
}

impl World {
    pub(crate) async fn start(name: &str) -> Self {
        let api = ApiServer::start(name).unwrap();
        Self { client: client(Some(&api.admin().unwrap())).await.unwrap(), api }
    }

    pub(crate) fn kubectl(&self) -> &Kubectl {
        self.api.kubectl()
    }

    pub(crate) fn services(&self, names: &[&str]) {
        for name in names {
            let service = format!(
                "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: default}}\n\
                 spec: {{ports: [{{port: 443}}]}}\n"
            );
            self.kubectl().apply(&service).unwrap();
        }
    }

    async fn slices(&self, count: usize) {
        let api: Api<discovery::EndpointSlice> = Api::namespaced(self.client.clone(), "default");
        stream::iter(0..count)
            .for_each_concurrent(8, |index| {
                let slice = discovery::EndpointSlice {
                    address_type: "IPv4".into(),
                    metadata: ObjectMeta { name: Some(format!("slice-{index}")), ..ObjectMeta::default() },
                    ..discovery::EndpointSlice::default()
                };
                let api = api.clone();
                async move {
                    api.create(&PostParams::default(), &slice).await.unwrap();
                }
            })
            .await;
    }
}

/// A source and everything that it has delivered.
pub(crate) struct Observer {
    pub(crate) source: KubernetesSource,
    pub(crate) objects: BTreeSet<String>,
    pub(crate) deleted: Vec<String>,
    pub(crate) last: Step,
}

impl Observer {
    pub(crate) fn of(source: KubernetesSource) -> Self {
        Self { source, objects: BTreeSet::new(), deleted: Vec::new(), last: Step::default() }
    }

    pub(crate) async fn step(&mut self) {
        let step = tokio::time::timeout(NEVER, self.source.next()).await;
        self.take(step.unwrap_or_else(|_| panic!("no further step; {:?}", self.source.status()())).unwrap());
    }

    /// Takes steps until it is so. A source whose steps nobody takes waits, and does nothing else.
    pub(crate) async fn until_it_is_so(&mut self, what: &str, is_so: impl Fn() -> bool) {
        let deadline = tokio::time::Instant::now() + NEVER;
        while !is_so() {
            assert!(tokio::time::Instant::now() < deadline, "never: {what}; {:?}", self.source.status()());
            let look = Duration::from_millis(20);
            if let Ok(step) = tokio::time::timeout(look, self.source.next()).await {
                self.take(step.unwrap());
            }
        }
    }

    fn take(&mut self, step: Step) {
        self.last = step;
        for change in &self.last.changes {
            match change {
                Change::Apply(object) => {
                    self.objects.insert(object.reference().to_string());
                }
                Change::Delete(object) => {
                    self.objects.remove(&object.to_string());
                    self.deleted.push(object.to_string());
                }
            }
        }
    }

    pub(crate) async fn until(&mut self, object: &str, present: bool) {
        while !self.last.complete || self.objects.contains(object) != present {
            self.step().await;
        }
    }
}

#[tokio::test]
async fn a_source_keeps_up_with_its_api_server_through_absence_and_new_kinds() {
    let world = World::start("kubernetes-source").await;
    world.services(&["a", "b"]);
    world.slices(SLICES).await;

    let settings =
        KubernetesSettings { discovery_period: Duration::from_millis(200), ..KubernetesSettings::default() };
    let source = KubernetesSource::start(world.client.clone(), settings);
    let mut observer = Observer::of(source);

    // The first complete step ends the initial sync, which took three pages.
    while !observer.last.complete {
        observer.step().await;
    }
    let slices =
        observer.objects.iter().filter(|name| name.starts_with("EndpointSlice default/slice-")).count();
    assert_eq!(slices, SLICES);
    assert!(observer.objects.contains("Service default/a") && observer.objects.contains("Service default/b"));
    assert!(observer.source.status()().complete);

    world.services(&["c"]);
    observer.until("Service default/c", true).await;

    // While the API server is away, everything stays; what was deleted meanwhile is gone afterwards.
    world.api.host().unplug().unwrap();
    world.kubectl().run(&["delete", "service", "b"]).unwrap();
    world.services(&["d"]);
    assert!(observer.source.next().now_or_never().is_none(), "nothing arrives through an unplugged link");
    assert!(observer.deleted.is_empty());
    world.api.host().plug().unwrap();
    observer.until("Service default/b", false).await;
    observer.until("Service default/d", true).await;
    assert_eq!(observer.deleted, ["Service default/b"]);

    // KKP is installed later. That its kind vanishes takes nothing away: only a complete list does.
    assert_eq!(observer.source.status()().clusters_from, ClustersFrom::Services);
    assert!(!observer.source.status()().watches.contains_key(&portico_api::meta::Kind::Cluster));
    world.kubectl().apply_json(&kkp::clusters()).unwrap();
    world.kubectl().wait_served("clusters.kubermatic.k8c.io").unwrap();
    world
        .kubectl()
        .apply(
            "apiVersion: kubermatic.k8c.io/v1\nkind: Cluster\nmetadata: {name: late}\n\
             spec: {exposeStrategy: Tunneling}\n",
        )
        .unwrap();
    observer.until("Cluster late", true).await;
    assert!(observer.last.policies_required);
    world.kubectl().run(&["delete", "crd", "clusters.kubermatic.k8c.io"]).unwrap();
    let status = observer.source.status();
    let is_gone = || status().watches[&portico_api::meta::Kind::Cluster].state == WatchState::Failing;
    observer.until_it_is_so("the kind is gone", is_gone).await;
    assert!(observer.objects.contains("Cluster late") && status().watches.len() == 3);
    world.kubectl().apply_json(&kkp::clusters()).unwrap();
    observer.until("Cluster late", false).await;
    assert_eq!(observer.deleted, ["Service default/b", "Cluster late"]);
    assert!(observer.last.problems.is_empty());
}
