//! The seed that `portico why` and `portico status` ask, and how they print the way to a cluster.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use portico_admin::table;
use portico_api::meta::ObjectKey;
use portico_expose::front::SNI_PORT;
use portico_reach::{Chain, Front, Link, SeedSnapshot, State};

use crate::args::{client_of_person, duration, object_key};

// The seed that is asked, and where its gateways are.
#[derive(Debug, Args)]
pub(crate) struct SeedFlags {
    /// How to reach the seed [default: as kubectl does: $KUBECONFIG, ~/.kube/config, or the pod's own]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// The Service of the load balancer in front of the gateways; they are in its namespace
    #[arg(long, value_name = "NS/NAME", default_value = "portico/portico", value_parser = object_key)]
    service: ObjectKey,
    /// Port at which clients find the listener that routes by server name
    #[arg(long, value_name = "PORT", default_value_t = SNI_PORT)]
    sni_port: u16,
    /// How long reading the seed may take, all together
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = duration)]
    timeout: Duration,
}

impl SeedFlags {
    /// Reads the seed.
    pub(crate) async fn read(&self) -> anyhow::Result<SeedSnapshot> {
        let client = client_of_person(self.kubeconfig.as_deref()).await?;
        let front = Front { service: self.service.clone(), sni_port: self.sni_port };
        SeedSnapshot::read(client, front, self.timeout).await
    }
}

/// The chain of a cluster as a table, and what follows from it.
pub(crate) fn text_of(chain: &Chain, cluster: &str) -> String {
    let row = |link: &Link| [link.link.to_owned(), link.state.to_string(), link.evidence.clone()];
    let rows: Vec<[String; 3]> = chain.links.iter().map(row).collect();
    let mut text = table::render(["LINK", "STATE", "FOUND"], &rows);
    let open = chain.links.iter().filter(|link| link.state != State::Holds && !link.remedy.is_empty());
    for link in open {
        text.push_str(&format!("\n{}: {}\n", link.link, link.remedy));
    }
    if chain.broken().is_none() {
        text.push_str(&format!("\ncluster {cluster} can be reached\n"));
    }
    text
}
