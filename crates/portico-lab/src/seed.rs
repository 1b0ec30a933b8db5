//! The seed: a real one-node cluster that hosts the control planes of user clusters.

use std::net::Ipv4Addr;

use anyhow::Result;
use serde_json::json;

use crate::control_plane::{Access, ControlPlane, Options};
use crate::etcd::Etcd;
use crate::host::Host;
use crate::image::Image;
use crate::kubectl::Kubectl;
use crate::lab::Lab;
use crate::name_server;
use crate::node::Node;

/// Addresses of the seed's pods. Its Services have 10.32.0.0/20; user clusters differ, as anywhere.
const POD_CIDR: &str = "10.33.0.0/24";

/// Where pods of a seed with names ask for them, as everywhere: the tenth address of the Services.
const NAME_SERVER: Ipv4Addr = Ipv4Addr::new(10, 32, 0, 10);

/// A running seed cluster. Everything runs on its host `seed`.
pub struct Seed {
    // Dropped in this order: nodes before what they talk to.
    node: Node,
    control_plane: ControlPlane,
    etcd: Etcd,
    kubectl: Kubectl,
}

impl Seed {
    /// Starts a one-node cluster on a new host `seed` of the lab and waits until it runs pods.
    pub fn start(lab: &Lab) -> Result<Seed> {
        Seed::start_with(lab, None)
    }

    /// Like [`Self::start`], with a name server: pods find Services, and pods of a StatefulSet, by their
    /// names.
    pub fn start_with_names(lab: &Lab) -> Result<Seed> {
        let coredns = Image::coredns()?;
        let seed = Seed::start_with(lab, Some(NAME_SERVER))?;
        seed.import(&coredns)?;
        name_server::start(&seed, NAME_SERVER)?;
        Ok(seed)
    }

    fn start_with(lab: &Lab, name_server: Option<Ipv4Addr>) -> Result<Seed> {
        let host = lab.host("seed")?;
        let etcd = Etcd::start(&host)?;
        let options = Options {
            service_cidr: "10.32.0.0/20".to_owned(),
            service_address: Ipv4Addr::new(10, 32, 0, 1),
            ..Options::new("seed")
        };
        let control_plane = ControlPlane::start(&host, &etcd, &options)?;
        let node = Node::join_with_names(&host, control_plane.access(), POD_CIDR, name_server)?;
        let kubectl = control_plane.access().kubectl(&host)?;
        Ok(Seed { node, control_plane, etcd, kubectl })
    }

    /// Its host.
    pub fn host(&self) -> &Host {
        self.node.host()
    }

    /// Its node.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// Its etcd, which user clusters share.
    pub fn etcd(&self) -> &Etcd {
        &self.etcd
    }

    /// Its control plane.
    pub fn control_plane(&self) -> &ControlPlane {
        &self.control_plane
    }

    /// The way into it.
    pub fn access(&self) -> &Access {
        self.control_plane.access()
    }

    /// kubectl as its administrator, on its own host.
    pub fn kubectl(&self) -> &Kubectl {
        &self.kubectl
    }

    /// Makes an image known to its node.
    pub fn import(&self, image: &Image) -> Result<()> {
        self.node.import(image)
    }

    /// Plays the cloud: gives a Service of type LoadBalancer a new address, on which the lab's network
    /// reaches the seed's node.
    pub fn give_address(&self, namespace: &str, service: &str) -> Result<Ipv4Addr> {
        let address = self.host().lab().free_address()?;
        self.give_this_address(namespace, service, address)?;
        Ok(address)
    }

    /// Gives the Service an address that was known before ([`Lab::free_address`]).
    pub fn give_this_address(&self, namespace: &str, service: &str, address: Ipv4Addr) -> Result<()> {
        let status = json!({"status": {"loadBalancer": {"ingress": [{"ip": address}]}}}).to_string();
        self.kubectl.run(&[
            "patch",
            "service",
            "-n",
            namespace,
            service,
            "--subresource=status",
            "--type=merge",
            "-p",
            &status,
        ])?;
        self.host().add_address(address)
    }
}
