//! Objects of a Kubernetes API, listed once: for verbs that only report.
//!
//! Reads only. Kinds of KKP and of Portico may be missing. A kind that may not be read is an error: the
//! report would lack its objects without a word. Everything together has one time limit. So an API server
//! that accepts requests and answers none is an error, too.

use std::time::Duration;

use kube::api::ListParams;
use kube::{Api, Client};
use portico_api::cluster::Cluster;
use portico_api::configuration::KubermaticConfiguration;
use portico_api::endpoint_slice::EndpointSlice;
use portico_api::exposed_cluster::ExposedCluster;
use portico_api::meta::Kind;
use portico_api::seed::Seed;
use portico_api::service::Service;
use portico_kube::error::{describe, no_api};
use portico_kube::page::{OBJECTS, TooLarge, page};
use thiserror::Error;
use tokio::time::{Instant, timeout_at};

use crate::load::Loaded;
use crate::reflector::invalid;
use crate::served::{Served, ServedKind};

/// HTTP status of a path that is not served.
const NOT_FOUND: u16 = 404;

/// Why not everything could be listed.
#[derive(Debug, Error)]
pub enum ListError {
    /// The API server refused, or could not be reached.
    #[error("listing {kind}s: {reason}")]
    Failed {
        /// What was listed.
        kind: Kind,
        /// The error text.
        reason: String,
    },
    /// The API server did not answer in time.
    #[error(
        "listing {kind}s: no answer within {limit:?} for everything; see whether the API server answers \
         `kubectl get --raw /readyz`, or give --timeout more"
    )]
    TooSlow {
        /// What was listed.
        kind: Kind,
        /// The time limit for all kinds.
        limit: Duration,
    },
}

/// Lists all kinds that Portico reads from a seed within `limit`; with a `namespace`, only the Services and
/// EndpointSlices there. An object that does not fit its kind is among the problems.
pub async fn list_objects(
    client: &Client,
    namespace: Option<&str>,
    limit: Duration,
) -> Result<Loaded, ListError> {
    let mut listing = Listing { client, limit, deadline: Instant::now() + limit, loaded: Loaded::default() };
    listing.kind::<KubermaticConfiguration>(None).await?;
    listing.kind::<Seed>(None).await?;
    listing.kind::<Cluster>(None).await?;
    listing.kind::<ExposedCluster>(None).await?;
    listing.kind::<Service>(namespace).await?;
    listing.kind::<EndpointSlice>(namespace).await?;
    Ok(listing.loaded)
}

struct Listing<'a> {
    client: &'a Client,
    limit: Duration,
    deadline: Instant,
    loaded: Loaded,
}

impl Listing<'_> {
    async fn kind<K: ServedKind>(&mut self, namespace: Option<&str>) -> Result<(), ListError> {
        let kind = K::KIND;
        let api: Api<Served<K>> = match namespace {
            Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, &()),
            None => Api::all_with(self.client.clone(), &()),
        };
        let failed = |reason| Err(ListError::Failed { kind, reason });
        let (mut objects, mut params) = (OBJECTS, ListParams::default());
        loop {
            params.limit = Some(objects);
            let answer = timeout_at(self.deadline, page(&api, &params)).await;
            let page = match answer.map_err(|_| ListError::TooSlow { kind, limit: self.limit })? {
                Ok(Some(page)) => page,
                Ok(None) if objects == 1 => return failed(TooLarge.to_string()),
                Ok(None) => {
                    objects /= 2;
                    continue;
                }
                Err(kube::Error::Api(status)) if status.code == NOT_FOUND => {
                    return match kind {
                        // These come with Kubernetes itself.
                        Kind::Service | Kind::EndpointSlice => failed(no_api("it serves no such kind")),
                        _ => Ok(()),
                    };
                }
                Err(error) => return failed(describe(&error)),
            };
            for served in page.items {
                self.add(served);
            }
            params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
            if params.continue_token.is_none() {
                return Ok(());
            }
        }
    }

    fn add<K>(&mut self, served: Served<K>) {
        match served.object {
            Ok(object) => self.loaded.objects.push(object),
            Err(error) => self.loaded.problems.push(invalid(served.reference, &error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use portico_lab::faulty_api::{Answer, FaultyApi, nowhere};

    use super::*;

    #[tokio::test]
    async fn a_server_without_any_kind_of_kubernetes_is_no_seed_without_clusters() {
        let server = FaultyApi::default();
        server.rules(|rules| rules.answers = vec![("/", Answer::Status(404), usize::MAX)]);
        let listed = list_objects(&server.client(&nowhere()), None, Duration::from_secs(60)).await;
        let error = listed.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains("what answered is no Kubernetes API"), "{error:?}");
    }
}
