//! A Kubernetes control plane: files, command lines, and the three programs on a host.
//!
//! The same files and command lines serve both places a control plane runs in a lab. It runs as processes on
//! a host ([`ControlPlane`], for the seed and for stories without one), or as containers in the seed
//! ([`UserCluster`](crate::UserCluster)). Kubeconfigs name certificates relative to themselves, so the
//! directory works wherever it is mounted.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;

use crate::etcd::Etcd;
use crate::host::Host;
use crate::kubectl::Kubectl;
use crate::pki::{self, Authority, write};
use crate::process::Process;
use crate::{programs, wait};

/// The certificate organisation that may do everything.
pub const ADMINS: &str = "system:masters";

/// How long an API server may take to become ready. Two to five seconds on an idle machine; a
/// minute when several labs start on two cores.
const STARTING: Duration = Duration::from_secs(120);

/// What a control plane should be.
#[derive(Debug, Clone)]
pub struct Options {
    /// Its name: of the cluster, of the etcd prefix, of its directory.
    pub name: String,
    /// Where the API server listens.
    pub secure_port: u16,
    /// The address it gives as the endpoint of Service `kubernetes`; the host's own if `None`.
    pub advertise_address: Option<Ipv4Addr>,
    /// Cluster IPs of its Services.
    pub service_cidr: String,
    /// The first address of `service_cidr`: Service `kubernetes`.
    pub service_address: Ipv4Addr,
    /// Host names and addresses the serving certificate holds beside the usual ones.
    pub names: Vec<String>,
    /// Further flags of the API server.
    pub api_server_flags: Vec<String>,
    /// Whether controller manager and scheduler run too. An API server alone is enough for stories
    /// that only talk to it, and saves 200 MB.
    pub controllers: bool,
    /// Hosted in a seed: whether its Deployment makes no pod until it is resumed, for those that patch it
    /// first. An API server that is replaced while it starts costs as much as one that stays.
    pub paused: bool,
}

impl Options {
    /// A control plane of this name with everything, on port 6443.
    pub fn new(name: &str) -> Options {
        Options {
            name: name.to_owned(),
            secure_port: 6443,
            advertise_address: None,
            // KKP's default for user clusters. Clusters of a lab share no network below Services,
            // so they may share it.
            service_cidr: "10.240.16.0/20".to_owned(),
            service_address: Ipv4Addr::new(10, 240, 16, 1),
            names: Vec::new(),
            api_server_flags: Vec::new(),
            controllers: true,
            paused: false,
        }
    }
}

/// What a kubeconfig says beside the URL.
#[derive(Debug, Clone, Default)]
struct Detour {
    server_name: Option<String>,
    proxy: Option<String>,
}

/// How one gets into a cluster: where its API server is, and the authority that signs its users.
#[derive(Clone)]
pub struct Access {
    server: String,
    detour: Detour,
    authority: Arc<Authority>,
    dir: PathBuf,
}

impl Access {
    /// Access at `server` (`https://HOST:PORT`); kubeconfigs go to `dir`.
    pub fn new(server: &str, authority: &Arc<Authority>, dir: &Path) -> Access {
        let (server, authority) = (server.to_owned(), Arc::clone(authority));
        Access { server, detour: Detour::default(), authority, dir: dir.to_path_buf() }
    }

    /// Access to this cluster by another way: through a gateway, or by another address.
    pub fn through(&self, server: &str) -> Access {
        Access { server: server.to_owned(), detour: Detour::default(), ..self.clone() }
    }

    /// Access by this way, but asking for this name in TLS whatever the URL says.
    pub fn with_server_name(&self, name: &str) -> Access {
        let detour = Detour { server_name: Some(name.to_owned()), ..self.detour.clone() };
        Access { detour, ..self.clone() }
    }

    /// Access by this way, but through a proxy (`http://HOST:PORT`) that is asked to CONNECT to the URL's
    /// host and port.
    pub fn by_proxy(&self, proxy: &str) -> Access {
        let detour = Detour { proxy: Some(proxy.to_owned()), ..self.detour.clone() };
        Access { detour, ..self.clone() }
    }

    /// The URL of the API server.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// The proxy on the way, if there is one.
    pub fn proxy(&self) -> Option<&str> {
        self.detour.proxy.as_deref()
    }

    /// The cluster's authority.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// A kubeconfig for a user in a group, with a new client certificate.
    pub fn kubeconfig(&self, user: &str, group: Option<&str>) -> Result<PathBuf> {
        let Detour { server_name, proxy } = &self.detour;
        let way: String = server_name.iter().chain(proxy).cloned().collect();
        let plain = |text: &str| text.replace(|c: char| !c.is_ascii_alphanumeric() && c != '.', "-");
        let server = self.server.trim_start_matches("https://");
        let dir = self.dir.join(plain(&format!("{server}{way}")));
        fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
        write(&dir.join("ca.crt"), &self.authority.cert())?;
        let file = plain(user);
        self.authority.client(user, group)?.write(&dir, &file)?;
        let path = dir.join(format!("{file}.kubeconfig"));
        write(&path, &kubeconfig(&self.server, &self.detour, &file))?;
        Ok(path)
    }

    /// kubectl as the administrator, on a host.
    pub fn kubectl(&self, host: &Host) -> Result<Kubectl> {
        Kubectl::new(host, &self.kubeconfig("admin", Some(ADMINS))?)
    }
}

/// A control plane running as processes on a host.
pub struct ControlPlane {
    // Dropped in this order: clients first, so that logs do not end in complaints.
    controllers: Vec<Process>,
    api_server: Process,
    access: Access,
    host: Host,
    command: ApiServerCommand,
}

/// What started an API server, to start it again.
struct ApiServerCommand {
    log: String,
    args: Vec<String>,
}

impl ControlPlane {
    /// Starts a control plane on a host and waits until its API server is ready.
    pub fn start(host: &Host, etcd: &Etcd, options: &Options) -> Result<ControlPlane> {
        let programs = programs::kube()?;
        let name = &options.name;
        let dir = host.dir().join(format!("{name}-control-plane"));
        let authority = Arc::new(Authority::new(&format!("{name} authority"))?);
        write_files(&dir, options, &authority, host.address())?;
        let here = dir.display().to_string();
        // Several control planes may share a host; a host named after its only one needs no more.
        let log_of = |program: &str| {
            if name == host.name() { program.to_owned() } else { format!("{name}-{program}") }
        };
        let start =
            |program: &str, args: Vec<String>| host.spawn(&log_of(program), programs.join(program), args);
        let advertise = options.advertise_address.unwrap_or(host.address());
        let args = api_server_args(options, &here, etcd.url(), advertise);
        let command = ApiServerCommand { log: log_of("kube-apiserver"), args };
        let api_server = start("kube-apiserver", command.args.clone())?;
        let server = format!("https://{}:{}", host.address(), options.secure_port);
        let access = Access::new(&server, &authority, &host.dir().join(format!("{name}-users")));
        let mut plane =
            ControlPlane { controllers: Vec::new(), api_server, access, host: host.clone(), command };
        plane.wait_ready()?;
        // Not before: a controller manager whose rights are not there within ten seconds ends, and nobody
        // here starts it again.
        if options.controllers {
            let controller_manager = controller_manager_args(options, &here);
            plane.controllers.push(start("kube-controller-manager", controller_manager)?);
            plane.controllers.push(start("kube-scheduler", scheduler_args(&here))?);
        }
        Ok(plane)
    }

    /// Ends the API server at once, as a crash would. [`start_again`](ControlPlane::start_again) brings it
    /// back.
    pub fn kill_api_server(&self) {
        self.api_server.kill();
    }

    /// Starts the API server again as it was, and waits until it is ready.
    pub fn start_again(&mut self) -> Result<()> {
        self.api_server.kill();
        let program = programs::kube()?.join("kube-apiserver");
        self.api_server = self.host.spawn(&self.command.log, program, &self.command.args)?;
        self.wait_ready()
    }

    fn wait_ready(&self) -> Result<()> {
        let kubectl = self.access.kubectl(&self.host)?;
        let what = format!("the API server at {} to be ready", self.access.server());
        wait::until(&what, STARTING, || {
            self.api_server.check()?;
            kubectl.run(&["get", "--raw", "/readyz"]).map(drop)
        })
    }

    /// The way in, directly.
    pub fn access(&self) -> &Access {
        &self.access
    }

    /// The API server's process.
    pub fn api_server(&self) -> &Process {
        &self.api_server
    }

    /// Controller manager and scheduler, if they run.
    pub fn controllers(&self) -> &[Process] {
        &self.controllers
    }
}

/// Writes certificates, keys and kubeconfigs that the command lines below refer to.
pub(crate) fn write_files(
    dir: &Path,
    options: &Options,
    authority: &Authority,
    host: Ipv4Addr,
) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
    let mut names: Vec<String> = [
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
        "localhost",
        "127.0.0.1",
    ]
    .map(str::to_owned)
    .to_vec();
    names.push(options.service_address.to_string());
    names.push(host.to_string());
    names.extend(options.advertise_address.map(|address| address.to_string()));
    names.extend(options.names.iter().cloned());
    authority.identity().write(dir, "ca")?;
    authority.server(&options.name, &names)?.write(dir, "api-server")?;
    authority.client("kube-apiserver", Some(ADMINS))?.write(dir, "kubelet-client")?;
    pki::write_signing_key(dir, "sa")?;
    let local = format!("https://127.0.0.1:{}", options.secure_port);
    for user in ["kube-controller-manager", "kube-scheduler"] {
        authority.client(&format!("system:{user}"), None)?.write(dir, user)?;
        write(&dir.join(format!("{user}.kubeconfig")), &kubeconfig(&local, &Detour::default(), user))?;
    }
    Ok(())
}

/// A kubeconfig whose certificates lie beside it as `ca.crt`, `USER.crt` and `USER.key`.
fn kubeconfig(server: &str, detour: &Detour, user: &str) -> String {
    let mut cluster = json!({"server": server, "certificate-authority": "ca.crt"});
    if let Some(name) = &detour.server_name {
        cluster["tls-server-name"] = json!(name);
    }
    if let Some(proxy) = &detour.proxy {
        cluster["proxy-url"] = json!(proxy);
    }
    let user = json!({
        "client-certificate": format!("{user}.crt"),
        "client-key": format!("{user}.key"),
    });
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "lab", "cluster": cluster}],
        "users": [{"name": "lab", "user": user}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "lab"}}],
        "current-context": "lab",
    })
    .to_string()
}

/// The API server's command line, with its files in `dir`.
pub(crate) fn api_server_args(options: &Options, dir: &str, etcd: &str, advertise: Ipv4Addr) -> Vec<String> {
    let mut args = vec![
        format!("--etcd-servers={etcd}"),
        format!("--etcd-prefix=/{}", options.name),
        format!("--advertise-address={advertise}"),
        format!("--secure-port={}", options.secure_port),
        format!("--service-cluster-ip-range={}", options.service_cidr),
        format!("--client-ca-file={dir}/ca.crt"),
        format!("--tls-cert-file={dir}/api-server.crt"),
        format!("--tls-private-key-file={dir}/api-server.key"),
        "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
        format!("--service-account-key-file={dir}/sa.pub"),
        format!("--service-account-signing-key-file={dir}/sa.key"),
        "--authorization-mode=Node,RBAC".to_owned(),
        format!("--kubelet-certificate-authority={dir}/ca.crt"),
        format!("--kubelet-client-certificate={dir}/kubelet-client.crt"),
        format!("--kubelet-client-key={dir}/kubelet-client.key"),
        // Node names resolve nowhere.
        "--kubelet-preferred-address-types=InternalIP".to_owned(),
        "--allow-privileged=true".to_owned(),
        "--profiling=false".to_owned(),
    ];
    args.extend(options.api_server_flags.iter().cloned());
    args
}

/// The controller manager's command line, with its files in `dir`.
pub(crate) fn controller_manager_args(options: &Options, dir: &str) -> Vec<String> {
    vec![
        format!("--kubeconfig={dir}/kube-controller-manager.kubeconfig"),
        format!("--service-account-private-key-file={dir}/sa.key"),
        format!("--root-ca-file={dir}/ca.crt"),
        format!("--cluster-signing-cert-file={dir}/ca.crt"),
        format!("--cluster-signing-key-file={dir}/ca.key"),
        format!("--service-cluster-ip-range={}", options.service_cidr),
        "--use-service-account-credentials=true".to_owned(),
        "--leader-elect=false".to_owned(),
        // Not served: several control planes on one host would want the same port.
        "--secure-port=0".to_owned(),
    ]
}

/// The scheduler's command line, with its files in `dir`.
pub(crate) fn scheduler_args(dir: &str) -> Vec<String> {
    vec![
        format!("--kubeconfig={dir}/kube-scheduler.kubeconfig"),
        "--leader-elect=false".to_owned(),
        "--secure-port=0".to_owned(),
    ]
}
