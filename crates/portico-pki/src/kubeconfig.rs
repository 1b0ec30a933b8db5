//! Kubeconfigs with everything in one file, as KKP's Secrets hold them.
//!
//! The cluster and the context have the cluster's name, the user is `default`. [`Kubeconfig::parse`] refuses
//! content that it could not write back. A credential or a way of trusting that is dropped unseen would lock
//! somebody out, or let somebody in.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use portico_yaml::{Documents, InvalidField, typed};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use thiserror::Error;

use crate::authority::{Authority, IssueError};
use crate::pair::{KeyKind, Pair};
use crate::profile::Profile;
use crate::renewal::wants_renewal;

/// The name of the user.
const USER: &str = "default";

/// The way into one cluster, as one user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kubeconfig {
    /// Name of cluster and context.
    pub cluster: String,
    /// `https://HOST:PORT`.
    pub server: String,
    /// CA certificates of the API server, PEM.
    pub authority: String,
    /// The user.
    pub credential: Credential,
}

/// What a user authenticates with.
#[derive(Clone, PartialEq, Eq)]
pub enum Credential {
    /// A client certificate.
    Certificate(Pair),
    /// A bearer token.
    Token(String),
}

/// Why a text is no kubeconfig that can be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadKubeconfig {
    /// Not YAML, or not the fields of a kubeconfig with everything in it.
    #[error("{0}")]
    Fields(String),
    /// It names something that is not in it.
    #[error("it has no {what} named {name:?}")]
    Missing {
        /// `context`, `cluster` or `user`.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// More than one, where none may get lost.
    #[error("it has {0} contexts; only one of exactly one can be used")]
    Contexts(usize),
    /// More than one cluster, or none, where one is meant.
    #[error("it has {0} clusters; only exactly one can be meant")]
    Clusters(usize),
    /// A field that is not base64 of text.
    #[error("{0} is no base64 of PEM")]
    Data(&'static str),
    /// Neither a token nor a certificate with its key.
    #[error("its user has neither a token nor a certificate with its key, or both")]
    Credential,
    /// A token that no request can carry.
    #[error("its token has a space, a line break or another character that no token has (RFC 6750)")]
    Token,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct File {
    current_context: String,
    contexts: Vec<Named<Context>>,
    clusters: Vec<Named<Cluster>>,
    users: Vec<Named<User>>,
}

/// As much of `cluster-info` as counts. kubeadm writes a null where there are no users.
#[derive(Deserialize)]
struct Info {
    clusters: Vec<Named<Cluster>>,
}

#[derive(Deserialize)]
struct Named<T> {
    name: String,
    #[serde(alias = "context", alias = "cluster", alias = "user")]
    value: T,
}

#[derive(Deserialize)]
struct Context {
    cluster: String,
    user: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Cluster {
    server: String,
    certificate_authority_data: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct User {
    token: Option<String>,
    client_certificate_data: Option<String>,
    client_key_data: Option<String>,
}

impl Kubeconfig {
    /// The file, as YAML.
    pub fn to_yaml(&self) -> String {
        self.with_user(&match &self.credential {
            Credential::Token(token) => json!({"token": token}),
            Credential::Certificate(pair) => json!({
                "client-certificate-data": STANDARD.encode(&pair.certificate),
                "client-key-data": STANDARD.encode(&pair.key),
            }),
        })
    }

    /// The file, as YAML, with the credential in two other files: paths that begin at its own folder.
    pub fn to_yaml_of_files(&self, certificate: &str, key: &str) -> String {
        self.with_user(&json!({"client-certificate": certificate, "client-key": key}))
    }

    fn with_user(&self, user: &Value) -> String {
        let cluster =
            json!({"certificate-authority-data": STANDARD.encode(&self.authority), "server": self.server});
        let file = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": self.cluster, "cluster": cluster}],
            "contexts": [{"name": self.cluster, "context": {"cluster": self.cluster, "user": USER}}],
            "current-context": self.cluster,
            "users": [{"name": USER, "user": user}],
        });
        portico_yaml::write(&file)
    }

    /// This way in with a client certificate: that of `before` while it is good, else a new one. Another
    /// address alone issues nothing, so that copies of the former file work as long as that address answers.
    pub fn with_certificate(
        mut self,
        before: Option<&Credential>,
        profile: &Profile,
        authority: &Authority,
        kind: KeyKind,
        now: Timestamp,
    ) -> Result<Self, IssueError> {
        let kept = match before {
            Some(Credential::Certificate(pair)) if wants_renewal(pair, profile, authority, now).is_none() => {
                Some(pair.clone())
            }
            _ => None,
        };
        let pair = kept.map_or_else(|| authority.issue(profile, kind, now), Ok)?;
        self.credential = Credential::Certificate(pair);
        Ok(self)
    }

    /// Reads a file with one context and everything in it.
    pub fn parse(text: &str) -> Result<Self, BadKubeconfig> {
        let file: File = read(text)?;
        if file.contexts.len() != 1 {
            return Err(BadKubeconfig::Contexts(file.contexts.len()));
        }
        let context = named("context", file.contexts, &file.current_context)?;
        let cluster = named("cluster", file.clusters, &context.cluster)?;
        let user = named("user", file.users, &context.user)?;
        let credential = match (user.token, user.client_certificate_data, user.client_key_data) {
            // It becomes part of a header, where a line break has no place.
            (Some(token), None, None) if token.bytes().all(|byte| byte.is_ascii_graphic()) => {
                Credential::Token(token)
            }
            (Some(_), None, None) => return Err(BadKubeconfig::Token),
            (None, Some(certificate), Some(key)) => {
                let certificate = decode("client-certificate-data", &certificate)?;
                Credential::Certificate(Pair { certificate, key: decode("client-key-data", &key)? })
            }
            _ => return Err(BadKubeconfig::Credential),
        };
        let authority = decode("certificate-authority-data", &cluster.certificate_authority_data)?;
        Ok(Self { cluster: file.current_context, server: cluster.server, authority, credential })
    }
}

/// A kubeconfig without a user: where an API server is, and what signs its certificate. That is what machines
/// find in the ConfigMap `cluster-info`, with one cluster that has no name.
pub fn cluster_info(server: &str, authority: &str) -> String {
    let cluster = json!({"certificate-authority-data": STANDARD.encode(authority), "server": server});
    portico_yaml::write(&json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "", "cluster": cluster}],
        "contexts": [],
        "current-context": "",
        "users": [],
    }))
}

/// The authority of the API server's certificate, in PEM, by the text of [`cluster_info`], or by kubeadm's.
pub fn read_cluster_info(text: &str) -> Result<String, BadKubeconfig> {
    let info: Info = read(text)?;
    match &info.clusters[..] {
        [one] => decode("certificate-authority-data", &one.value.certificate_authority_data),
        others => Err(BadKubeconfig::Clusters(others.len())),
    }
}

impl fmt::Debug for Credential {
    /// Without key and token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Certificate(pair) => f.debug_tuple("Certificate").field(pair).finish(),
            Self::Token(_) => f.debug_tuple("Token").finish_non_exhaustive(),
        }
    }
}

/// Says where something is wrong, and does not quote it: it may be a token or a key.
fn read<T: DeserializeOwned>(text: &str) -> Result<T, BadKubeconfig> {
    let wrong = |text: &str| BadKubeconfig::Fields(text.to_owned());
    let document = Documents::new(text).next().ok_or_else(|| wrong("it is empty"))?;
    let document = document.map_err(|error| wrong(&format!("line {} is no YAML", error.line)))?;
    typed(document.to_value()).map_err(|invalid: InvalidField| {
        let names_a_field = ["unknown field", "missing field"];
        match &*invalid.field {
            _ if names_a_field.into_iter().any(|begin| invalid.message.starts_with(begin)) => {
                wrong(&invalid.to_string())
            }
            "" => wrong("it is no mapping with clusters, contexts and users; is it encoded twice?"),
            field => wrong(&format!("{field} is not of the type that belongs there")),
        }
    })
}

fn named<T>(what: &'static str, all: Vec<Named<T>>, name: &str) -> Result<T, BadKubeconfig> {
    let found = all.into_iter().find(|named| named.name == name).map(|named| named.value);
    found.ok_or_else(|| BadKubeconfig::Missing { what, name: name.to_owned() })
}

fn decode(field: &'static str, data: &str) -> Result<String, BadKubeconfig> {
    let bytes = STANDARD.decode(data.trim()).map_err(|_| BadKubeconfig::Data(field))?;
    String::from_utf8(bytes).map_err(|_| BadKubeconfig::Data(field))
}
