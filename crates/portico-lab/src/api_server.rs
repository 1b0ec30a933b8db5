//! An API server alone, with etcd behind it: enough for what only talks to one, and up in seconds.

use std::path::PathBuf;

use anyhow::Result;

use crate::control_plane::{ADMINS, Access, ControlPlane, Options};
use crate::etcd::Etcd;
use crate::host::Host;
use crate::kubectl::Kubectl;
use crate::lab::Lab;

/// A running API server, on the host `seed` of a lab of its own.
pub struct ApiServer {
    // Dropped in this order: clients first.
    kubectl: Kubectl,
    control_plane: ControlPlane,
    _etcd: Etcd,
    host: Host,
}

impl ApiServer {
    /// Starts a lab of this name with an API server and waits until that is ready.
    pub fn start(name: &str) -> Result<ApiServer> {
        Self::start_with(name, &[])
    }

    /// As [`start`](ApiServer::start), with further flags of kube-apiserver.
    pub fn start_with(name: &str, flags: &[&str]) -> Result<ApiServer> {
        Self::start_as(name, flags, false)
    }

    /// As [`start_with`](ApiServer::start_with), with controller manager and scheduler.
    pub fn start_with_controllers(name: &str, flags: &[&str]) -> Result<ApiServer> {
        Self::start_as(name, flags, true)
    }

    fn start_as(name: &str, flags: &[&str], controllers: bool) -> Result<ApiServer> {
        let api_server_flags = flags.iter().map(|&flag| flag.to_owned()).collect();
        let options = Options { controllers, api_server_flags, ..Options::new("seed") };
        let host = Lab::start(name)?.host("seed")?;
        let etcd = Etcd::start(&host)?;
        let control_plane = ControlPlane::start(&host, &etcd, &options)?;
        let kubectl = control_plane.access().kubectl(&host)?;
        Ok(ApiServer { kubectl, control_plane, _etcd: etcd, host })
    }

    /// Its host.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// The way into it.
    pub fn access(&self) -> &Access {
        self.control_plane.access()
    }

    /// kubectl as its administrator.
    pub fn kubectl(&self) -> &Kubectl {
        &self.kubectl
    }

    /// The kubeconfig of its administrator, with everything in it.
    pub fn admin_with_everything(&self) -> Result<String> {
        self.kubectl.run(&["config", "view", "--raw", "--flatten"])
    }

    /// The kubeconfig of its administrator.
    pub fn admin(&self) -> Result<PathBuf> {
        self.access().kubeconfig("admin", Some(ADMINS))
    }
}
