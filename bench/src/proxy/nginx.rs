//! nginx: stream module, `ssl_preread`, one upstream group a route and a map from server name to group.

use std::fmt::Write as _;
use std::process::Command;
use std::time::Instant;

use anyhow::Result;
use rustix::process::Signal;

use super::{Proxy, Running, passthrough_routes, stage};
use crate::site::Site;

/// Debian's nginx with `libnginx-mod-stream`.
pub(crate) struct Nginx;

impl Proxy for Nginx {
    fn name(&self) -> &'static str {
        "nginx"
    }

    fn configure(&self, site: &Site) -> Result<()> {
        let dir = site.dir.display();
        let mut upstreams = String::new();
        let mut map = String::new();
        for cluster in &site.clusters {
            for (upstream, host) in passthrough_routes(cluster) {
                writeln!(upstreams, "  upstream {upstream} {{ server {}; }}", cluster.backend)?;
                writeln!(map, "    {host} {upstream};")?;
            }
        }
        let sni = site.sni;
        stage(
            site.dir.join("nginx.conf"),
            format!(
                "load_module /usr/lib/nginx/modules/ngx_stream_module.so;
daemon off;
user root;
worker_processes 1;
worker_rlimit_nofile 20000;
pid {dir}/nginx.pid;
error_log stderr error;
events {{ worker_connections 18000; }}
stream {{
  access_log off;
  proxy_connect_timeout 1s;
  proxy_timeout 1h;
  map_hash_max_size 131072;
  map_hash_bucket_size 256;
  map $ssl_preread_server_name $upstream {{
    default '';
{map}  }}
{upstreams}  server {{
    listen {sni} backlog=4096;
    ssl_preread on;
    proxy_pass $upstream;
  }}
}}
"
            ),
        )?
        .publish()
    }

    fn command(&self, site: &Site) -> Command {
        let mut command = Command::new("/usr/sbin/nginx");
        command.arg("-p").arg(&site.dir).arg("-e").arg("stderr").arg("-c").arg(site.dir.join("nginx.conf"));
        command
    }

    fn publish(&self, site: &Site, running: &mut Running) -> Result<Instant> {
        self.configure(site)?;
        let start = Instant::now();
        running.signal(Signal::HUP)?;
        Ok(start)
    }

    fn publishes_by(&self) -> &'static str {
        "reload"
    }
}
