//! A certificate of a user cluster for one person, that ends soon.
//!
//! The cluster signs it, by a CertificateSigningRequest that its administrator approves. So no key of an
//! authority leaves the seed, and the cluster's audit log has the person and the certificate. Works for every
//! cluster whose controller manager signs for clients.

use std::time::Duration;

use anyhow::{Context, anyhow, bail, ensure};
use aws_lc_rs::rand;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use portico_api::text::one_line;
use portico_hosting::serving::REQUESTS;
use portico_kube::untrusted_api::{Applied, UntrustedApi, UntrustedApiError};
use portico_pki::{Credential, Kubeconfig, Pair, Request, ends};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::admin::enter;

/// The signer of certificates that open the API server.
const SIGNER: &str = "kubernetes.io/kube-apiserver-client";

/// The shortest lifetime that Kubernetes accepts.
pub const SHORTEST_LIFETIME: Duration = Duration::from_mins(10);

/// How long the controller manager may take to sign.
const PATIENCE: Duration = Duration::from_secs(30);

/// Between two looks for the certificate.
const LOOK: Duration = Duration::from_millis(250);

/// Signers backdate by minutes, and the end follows from that.
const SLACK: Duration = Duration::from_mins(10);

/// Most characters of the cluster's text that get into a message.
const QUOTED: usize = 200;

/// The way that `admin` has, with a certificate of this user, a member of this group: names of 1 to 64
/// printable letters of ASCII. `lifetime` is [`SHORTEST_LIFETIME`] to `i32::MAX` seconds; that the cluster
/// signs for less is logged.
///
/// # Errors
/// The cluster does not sign it: why, and what to do.
pub async fn sign_for_person(
    admin: Kubeconfig,
    user: &str,
    group: Option<&str>,
    lifetime: Duration,
) -> anyhow::Result<Kubeconfig> {
    let Request { request, key } = Request::new(user, group)?;
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
            "expirationSeconds": lifetime.as_secs(),
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
    if let Some(end) = ends(&certificate).filter(|&end| is_early(end, lifetime, Timestamp::now())) {
        tracing::warn!("the cluster signs for less than was asked for: the certificate ends at {end:.0}");
    }
    Ok(Kubeconfig { credential: Credential::Certificate(Pair { certificate, key }), ..admin })
}

/// Whether a certificate ends before what was asked for. A cluster may sign one that ends at the end of all
/// time, so nothing is added to `end`.
fn is_early(end: Timestamp, lifetime: Duration, now: Timestamp) -> bool {
    let left = Duration::try_from(end.duration_since(now)).unwrap_or_default();
    left.saturating_add(SLACK) < lifetime
}

async fn approve(inside: &UntrustedApi, path: &str) -> anyhow::Result<()> {
    let request = inside.get(path).await?.context("it is gone")?;
    let message = "asked for by portico kubeconfig --as";
    Ok(inside.approve(path, request, "PorticoKubeconfig", message).await?)
}

/// Waits for the certificate, PEM.
async fn signed(inside: &UntrustedApi, path: &str) -> anyhow::Result<String> {
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
fn explained(error: UntrustedApiError) -> anyhow::Error {
    match &error {
        UntrustedApiError::Refused { code: 403, message, .. } if message.contains("system:masters") => {
            anyhow!(
                "{error}; have --group another name, and bind it: kubectl create clusterrolebinding NAME \
             --clusterrole=cluster-admin --group=GROUP"
            )
        }
        _ => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_without_an_end_is_long_enough_and_one_that_ends_early_is_reported() {
        let now = Timestamp::UNIX_EPOCH;
        let is_early = |end| is_early(end, Duration::from_hours(1), now);
        assert!(!is_early(Timestamp::MAX));
        assert!(!is_early(now + Duration::from_mins(50)));
        assert!(is_early(now + Duration::from_mins(49)));
        assert!(is_early(Timestamp::MIN));
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
