//! `portico join token CLUSTER`: a bootstrap token, and the command for the machines.

use std::time::Duration;

use anyhow::{Context, anyhow, bail, ensure};
use aws_lc_rs::rand;
use clap::Args;
use jiff::Timestamp;
use portico_hosting::join::machine::KubeletConfig;
use portico_hosting::join::token::Token;
use portico_hosting::join::trust::CaHash;
use portico_join::cluster::KUBELET_CONFIG;
use portico_kube::untrusted_api::Applied;
use portico_reach::admin::enter;

use crate::args::positive_duration;
use crate::outcome::{Outcome, print};
use crate::verb::kubeconfig::AdminFlags;

/// Of twice as many bytes as a token has letters, more than enough are used.
const RANDOM: usize = 64;

// `portico join token`.
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    admin: AdminFlags,
    /// How long machines can join with the token
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = positive_duration)]
    ttl: Duration,
}

/// Makes the token.
pub(super) async fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    let admin = flags.admin.read().await?;
    let hashes = CaHash::all(&admin.authority);
    ensure!(!hashes.is_empty(), "the kubeconfig of the cluster has no authority that machines could pin");
    let inside = enter(&admin).await?;
    let object = inside.get(KUBELET_CONFIG).await.with_context(|| format!("at {}", admin.server))?;
    let object = object.with_context(|| {
        format!(
            "the cluster at {} has no ConfigMap kube-system/kubelet-config: Portico does not host it, or has \
             not made it yet (condition PorticoUserClusterReady of the Cluster). Where another product made \
             the control plane, machines join as that product says",
            admin.server
        )
    })?;
    KubeletConfig::read(&object)?;

    let mut bytes = [0; RANDOM];
    rand::fill(&mut bytes).map_err(|_| anyhow!("the system has no random numbers"))?;
    let token = Token::from_random(bytes).context("the system has no good random numbers")?;
    let ends = Timestamp::now().checked_add(flags.ttl).context("--ttl reaches beyond the year 9999")?;
    let ends = ends.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    match inside.apply(&token.path(), &token.object(&ends)).await.context("making the bootstrap token")? {
        Applied::Changed => {}
        Applied::Unchanged | Applied::Foreign(_) => bail!("a token of this name exists; try again"),
    }
    let pins: String = hashes.iter().map(|hash| format!(" \\\n  --ca-hash {hash}")).collect();
    print(&format!(
        "# As root, on each machine that joins, until {ends}:\nportico join --server {} --token {}{pins}\n",
        admin.server,
        token.reveal()
    ))?;
    Ok(Outcome::Done)
}
