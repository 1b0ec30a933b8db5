//! `portico agent reach`: whether this machine reaches API servers as a kubelet does. A kubelet connects
//! directly, by the CA of the cluster and by the name in the URL. The servers are shown no credential, and
//! what they answer hardly counts. The server with the certificate is the API server, also if it lets nobody
//! in without a credential.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use clap::Args;
use futures_util::future::join_all;
use portico_dial::pem;
use portico_dial::{Dialer, server_url};
use portico_kube::error::describe;
use portico_kube::untrusted_api::{UntrustedApi, UntrustedApiError};
use serde_json::json;

use super::observe::{self, Observation};
use crate::args::positive_duration;
use crate::outcome::Outcome;

/// What is asked for: every API server has it.
const ASKED: &str = "/readyz";

// `portico agent reach`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    /// An API server; of several, each must be reached
    #[arg(value_name = "URL", required = true)]
    urls: Vec<Server>,
    /// CA that its certificate must come from, PEM; read again for each attempt
    #[arg(long, value_name = "FILE")]
    ca_file: PathBuf,
    /// Go on, with this time between two attempts, and print a line for each change
    #[arg(long, value_name = "TIME", value_parser = positive_duration)]
    every: Option<Duration>,
}

/// The URL of an API server.
#[derive(Debug, Clone)]
pub(super) struct Server(pub(super) String);

impl FromStr for Server {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let url = server_url(text);
        url.map(Self).ok_or_else(|| "give https://HOST:PORT, without anything behind it".to_owned())
    }
}

/// Tries once, or again and again until it is told to stop.
pub(super) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    observe::run(flags.every, async || attempts(flags).await)
}

async fn attempts(flags: &Flags) -> anyhow::Result<Vec<Observation>> {
    let authority = pem::read(&flags.ca_file).context("--ca-file")?;
    // Without a certificate in it every server would look like the wrong one.
    pem::certificates(&flags.ca_file, &authority).context("--ca-file")?;
    Ok(join_all(flags.urls.iter().map(|server| seen(server, &authority))).await)
}

async fn seen(server: &Server, authority: &[u8]) -> Observation {
    let url = &server.0;
    match attempt(server, authority).await {
        Ok(()) => Observation { line: format!("{url}: reached"), good: true },
        Err(why) => Observation { line: format!("{url}: not reached: {why}"), good: false },
    }
}

async fn attempt(server: &Server, authority: &[u8]) -> Result<(), String> {
    let way = UntrustedApi::new(&anonymous(server, authority), Dialer::direct()).await;
    match way.map_err(|error| describe(&error))?.get(ASKED).await {
        // A text and no object, which is what it says if all is well.
        Ok(Some(_))
        | Err(UntrustedApiError::Unreadable(_) | UntrustedApiError::Refused { code: 401 | 403, .. }) => {
            Ok(())
        }
        Ok(None) => Err(format!("GET {ASKED}: it answered 404: what answers is no API server")),
        Err(error) => Err(error.to_string()),
    }
}

/// A kubeconfig that shows nothing.
fn anonymous(Server(url): &Server, authority: &[u8]) -> String {
    let authority = BASE64_STANDARD.encode(authority);
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "any", "cluster": {"server": url, "certificate-authority-data": authority}}],
        "users": [{"name": "nobody", "user": {}}],
        "contexts": [{"name": "any", "context": {"cluster": "any", "user": "nobody"}}],
        "current-context": "any",
    })
    .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_an_url_of_a_host_alone() {
        for good in ["https://a.example.com:6443", "https://[2001:db8::1]:6443", "https://a/"] {
            assert_eq!(good.parse::<Server>().unwrap().0, good.trim_end_matches('/'));
        }
        for bad in ["", "a:6443", "http://a:6443", "https://a/b", "https://u@a", "https://a?b", "https://"] {
            assert!(bad.parse::<Server>().is_err(), "{bad}");
        }
    }
}
