//! The purpose of the planner, and its settings.

use std::net::IpAddr;

use crate::inputs::LoadBalancers;
use crate::services::APISERVER_PORT;

/// What the planner is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Objects come from a directory. The planner plans Services and allocates NodePorts. It lets the gateway
    /// serve as every load balancer, and refuses a change of strategy without the label.
    Plan,
    /// KKP is at work: Services exist, and its webhook checks changes of strategy. Only policies and problems
    /// come out; Services pass through as they are.
    Observe,
}

/// The settings of the planner, beside the objects.
#[derive(Debug, Clone)]
pub struct Settings {
    /// What it is for.
    pub mode: Mode,
    /// External addresses of the seed's nodes, if known.
    pub node_ips: Vec<IpAddr>,
    /// Ports the gateway itself listens on: they are never allocated as NodePorts.
    pub reserved_ports: Vec<u16>,
    /// The one Seed that counts; `None` for all of them.
    pub seed: Option<Box<str>>,
    /// Port at which clients find the listener that routes by server name.
    pub sni_port: u16,
}

impl Settings {
    /// Settings for `mode` where nothing is known of nodes and listeners.
    pub fn new(mode: Mode) -> Self {
        Self { mode, node_ips: Vec::new(), reserved_ports: Vec::new(), seed: None, sni_port: APISERVER_PORT }
    }

    /// The load balancer of a cluster.
    pub(super) fn load_balancers(&self) -> LoadBalancers {
        match self.mode {
            Mode::Plan => LoadBalancers::Gateway,
            Mode::Observe => LoadBalancers::Cloud,
        }
    }
}
