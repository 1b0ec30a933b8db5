//! The questions of a machine to the cluster that it joins.
//!
//! Over the first connection nobody is verified and nothing secret is sent. Two things of the answer count:
//! certificates with a pinned key, and a time that only helps to explain failures. Everything else is asked,
//! with the token, of a server that the pinned authority vouches for.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, anyhow};
use jiff::Timestamp;
use portico_api::text::one_line;
use portico_dial::{Dialer, ProxyError, ProxyFiles, ProxySetting, server_url};
use portico_hosting::join::machine::KubeletConfig;
use portico_hosting::join::options::NodeName;
use portico_hosting::join::token::Token;
use portico_hosting::join::trust::{CaHash, pinned};
use portico_kube::untrusted_api::{UntrustedApi, UntrustedApiError};
use portico_pki::{Credential, Kubeconfig};
use serde_json::{Value, json};

/// What the operator keeps there for kubelets.
pub const KUBELET_CONFIG: &str = "/api/v1/namespaces/kube-system/configmaps/kubelet-config";
const CLUSTER_INFO: &str = "/api/v1/namespaces/kube-public/configmaps/cluster-info";

/// Most characters of a version, which gets to the terminal of an administrator.
const LONGEST_VERSION: usize = 40;

/// The URL of an API server.
#[derive(Debug, Clone)]
pub struct Server {
    /// Without a slash at its end.
    pub url: String,
}

impl FromStr for Server {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let url = server_url(text);
        let url =
            url.ok_or_else(|| "give https://HOST:PORT, as `portico join token` prints it".to_owned())?;
        Ok(Self { url })
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.url)
    }
}

/// What the cluster says.
pub struct Answers {
    /// What signs the API server's certificate, PEM.
    pub authority: String,
    /// What kubelets of this cluster are configured with.
    pub kubelet: KubeletConfig,
    /// `v1.34.4`.
    pub version: String,
    /// Whether a Node of this name is there and reports.
    pub name_is_taken: bool,
}

/// What came of asking.
pub struct Asked {
    /// What it says, or why nothing that counts.
    pub answers: anyhow::Result<Answers>,
    /// The time there, if an answer had one.
    pub time: Option<Timestamp>,
}

/// Asks. `by_environment` is whether the kubelet will go through the proxy that the environment names.
pub async fn ask(
    server: &Server,
    token: &Token,
    pins: &[CaHash],
    name: &NodeName,
    by_environment: bool,
) -> Asked {
    let mut time = None;
    let answers = questions(server, token, pins, name, by_environment, &mut time).await;
    let answers = answers.with_context(|| format!("joining by {server}"));
    Asked { answers, time }
}

async fn questions(
    server: &Server,
    token: &Token,
    pins: &[CaHash],
    name: &NodeName,
    by_environment: bool,
    time: &mut Option<Timestamp>,
) -> anyhow::Result<Answers> {
    let stranger = UntrustedApi::new(&unverified(server), dialer(by_environment)?).await?;
    // The time is a help alone.
    *time = stranger.version().await.ok().and_then(|(_, time)| time);
    let info = stranger.get(CLUSTER_INFO).await?.ok_or_else(|| {
        anyhow!("there is no ConfigMap kube-public/cluster-info: Portico does not keep it, or not yet")
    })?;
    let authority = pinned(&info, pins)?;
    let credential = Credential::Token(token.reveal());
    let (cluster, url) = ("default".to_owned(), server.url.clone());
    let kubeconfig = Kubeconfig { cluster, server: url, authority: authority.clone(), credential };
    let inside = UntrustedApi::new(&kubeconfig.to_yaml(), dialer(by_environment)?).await?;
    let object = inside.get(KUBELET_CONFIG).await.map_err(explained)?.ok_or_else(|| {
        anyhow!(
            "there is no ConfigMap kube-system/kubelet-config: Portico exposes this cluster, and does not \
             host it. How machines join depends on what made its control plane"
        )
    })?;
    let kubelet = KubeletConfig::read(&object)?;
    let version = inside.version().await?.0;
    let version = one_line(version["gitVersion"].as_str().unwrap_or_default(), LONGEST_VERSION);
    let node = inside.get(&format!("/api/v1/nodes/{name}")).await?;
    Ok(Answers { authority, kubelet, version, name_is_taken: node.as_ref().is_some_and(reports) })
}

/// Connects as the kubelet will: through the proxy that this environment names, or through none.
pub(crate) fn dialer(by_environment: bool) -> Result<Dialer, ProxyError> {
    let proxy = if by_environment { ProxySetting::Env } else { ProxySetting::Off };
    Dialer::new(proxy, ProxyFiles::default())
}

/// A kubeconfig by which nobody is verified, and which shows nothing.
fn unverified(server: &Server) -> String {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "any", "cluster": {"server": server.url, "insecure-skip-tls-verify": true}}],
        "users": [{"name": "nobody", "user": {}}],
        "contexts": [{"name": "any", "context": {"cluster": "any", "user": "nobody"}}],
        "current-context": "any",
    })
    .to_string()
}

/// What to do about a refusal.
fn explained(error: UntrustedApiError) -> anyhow::Error {
    let remedy = match &error {
        UntrustedApiError::Refused { code: 401, .. } => {
            "the token is unknown there, or has ended: `portico join token` makes another"
        }
        UntrustedApiError::Refused { code: 403, .. } => {
            "the operator has not made the rights of machines yet: see the condition \
             PorticoUserClusterReady of the Cluster"
        }
        UntrustedApiError::Unreachable { .. } => {
            "it was reached before: if its certificate is not trusted, another server answers now and \
             then, or the clock is off"
        }
        _ => return error.into(),
    };
    anyhow!("{error}; {remedy}")
}

/// Whether a Node is ready.
fn reports(node: &Value) -> bool {
    let conditions = node.pointer("/status/conditions").and_then(Value::as_array);
    conditions.into_iter().flatten().any(|one| one["type"] == "Ready" && one["status"] == "True")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_an_url_of_a_host_alone() {
        for good in
            ["https://a.example.com:6443", "https://a.example.com:6443/", "https://[2001:db8::1]:6443"]
        {
            assert_eq!(good.parse::<Server>().unwrap().url, good.trim_end_matches('/'));
        }
        for bad in ["", "a:6443", "http://a:6443", "https://a/b", "https://u@a", "https://a?b", "https://"] {
            assert!(bad.parse::<Server>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_refused_token_is_reported_with_how_to_get_another() {
        let refused = |code| UntrustedApiError::Refused { what: "GET /".into(), code, message: "no".into() };
        assert!(explained(refused(401)).to_string().contains("`portico join token` makes another"));
        assert!(explained(refused(403)).to_string().contains("PorticoUserClusterReady"));
        assert_eq!(explained(refused(500)).to_string(), refused(500).to_string());
    }

    #[test]
    fn a_name_is_taken_by_a_node_that_reports_alone() {
        let node = |status: &str| json!({"status": {"conditions": [{"type": "Ready", "status": status}]}});
        assert!(reports(&node("True")));
        assert!(![node("Unknown"), node("False"), json!({}), json!(7)].iter().any(reports));
    }
}
