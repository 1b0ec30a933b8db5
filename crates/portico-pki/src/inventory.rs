//! Every certificate of a seed and of a cluster: Secret, keys, names, usage, signer.
//!
//! Names of Secrets, their keys, common names and organisations are KKP's where KKP has the certificate. KKP
//! signs everything but the front proxy's by one authority. Here a certificate that opens the API server
//! opens nothing in etcd. A kubelet's serving certificate opens nothing at all. docs/pki.md prints these
//! tables.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use crate::profile::{LIFETIME, Names, Profile, Usage};

/// The Secret with the kubeconfig of the administrators of a cluster.
pub const ADMIN_KUBECONFIG: &str = "admin-kubeconfig";
/// The Secret with the kubeconfig of controllers on the seed. No strategy changes the address in it.
pub const INTERNAL_KUBECONFIG: &str = "internal-admin-kubeconfig";
/// Key of an authority's certificate in its Secret.
pub const CA_CERTIFICATE: &str = "ca.crt";
/// Key of an authority's private key in its Secret.
pub const CA_KEY: &str = "ca.key";
/// Key of a kubeconfig in its Secret.
pub const KUBECONFIG: &str = "kubeconfig";
/// Key of a kubeconfig that names [`CLIENT_CERTIFICATE`] and [`CLIENT_KEY`] as files beside it. Programs read
/// files again when a certificate is renewed, and a kubeconfig never.
pub const KUBECONFIG_OF_FILES: &str = "kubeconfig-files";
/// Key of the certificate of such a kubeconfig.
pub const CLIENT_CERTIFICATE: &str = "client.crt";
/// Key of the private key of such a kubeconfig.
pub const CLIENT_KEY: &str = "client.key";

/// The Secret of the keys of service accounts.
pub const SERVICE_ACCOUNT_KEYS: &str = "service-account-key";
/// Key of the private key that signs tokens of service accounts.
pub const SIGNING_KEY: &str = "sa.key";
/// Key of the public keys by which they are verified.
pub const VERIFYING_KEYS: &str = "sa.pub";

/// Most members of an etcd cluster, as in KKP. Its certificate has the names of all of them, so that more
/// members need no other one.
const ETCD_MEMBERS: usize = 9;

/// An authority, by what it signs. The first two are the seed's, in Portico's namespace; each cluster has the
/// others in its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Signer {
    /// The gateway's tunnel certificate.
    Tunnel,
    /// The operator's admission webhook.
    Webhook,
    /// Servers of the cluster: API server, Konnectivity server, kubelets.
    Cluster,
    /// Clients of the API server and of kubelets.
    Clients,
    /// The API server as a client of extension API servers.
    FrontProxy,
    /// Members and clients of etcd.
    Etcd,
}

impl Signer {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Tunnel, Self::Webhook, Self::Cluster, Self::Clients, Self::FrontProxy, Self::Etcd];

    /// The signers that each cluster has.
    pub const OF_A_CLUSTER: [Self; 4] = [Self::Cluster, Self::Clients, Self::FrontProxy, Self::Etcd];

    /// The Secret that holds it, under [`CA_CERTIFICATE`] and [`CA_KEY`].
    pub const fn secret(self) -> &'static str {
        match self {
            Self::Tunnel => "portico-tunnel-ca",
            Self::Webhook => "portico-webhook-ca",
            Self::Cluster => "ca",
            Self::Clients => "client-ca",
            Self::FrontProxy => "front-proxy-ca",
            Self::Etcd => "etcd-ca",
        }
    }

    /// Its common name. `external_name` is the cluster's at the time it is made; it may change later.
    pub fn common_name(self, external_name: &str) -> String {
        match self {
            Self::Cluster => format!("root-ca.{external_name}"),
            other => other.secret().to_owned(),
        }
    }
}

/// A certificate that an authority signs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leaf {
    /// The Secret that holds it.
    pub secret: &'static str,
    /// How the Secret holds it.
    pub stored: Stored,
    /// The common name.
    pub common_name: &'static str,
    /// The organisation.
    pub organisation: Option<&'static str>,
    /// What it is for.
    pub usage: Usage,
    /// Where its names come from.
    pub names: NamesOf,
    /// The authority that signs it.
    pub signer: Signer,
}

/// How a Secret holds a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// Certificate and private key under these keys.
    Pair(&'static str, &'static str),
    /// In a kubeconfig under [`KUBECONFIG`], which leads to this address. That of a program of the control
    /// plane is there as [`KUBECONFIG_OF_FILES`] too.
    Kubeconfig(Server),
}

/// Where a kubeconfig leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Server {
    /// `status.address.url`, for people.
    External,
    /// The Service on the seed, which no expose strategy changes.
    Internal,
    /// The API server, as the other programs of the control plane reach it: the one in their pod, else by the
    /// Service on the seed.
    ControlPlane,
}

/// Where the names of a certificate come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NamesOf {
    /// A client has none.
    Client,
    /// The hosts of the front Service.
    Front,
    /// How the seed's API server reaches the operator.
    Webhook,
    /// `portico_expose::certificate::SubjectNames` of the cluster's plan.
    ApiServer,
    /// [`konnectivity`].
    Konnectivity,
    /// [`etcd`].
    Etcd,
}

/// What agents see of a tunnel listener.
pub const TUNNEL: Leaf =
    server("portico-tunnel", "tls.crt", "tls.key", "portico-tunnel", NamesOf::Front, Signer::Tunnel);

/// The certificate of the admission webhook for the seed's API server.
pub const WEBHOOK: Leaf =
    server("portico-webhook", "tls.crt", "tls.key", "portico-webhook", NamesOf::Webhook, Signer::Webhook);

/// Every certificate that an authority of [`Signer::ALL`] signs by Portico's hand. Kubelets' are signed by
/// the controller manager of their cluster.
pub const LEAVES: [Leaf; 14] = [
    TUNNEL,
    WEBHOOK,
    server(
        "apiserver-tls",
        "apiserver-tls.crt",
        "apiserver-tls.key",
        "kube-apiserver",
        NamesOf::ApiServer,
        Signer::Cluster,
    ),
    server(
        "konnectivityproxy-tls",
        "konnectivityproxy-tls.crt",
        "konnectivityproxy-tls.key",
        "konnectivity-proxy",
        NamesOf::Konnectivity,
        Signer::Cluster,
    ),
    Leaf {
        usage: Usage::ServerAndClient,
        ..server("etcd-tls-certificate", "etcd-tls.crt", "etcd-tls.key", "etcd", NamesOf::Etcd, Signer::Etcd)
    },
    client(
        "apiserver-etcd-client-certificate",
        Stored::Pair("apiserver-etcd-client.crt", "apiserver-etcd-client.key"),
        "apiserver",
        None,
        Signer::Etcd,
    ),
    client(
        "apiserver-proxy-client-certificate",
        Stored::Pair("apiserver-proxy-client.crt", "apiserver-proxy-client.key"),
        "apiserver-aggregator",
        None,
        Signer::FrontProxy,
    ),
    client(
        "kubelet-client-certificates",
        Stored::Pair("kubelet-client.crt", "kubelet-client.key"),
        "kube-apiserver-kubelet-client",
        Some(ADMINS),
        Signer::Clients,
    ),
    kubeconfig(ADMIN_KUBECONFIG, Server::External, "admin", Some(ADMINS)),
    kubeconfig(INTERNAL_KUBECONFIG, Server::Internal, "kubermatic-controllers", Some(ADMINS)),
    kubeconfig("scheduler-kubeconfig", Server::ControlPlane, "system:kube-scheduler", None),
    kubeconfig("controllermanager-kubeconfig", Server::ControlPlane, "system:kube-controller-manager", None),
    kubeconfig("konnectivity-kubeconfig", Server::ControlPlane, "system:konnectivity-server", None),
    kubeconfig("prometheus-kubeconfig", Server::Internal, "prometheus", None),
];

/// The group that may do everything.
const ADMINS: &str = "system:masters";

const fn server(
    secret: &'static str,
    certificate: &'static str,
    key: &'static str,
    common_name: &'static str,
    names: NamesOf,
    signer: Signer,
) -> Leaf {
    let stored = Stored::Pair(certificate, key);
    Leaf { secret, stored, common_name, organisation: None, usage: Usage::Server, names, signer }
}

const fn client(
    secret: &'static str,
    stored: Stored,
    common_name: &'static str,
    organisation: Option<&'static str>,
    signer: Signer,
) -> Leaf {
    Leaf { secret, stored, common_name, organisation, usage: Usage::Client, names: NamesOf::Client, signer }
}

const fn kubeconfig(
    secret: &'static str,
    server: Server,
    common_name: &'static str,
    organisation: Option<&'static str>,
) -> Leaf {
    client(secret, Stored::Kubeconfig(server), common_name, organisation, Signer::Clients)
}

impl Leaf {
    /// What the certificate is to say; `names` from where [`Leaf::names`] says.
    pub fn profile(&self, names: Names) -> Profile {
        Profile {
            common_name: self.common_name.to_owned(),
            organisation: self.organisation.map(ToOwned::to_owned),
            names,
            usage: self.usage,
            lifetime: LIFETIME,
        }
    }

    /// The keys of its Secret. Members and clients of etcd have their authority beside them, as in KKP: tools
    /// for backups mount one Secret.
    pub fn keys(&self) -> Vec<&'static str> {
        match self.stored {
            Stored::Kubeconfig(Server::ControlPlane) => {
                vec![KUBECONFIG, KUBECONFIG_OF_FILES, CLIENT_CERTIFICATE, CLIENT_KEY]
            }
            Stored::Kubeconfig(_) => vec![KUBECONFIG],
            Stored::Pair(certificate, key) if self.signer == Signer::Etcd => {
                vec![certificate, key, CA_CERTIFICATE]
            }
            Stored::Pair(certificate, key) => vec![certificate, key],
        }
    }
}

/// Names of the members of etcd in `namespace`.
pub fn etcd(namespace: &str) -> Names {
    let mut dns = BTreeSet::from(["localhost".to_owned()]);
    for number in 0..ETCD_MEMBERS {
        dns.insert(format!("etcd-{number}"));
        dns.insert(format!("etcd-{number}.etcd.{namespace}.svc.cluster.local"));
    }
    Names { dns, ips: BTreeSet::from([Ipv4Addr::LOCALHOST.into()]) }
}

/// Names of a Konnectivity server: the cluster's external name, `konnectivity-server` below it, `addresses`
/// and loopback. The `addresses` have that of the API server inside the user cluster, and the external one
/// where agents use no name.
pub fn konnectivity(external_name: &str, addresses: impl IntoIterator<Item = IpAddr>) -> Names {
    let mut names = Names::default();
    // Under the strategy LoadBalancer the external name may be an address.
    match external_name.parse() {
        Ok(ip) => drop(names.ips.insert(ip)),
        Err(_) => {
            names.dns.extend([external_name.to_owned(), format!("konnectivity-server.{external_name}")])
        }
    }
    names.ips.extend(addresses);
    names.ips.insert(Ipv4Addr::LOCALHOST.into());
    names
}
