//! `portico konnectivity server`: its flags, and what they mean together.
//!
//! `flags` are those of the upstream proxy-server and Portico's own, `cipher_suites` reads one of them.
//! `control` is the order at start and end, `pages` and `metrics` what it says of itself.

mod cipher_suites;
pub(super) mod control;
mod flags;
mod metrics;
mod pages;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, bail, ensure};
use portico_konnectivity::server::{
    Authentication, Expected, FrontendListen, Mode, ServerLease, ServerTls, Settings, Status, TlsFiles,
    TlsOptions,
};
use rustls::version::{TLS12, TLS13};

pub(crate) use self::flags::Flags;
use self::flags::{AgentFlags, FrontendFlags, HealthFlags, IgnoredFlags, LeaseFlags, ModeFlag, TokenFlags};
use super::flag_values::listen;
use super::uuid::uuid;
use crate::daemon::{self, Daemon, Hangup};
use crate::outcome::Outcome;

/// What upstream's server does without a limit: an agent that hangs would keep the dial for ever.
const DIAL_TIMEOUT: Duration = Duration::from_secs(30);

/// The silence before a PING that 0 stands for, and the least there is. As in grpc-go.
const PING_OF_ZERO: Duration = Duration::from_hours(2);
const LEAST_PING: Duration = Duration::from_secs(1);

/// Everything that a server is started with.
struct Plan {
    settings: Settings,
    mode: Mode,
    frontends: FrontendListen,
    agents: (SocketAddr, Arc<ServerTls>),
    /// TLS whose files are watched.
    tls: Vec<Arc<ServerTls>>,
    health: Option<SocketAddr>,
    admin: Option<SocketAddr>,
}

impl Flags {
    /// Checks the flags against each other, reads the certificates, and looks up where to listen.
    async fn plan(&self) -> anyhow::Result<Plan> {
        let options = self.tls_options()?;
        let agents_tls = Arc::new(self.agents_tls(options.clone())?);
        let frontends = self.frontends(options).await?;
        let mut tls = vec![Arc::clone(&agents_tls)];
        if let FrontendListen::Tcp { tls: of_frontends, .. } = &frontends {
            tls.push(Arc::clone(of_frontends));
        }
        let at = async |flag: &str, host: &str, port| {
            listen(host, port).await.map_err(|why| anyhow!("{flag}: {why}"))
        };
        let HealthFlags { health_port, health_bind_address, admin_port, admin_bind_address, .. } =
            &self.health;
        let health = at("--health-bind-address", health_bind_address, *health_port).await?;
        let admin = at("--admin-bind-address", admin_bind_address, *admin_port).await?;
        let AgentFlags { agent_bind_address, agent_port, .. } = &self.agents;
        let agents = at("--agent-bind-address", agent_bind_address, *agent_port).await?;
        ensure!(*agent_port != 0, "--agent-port: give a port that agents can know");
        Ok(Plan {
            settings: self.settings(),
            mode: match self.frontend.mode {
                ModeFlag::Grpc => Mode::Grpc,
                ModeFlag::HttpConnect => Mode::HttpConnect,
            },
            frontends,
            agents: (agents, agents_tls),
            tls,
            health: (*health_port != 0).then_some(health),
            admin: (*admin_port != 0).then_some(admin),
        })
    }

    fn settings(&self) -> Settings {
        let Self { agents, own, .. } = self;
        let is_limited = agents.backend_dial_timeout > Duration::ZERO;
        Settings {
            id: if agents.server_id.is_empty() { uuid() } else { agents.server_id.clone() },
            count: agents.server_count,
            max_agents: own.max_agents as usize,
            strategies: agents.proxy_strategies.clone(),
            route_cidr: own.route_cidr,
            dial_timeout: if is_limited { agents.backend_dial_timeout } else { DIAL_TIMEOUT },
            connection_buffer: own.connection_buffer,
            memory: own.max_held_bytes,
            keepalive: silence(agents.keepalive_time),
            frontend_keepalive: silence(self.frontend.frontend_keepalive_time),
        }
    }

    async fn frontends(&self, options: TlsOptions) -> anyhow::Result<FrontendListen> {
        let FrontendFlags { uds_name, server_cert, server_key, server_ca_cert, .. } = &self.frontend;
        let (cert, key, ca) = (server_cert.0.clone(), server_key.0.clone(), server_ca_cert.0.clone());
        if let Some(path) = uds_name.0.clone() {
            ensure!(self.frontend.server_port == 0, "--uds-name: give --server-port=0 with it");
            ensure!(
                cert.is_none() && key.is_none() && ca.is_none(),
                "--uds-name: there is no TLS on a Unix socket; leave out --server-cert, --server-key and \
                 --server-ca-cert"
            );
            return Ok(FrontendListen::Unix { path, replace: self.frontend.delete_existing_uds_file });
        }
        ensure!(self.frontend.server_port != 0, "give --uds-name, or a --server-port other than 0");
        let address = listen(&self.frontend.server_bind_address, self.frontend.server_port)
            .await
            .map_err(|why| anyhow!("--server-bind-address: {why}"))?;
        let files = TlsFiles {
            certificate: cert.context("--server-cert is missing: TCP needs TLS; or give --uds-name")?,
            key: key.context("--server-key is missing: TCP needs TLS; or give --uds-name")?,
            client_ca: Some(ca.context("--server-ca-cert is missing: who may connect? Or give --uds-name")?),
        };
        let alpn: &[u8] = if self.frontend.mode == ModeFlag::Grpc { b"h2" } else { b"http/1.1" };
        let tls = Arc::new(ServerTls::load(files, options, alpn)?);
        Ok(FrontendListen::Tcp { address, tls })
    }

    fn agents_tls(&self, options: TlsOptions) -> anyhow::Result<ServerTls> {
        let files = TlsFiles {
            certificate: self
                .agents
                .cluster_cert
                .0
                .clone()
                .context("--cluster-cert is missing: agents need TLS")?,
            key: self.agents.cluster_key.0.clone().context("--cluster-key is missing: agents need TLS")?,
            client_ca: self.agents.cluster_ca_cert.0.clone(),
        };
        if files.client_ca.is_none() && self.tokens.agent_namespace.is_empty() {
            tracing::warn!(
                "every agent is accepted: give --cluster-ca-cert, or --agent-namespace for tokens"
            );
        }
        Ok(ServerTls::load(files, options, b"h2")?)
    }

    fn tls_options(&self) -> anyhow::Result<TlsOptions> {
        let versions = match self.agents.tls_min_version.as_str() {
            "" | "VersionTLS10" | "VersionTLS11" | "VersionTLS12" => vec![&TLS12, &TLS13],
            "VersionTLS13" => vec![&TLS13],
            other => bail!("--tls-min-version {other:?}: give VersionTLS12 or VersionTLS13"),
        };
        let mut options = TlsOptions { versions, ..TlsOptions::default() };
        let Some(choice) = cipher_suites::choose(&self.agents.cipher_suites, &options.provider)? else {
            return Ok(options);
        };
        if !choice.left_out.is_empty() {
            let names = choice.left_out.join(",");
            tracing::warn!(names, "--cipher-suites: the TLS library does not have these; they are left out");
        }
        if !choice.has_tls12 && options.versions.contains(&&TLS12) {
            tracing::warn!("--cipher-suites: none of TLS 1.2 is left; peers need TLS 1.3");
        }
        options.provider = choice.provider;
        Ok(options)
    }

    /// How agents authenticate.
    async fn authentication(&self) -> anyhow::Result<Authentication> {
        let TokenFlags { agent_namespace, agent_service_account, authentication_audience, kubeconfig } =
            &self.tokens;
        let all = [agent_namespace, agent_service_account, authentication_audience];
        let bindings = self.own.bind_identifiers.clone();
        if all.iter().all(|text| text.is_empty()) {
            ensure!(
                bindings.is_empty() || self.agents.cluster_ca_cert.0.is_some(),
                "--bind-identifiers: agents have no identity; give --cluster-ca-cert, or --agent-namespace \
                 for tokens"
            );
            return Ok(Authentication::none().bound(bindings));
        }
        ensure!(
            all.iter().all(|text| !text.is_empty()),
            "give all of --agent-namespace, --agent-service-account and --authentication-audience, or none"
        );
        ensure!(
            self.agents.cluster_ca_cert.0.clone().is_none(),
            "--cluster-ca-cert and --agent-namespace: agents show certificates or tokens; leave out one"
        );
        let client = portico_kube::client(kubeconfig.0.as_deref()).await.context("for reviews of tokens")?;
        let expected = Expected {
            namespace: agent_namespace.clone(),
            service_account: agent_service_account.clone(),
            audience: authentication_audience.clone(),
        };
        Ok(Authentication::by_token(client, expected).bound(bindings))
    }

    /// The Lease of the server with this status, if it is to have one.
    async fn lease(&self, status: Status) -> anyhow::Result<Option<ServerLease>> {
        let LeaseFlags { enable_lease_controller, lease_namespace, lease_label } = &self.leases;
        if !enable_lease_controller {
            return Ok(None);
        }
        let labels =
            flags::labels(lease_label).map_err(|why| anyhow!("--lease-label={lease_label}: {why}"))?;
        let kubeconfig = self.tokens.kubeconfig.0.as_deref();
        let client = portico_kube::client(kubeconfig).await.context("--enable-lease-controller")?;
        Ok(Some(ServerLease::new(client, lease_namespace, labels, status)))
    }

    /// Says which flags have no effect.
    fn hint(&self) {
        self.klog.hint();
        let IgnoredFlags { frontend_write_channel_size, kubeconfig_qps, kubeconfig_burst, both } =
            &self.ignored;
        both.hint(&[
            ("--frontend-write-channel-size", frontend_write_channel_size.is_some()),
            ("--kubeconfig-qps", kubeconfig_qps.is_some()),
            ("--kubeconfig-burst", kubeconfig_burst.is_some()),
        ]);
    }
}

/// The silence before a PING that a flag means.
fn silence(given: Duration) -> Duration {
    if given.is_zero() { PING_OF_ZERO } else { given.max(LEAST_PING) }
}

/// Runs a server.
pub(crate) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    daemon::run(async { control::run(flags, Daemon::start(Hangup::of_terminal())?).await })
        .map(|()| Outcome::Done)
}

#[cfg(test)]
mod tests;
