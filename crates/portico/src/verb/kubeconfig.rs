//! `portico kubeconfig CLUSTER`: the way into a user cluster, by its present address.
//!
//! Address from the Cluster, CA and credentials from the Secret in which KKP keeps them. Only what was read
//! is written: nothing changes on the seed. With `--as` the credentials are a certificate for one person,
//! which the cluster signs ([`personal`]).

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use clap::Args;
use portico_api::cluster::{Cluster, EXPOSED};
use portico_api::names::{ClusterName, HostName};
use portico_dial::{Dialer, ProxyFiles, ProxySetting};
use portico_kube::foreign::Foreign;
use portico_kube::{Client, read};
use portico_pki::{Kubeconfig, inventory};
use serde::Deserialize;

use crate::args::kubeconfig;
use crate::daemon;
use crate::outcome::{Outcome, print};

mod personal;

/// The Secret with the credentials of an administrator, as KKP and the operator make it.
const SECRET: &str = "admin-kubeconfig";

/// `portico kubeconfig`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    /// Name of the Cluster
    #[arg(value_name = "CLUSTER", value_parser = label)]
    cluster: String,
    /// Write this file, readable by its owner alone, instead of standard output. A file that exists is only
    /// replaced if it is a kubeconfig of this cluster and of nothing else
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// How to reach the seed [default: as kubectl does: $KUBECONFIG, the pod's own, or ~/.kube/config]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Secret in the namespace of the cluster that holds the credentials, for example viewer-kubeconfig
    #[arg(long, value_name = "NAME", default_value = SECRET, value_parser = label)]
    secret: String,
    #[command(flatten)]
    personal: personal::Person,
}

/// The administrator of a user cluster: as the seed knows it, or by a kubeconfig of its own.
#[derive(Debug, Args)]
pub(crate) struct AdminFlags {
    /// Name of the Cluster
    #[arg(value_name = "CLUSTER", required_unless_present = "cluster_kubeconfig", value_parser = label)]
    cluster: Option<String>,
    /// How to reach the seed [default: as kubectl does: $KUBECONFIG, the pod's own, or ~/.kube/config]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// The kubeconfig of an administrator of the cluster; the seed is not asked then
    #[arg(long, value_name = "FILE", conflicts_with_all = ["cluster", "kubeconfig"])]
    cluster_kubeconfig: Option<PathBuf>,
}

impl AdminFlags {
    /// The kubeconfig of the administrator.
    pub(crate) async fn read(&self) -> anyhow::Result<Kubeconfig> {
        match (&self.cluster_kubeconfig, &self.cluster) {
            (Some(path), _) => {
                let cannot = || format!("cannot use {}", path.display());
                Kubeconfig::parse(&fs::read_to_string(path).with_context(cannot)?).with_context(cannot)
            }
            (None, Some(name)) => {
                let seed = portico_kube::client(kubeconfig(self.kubeconfig.as_deref()).as_deref()).await?;
                of_cluster(&seed, name).await
            }
            (None, None) => bail!("name a Cluster, or give --cluster-kubeconfig"),
        }
    }
}

/// The way into the cluster that the administrator has from here, by the corporate proxy of the environment.
pub(crate) async fn inside(admin: &Kubeconfig) -> anyhow::Result<Foreign> {
    let dialer = Dialer::new(ProxySetting::Env, ProxyFiles::default())?;
    Ok(Foreign::new(&admin.to_yaml(), dialer).await?)
}

/// A Secret, as far as it counts here.
#[derive(Deserialize)]
struct Secret {
    #[serde(default)]
    data: BTreeMap<String, String>,
}

/// Writes the kubeconfig.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    let found = daemon::runtime()?.block_on(async {
        let client = portico_kube::client(kubeconfig(flags.kubeconfig.as_deref()).as_deref()).await?;
        let admin = fetch(&client, &flags.cluster, &flags.secret).await?;
        match &flags.personal.user {
            Some(user) => personal::issue(admin, user, &flags.personal).await,
            None => Ok(admin),
        }
    })?;
    match &flags.output {
        Some(path) => write(path, &found)?,
        None => print(&found.to_yaml())?,
    }
    Ok(Outcome::Done)
}

/// The kubeconfig that this verb writes without further flags.
pub(crate) async fn of_cluster(client: &Client, name: &str) -> anyhow::Result<Kubeconfig> {
    fetch(client, name, SECRET).await
}

/// Reads Cluster and Secret.
async fn fetch(client: &Client, name: &str, secret: &str) -> anyhow::Result<Kubeconfig> {
    let path = format!("/apis/kubermatic.k8c.io/v1/clusters/{name}");
    let cluster: Option<Cluster> = read(client, &path, &format!("Cluster {name}")).await?;
    let cluster =
        cluster.ok_or_else(|| anyhow!("there is no Cluster {name}; `kubectl get clusters` lists them"))?;
    let server = server(name, &cluster)?;
    let namespace = ClusterName::new(name).namespace();
    let path = format!("/api/v1/namespaces/{namespace}/secrets/{secret}");
    let what = format!("Secret {namespace}/{secret}");
    let stored: Option<Secret> = read(client, &path, &what).await?;
    let stored = stored.ok_or_else(|| {
        anyhow!(
            "there is no {what}: nothing has made credentials for this cluster; --secret names another that \
             holds a kubeconfig"
        )
    })?;
    present(&stored, name, server).with_context(|| format!("{what} cannot be used"))
}

/// Where the API server of the cluster is now.
fn server(name: &str, cluster: &Cluster) -> anyhow::Result<String> {
    let address = &cluster.status.address;
    let condition = cluster.status.conditions.get(EXPOSED).filter(|condition| &*condition.status != "True");
    let why = condition.map(|condition| format!(": {} ({})", condition.message, condition.reason));
    // As KKP's API: where the API server has a load balancer of its own, that one leads.
    let known = [&address.api_server_external_address, &address.url].into_iter().find(|url| !url.is_empty());
    let Some(url) = known else {
        let why = why.unwrap_or_else(|| "; `kubectl describe cluster` says how it stands".to_owned());
        bail!("Cluster {name} has no address yet{why}");
    };
    if let Some(why) = why {
        tracing::warn!("clients may not reach Cluster {name} at {url}{why}");
    }
    Ok(url.to_string())
}

/// The kubeconfig that the Secret holds, named after the cluster and leading to `server`.
fn present(stored: &Secret, cluster: &str, server: String) -> anyhow::Result<Kubeconfig> {
    let key = inventory::KUBECONFIG;
    let data = stored.data.get(key).with_context(|| format!("it has no key {key:?}"))?;
    let text = String::from_utf8(STANDARD.decode(data)?)?;
    Ok(Kubeconfig { cluster: cluster.to_owned(), server, ..Kubeconfig::parse(&text)? })
}

/// Replaces the file at once, or not at all. A file with other clusters in it is left alone.
fn write(path: &Path, kubeconfig: &Kubeconfig) -> anyhow::Result<()> {
    let cannot = || format!("cannot write {}", path.display());
    match fs::read_to_string(path) {
        Ok(text) => {
            let same = Kubeconfig::parse(&text).is_ok_and(|before| before.cluster == kubeconfig.cluster);
            ensure!(
                same,
                "{} exists and is no kubeconfig of cluster {} alone; name another file",
                path.display(),
                kubeconfig.cluster
            );
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(cannot),
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Readable by its owner alone from the first byte.
    let mut file = tempfile::NamedTempFile::new_in(folder).with_context(cannot)?;
    file.write_all(kubeconfig.to_yaml().as_bytes()).with_context(cannot)?;
    file.persist(path).with_context(cannot)?;
    Ok(())
}

/// The name of an object, as it can stand in a path of the API.
pub(crate) fn label(text: &str) -> Result<String, String> {
    match HostName::parse(text) {
        Ok(name) if name.as_str() == text => Ok(text.to_owned()),
        _ => Err("give the name of one object, such as a or p4k2m7xzq9".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use portico_pki::Credential;
    use serde_json::json;

    use super::*;

    fn cluster(status: &serde_json::Value) -> Cluster {
        serde_json::from_value(json!({"metadata": {"name": "a"}, "status": status})).unwrap()
    }

    fn kubeconfig(cluster: &str, server: &str) -> Kubeconfig {
        let credential = Credential::Token("secret".to_owned());
        let (cluster, server, authority) = (cluster.to_owned(), server.to_owned(), "CA".to_owned());
        Kubeconfig { cluster, server, authority, credential }
    }

    #[test]
    fn the_address_is_that_of_now_and_its_absence_is_explained() {
        let url = json!({"address": {"url": "https://a.example.com:6443"}});
        assert_eq!(server("a", &cluster(&url)).unwrap(), "https://a.example.com:6443");
        let own = json!({"address": {"url": "https://192.0.2.7:31000",
            "apiServerExternalAddress": "https://lb.example.com"}});
        assert_eq!(server("a", &cluster(&own)).unwrap(), "https://lb.example.com");
        let waits = json!({"conditions": {"PorticoExposed": {"status": "False",
            "reason": "LoadBalancerPending", "message": "front-loadbalancer has no address"}}});
        assert_eq!(
            server("a", &cluster(&waits)).unwrap_err().to_string(),
            "Cluster a has no address yet: front-loadbalancer has no address (LoadBalancerPending)"
        );
        let error = server("a", &cluster(&json!({}))).unwrap_err().to_string();
        assert!(error.ends_with("; `kubectl describe cluster` says how it stands"), "{error}");
    }

    #[test]
    fn a_file_is_replaced_if_it_is_of_this_cluster_and_of_nothing_else() {
        use std::os::unix::fs::PermissionsExt;

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.kubeconfig");
        for server in ["https://old:1", "https://new:2"] {
            write(&path, &kubeconfig("a", server)).unwrap();
            let text = fs::read_to_string(&path).unwrap();
            assert_eq!(Kubeconfig::parse(&text).unwrap(), kubeconfig("a", server));
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
        for other in [kubeconfig("b", "https://b:1").to_yaml(), "contexts: []\n".to_owned()] {
            fs::write(&path, &other).unwrap();
            let error = write(&path, &kubeconfig("a", "https://a:1")).unwrap_err().to_string();
            assert!(error.ends_with("is no kubeconfig of cluster a alone; name another file"), "{error}");
            assert_eq!(fs::read_to_string(&path).unwrap(), other);
        }
        let nowhere = dir.path().join("nowhere/a");
        let error = write(&nowhere, &kubeconfig("a", "https://a:1")).unwrap_err().to_string();
        assert!(error.starts_with("cannot write ") && error.contains("nowhere/a"), "{error}");
    }

    #[test]
    fn a_secret_without_a_usable_kubeconfig_says_what_is_wrong() {
        let stored = |data: serde_json::Value| serde_json::from_value(json!({ "data": data })).unwrap();
        let refused = |data| present(&stored(data), "a", "https://new:2".to_owned()).unwrap_err().to_string();
        assert_eq!(refused(json!({"token": "eA=="})), "it has no key \"kubeconfig\"");
        assert_eq!(refused(json!({"kubeconfig": ""})), "it is empty");
        let good = json!({"kubeconfig": STANDARD.encode(kubeconfig("b", "https://old:1").to_yaml())});
        let present = present(&stored(good), "a", "https://new:2".to_owned()).unwrap();
        assert_eq!(present, kubeconfig("a", "https://new:2"));
    }

    #[test]
    fn what_is_no_name_never_becomes_a_path() {
        for bad in ["", "a/b", "..", "a?b", "A", "a b", "%2e"] {
            assert!(label(bad).is_err(), "{bad}");
        }
        assert_eq!(label("p4k2m7xzq9").unwrap(), "p4k2m7xzq9");
    }
}
