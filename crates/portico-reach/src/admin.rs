//! The way into a user cluster as its administrator. The address is from the Cluster. CA and credentials are
//! from the Secret in which KKP and the operator keep them. Nothing changes on the seed.

use std::collections::BTreeMap;

use anyhow::{Context, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use portico_api::cluster::{Cluster, EXPOSED};
use portico_api::names::ClusterName;
use portico_dial::{Dialer, ProxyFiles, ProxySetting};
use portico_kube::untrusted_api::UntrustedApi;
use portico_kube::{Client, read};
use portico_pki::Kubeconfig;
use portico_pki::inventory::{ADMIN_KUBECONFIG, KUBECONFIG};
use serde::Deserialize;
use thiserror::Error;

use crate::cluster::read_cluster;

/// There is no Secret of this name.
#[derive(Debug, Error)]
#[error("there is no {0}: nothing has made credentials for this cluster")]
pub struct NoSecret(String);

/// The kubeconfig of the administrator of the cluster `name`, leading to the address of now.
pub async fn of_cluster(client: &Client, name: &str) -> anyhow::Result<Kubeconfig> {
    of_secret(client, name, ADMIN_KUBECONFIG).await
}

/// The kubeconfig in another Secret in the namespace of the cluster, leading to the address of now. The error
/// is a [`NoSecret`] if that is missing. Both names become part of a path: the caller has checked them, or
/// they are those of objects.
pub async fn of_secret(client: &Client, name: &str, secret: &str) -> anyhow::Result<Kubeconfig> {
    let (_, cluster) = read_cluster(client, name).await?;
    let server = server(name, &cluster)?;
    let namespace = ClusterName::new(name).namespace();
    let path = format!("/api/v1/namespaces/{namespace}/secrets/{secret}");
    let what = format!("Secret {namespace}/{secret}");
    let stored: Option<Secret> = read(client, &path, &what).await?;
    let Some(stored) = stored else { return Err(NoSecret(what).into()) };
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
    let data = stored.data.get(KUBECONFIG).with_context(|| format!("it has no key {KUBECONFIG:?}"))?;
    let text = String::from_utf8(STANDARD.decode(data)?)?;
    Ok(Kubeconfig { cluster: cluster.to_owned(), server, ..Kubeconfig::parse(&text)? })
}

/// The way into the cluster that the administrator has from here, by the corporate proxy of the environment.
pub async fn enter(admin: &Kubeconfig) -> anyhow::Result<UntrustedApi> {
    let dialer = Dialer::new(ProxySetting::Env, ProxyFiles::default())?;
    Ok(UntrustedApi::new(&admin.to_yaml(), dialer).await?)
}

/// The way into the cluster `name` as its administrator, with the kubeconfig that the seed has.
pub(crate) async fn enter_as_admin(seed: &Client, name: &str) -> anyhow::Result<UntrustedApi> {
    enter(&of_cluster(seed, name).await?).await
}

/// A Secret, as far as it counts here.
#[derive(Deserialize)]
struct Secret {
    #[serde(default)]
    data: BTreeMap<String, String>,
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
    fn a_secret_without_a_usable_kubeconfig_says_what_is_wrong() {
        let stored = |data: serde_json::Value| serde_json::from_value(json!({ "data": data })).unwrap();
        let refused = |data| present(&stored(data), "a", "https://new:2".to_owned()).unwrap_err().to_string();
        assert_eq!(refused(json!({"token": "eA=="})), "it has no key \"kubeconfig\"");
        assert_eq!(refused(json!({"kubeconfig": ""})), "it is empty");
        let good = json!({"kubeconfig": STANDARD.encode(kubeconfig("b", "https://old:1").to_yaml())});
        let present = present(&stored(good), "a", "https://new:2".to_owned()).unwrap();
        assert_eq!(present, kubeconfig("a", "https://new:2"));
    }
}
