//! Rules of a firewall for one role: computed once, written in the language of each product.
//!
//! [`rules`] decides what is allowed, from the model, the facts and an inventory. It answers with what it
//! would have to know ([`Missing`]) instead of opening anything to everybody. The files of this folder write
//! the same [`Ruleset`] as nftables, iptables, cloud resources, policies and a ticket.

mod aws;
mod azure;
mod gcp;
mod iptables;
mod nftables;
mod openstack;
mod policy;
mod rules;
mod terraform;
mod ticket;

pub use rules::{Direction, Missing, Rule, Ruleset, rules};

/// For whom rules are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// `nft -f`.
    Nftables,
    /// A script for iptables and ip6tables.
    Iptables,
    /// A CloudFormation template with a security group.
    Aws,
    /// An ARM template with a network security group.
    Azure,
    /// VPC firewall rules, as the Compute API takes them.
    Gcp,
    /// A script of `openstack security group` commands.
    Openstack,
    /// Terraform, provider AWS.
    TerraformAws,
    /// A Kubernetes NetworkPolicy.
    NetworkPolicy,
    /// A policy of Cilium, of pods or of nodes.
    Cilium,
    /// Plain text for a firewall team.
    Ticket,
}

/// What a writer must know besides the rules.
#[derive(Debug, Clone)]
pub struct Writing<'a> {
    /// What is not allowed is refused.
    pub default_deny: bool,
    /// Labels of the pods, or nodes, that policies are for.
    pub selector: &'a [(String, String)],
    /// The namespace of policies.
    pub namespace: &'a str,
}

/// Rules in a language, and what its reader must be told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// The rules.
    pub text: String,
    /// What they cannot say, or say by nature although nobody asked.
    pub notes: Vec<String>,
}

impl Target {
    /// Writes `rules`.
    pub fn write(self, rules: &Ruleset, writing: &Writing<'_>) -> Written {
        match self {
            Self::Nftables => nftables::write(rules, writing),
            Self::Iptables => iptables::write(rules, writing),
            Self::Aws => aws::write(rules, writing),
            Self::Azure => azure::write(rules, writing),
            Self::Gcp => gcp::write(rules, writing),
            Self::Openstack => openstack::write(rules, writing),
            Self::TerraformAws => terraform::write(rules, writing),
            Self::NetworkPolicy => policy::write_kubernetes(rules, writing),
            Self::Cilium => policy::write_cilium(rules, writing),
            Self::Ticket => ticket::write(rules, writing),
        }
    }
}

/// Rules of a host do not see what it forwards.
fn forwarded(writing: &Writing<'_>) -> Vec<String> {
    if !writing.default_deny {
        return Vec::new();
    }
    vec![
        "traffic of pods is forwarded, and is not judged by these rules. What the model does not have (SSH, \
         time, package sources) is refused: docs/firewall-team.md says where to allow it"
            .to_owned(),
    ]
}

/// JSON as people read it, with a line end.
fn json(value: &serde_json::Value) -> String {
    format!("{value:#}\n")
}

#[cfg(test)]
#[path = "firewall/tests.rs"]
mod tests;
