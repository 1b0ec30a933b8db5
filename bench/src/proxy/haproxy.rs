//! HAProxy: TCP mode, a map from server name to backend, splice both ways.
//!
//! As the others do for a cluster with one endpoint, it tries once to connect (its default is three times
//! more).

use std::fmt::Write as _;
use std::process::Command;
use std::time::Instant;

use anyhow::Result;

use super::{Proxy, Running, passthrough_routes, stage};
use crate::site::Site;

/// Debian's HAProxy.
pub(crate) struct Haproxy {
    /// Bytes of a pipe for splice. Its default is that of the kernel, 64 KiB, a sixteenth of Portico's.
    pub(crate) pipe_bytes: Option<u32>,
}

impl Proxy for Haproxy {
    fn name(&self) -> &'static str {
        "HAProxy"
    }

    fn configure(&self, site: &Site) -> Result<()> {
        let map = site.dir.join("sni.map");
        let mut routes = String::new();
        let mut backends = String::new();
        for cluster in &site.clusters {
            for (name, host) in passthrough_routes(cluster) {
                writeln!(routes, "{host} {name}")?;
                writeln!(backends, "backend {name}\n  server a {}", cluster.backend)?;
            }
        }
        stage(map.clone(), routes)?.publish()?;
        let pipes = self.pipe_bytes.map(|bytes| format!("  tune.pipesize {bytes}\n")).unwrap_or_default();
        stage(
            site.dir.join("haproxy.cfg"),
            format!(
                "global
  nbthread 1
  maxconn 4000
  pidfile {pid}
{pipes}defaults
  mode tcp
  option splice-request
  option splice-response
  timeout connect 1s
  retries 0
  timeout client 1h
  timeout server 1h
frontend sni
  bind {sni} backlog 4096
  tcp-request inspect-delay 5s
  tcp-request content accept if {{ req.ssl_hello_type 1 }}
  use_backend %[req.ssl_sni,lower,map({map})]
{backends}",
                pid = site.dir.join("haproxy.pid").display(),
                sni = site.sni,
                map = map.display(),
            ),
        )?
        .publish()
    }

    fn command(&self, site: &Site) -> Command {
        let mut command = Command::new("/usr/sbin/haproxy");
        command.arg("-db").arg("-f").arg(site.dir.join("haproxy.cfg"));
        // Present only while a successor starts: the process whose listeners it takes the place of.
        if let Ok(old) = std::fs::read_to_string(site.dir.join("predecessor")) {
            command.arg("-sf").arg(old);
        }
        command
    }

    fn publish(&self, site: &Site, running: &mut Running) -> Result<Instant> {
        self.configure(site)?;
        std::fs::write(site.dir.join("predecessor"), running.pid().to_string())?;
        let start = Instant::now();
        let mut old = running.succeed(self)?;
        // A wait here would measure the end of the old process instead of the start of the new one.
        std::thread::spawn(move || old.wait());
        Ok(start)
    }

    fn publishes_by(&self) -> &'static str {
        "new process"
    }
}
