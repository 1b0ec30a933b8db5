//! Rules of a firewall for one role: computed once, written in the language of each product.
//!
//! [`rules`] decides what is allowed, from the model, the facts and an inventory. It returns what it would
//! have to know ([`Missing`]) instead of opening anything to everybody. The files of this folder write the
//! same [`Ruleset`] as nftables, iptables, cloud resources, policies and a ticket.

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
mod writing;

pub use rules::{Direction, Missing, Rule, Ruleset, rules};
pub use writing::{CannotWrite, Writing, Written};

/// The product whose language rules are written in.
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

impl Target {
    /// Writes `rules`. An error: what this firewall would do is not what they say.
    pub fn write(self, rules: &Ruleset, writing: &Writing<'_>) -> Result<Written, CannotWrite> {
        Ok(match self {
            Self::Nftables => nftables::write(rules, writing),
            Self::Iptables => iptables::write(rules, writing),
            Self::Aws => aws::write(rules, writing),
            Self::Azure => azure::write(rules, writing),
            Self::Gcp => gcp::write(rules, writing),
            Self::Openstack => openstack::write(rules, writing),
            Self::TerraformAws => terraform::write(rules, writing),
            Self::NetworkPolicy => policy::write_kubernetes(rules, writing),
            Self::Cilium => policy::write_cilium(rules, writing)?,
            Self::Ticket => ticket::write(rules, writing),
        })
    }
}

#[cfg(test)]
#[path = "firewall/tests.rs"]
mod tests;
