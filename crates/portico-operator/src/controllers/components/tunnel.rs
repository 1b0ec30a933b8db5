//! The certificate of the tunnel listener, and the authorities that agents trust. Both are made here, or
//! provided and judged.
//!
//! Secrets and names are those of [`portico_pki::inventory`]. An authority that is gone is not made anew
//! while a certificate of it remains: agents would trust nothing any more. The ConfigMap has the authorities
//! that agents must trust, also for a provided certificate. So a reader of it needs no right to read a
//! private key.

use std::net::IpAddr;

use jiff::Timestamp;
use portico_api::annotations::{PROVIDED, TUNNEL_CERTIFICATE};
use portico_api::names::GATEWAY;
use portico_api::seed::Seed;
use portico_kube::events::Severity;
use portico_pki::inventory::{CA_CERTIFICATE, TUNNEL};
use portico_pki::{IssueError, Names, Pair, Profile, ends, unfit};
use serde_json::json;

use super::context::Context;
use crate::clock::{CLOCK_OFF, far_off, waits};
use crate::condition::State;
use crate::issued::{Issued, text};
use crate::managed::{Managed, Presence};
use crate::write::WriteError;

/// Status of the certificate of the tunnel listener.
pub(super) struct Tunnel {
    /// Whether there is one: the gateway ends without the files that it is configured to read.
    pub(super) serves: bool,
    /// What is wrong with it.
    pub(super) problem: Option<State>,
    /// When it ends.
    pub(super) ends: Option<Timestamp>,
}

/// Whether something else makes the certificate.
pub(super) fn is_provided(seed: &Seed) -> bool {
    seed.metadata.annotation(TUNNEL_CERTIFICATE) == Some(PROVIDED)
}

/// The certificate that agents see, in this namespace.
pub(super) fn issued(namespace: &str) -> Issued {
    Issued::new(TUNNEL, namespace, GATEWAY)
}

impl Context {
    /// Makes the certificate as it should be, or judges the one that is there.
    pub(super) async fn tunnel(
        &self,
        seed: &Seed,
        names: Names,
        now: Timestamp,
    ) -> Result<Tunnel, WriteError> {
        let profile = self.issued.profile(names);
        let held = || self.certificate.value().map(|secret| self.issued.pair(&secret));
        let mut tunnel = if is_provided(seed) {
            self.provided(seed, &profile, held().as_ref(), now).await?
        } else {
            self.made(seed, &profile, held().as_ref(), now).await?
        };
        // It may be another one by now.
        tunnel.ends = held().and_then(|pair| ends(&pair.certificate));
        Ok(tunnel)
    }

    /// Judges a certificate that something else makes, and passes on what it is to be trusted by.
    async fn provided(
        &self,
        seed: &Seed,
        profile: &Profile,
        pair: Option<&Pair>,
        now: Timestamp,
    ) -> Result<Tunnel, WriteError> {
        // This controller may have issued the certificate before. A change by its new owner is no contention.
        self.certificate.forget();
        let (secret, keys) = (self.certificate.key(), self.issued.keys());
        let whole = pair.filter(|pair| !pair.certificate.is_empty() && !pair.key.is_empty());
        let problem = match whole {
            None => Some(State::bad(
                "CertificateMissing",
                format!(
                    "Secret {secret} with {} and {} is not there yet, and nothing is tunneled before; what \
                     the annotation {TUNNEL_CERTIFICATE} speaks of must write it",
                    keys.0, keys.1
                ),
            )),
            Some(pair) => unfit(pair, profile, now).map(|reason| {
                let message = format!(
                    "the certificate in Secret {secret}: {reason}; have what issues it (kubectl describe \
                     certificate, with cert-manager) put that right"
                );
                State::bad("CertificateUnfit", message)
            }),
        };
        let trusted =
            self.certificate.value().map(|secret| text(&secret, CA_CERTIFICATE)).unwrap_or_default();
        if trusted.is_empty() {
            self.remove(&self.trusted).await?;
        } else {
            self.trust(seed, &trusted).await?;
        }
        Ok(Tunnel { serves: whole.is_some(), problem, ends: None })
    }

    /// Makes authority and certificate, or renews them.
    async fn made(
        &self,
        seed: &Seed,
        profile: &Profile,
        pair: Option<&Pair>,
        now: Timestamp,
    ) -> Result<Tunnel, WriteError> {
        let impossible = |error: IssueError| WriteError::Impossible(error.to_string());
        let serves = pair.is_some();
        let stays = |state| Ok(Tunnel { serves, problem: Some(state), ends: None });
        let mut found = self.authority.value();
        if found.is_none() {
            // A second authority would take the trust away from everything that the first one signed.
            found = self.authority.read(&self.client).await?;
        }
        if found.is_none() && serves {
            return stays(self.authority_is_gone());
        }
        let due = self.issued.due(found.as_ref(), pair, profile, now).map_err(impossible)?;
        if due.replaces
            && let Some(clock) = far_off(&self.client, self.settings.clock).await
        {
            return stays(State::bad(CLOCK_OFF, waits(&clock)));
        }
        if let Some((secret, step)) = due.authority {
            self.write(seed, &self.authority, &secret).await?;
            if let Some(step) = step {
                let text = format!("Secret {}: {step}", self.authority.key());
                self.tell(seed, Severity::Normal, "TunnelAuthority", &text).await;
            }
        }
        match due.certificate {
            Err(why) => {
                let message = format!("Secret {}: {why}", self.authority.key());
                return stays(State::bad("AuthorityUnusable", message));
            }
            Ok(Some((secret, why))) => {
                self.write(seed, &self.certificate, &secret).await?;
                let text = format!("Secret {}: the certificate is issued: {why}", self.certificate.key());
                self.tell(seed, Severity::Normal, "CertificateIssued", &text).await;
            }
            Ok(None) => {}
        }
        self.trust(seed, &due.trusted).await?;
        Ok(Tunnel { serves: true, problem: None, ends: None })
    }

    fn authority_is_gone(&self) -> State {
        let (authority, certificate) = (self.authority.key(), self.certificate.key());
        let message = format!(
            "Secret {authority} is gone, and what it signed is trusted by agents: restore it from a backup, \
             with its labels. Or start anew, after which every agent needs the new CA: kubectl delete secret \
             -n {} {}",
            certificate.namespace, certificate.name
        );
        State::bad("AuthorityMissing", message)
    }

    /// Writes what agents must trust.
    async fn trust(&self, seed: &Seed, certificates: &str) -> Result<(), WriteError> {
        let metadata = self.issued.metadata(self.trusted.key());
        let wanted = json!({"metadata": metadata, "data": {CA_CERTIFICATE: certificates}});
        self.write(seed, &self.trusted, &wanted).await
    }
}

/// The hosts as a certificate has them.
pub(super) fn names(hosts: impl IntoIterator<Item = String>) -> Names {
    let mut names = Names::default();
    for host in hosts {
        match host.parse::<IpAddr>() {
            Ok(ip) => drop(names.ips.insert(ip)),
            Err(_) => drop(names.dns.insert(host)),
        }
    }
    names
}

/// Whether a Secret of somebody else is in the way: of these two, those that are to be made here.
pub(super) fn is_in_the_way(held: &dyn Managed, seed: &Seed) -> bool {
    held.presence() == Presence::Foreign && !is_provided(seed)
}
