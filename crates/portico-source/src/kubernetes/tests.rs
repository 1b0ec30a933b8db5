use portico_lab::faulty_api::nowhere;
use serde_json::json;

use super::*;

/// One that has listed a Service, of no cluster, and reaches nothing.
fn worker() -> Worker {
    let service: Served<Service> =
        serde_json::from_value(json!({"metadata": {"name": "a", "namespace": "n"}})).unwrap();
    let mut worker = Worker::new(nowhere(), KubernetesSettings::default());
    worker.watch::<Service>(None, None);
    for event in [Event::Init, Event::InitApply(service.into()), Event::InitDone] {
        worker.receive(Message::Watch(Kind::Service, event));
    }
    worker
}

/// What is taken after each of these discoveries.
fn taken<const N: usize>(discoveries: [&[Kind]; N]) -> [ClustersFrom; N] {
    let mut worker = worker();
    discoveries.map(|kinds| {
        worker.discovered(Ok(kinds.to_vec()));
        worker.clusters
    })
}

const NOTHING: &[Kind] = &[];
const PART: &[Kind] = &[Kind::Seed, Kind::KubermaticConfiguration];
const KKP: &[Kind] = &KKP_KINDS;
const BOTH: &[Kind] = &[Kind::Cluster, Kind::ExposedCluster];

#[tokio::test]
async fn clusters_are_taken_once_discoveries_in_a_row_find_them_and_no_exposed_clusters() {
    use ClustersFrom::{Auto, Clusters, ExposedClusters, Services};
    assert_eq!(taken([KKP, KKP, KKP, BOTH]), [Auto, Auto, Clusters, Clusters]);
    // KKP's group may be known before the other one.
    assert_eq!(taken([KKP, KKP, BOTH]), [Auto, Auto, ExposedClusters]);
    // Other kinds of KKP tell of no cluster, and for a moment there may be no more.
    assert_eq!(taken([PART, PART, KKP, BOTH]), [Auto, Auto, Auto, ExposedClusters]);
    assert_eq!(taken([PART, PART, PART, BOTH]), [Auto, Auto, Services, ExposedClusters]);
    let installed_late = [NOTHING, NOTHING, NOTHING, KKP, KKP, KKP];
    assert_eq!(taken(installed_late), [Auto, Auto, Services, Services, Services, Clusters]);
}

#[tokio::test]
async fn a_discovery_that_failed_is_no_answer() {
    let mut worker = worker();
    for _ in 0..3 * ABSENCES {
        for found in [Ok(KKP.to_vec()), Ok(KKP.to_vec()), Err("no".to_owned())] {
            worker.discovered(found);
        }
    }
    assert_eq!(worker.clusters, ClustersFrom::Auto);
}

#[tokio::test]
async fn only_the_operator_says_that_a_service_of_a_cluster_without_a_list_is_open() {
    let required = |clusters| {
        let settings = KubernetesSettings { clusters, ..KubernetesSettings::default() };
        let mut worker = Worker { settings, ..worker() };
        worker.take_from(if clusters == ClustersFrom::Auto { ClustersFrom::Clusters } else { clusters });
        worker.step(false).unwrap().policies_required
    };
    let named = [ClustersFrom::ExposedClusters, ClustersFrom::Clusters, ClustersFrom::Services];
    assert_eq!(named.map(required), [true, true, false]);
    assert!(required(ClustersFrom::Auto), "Clusters were not listed yet, or never will be");
}
