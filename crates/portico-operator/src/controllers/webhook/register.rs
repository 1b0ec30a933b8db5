//! The objects that the leader writes for the webhook. They are its certificate, and the
//! ValidatingWebhookConfiguration that leads the API server to it.
//!
//! The authority is known to that configuration alone, which is written in the same pass. So one that is lost
//! or cannot be used is made anew, unlike that of the tunnel listener. Where KKP's controllers run there is
//! no configuration, and a former one is deleted.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::Resource;
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use k8s_openapi::api::core::v1::ObjectReference;
use portico_api::annotations::EXPOSE_NAMESPACED;
use portico_api::meta::ObjectKey;
use portico_kube::events::{Note, Severity};
use portico_pki::{IssueError, Names, ends};
use serde_json::{Value, json};
use tokio::time::Instant;
use tracing::{info, warn};

use super::server::PATH;
use super::{Context, Reached};
use crate::clock::{CLOCK_OFF, far_off, waits};
use crate::issued::trusted;
use crate::kkp::Kkp;
use crate::managed::{Managed, Presence, Put};
use crate::write::{PUT_BACK, WriteError, must_lead, part};

/// Seconds that the API server waits for an answer, before it admits.
const TIMEOUT: u8 = 3;

/// Status of the webhook's registration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum State {
    /// The API server asks.
    Registered,
    /// It does not, because it must not: KKP's controllers run.
    Observing(String),
    /// It does not, or not as it should.
    Trouble(&'static str, String),
}

impl Context {
    /// Makes certificate and configuration as they should be; `None` while it is not known whether KKP
    /// keeps the clusters.
    pub(super) async fn pass(&self) -> Result<Option<State>, WriteError> {
        match self.kkp.now() {
            Kkp::Unknown => return Ok(None),
            Kkp::Present(deployment) => {
                self.remove_configuration().await?;
                let text = format!(
                    "KKP's controllers are here (Deployment {deployment}): they decide what is admitted"
                );
                return Ok(Some(State::Observing(text)));
            }
            Kkp::Absent => {}
        }
        if let Some(trouble) = self.in_the_way().or_else(|| self.yielded()) {
            return Ok(Some(trouble));
        }
        let (bundle, clock) = self.certify().await?;
        if let Some(bundle) = bundle {
            self.write(&self.configuration, &self.wanted_configuration(&bundle)).await?;
        }
        Ok(Some(match clock {
            None => State::Registered,
            Some(clock) => State::Trouble(CLOCK_OFF, waits(&clock)),
        }))
    }

    /// Renews what is due. Returns what the API server must trust, if there is a certificate, and why the
    /// clock keeps that as it is.
    async fn certify(&self) -> Result<(Option<String>, Option<String>), WriteError> {
        let impossible = |error: IssueError| WriteError::Impossible(error.to_string());
        let now = (self.settings.clock)();
        let profile = self.issued.profile(self.names());
        let held = self.certificate.value().map(|secret| self.issued.pair(&secret));
        let due = |authority: Option<&Value>| {
            self.issued.due(authority, held.as_ref(), &profile, now).map_err(impossible)
        };
        let authority = self.authority.value();
        let mut wanted = due(authority.as_ref())?;
        if (wanted.replaces || wanted.certificate.is_err())
            && let Some(clock) = far_off(&self.client, self.settings.clock).await
        {
            let signer = authority.filter(|_| held.is_some());
            return Ok((signer.and_then(|secret| trusted(&secret)), Some(clock)));
        }
        if let Err(why) = &wanted.certificate {
            self.tell(
                Severity::Warning,
                "AuthorityReplaced",
                &format!("Secret {}: {why}", self.authority.key()),
            )
            .await;
            wanted = due(None)?;
        }
        if let Some((secret, step)) = &wanted.authority {
            self.write(&self.authority, secret).await?;
            if let Some(step) = step {
                let text = format!("Secret {}: {step}", self.authority.key());
                self.tell(Severity::Normal, "WebhookAuthority", &text).await;
            }
        }
        if let Ok(Some((secret, why))) = &wanted.certificate {
            self.write(&self.certificate, secret).await?;
            let text = format!("Secret {}: the certificate is issued: {why}", self.certificate.key());
            self.tell(Severity::Normal, "CertificateIssued", &text).await;
        }
        Ok((Some(wanted.trusted), None))
    }

    /// The name by which the API server verifies the certificate.
    fn names(&self) -> Names {
        let host = match &self.settings.reached {
            Reached::Service(service) => format!("{}.{}.svc", service.name, service.namespace),
            Reached::Url(url) => url.host().unwrap_or_default().trim_matches(['[', ']']).to_owned(),
        };
        let mut names = Names::default();
        match host.parse() {
            Ok(ip) => drop(names.ips.insert(ip)),
            Err(_) => drop(names.dns.insert(host)),
        }
        names
    }

    fn wanted_configuration(&self, bundle: &str) -> Value {
        let mut client = match &self.settings.reached {
            Reached::Service(service) => json!({"service": {
                "name": service.name, "namespace": service.namespace, "port": 443, "path": PATH}}),
            Reached::Url(url) => json!({"url": format!("{}{PATH}", url.to_string().trim_end_matches('/'))}),
        };
        client["caBundle"] = STANDARD.encode(bundle).into();
        let own = format!("system:serviceaccounts:{}", self.issued.certificate.namespace);
        // Clients that change clusters all the time and never make these mistakes: Portico, nodes, the
        // controllers of Kubernetes.
        let others = format!(
            "!['{own}', 'system:nodes', 'system:serviceaccounts:kube-system'].exists(group, group in \
             request.userInfo.groups)"
        );
        let conditions = [
            json!({"name": "by-others", "expression": others}),
            json!({"name": "not-being-deleted", "expression": "!has(object.metadata.deletionTimestamp)"}),
        ];
        let exposed = format!(
            "has(object.metadata.annotations) && ['{}', '{EXPOSE_NAMESPACED}'].exists(key, key in \
             object.metadata.annotations)",
            self.settings.expose_annotation
        );
        let of_services = [&conditions[..], &[json!({"name": "exposed", "expression": exposed})]].concat();
        let webhook = |name: &str, group: &str, resources: &[&str], conditions: &[Value]| {
            json!({
                "name": name, "clientConfig": client, "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "failurePolicy": "Ignore", "matchPolicy": "Equivalent", "timeoutSeconds": TIMEOUT,
                "rules": [{"apiGroups": [group], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"],
                    "resources": resources, "scope": "*"}],
                "matchConditions": conditions,
            })
        };
        let kkp = ["clusters", "seeds", "kubermaticconfigurations"];
        let mut services = webhook("services.portico.k8c.io", "", &["services"], &of_services);
        // Nothing is to stand in the way of what the seed itself needs.
        services["namespaceSelector"] = json!({"matchExpressions": [
            {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system"]}]});
        json!({"metadata": self.issued.metadata(self.configuration.key()), "webhooks": [
            webhook("clusters.portico.k8c.io", "kubermatic.k8c.io", &kkp, &conditions), services]})
    }

    /// The objects that somebody else has made under the names of the webhook.
    fn in_the_way(&self) -> Option<State> {
        let found = self.held().into_iter().find(|held| held.presence() == Presence::Foreign)?;
        let message = format!(
            "{} {} is not made by this operator, so nothing is written; delete it, or rename yours",
            found.kind(),
            name(found.key())
        );
        Some(State::Trouble("NameTaken", message))
    }

    /// An object that another writer changes back.
    fn yielded(&self) -> Option<State> {
        let now = Instant::now();
        let (held, writer) = self.held().into_iter().find_map(|held| Some((held, held.yielded_to(now)?)))?;
        let message = format!(
            "{} {} is changed back by {writer} each time it is written; stop that writer, this one waits",
            held.kind(),
            name(held.key())
        );
        Some(State::Trouble("ForeignWriter", message))
    }

    async fn remove_configuration(&self) -> Result<(), WriteError> {
        must_lead(&self.leads)?;
        if self.configuration.remove(&self.client).await? {
            self.counters.wrote(self.configuration.kind());
            info!(object = name(self.configuration.key()), kind = self.configuration.kind(), "deleted");
        }
        Ok(())
    }

    async fn write(&self, held: &dyn Managed, wanted: &Value) -> Result<(), WriteError> {
        must_lead(&self.leads)?;
        let put = held.put(&self.client, wanted).await?;
        if put != Put::Unchanged {
            self.counters.wrote(held.kind());
            info!(object = name(held.key()), kind = held.kind(), "written");
        }
        if let Put::Back(text) = put {
            let note =
                Note { severity: Severity::Normal, reason: PUT_BACK, action: "KeepWebhook", text: &text };
            self.events.publish_about(&self.reference(), part(held.kind(), held.key()), note).await;
        }
        Ok(())
    }

    /// Records the status of the registration, and reports it if it changed.
    pub(super) async fn report(&self, state: State) {
        let before = self.status.webhook(|webhook| {
            let before = (webhook.registered, webhook.trouble.clone(), webhook.observing.clone());
            webhook.registered = state == State::Registered;
            (webhook.trouble, webhook.observing) = match &state {
                State::Registered => (None, None),
                State::Observing(text) => (None, Some(text.clone())),
                State::Trouble(reason, text) => (Some(format!("{reason}: {text}")), None),
            };
            (before, (webhook.registered, webhook.trouble.clone(), webhook.observing.clone()))
        });
        if before.0 == before.1 {
            return;
        }
        match state {
            State::Registered => {
                let text = "changes of Clusters, Seeds, configurations and exposed Services are reviewed";
                self.tell(Severity::Normal, "WebhookRegistered", text).await;
            }
            // Written beside KKP is nothing, no Event either.
            State::Observing(text) => info!("{text}"),
            State::Trouble(reason, text) => self.tell(Severity::Warning, reason, &text).await,
        }
    }

    /// An Event on the configuration, and a line in the log.
    async fn tell(&self, severity: Severity, reason: &str, text: &str) {
        match severity {
            Severity::Normal => info!(reason, "{text}"),
            Severity::Warning => warn!(reason, "{text}"),
        }
        self.events.publish(&self.reference(), Note { severity, reason, action: "KeepWebhook", text }).await;
    }

    /// The configuration as Events name it.
    fn reference(&self) -> ObjectReference {
        let seen = self.configuration.value().unwrap_or_default();
        ObjectReference {
            api_version: Some(ValidatingWebhookConfiguration::API_VERSION.to_owned()),
            kind: Some(ValidatingWebhookConfiguration::KIND.to_owned()),
            name: Some(self.configuration.key().name.to_string()),
            uid: seen.pointer("/metadata/uid").and_then(Value::as_str).map(str::to_owned),
            ..ObjectReference::default()
        }
    }

    /// When the certificate ends that is served now.
    pub(super) fn note_end(&self) {
        let held = self.certificate.value().map(|secret| self.issued.pair(&secret));
        let end = held.and_then(|pair| ends(&pair.certificate)).map(|end| end.as_second());
        self.status.webhook(|webhook| webhook.certificate_ends = end);
    }
}

/// Namespace and name, of objects that have both.
fn name(key: &ObjectKey) -> String {
    if key.namespace.is_empty() { key.name.to_string() } else { key.to_string() }
}
