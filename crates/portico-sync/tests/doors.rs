//! Services with two doors, in the pipeline of a gateway: every route of either is there, and no other.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::collections::BTreeSet;

use portico_api::annotations::{EXPOSE, EXPOSE_NAMESPACED, ExposeKeys};
use portico_api::change::Change;
use portico_api::cluster::Cluster;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::seed::Seed;
use portico_api::service::Service;
use portico_api::strategy::ExposeStrategy;
use portico_expose::doors::{Door, both};
use portico_expose::inputs::{Inputs, Known, LoadBalancers, Scope};
use portico_expose::persisted::PersistedState;
use portico_expose::plan::{Plan, plan};
use portico_expose::planner::{Mode, Settings as PlannerSettings};
use portico_expose::resolve;
use portico_expose::services::EXPOSED;
use portico_routes::index::Settings as IndexSettings;
use portico_routes::rows::{RouteRow, RouteState};
use portico_source::Object;
use portico_sync::Pipeline;
use serde_json::{Value, json};

fn cluster(annotations: &Value, mla: bool) -> Cluster {
    let spec = json!({"mla": {"monitoringEnabled": mla}});
    let cluster = json!({"metadata": {"name": "a", "annotations": annotations}, "spec": spec});
    serde_json::from_value(cluster).unwrap()
}

/// The plan of `cluster` with the door by `strategy` alone. Services of the API server have the NodePorts
/// 31000, 31001 and 31002.
fn by(strategy: ExposeStrategy, cluster: &Cluster, load_balancers: LoadBalancers) -> Plan {
    let cluster = Door::of(cluster, strategy).alone(cluster);
    let seed = json!({"metadata": {"name": "north"}, "spec": {"mla": {"userClusterMLAEnabled": true}}});
    let seed: Seed = serde_json::from_value(seed).unwrap();
    let domain = json!({"spec": {"ingress": {"domain": "kkp.example.com"}}});
    let configuration: KubermaticConfiguration = serde_json::from_value(domain).unwrap();
    let decision = resolve::strategy(&cluster, &seed, Some(&configuration));
    let node_ports = |service: &str, _: &str| Some(31_000 + index(service));
    let scope = Scope { cluster: &cluster, decision, seed: &seed, configuration: Some(&configuration) };
    let known = Known::default();
    plan(&Inputs { scope, node_ports: &node_ports, known: &known, load_balancers, sni_port: 6_443 })
}

fn index(service: &str) -> u16 {
    EXPOSED.iter().position(|&name| name == service).unwrap().try_into().unwrap()
}

/// What a gateway that follows both annotations makes of `services`, with one endpoint behind each.
fn rows(services: &[Service]) -> Vec<RouteRow> {
    let settings = IndexSettings {
        expose_annotations: ExposeKeys::from_iter([EXPOSE, EXPOSE_NAMESPACED]),
        ..IndexSettings::default()
    };
    let planner = PlannerSettings::new(Mode::Observe);
    let mut pipeline = Pipeline::new(settings, planner, PersistedState::default(), 0);
    let exposed = services.iter().filter(|service| EXPOSED.contains(&&*service.metadata.name));
    let slices = exposed.map(|service| {
        let port = &service.spec.ports[0];
        let address = format!("10.1.0.{}", 1 + index(&service.metadata.name));
        let slice = json!({
            "metadata": {"name": service.metadata.name, "namespace": service.metadata.namespace,
                "labels": {"kubernetes.io/service-name": service.metadata.name}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [address], "conditions": {"ready": true}}],
            "ports": [{"name": port.name, "port": 6_443}],
        });
        Object::EndpointSlice(serde_json::from_value(slice).unwrap())
    });
    let objects = services.iter().cloned().map(|service| Object::Service(service.into())).chain(slices);
    pipeline.apply(objects.map(Change::Apply), true);
    pipeline.commit();
    assert_eq!(pipeline.problems(), BTreeSet::new());
    pipeline.rows().collect()
}

/// Each route, with where it leads.
fn routes(services: &[Service]) -> BTreeSet<String> {
    let route = |row: RouteRow| {
        assert_eq!(row.state, RouteState::Ready, "{}", row.key);
        format!("{} -> {} {:?}", row.key, row.backend, row.endpoints)
    };
    rows(services).into_iter().map(route).collect()
}

#[test]
fn both_doors_lead_where_each_leads_alone() {
    let hosted = json!({"portico.k8c.io/layout": "compact"});
    for (annotations, mla) in [(&hosted, false), (&hosted, true), (&json!({}), true)] {
        let cluster = cluster(annotations, mla);
        for load_balancers in [LoadBalancers::CloudAndGateway, LoadBalancers::Gateway] {
            let plans = ExposeStrategy::ALL.map(|strategy| by(strategy, &cluster, load_balancers));
            for first in &plans {
                for second in &plans {
                    let pair = format!("{} and {}", first.decision.strategy, second.decision.strategy);
                    let together = routes(&both(first, second).services);
                    let union = &routes(&first.services) | &routes(&second.services);
                    assert_eq!(together, union, "{pair}");
                    assert_eq!(together.len(), number_of_routes([first, second]), "{pair}");
                }
            }
        }
    }
}

/// Each port, host and authority that one of the plans has.
fn number_of_routes(plans: [&Plan; 2]) -> usize {
    let keys = plans.into_iter().flat_map(|plan| &plan.entries).flat_map(|entry| {
        let port = entry.node_port.map(|port| port.to_string());
        let host = entry.host.as_ref().map(ToString::to_string);
        let authority = entry.authority.as_ref().map(ToString::to_string);
        [port, host, authority].into_iter().flatten()
    });
    keys.collect::<BTreeSet<_>>().len()
}
