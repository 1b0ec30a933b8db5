//! Decides whether a kubelet gets the serving certificate that it asks for.
//!
//! Kubernetes approves none by itself. The certificate is signed by the authority of the API server. So a
//! hostile node must not get names of another machine, whatever it says about itself: with the names of the
//! API server it could pass for the API server. Every name and usage in the request is judged. Those that the
//! signer would leave out are refused too.

use std::net::IpAddr;

use ipnet::IpNet;
use portico_expose::services::KONNECTIVITY_PREFIX;
use thiserror::Error;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::cri_attributes::ParsedCriAttribute;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::oid_registry::{OID_X509_COMMON_NAME, OID_X509_ORGANIZATION_NAME};
use x509_parser::prelude::FromDer;
use x509_parser::x509::X509Name;

use crate::join::trust::written;

/// Whose certificates these are.
pub const SIGNER: &str = "kubernetes.io/kubelet-serving";

/// Where the requests for certificates of a cluster are.
pub const REQUESTS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";

/// The list of those that are for kubelets to serve with.
pub fn listed() -> String {
    format!("{REQUESTS}?fieldSelector=spec.signerName%3D{}", SIGNER.replace('/', "%2F"))
}

/// The group of all nodes, and the organisation in their certificates.
const NODES: &str = "system:nodes";
/// The beginning of the name of a node's user.
const NODE: &str = "system:node:";

/// Names of one request; a kubelet asks for a handful. Each is compared with each of the Node.
const MOST_NAMES: usize = 64;

/// What a CertificateSigningRequest says.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// The signer that it is for.
    pub signer: &'a str,
    /// The user that asks, as the API server has found.
    pub user: &'a str,
    /// The groups of that user.
    pub groups: &'a [String],
    /// What the certificate is to be used for.
    pub usages: &'a [String],
    /// The request, in PEM.
    pub request: &'a [u8],
}

/// One address of a Node, as in `status.addresses`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeAddress {
    /// `InternalIP`, `ExternalIP`
    Ip(IpAddr),
    /// `Hostname`, `InternalDNS`, `ExternalDNS`
    Name(String),
}

/// Names and addresses that belong to the control plane and to Services, never to a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Reserved {
    /// The cluster's name. The host names of its control plane begin with it, or with the prefix of its
    /// Konnectivity server and it, under each strategy and in each domain.
    pub cluster: String,
    /// Host names; those below them too.
    pub names: Vec<String>,
    /// Networks.
    pub networks: Vec<IpNet>,
}

/// Why a kubelet does not get a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Unapproved {
    /// It is for something else.
    #[error("it is for another signer")]
    Signer,
    /// No node asks.
    #[error("the client is no node")]
    NoNode,
    /// It is to be used for more than serving.
    #[error("the usages are not those of a server")]
    Usages,
    /// It is no request, or one with more in it than a kubelet asks for.
    #[error("the request is not as a kubelet writes it")]
    Unreadable,
    /// It is for somebody else.
    #[error("the subject is not the node that asks")]
    Subject,
    /// It has no names, names of another kind, or far too many.
    #[error("there is no name or address in it, or one of another kind, or more than {MOST_NAMES}")]
    Names,
    /// It has a name or an address of the control plane.
    #[error("a name or an address in it belongs to the control plane")]
    Reserved,
    /// It has a name or an address that is not among the node's; these may come later.
    #[error("a name or an address in it is not one of the Node")]
    Address,
}

impl Unapproved {
    /// Its name where it is counted.
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Signer => "ServingOtherSigner",
            Self::NoNode => "ServingNoNode",
            Self::Usages => "ServingOtherUsages",
            Self::Unreadable => "ServingUnreadable",
            Self::Subject => "ServingOtherSubject",
            Self::Names => "ServingNoNames",
            Self::Reserved => "ServingReservedName",
            Self::Address => "ServingOtherAddress",
        }
    }
}

/// The Node whose kubelet asks.
pub fn node_of(user: &str) -> Option<&str> {
    user.strip_prefix(NODE).filter(|name| !name.is_empty())
}

/// Judges what a kubelet asks for. `addresses` are those of the Node that [`node_of`] names.
pub fn judge(asked: &Asked<'_>, addresses: &[NodeAddress], reserved: &Reserved) -> Result<(), Unapproved> {
    if asked.signer != SIGNER {
        return Err(Unapproved::Signer);
    }
    if node_of(asked.user).is_none() || !asked.groups.iter().any(|group| group == NODES) {
        return Err(Unapproved::NoNode);
    }
    let allowed =
        |usage: &String| matches!(&**usage, "digital signature" | "key encipherment" | "server auth");
    let has = |name: &str| asked.usages.iter().any(|usage| usage == name);
    if !asked.usages.iter().all(allowed) || !has("server auth") || !has("digital signature") {
        return Err(Unapproved::Usages);
    }
    let names = names(asked)?;
    for name in &names {
        if reserved.has(name) {
            return Err(Unapproved::Reserved);
        }
    }
    let known = |name: &NodeAddress| addresses.iter().any(|address| same(address, name));
    if names.iter().all(known) { Ok(()) } else { Err(Unapproved::Address) }
}

/// The names and addresses that a request is for, at least one.
fn names(asked: &Asked<'_>) -> Result<Vec<NodeAddress>, Unapproved> {
    let unreadable = Unapproved::Unreadable;
    let pem = pem::parse(asked.request).map_err(|_| unreadable)?;
    // Go's parser, by which it is signed, would find another request in a text that has more than this one.
    let alone = written("CERTIFICATE REQUEST", pem.contents().to_owned());
    if !without_spaces(asked.request).eq(without_spaces(alone.as_bytes())) {
        return Err(unreadable);
    }
    let (rest, request) = X509CertificationRequest::from_der(pem.contents()).map_err(|_| unreadable)?;
    if !rest.is_empty() {
        return Err(unreadable);
    }
    let info = &request.certification_request_info;
    if !is_subject(&info.subject, asked.user) {
        return Err(Unapproved::Subject);
    }
    // With one list of extensions, and in it one of a kind, there is one way to read them.
    let [attribute] = info.attributes() else { return Err(Unapproved::Names) };
    let ParsedCriAttribute::ExtensionRequest(extensions) = attribute.parsed_attribute() else {
        return Err(unreadable);
    };
    let [extension] = &*extensions.extensions else { return Err(unreadable) };
    let ParsedExtension::SubjectAlternativeName(names) = extension.parsed_extension() else {
        return Err(Unapproved::Names);
    };
    if names.general_names.len() > MOST_NAMES {
        return Err(Unapproved::Names);
    }
    let names = names.general_names.iter().map(|name| match name {
        GeneralName::DNSName(name) => Ok(NodeAddress::Name((*name).to_owned())),
        GeneralName::IPAddress(bytes) => ip(bytes).map(NodeAddress::Ip).ok_or(Unapproved::Names),
        _ => Err(Unapproved::Names),
    });
    let names: Vec<NodeAddress> = names.collect::<Result<_, _>>()?;
    if names.is_empty() { Err(Unapproved::Names) } else { Ok(names) }
}

/// Whether a subject is the user, in the organisation of nodes, and nothing else.
fn is_subject(subject: &X509Name<'_>, user: &str) -> bool {
    let wanted = [(OID_X509_COMMON_NAME, user), (OID_X509_ORGANIZATION_NAME, NODES)];
    let has = |(kind, value): &(_, &str)| {
        subject.iter_attributes().any(|part| part.attr_type() == kind && part.as_str().ok() == Some(*value))
    };
    subject.iter_attributes().count() == wanted.len() && wanted.iter().all(has)
}

fn without_spaces(text: &[u8]) -> impl Iterator<Item = &u8> {
    text.iter().filter(|byte| !byte.is_ascii_whitespace())
}

/// An address. The signer writes an IPv4 address that is mapped into IPv6 as the IPv4 address.
fn ip(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    let ip = v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()?;
    Some(ip.to_canonical())
}

fn same(one: &NodeAddress, other: &NodeAddress) -> bool {
    match (one, other) {
        (NodeAddress::Ip(one), NodeAddress::Ip(other)) => one.to_canonical() == other.to_canonical(),
        (NodeAddress::Name(one), NodeAddress::Name(other)) => one.eq_ignore_ascii_case(other),
        _ => false,
    }
}

impl Reserved {
    fn has(&self, name: &NodeAddress) -> bool {
        match name {
            NodeAddress::Ip(ip) => {
                let never = ip.is_loopback() || ip.is_unspecified() || ip.is_multicast();
                never || self.networks.iter().any(|network| network.contains(ip))
            }
            NodeAddress::Name(name) => {
                if let Ok(ip) = name.parse::<IpAddr>() {
                    return self.has(&NodeAddress::Ip(ip.to_canonical()));
                }
                let name = name.trim_end_matches('.').to_ascii_lowercase();
                let labels: Vec<&str> = name.split('.').collect();
                // As pods write the names of Services: with some of the labels at the end.
                let service = labels[0] == "kubernetes"
                    || labels.contains(&"svc")
                    || labels.ends_with(&["cluster", "local"])
                    || labels.ends_with(&["localhost"])
                    || labels.contains(&"*");
                let below = |reserved: &String| {
                    let reserved: Vec<&str> = reserved.trim_end_matches('.').split('.').collect();
                    labels.ends_with(&reserved)
                };
                let host = name.strip_prefix(KONNECTIVITY_PREFIX).unwrap_or(&name);
                let own = host.split_once('.').is_some_and(|(cluster, _)| cluster == self.cluster);
                service || own || self.names.iter().filter(|reserved| !reserved.is_empty()).any(below)
            }
        }
    }
}

#[cfg(test)]
mod tests;
