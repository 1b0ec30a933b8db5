//! The kubeconfig of a cluster's administrators, Secret `admin-kubeconfig`: made where the cluster's
//! authorities are on the seed with their keys.
//!
//! Another address changes the address in it and nothing else, so that copies of the former one work as long
//! as the former address answers. A Secret that somebody else made is left alone: KKP's, or a person's.

use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::{Client, Resource};
use portico_api::exposed_cluster::MigrationState;
use portico_expose::exposure::{CLUSTER_LABEL, MANAGED_BY};
use portico_expose::migration::{Fact, Proof};
use portico_kube::cached::Cached;
use portico_pki::inventory::{ADMIN_KUBECONFIG, CA_CERTIFICATE, CA_KEY, KUBECONFIG, LEAVES, Signer};
use portico_pki::{Authority, Credential, KeyKind, Kubeconfig, Names, Pair, Profile};
use serde_json::{Value, json};

use super::context::Context;
use super::subject::{Known, Subject, text};
use crate::cache::api;
use crate::clock::far_off;
use crate::write::RequestError;

impl Context {
    /// Makes the Secret as it should be; `Err` says why there can be none.
    pub(super) async fn issue(&self, subject: &Subject) -> Result<Result<(), String>, RequestError> {
        let (name, namespace) = (&*subject.cluster.metadata.name, &*subject.namespace);
        if subject.cluster.is_hosted() {
            // One of many Secrets that the hosting controller keeps.
            return Ok(Ok(()));
        }
        let Some(servers) = self.secret(namespace, Signer::Cluster.secret()).await? else {
            return Ok(Ok(()));
        };
        // As KKP has it: one authority for servers and clients.
        let clients = self.secret(namespace, Signer::Clients.secret()).await?;
        let signs = clients.as_ref().unwrap_or(&servers);
        let (Some(authority), Some(signer)) = (text(&servers, CA_CERTIFICATE), pair(signs)) else {
            return Ok(Ok(()));
        };
        let secrets = api::<Secret>(&self.client, namespace);
        let current = self.read(secrets.clone(), "Secret", ADMIN_KUBECONFIG).await?;
        if current.as_ref().is_some_and(|current| !current.is_ours()) {
            return Ok(Ok(()));
        }
        let server = subject.exposed.spec.address.url.to_string();
        let address = Kubeconfig {
            cluster: name.to_owned(),
            server,
            authority,
            credential: Credential::Token(String::new()),
        };
        let before = current.as_ref().and_then(held);
        let kubeconfig = match timely(&self.client, before, address, &signer, Timestamp::now).await {
            Ok(kubeconfig) => kubeconfig,
            Err(why) => {
                let secret = signs.meta().name.as_deref().unwrap_or_default();
                let message =
                    format!("no {ADMIN_KUBECONFIG} can be issued: Secret {namespace}/{secret}: {why}");
                return Ok(Err(message));
            }
        };
        let what = format!("Secret {namespace}/{ADMIN_KUBECONFIG}");
        let wanted = wanted(name, namespace, &kubeconfig);
        self.apply(&what, &secrets, &wanted, current.as_ref()).await
    }

    /// Whether the kubeconfig of a cluster that migrates leads to its first door, KKP's too.
    pub(super) async fn prove_issued(
        &self,
        subject: &Subject,
        known: &mut Known,
    ) -> Result<(), RequestError> {
        if subject.state() != Some(MigrationState::Moving) {
            return Ok(());
        }
        let namespace = &subject.namespace;
        let secret = self.read(api::<Secret>(&self.client, namespace), "Secret", ADMIN_KUBECONFIG).await?;
        let (name, url) =
            (format!("Secret {namespace}/{ADMIN_KUBECONFIG}"), &subject.exposed.spec.address.url);
        let fact = match secret {
            None if subject.cluster.is_hosted() => Fact::NotSo(format!("there is no {name} yet")),
            secret => leads_to(&name, secret.as_ref(), url),
        };
        known.insert(Proof::Kubeconfigs, fact);
        Ok(())
    }
}

/// Whether a kubeconfig leads to `url`. None was issued if there is no Secret.
fn leads_to(name: &str, secret: Option<&Cached<Secret>>, url: &str) -> Fact {
    let Some(secret) = secret else { return Fact::So };
    let why = match held(secret) {
        Some(kubeconfig) if kubeconfig.server == url => return Fact::So,
        Some(_) => "leads elsewhere",
        None => "holds no kubeconfig that can be read",
    };
    Fact::NotSo(format!(
        "{name} {why}, and not to {url}; Portico writes its own, one by somebody else is to be changed or \
         deleted"
    ))
}

/// The Secret as it is applied.
fn wanted(cluster: &str, namespace: &str, kubeconfig: &Kubeconfig) -> Value {
    let data = ByteString(kubeconfig.to_yaml().into_bytes());
    let labels = json!({MANAGED_BY.0: MANAGED_BY.1, CLUSTER_LABEL: cluster});
    json!({"metadata": {"name": ADMIN_KUBECONFIG, "namespace": namespace, "labels": labels},
        "data": {KUBECONFIG: data}})
}

/// The kubeconfig that a Secret holds.
fn held(secret: &Cached<Secret>) -> Option<Kubeconfig> {
    let secret: Secret = serde_json::from_value(secret.value()).ok()?;
    Kubeconfig::parse(&text(&secret, KUBECONFIG)?).ok()
}

/// An authority with its key; `None` if only its certificate is there.
fn pair(secret: &Secret) -> Option<Pair> {
    Some(Pair { certificate: text(secret, CA_CERTIFICATE)?, key: text(secret, CA_KEY)? })
}

/// What [`present`] has. By a clock that is far off nothing takes the place of the credential of `before`.
async fn timely(
    client: &Client,
    before: Option<Kubeconfig>,
    address: Kubeconfig,
    signer: &Pair,
    now: fn() -> Timestamp,
) -> Result<Kubeconfig, String> {
    let kubeconfig = present(before.clone(), address, signer, now())?;
    if before.is_some_and(|before| before.credential != kubeconfig.credential)
        && let Some(clock) = far_off(client, now).await
    {
        return Err(format!("it signs nothing in place of the former while the operator's clock is {clock}"));
    }
    Ok(kubeconfig)
}

/// The kubeconfig that leads to `address`, with the credential of `before` as long as that is good.
fn present(
    before: Option<Kubeconfig>,
    address: Kubeconfig,
    signer: &Pair,
    now: Timestamp,
) -> Result<Kubeconfig, String> {
    let authority = Authority::read(signer, now).map_err(|why| why.to_string())?;
    let profile = profile().ok_or("it is in no inventory")?;
    let before = before.map(|before| before.credential);
    let kubeconfig = address.with_certificate(before.as_ref(), &profile, &authority, KeyKind::default(), now);
    kubeconfig.map_err(|why| why.to_string())
}

/// What its certificate says.
fn profile() -> Option<Profile> {
    let leaf = LEAVES.iter().find(|leaf| leaf.secret == ADMIN_KUBECONFIG)?;
    Some(leaf.profile(Names::default()))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::{Request, Response, header};
    use jiff::ToSpan;
    use kube::client::Body;
    use tower::service_fn;

    use super::*;

    fn now() -> Timestamp {
        "2026-08-01T00:00:00Z".parse().unwrap()
    }

    fn kubeconfig_to(server: &str) -> Kubeconfig {
        let credential = Credential::Token(String::new());
        Kubeconfig { cluster: "a".into(), server: server.into(), authority: "CA".into(), credential }
    }

    #[test]
    fn another_address_keeps_the_credential_and_a_late_one_is_issued_again() {
        let ca = Authority::create("client-ca", KeyKind::default(), now()).unwrap();
        let first = present(None, kubeconfig_to("https://a:1"), &ca, now()).unwrap();
        let moved = present(Some(first.clone()), kubeconfig_to("https://a:2"), &ca, now()).unwrap();
        assert_eq!(moved.server, "https://a:2");
        assert!(moved.credential == first.credential);
        let late = now() + (340 * 24).hours();
        let renewed = present(Some(first.clone()), kubeconfig_to("https://a:1"), &ca, late).unwrap();
        assert!(renewed.credential != first.credential);
        let other = Authority::create("client-ca", KeyKind::default(), now()).unwrap();
        let replaced = present(Some(first.clone()), kubeconfig_to("https://a:1"), &other, now()).unwrap();
        assert!(replaced.credential != first.credential);
    }

    /// An API server whose clock is right.
    fn on_time() -> Client {
        let service = service_fn(|_: Request<Body>| async {
            let date = Timestamp::now().strftime("%a, %d %b %Y %H:%M:%S GMT").to_string();
            Ok::<_, Infallible>(Response::builder().header(header::DATE, date).body(Body::empty()).unwrap())
        });
        Client::new(service, "default")
    }

    #[tokio::test]
    async fn a_clock_that_is_far_ahead_replaces_no_certificate_that_is_good() {
        let (api, early) = (on_time(), Timestamp::now() - (340 * 24).hours());
        let ca = Authority::create("client-ca", KeyKind::default(), early).unwrap();
        let first = present(None, kubeconfig_to("https://a:1"), &ca, Timestamp::now()).unwrap();
        let ahead = || Timestamp::now() + (340 * 24).hours();
        let issued = timely(&api, Some(first.clone()), kubeconfig_to("https://a:1"), &ca, ahead).await;
        let why = issued.err().unwrap();
        assert!(why.contains("clock is more than two hours ahead of the API server's"), "{why}");
        // Another address ends no credential, and waits for no clock.
        let days_ahead = || Timestamp::now() + (3 * 24).hours();
        let moved = timely(&api, Some(first.clone()), kubeconfig_to("https://a:2"), &ca, days_ahead).await;
        let moved = moved.unwrap();
        assert!(moved.credential == first.credential && moved.server == "https://a:2");
        let late = present(None, kubeconfig_to("https://a:1"), &ca, early).unwrap();
        let renewed =
            timely(&api, Some(late.clone()), kubeconfig_to("https://a:1"), &ca, Timestamp::now).await;
        assert!(renewed.unwrap().credential != late.credential);
    }

    #[test]
    fn only_a_kubeconfig_to_the_first_door_counts_and_none_is_as_good() {
        let of = |secret: Option<Value>| {
            let secret = secret.map(|data| {
                let meta = json!({"name": ADMIN_KUBECONFIG, "namespace": "cluster-a"});
                let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": data});
                serde_json::from_value::<Cached<Secret>>(secret).unwrap()
            });
            leads_to("Secret cluster-a/admin-kubeconfig", secret.as_ref(), "https://a:1")
        };
        let text = |text: String| json!({KUBECONFIG: ByteString(text.into_bytes())});
        let kubeconfig =
            |server| Kubeconfig { credential: Credential::Token("t".into()), ..kubeconfig_to(server) };
        assert_eq!(of(None), Fact::So);
        assert_eq!(of(Some(text(kubeconfig("https://a:1").to_yaml()))), Fact::So);
        for bad in [text(kubeconfig("https://a:2").to_yaml()), text("mine".into()), json!({})] {
            assert!(matches!(of(Some(bad)), Fact::NotSo(why) if why.contains("not to https://a:1")));
        }
    }

    #[test]
    fn an_authority_that_cannot_sign_is_reported() {
        let ca = Authority::create("client-ca", KeyKind::default(), now()).unwrap();
        let after = now() + (11 * 366 * 24).hours();
        let why = present(None, kubeconfig_to("https://a:1"), &ca, after).unwrap_err();
        assert!(why.starts_with("it expired on "), "{why}");
    }
}
