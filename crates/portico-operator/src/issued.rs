//! A certificate of the seed and the authority that signs it, each in a Secret. Decides which of the two has
//! to be written by now, and which authorities their clients must trust.
//!
//! Pure: the tunnel listener's and the webhook's controllers write it, each with a view of its own on an
//! authority that is gone. Secrets and names are those of [`portico_pki::inventory`].

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use portico_api::meta::ObjectKey;
use portico_expose::exposure::MANAGED_BY;
use portico_pki::inventory::{CA_CERTIFICATE, CA_KEY, Leaf, Stored};
use portico_pki::{
    Authority, IssueError, KeyKind, Names, Pair, Profile, Step, Succession, Unusable, ends, wants_renewal,
};
use serde_json::{Map, Value, json};

/// Keys of a certificate in a Secret of type `kubernetes.io/tls`.
const TLS: (&str, &str) = ("tls.crt", "tls.key");

/// Keys of the successor of the authority, and of the certificate of the one before.
const NEXT: (&str, &str) = ("next-ca.crt", "next-ca.key");
const FORMER: &str = "former-ca.crt";

/// A certificate, and the Secrets of it and of its authority.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Issued {
    leaf: Leaf,
    /// The Secret of the certificate.
    pub(crate) certificate: ObjectKey,
    /// The Secret of the authority.
    pub(crate) authority: ObjectKey,
    /// What both belong to, for the label of that name.
    app: &'static str,
}

/// What has to be written, in this order.
pub(crate) struct Due {
    /// The Secret of the authority, if it is another one by now, and the step of its succession.
    pub(crate) authority: Option<(Value, Option<Step>)>,
    /// The Secret of the certificate and the reason, if it has to be issued. An error if that is not
    /// possible.
    pub(crate) certificate: Result<Option<(Value, String)>, Unusable>,
    /// Whether one of the two would take the place of what is there.
    pub(crate) replaces: bool,
    /// What clients must trust.
    pub(crate) trusted: String,
}

impl Issued {
    /// The Secrets of `leaf` in this namespace.
    pub(crate) fn new(leaf: Leaf, namespace: &str, app: &'static str) -> Self {
        let key = |name| ObjectKey::new(namespace, name);
        Self { certificate: key(leaf.secret), authority: key(leaf.signer.secret()), leaf, app }
    }

    /// Keys of certificate and private key in the Secret.
    pub(crate) fn keys(&self) -> (&'static str, &'static str) {
        match self.leaf.stored {
            Stored::Pair(certificate, key) => (certificate, key),
            Stored::Kubeconfig(_) => TLS,
        }
    }

    /// What the certificate is to say.
    pub(crate) fn profile(&self, names: Names) -> Profile {
        self.leaf.profile(names)
    }

    /// The certificate that a Secret holds.
    pub(crate) fn pair(&self, secret: &Value) -> Pair {
        pair(secret, self.keys())
    }

    /// What has to be written, with the two Secrets as they are. Without an authority a new one is made.
    pub(crate) fn due(
        &self,
        authority: Option<&Value>,
        held: Option<&Pair>,
        profile: &Profile,
        now: Timestamp,
    ) -> Result<Due, IssueError> {
        let name = self.leaf.signer.common_name("");
        let is_new = authority.is_none();
        let mut succession = match authority {
            Some(secret) => read_succession(secret),
            None => Succession::first(&name, now)?,
        };
        let step = succession.advance(&name, now)?;
        let certificate = match Authority::read(&succession.current, now) {
            Ok(signer) => Ok(self.certificate_due(&signer, held, profile, now)?),
            Err(why) => Err(why),
        };
        let changed = is_new || step.is_some();
        let renewed = held.is_some() && matches!(certificate, Ok(Some(_)));
        Ok(Due {
            replaces: renewed || changed && !is_new,
            trusted: succession.trusted(),
            authority: changed.then(|| (self.authority_secret(&succession), step)),
            certificate,
        })
    }

    fn certificate_due(
        &self,
        signer: &Authority,
        held: Option<&Pair>,
        profile: &Profile,
        now: Timestamp,
    ) -> Result<Option<(Value, String)>, IssueError> {
        let why = match held {
            None => "it is new".to_owned(),
            Some(held) => match wants_renewal(held, profile, signer, now) {
                Some(reason) => reason.to_string(),
                None => return Ok(None),
            },
        };
        let issued = signer.issue(profile, KeyKind::default(), now)?;
        let keys = self.keys();
        let data = [(keys.0, &*issued.certificate), (keys.1, &issued.key)];
        Ok(Some((self.secret(&self.certificate, "kubernetes.io/tls", data), why)))
    }

    fn authority_secret(&self, authority: &Succession) -> Value {
        let Succession { current, next, former } = authority;
        let mut data = vec![(CA_CERTIFICATE, &*current.certificate), (CA_KEY, &*current.key)];
        if let Some(next) = next {
            data.extend([(NEXT.0, &*next.certificate), (NEXT.1, &*next.key)]);
        }
        data.extend(former.iter().map(|former| (FORMER, &**former)));
        self.secret(&self.authority, "Opaque", data)
    }

    fn secret<'a>(
        &self,
        key: &ObjectKey,
        kind: &str,
        data: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Value {
        let data: Map<String, Value> =
            data.into_iter().map(|(key, text)| (key.to_owned(), STANDARD.encode(text).into())).collect();
        json!({"metadata": self.metadata(key), "type": kind, "data": data})
    }

    /// The metadata of an object that belongs to the same app as the certificate.
    pub(crate) fn metadata(&self, key: &ObjectKey) -> Value {
        let mut metadata = json!({"name": key.name, "labels": {"app.kubernetes.io/name": self.app,
            "app.kubernetes.io/part-of": "portico", MANAGED_BY.0: MANAGED_BY.1}});
        if !key.namespace.is_empty() {
            metadata["namespace"] = json!(key.namespace);
        }
        metadata
    }
}

/// What clients must trust by the Secret of an authority as it is; `None` if that holds no certificate.
pub(crate) fn trusted(authority: &Value) -> Option<String> {
    let succession = read_succession(authority);
    ends(&succession.current.certificate).map(|_| succession.trusted())
}

fn read_succession(secret: &Value) -> Succession {
    let next = pair(secret, NEXT);
    let former = text(secret, FORMER);
    Succession {
        current: pair(secret, (CA_CERTIFICATE, CA_KEY)),
        next: (!next.certificate.is_empty()).then_some(next),
        former: (!former.is_empty()).then_some(former),
    }
}

fn pair(secret: &Value, (certificate, key): (&str, &str)) -> Pair {
    Pair { certificate: text(secret, certificate), key: text(secret, key) }
}

/// What a Secret holds under `key`; empty if that is no text.
pub(crate) fn text(secret: &Value, key: &str) -> String {
    let data = secret.get("data").and_then(|data| data.get(key)).and_then(Value::as_str);
    let bytes = data.and_then(|data| STANDARD.decode(data).ok()).unwrap_or_default();
    String::from_utf8(bytes).unwrap_or_default()
}
