//! The objects inside a hosted cluster beside those of every cluster. `portico_hosting` decides on them.

use portico_api::exposed_cluster::MigrationState;
use portico_expose::user_cluster::{Inside, Konnectivity};
use portico_expose::validate::usable;
use portico_hosting::Reach;
use portico_hosting::join::reach::ways;
use portico_pki::inventory::{CA_CERTIFICATE, Signer};

use super::context::Context;
use super::subject::{Subject, text};
use crate::write::RequestError;

impl Context {
    /// The objects inside a hosted cluster; none for others. What cannot be decided on is left as it is.
    pub(super) async fn hosted(
        &self,
        subject: &Subject,
        konnectivity: &Konnectivity,
    ) -> Result<Inside, RequestError> {
        let cluster = &subject.cluster;
        let Some(settings) = self.settings.hosted.as_ref().filter(|_| cluster.is_hosted()) else {
            return Ok(Inside::default());
        };
        let secret = self.secret(&subject.namespace, Signer::Clients.secret()).await?;
        let client_ca = secret.and_then(|secret| text(&secret, CA_CERTIFICATE));
        let exposed = &subject.exposed;
        let ways = ways(exposed, konnectivity, &self.settings.agents);
        let (url, client_ca) = (&*exposed.spec.address.url, client_ca.as_deref());
        let is_new = subject.state() == Some(MigrationState::Moving);
        let reach = Reach { url, client_ca, ways: &ways, is_new };
        let seeds = self.installation.seeds.seeds();
        let found = self.installation.configurations.one().ok().and_then(|configuration| {
            let scope = usable(cluster, &seeds, configuration.as_ref()).ok()?;
            portico_hosting::inside(&scope, settings, reach).ok()
        });
        Ok(found.unwrap_or_else(|| Inside {
            waiting: vec!["what a hosted cluster has inside: the Cluster cannot be used as it is written"],
            ..Inside::default()
        }))
    }
}
