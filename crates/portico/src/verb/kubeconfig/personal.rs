//! `portico kubeconfig --as USER`: a certificate for one person, that ends soon.
//!
//! The cluster signs it, by a CertificateSigningRequest that its administrator approves: no key of an
//! authority leaves the seed, and the cluster's audit log says who got what. Works for every cluster whose
//! controller manager signs for clients.

use std::time::Duration;

use anyhow::{Context, anyhow, bail, ensure};
use aws_lc_rs::rand;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use clap::Args;
use jiff::Timestamp;
use portico_dial::text::one_line;
use portico_hosting::serving::REQUESTS;
use portico_kube::foreign::{Applied, Foreign, ForeignError};
use portico_pki::{Credential, Kubeconfig, Pair, Request, ends};
use portico_reach::admin::enter;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::args::positive_duration;

/// The signer of certificates that open the API server.
const SIGNER: &str = "kubernetes.io/kube-apiserver-client";

/// The shortest lifetime that Kubernetes accepts.
const SHORTEST: Duration = Duration::from_mins(10);

/// How long the controller manager may take to sign.
const PATIENCE: Duration = Duration::from_secs(30);

/// Between two looks for the certificate.
const LOOK: Duration = Duration::from_millis(250);

/// Signers backdate by minutes, and the end follows from that.
const SLACK: Duration = Duration::from_mins(10);

/// Most characters of the cluster's words that get into a message.
const QUOTED: usize = 200;

/// The user that the credentials are for.
#[derive(Debug, Args)]
pub(super) struct Person {
    /// Have the cluster sign a certificate of this user, instead of handing out the stored credentials
    #[arg(long = "as", value_name = "USER", value_parser = name)]
    pub(super) user: Option<String>,
    /// A group of that user: RBAC binds rights to user or group
    #[arg(long, value_name = "GROUP", requires = "user", value_parser = name)]
    group: Option<String>,
    /// How long that certificate is valid, at least 10m; the cluster may make it less
    #[arg(long = "for", value_name = "TIME", requires = "user", default_value = "8h")]
    #[arg(value_parser = lifetime)]
    lifetime: Duration,
}

/// The way that `admin` has, with a certificate of this user.
pub(super) async fn issue(admin: Kubeconfig, user: &str, flags: &Person) -> anyhow::Result<Kubeconfig> {
    let Request { request, key } = Request::new(user, flags.group.as_deref())?;
    let inside = enter(&admin).await?;
    let mut random = [0; 8];
    rand::fill(&mut random).map_err(|_| anyhow!("the system has no random numbers"))?;
    let id = format!("portico-kubeconfig-{:016x}", u64::from_be_bytes(random));
    let path = format!("{REQUESTS}/{id}");
    let wanted = json!({
        "apiVersion": "certificates.k8s.io/v1",
        "kind": "CertificateSigningRequest",
        "metadata": {"name": id},
        "spec": {
            "request": STANDARD.encode(request),
            "signerName": SIGNER,
            "expirationSeconds": flags.lifetime.as_secs(),
            "usages": ["digital signature", "client auth"],
        },
    });
    let what = || format!("asking the cluster at {} for a certificate of {user}", admin.server);
    match inside.apply(&path, &wanted).await.map_err(explained).with_context(what)? {
        Applied::Changed => {}
        Applied::Unchanged | Applied::Foreign(_) => bail!("a request named {id} exists; try again"),
    }
    approve(&inside, &path).await.with_context(|| format!("approving CertificateSigningRequest {id}"))?;
    let certificate = signed(&inside, &path).await.with_context(what)?;
    if let Some(end) = ends(&certificate)
        && end + SLACK < Timestamp::now() + flags.lifetime
    {
        tracing::warn!("the cluster signs for less than --for asks: the certificate ends at {end:.0}");
    }
    Ok(Kubeconfig { credential: Credential::Certificate(Pair { certificate, key }), ..admin })
}

async fn approve(inside: &Foreign, path: &str) -> anyhow::Result<()> {
    let request = inside.get(path).await?.context("it is gone")?;
    let message = "asked for by portico kubeconfig --as";
    Ok(inside.approve(path, request, "PorticoKubeconfig", message).await?)
}

/// Waits for the certificate, PEM.
async fn signed(inside: &Foreign, path: &str) -> anyhow::Result<String> {
    let started = Instant::now();
    loop {
        let object = inside.get(path).await?.context("the request is gone")?;
        if let Some(certificate) = object.pointer("/status/certificate").and_then(Value::as_str) {
            return Ok(String::from_utf8(STANDARD.decode(certificate)?)?);
        }
        if let Some(why) = failed(&object) {
            bail!("it was not signed: {why}");
        }
        ensure!(
            started.elapsed() < PATIENCE,
            "it is approved and not signed after {PATIENCE:?}: the cluster's controller manager does not \
             work, or does not sign for {SIGNER}"
        );
        sleep(LOOK).await;
    }
}

/// Why the signer did not sign, if it says so.
fn failed(object: &Value) -> Option<String> {
    let conditions = object.pointer("/status/conditions").and_then(Value::as_array)?;
    let failed = conditions.iter().find(|one| one["type"] == "Failed" || one["type"] == "Denied")?;
    Some(one_line(failed["message"].as_str().unwrap_or_default(), QUOTED))
}

/// What to do about a refusal.
fn explained(error: ForeignError) -> anyhow::Error {
    match &error {
        ForeignError::Refused { code: 403, message, .. } if message.contains("system:masters") => anyhow!(
            "{error}; have --group another name, and bind it: kubectl create clusterrolebinding NAME \
             --clusterrole=cluster-admin --group=GROUP"
        ),
        _ => error.into(),
    }
}

/// A user or group, as a certificate can name it.
fn name(text: &str) -> Result<String, String> {
    let fits = (1..=64).contains(&text.len()) && text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    if fits { Ok(text.to_owned()) } else { Err("give 1 to 64 letters of ASCII".to_owned()) }
}

fn lifetime(text: &str) -> Result<Duration, String> {
    match positive_duration(text)? {
        lifetime if lifetime < SHORTEST => Err("Kubernetes signs for 10m or more".to_owned()),
        // The field has 32 bits.
        lifetime if i32::try_from(lifetime.as_secs()).is_err() => Err("that is too long".to_owned()),
        lifetime => Ok(lifetime),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_fits_into_a_certificate_and_a_lifetime_into_the_request() {
        for good in ["alice", "alice@example.com", "Alice B", "oidc:x"] {
            assert_eq!(name(good).as_deref(), Ok(good));
        }
        for bad in ["", "a\nb", "\u{1b}[0m", "ä", &"a".repeat(65)] {
            assert!(name(bad).is_err(), "{bad}");
        }
        assert_eq!(lifetime("10m"), Ok(SHORTEST));
        assert!(lifetime("9m59s").is_err() && lifetime("0s").is_err() && lifetime("1000000h").is_err());
    }

    #[test]
    fn a_request_that_is_not_signed_says_why() {
        let object = |kind: &str| {
            let last = json!({"type": kind, "message": "no\nkey"});
            json!({"status": {"conditions": [{"type": "Approved"}, last]}})
        };
        assert_eq!(failed(&object("Failed")).as_deref(), Some("no key"));
        assert_eq!(failed(&object("Denied")).as_deref(), Some("no key"));
        assert_eq!(failed(&object("Other")), None);
        assert_eq!(failed(&json!(7)), None);
    }
}
