//! The certificates and keys of one cluster, all together. A review says what its Secrets should hold, which
//! of them are due, and when the next will be.
//!
//! A certificate or key that can be replaced is issued again when it is due. Others are never made anew: an
//! authority or the keys of service accounts, once the cluster has used them. A missing one is reported as
//! [`Lost`], and everything that depends on it stays as it is.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use thiserror::Error;

use crate::authority::{Authority, IssueError, Unusable};
use crate::inventory::{
    CA_CERTIFICATE, CA_KEY, CLIENT_CERTIFICATE, CLIENT_KEY, KUBECONFIG, KUBECONFIG_OF_FILES, LEAVES, Leaf,
    NamesOf, SERVICE_ACCOUNT_KEYS, SIGNING_KEY, Server, Signer, Stored, VERIFYING_KEYS, etcd,
};
use crate::kubeconfig::{Credential, Kubeconfig};
use crate::pair::{KeyKind, Pair};
use crate::profile::{LIFETIME, Names};
use crate::renewal::{Reason, renewed_at, wants_renewal};
use crate::service_account::{BadKeys, ServiceAccountKeys};
use crate::succession::ends;

/// The end of an authority is announced when less than this is left. Those of the seed announce a successor
/// as early.
const ANNOUNCED: SignedDuration = LIFETIME;

/// What Secrets hold, by name and key.
pub type Secrets = BTreeMap<String, BTreeMap<String, String>>;

/// What the certificates of a cluster follow from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterPki {
    /// Name of the Cluster: of cluster and context in kubeconfigs.
    pub cluster: String,
    /// Its namespace on the seed.
    pub namespace: String,
    /// Its external name, for the subject of a new authority.
    pub external_name: String,
    /// Names of the API server.
    pub api_server: Names,
    /// Names of the Konnectivity server.
    pub konnectivity: Names,
    /// The URL of the API server for users. `None` while that is not known; then they have no kubeconfig.
    pub external_url: Option<String>,
    /// Where the seed finds it.
    pub internal_url: String,
    /// Where the other programs of the control plane find it.
    pub control_plane_url: String,
    /// The kind of keys that are made.
    pub keys: KeyKind,
}

/// The actions on the Secrets of a cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Review {
    /// Secrets to write.
    pub due: Vec<Due>,
    /// Secrets that must not be made anew, and are missing or cannot be used.
    pub lost: Vec<Lost>,
    /// When the next certificate is due, if nothing else changes before.
    pub next: Option<Timestamp>,
    /// When each authority ends, by its Secret.
    pub authorities: BTreeMap<&'static str, Timestamp>,
}

/// A Secret to write.
#[derive(Clone, PartialEq, Eq)]
pub struct Due {
    /// Its name.
    pub secret: &'static str,
    /// Everything that it is to hold.
    pub data: BTreeMap<&'static str, String>,
    /// Why it is written. The text goes into an Event.
    pub why: Why,
}

impl Due {
    /// Whether everything breaks if there is ever another version of it.
    pub fn is_irreplaceable(&self) -> bool {
        let authorities = Signer::OF_A_CLUSTER.map(Signer::secret);
        self.secret == SERVICE_ACCOUNT_KEYS || authorities.contains(&self.secret)
    }
}

impl std::fmt::Debug for Due {
    /// Without the data.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Due").field("secret", &self.secret).field("why", &self.why).finish_non_exhaustive()
    }
}

/// Why a Secret is written.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Why {
    /// It is not there.
    #[error("it is missing")]
    Missing,
    /// Its certificate has to be issued again.
    #[error("{0}")]
    Renewal(Reason),
    /// Some of its keys are not there: somebody removed them, or an earlier version had none.
    #[error("it lacks {}", .0.join(", "))]
    Incomplete(Vec<&'static str>),
    /// The field beside the certificate differs: the address in a kubeconfig, or an authority.
    #[error("address or authority have changed")]
    Beside,
}

/// A Secret that must not be made anew.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "Secret {secret}: {why}. {depends}. Portico does not make it anew, and leaves what it signed as it is"
)]
pub struct Lost {
    /// The Secret.
    pub secret: &'static str,
    /// What is wrong with it.
    pub why: LostWhy,
    /// The parts that depend on it, as a sentence without its full stop.
    pub depends: &'static str,
}

/// The problem of a Secret that must not be made anew.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LostWhy {
    /// It is gone, or a part of it is.
    #[error("{} missing, and the cluster has used it; restore the Secret from a backup", listed(.0))]
    Missing(Vec<&'static str>),
    /// An authority that cannot sign.
    #[error("{0}")]
    Authority(Unusable),
    /// Keys that cannot be used.
    #[error("{0}; restore the Secret from a backup")]
    Keys(BadKeys),
}

fn listed(keys: &[&str]) -> String {
    format!("{} {}", keys.join(" and "), if keys.len() == 1 { "is" } else { "are" })
}

/// The authorities of a cluster that can be used, in the order of [`Signer::OF_A_CLUSTER`].
type Authorities = Vec<(Signer, Signing)>;

struct Signing {
    authority: Authority,
    certificate: String,
}

impl ClusterPki {
    /// The PKI that follows from Secrets alone, for a cluster of which nothing else is certain. Its names and
    /// addresses are those that it has. Only [`Review::endings`] of it are to be written.
    pub fn as_found(cluster: &str, namespace: &str, found: &Secrets, keys: KeyKind) -> Self {
        let names = |of: NamesOf| {
            let leaf = LEAVES.iter().find(|leaf| leaf.names == of);
            let certificate = leaf.and_then(|leaf| match leaf.stored {
                Stored::Pair(certificate, _) => found.get(leaf.secret)?.get(certificate),
                Stored::Kubeconfig(_) => None,
            });
            // One that cannot be read is not written again.
            certificate.and_then(|pem| Names::of(pem).ok()).unwrap_or_default()
        };
        let url = |of: Server| {
            let at = |leaf: &Leaf| matches!(leaf.stored, Stored::Kubeconfig(server) if server == of);
            let mut texts = LEAVES.iter().filter(|leaf| at(leaf)).filter_map(|leaf| found.get(leaf.secret));
            texts.find_map(|data| Some(Kubeconfig::parse(data.get(KUBECONFIG)?).ok()?.server))
        };
        Self {
            cluster: cluster.to_owned(),
            namespace: namespace.to_owned(),
            // No authority is made.
            external_name: cluster.to_owned(),
            api_server: names(NamesOf::ApiServer),
            konnectivity: names(NamesOf::Konnectivity),
            external_url: url(Server::External),
            internal_url: url(Server::Internal).unwrap_or_default(),
            control_plane_url: url(Server::ControlPlane).unwrap_or_default(),
            keys,
        }
    }

    /// Compares the Secrets of the namespace with what they should be. `used` is whether the cluster has been
    /// up once; Secrets that depend on another say so too.
    ///
    /// # Errors
    /// A certificate cannot be made: a name is no DNS name, or the library failed. Nothing is due then.
    pub fn review(&self, found: &Secrets, used: bool, now: Timestamp) -> Result<Review, IssueError> {
        let mut review = Review::default();
        let mut authorities = Authorities::new();
        for signer in Signer::OF_A_CLUSTER {
            let signing = self.authority(signer, found, used, now, &mut review)?;
            authorities.extend(signing.map(|signing| (signer, signing)));
        }
        for leaf in LEAVES.iter().filter(|leaf| Signer::OF_A_CLUSTER.contains(&leaf.signer)) {
            self.leaf(leaf, &authorities, found, now, &mut review)?;
        }
        self.service_accounts(found, used, &mut review)?;
        Ok(review)
    }

    /// The authority that a Secret holds, or a new one if nothing depends on it yet.
    fn authority(
        &self,
        signer: Signer,
        found: &Secrets,
        used: bool,
        now: Timestamp,
        review: &mut Review,
    ) -> Result<Option<Signing>, IssueError> {
        let secret = signer.secret();
        let signed = |leaf: &&Leaf| leaf.signer == signer && found.contains_key(leaf.secret);
        let used = used || LEAVES.iter().any(|leaf| signed(&leaf));
        let pair = match held(found, secret, [CA_CERTIFICATE, CA_KEY], used) {
            Ok(Some([certificate, key])) => Pair { certificate, key },
            Ok(None) => {
                let pair = Authority::create(&signer.common_name(&self.external_name), self.keys, now)?;
                review.make(secret, [(CA_CERTIFICATE, &pair.certificate), (CA_KEY, &pair.key)]);
                pair
            }
            Err(why) => {
                review.lost.push(Lost { secret, why, depends: depends(signer) });
                return Ok(None);
            }
        };
        let end = ends(&pair.certificate);
        review.authorities.extend(end.map(|end| (secret, end)));
        match Authority::read(&pair, now) {
            Ok(authority) => {
                review.look_at(end);
                Ok(Some(Signing { authority, certificate: pair.certificate }))
            }
            Err(why) => {
                review.lost.push(Lost { secret, why: LostWhy::Authority(why), depends: depends(signer) });
                Ok(None)
            }
        }
    }

    /// A certificate, or a kubeconfig with one. Without its authority it stays as it is.
    fn leaf(
        &self,
        leaf: &Leaf,
        authorities: &Authorities,
        found: &Secrets,
        now: Timestamp,
        review: &mut Review,
    ) -> Result<(), IssueError> {
        let of = |signer| authorities.iter().find(|(found, _)| *found == signer).map(|(_, signing)| signing);
        let Some(signing) = of(leaf.signer) else { return Ok(()) };
        let profile = leaf.profile(self.names(leaf.names));
        let current = found.get(leaf.secret);
        let text = |key: &str| current.and_then(|data| data.get(key)).cloned();
        let judge = |pair: &Pair| wants_renewal(pair, &profile, &signing.authority, now);
        let mut data = BTreeMap::new();
        let (before, after) = match leaf.stored {
            Stored::Pair(certificate, key) => {
                let before = text(certificate).zip(text(key));
                let before = before.map(|(certificate, key)| Pair { certificate, key });
                let kept = before.clone().filter(|pair| judge(pair).is_none());
                let issue = || signing.authority.issue(&profile, self.keys, now);
                let pair = kept.map_or_else(issue, Ok)?;
                data.insert(certificate, pair.certificate.clone());
                data.insert(key, pair.key.clone());
                if leaf.keys().contains(&CA_CERTIFICATE) {
                    data.insert(CA_CERTIFICATE, signing.certificate.clone());
                }
                (before, Some(pair))
            }
            Stored::Kubeconfig(server) => {
                // It also says which authority signs the API server's certificate.
                let (Some(servers), Some(url)) = (of(Signer::Cluster), self.url(server)) else {
                    return Ok(());
                };
                let before = text(KUBECONFIG).and_then(|text| Kubeconfig::parse(&text).ok());
                let before = before.map(|kubeconfig| kubeconfig.credential);
                let kubeconfig = Kubeconfig {
                    cluster: self.cluster.clone(),
                    server: url.to_owned(),
                    authority: servers.certificate.clone(),
                    credential: Credential::Token(String::new()),
                }
                .with_certificate(
                    before.as_ref(),
                    &profile,
                    &signing.authority,
                    self.keys,
                    now,
                )?;
                data.insert(KUBECONFIG, kubeconfig.to_yaml());
                let of_files = kubeconfig.to_yaml_of_files(CLIENT_CERTIFICATE, CLIENT_KEY);
                let pair = pair_of(kubeconfig.credential);
                if let (Server::ControlPlane, Some(pair)) = (server, &pair) {
                    data.insert(KUBECONFIG_OF_FILES, of_files);
                    data.insert(CLIENT_CERTIFICATE, pair.certificate.clone());
                    data.insert(CLIENT_KEY, pair.key.clone());
                }
                (before.and_then(pair_of), pair)
            }
        };
        let end = after.and_then(|pair| ends(&pair.certificate));
        review.look_at(end.map(|end| renewed_at(end, profile.lifetime)));
        let same = |(key, value): (&&str, &String)| text(key).as_ref() == Some(value);
        if !data.iter().all(same) {
            let renewal = before.as_ref().and_then(judge).map(Why::Renewal);
            let otherwise = || {
                let lacking: Vec<_> = data.keys().copied().filter(|key| text(key).is_none()).collect();
                match current {
                    None => Why::Missing,
                    Some(_) if lacking.is_empty() => Why::Beside,
                    Some(_) => Why::Incomplete(lacking),
                }
            };
            let why = renewal.unwrap_or_else(otherwise);
            review.due.push(Due { secret: leaf.secret, data, why });
        }
        Ok(())
    }

    fn service_accounts(&self, found: &Secrets, used: bool, review: &mut Review) -> Result<(), IssueError> {
        let secret = SERVICE_ACCOUNT_KEYS;
        let why = match held(found, secret, [SIGNING_KEY, VERIFYING_KEYS], used) {
            Ok(Some([signing, verifying])) => match ServiceAccountKeys::read(&signing, &verifying) {
                Ok(_) => return Ok(()),
                Err(why) => LostWhy::Keys(why),
            },
            Ok(None) => {
                let keys = ServiceAccountKeys::create(self.keys)?;
                review.make(secret, [(SIGNING_KEY, &keys.signing), (VERIFYING_KEYS, &keys.verifying)]);
                return Ok(());
            }
            Err(why) => why,
        };
        let depends = "Every token of a service account is signed by it: those of all pods with rights";
        review.lost.push(Lost { secret, why, depends });
        Ok(())
    }

    fn names(&self, names: NamesOf) -> Names {
        match names {
            // These certificates belong to the seed, and to no cluster.
            NamesOf::Client | NamesOf::Front | NamesOf::Webhook => Names::default(),
            NamesOf::ApiServer => self.api_server.clone(),
            NamesOf::Konnectivity => self.konnectivity.clone(),
            NamesOf::Etcd => etcd(&self.namespace),
        }
    }

    fn url(&self, server: Server) -> Option<&str> {
        match server {
            Server::External => self.external_url.as_deref(),
            Server::Internal => Some(&self.internal_url),
            Server::ControlPlane => Some(&self.control_plane_url),
        }
    }
}

impl Review {
    /// What ends soon, and nothing else.
    #[must_use]
    pub fn endings(mut self) -> Self {
        self.due.retain(|due| matches!(due.why, Why::Renewal(Reason::Expiring(_))));
        self.lost.clear();
        self
    }

    /// The authorities that end within a year, as a sentence without its full stop. `None` if all last
    /// longer.
    pub fn ending_authorities(&self, now: Timestamp) -> Option<String> {
        let soon = self.authorities.iter().filter(|(_, end)| end.duration_since(now) < ANNOUNCED);
        let ends: Vec<String> = soon.map(|(secret, end)| format!("Secret {secret} on {end}")).collect();
        (!ends.is_empty()).then(|| {
            format!(
                "authorities end, and with each all that it signed: {}. Portico does not replace them: \
                 docs/pki.md says what to do before",
                ends.join(", ")
            )
        })
    }

    fn make<const N: usize>(&mut self, secret: &'static str, data: [(&'static str, &String); N]) {
        let data = data.into_iter().map(|(key, value)| (key, value.clone())).collect();
        self.due.push(Due { secret, data, why: Why::Missing });
    }

    fn look_at(&mut self, time: Option<Timestamp>) {
        self.next = self.next.into_iter().chain(time).min();
    }
}

/// The values of two keys of a Secret; `None` if the Secret may be made.
fn held(
    found: &Secrets,
    secret: &str,
    keys: [&'static str; 2],
    used: bool,
) -> Result<Option<[String; 2]>, LostWhy> {
    let values = keys.map(|key| found.get(secret).and_then(|data| data.get(key)).cloned());
    match values {
        [Some(first), Some(second)] => Ok(Some([first, second])),
        [None, None] if !used => Ok(None),
        values => {
            let missing = keys.into_iter().zip(&values).filter(|(_, value)| value.is_none());
            Err(LostWhy::Missing(missing.map(|(key, _)| key).collect()))
        }
    }
}

fn pair_of(credential: Credential) -> Option<Pair> {
    match credential {
        Credential::Certificate(pair) => Some(pair),
        Credential::Token(_) => None,
    }
}

/// What breaks if an authority is made anew.
fn depends(signer: Signer) -> &'static str {
    match signer {
        Signer::Tunnel => "Agents trust the gateway by it",
        Signer::Webhook => "The API server of the seed trusts the admission webhook by it",
        Signer::Cluster => "Kubelets, pods and every kubeconfig trust the API server by it",
        Signer::Clients => "The API server trusts kubelets and the users of kubeconfigs by it",
        Signer::FrontProxy => "Extension API servers trust the API server by it",
        Signer::Etcd => "The members of etcd and the API server trust each other by it",
    }
}
