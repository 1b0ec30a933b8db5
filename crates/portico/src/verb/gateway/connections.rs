//! `/connections`: every open connection and tunnel stream, for people and scripts.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use portico_admin::listing::OutputFormat;
use portico_admin::table::{self, age, bytes};
use portico_gateway::{Gateway, Listener, Record};
use portico_net::ConnectionId;
use serde::Serialize;

/// One open connection. Field names are those of the access line.
#[derive(Debug, Serialize)]
pub(super) struct Connection {
    connection: ConnectionId,
    listener: Listener,
    cluster: String,
    service: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<Arc<str>>,
    client: SocketAddr,
    upstream: SocketAddr,
    bytes_up: u64,
    bytes_down: u64,
    duration_ms: u64,
}

/// What is open now, the oldest first.
pub(super) fn list(gateway: Option<&Gateway>) -> Vec<Connection> {
    let Some(gateway) = gateway else { return Vec::new() };
    let now = gateway.shared().now();
    let mut records = gateway.connections();
    records.sort_unstable_by_key(|record| record.accepted);
    records.iter().map(|record| Connection::new(record, now)).collect()
}

impl Connection {
    fn new(record: &Record, now: Duration) -> Self {
        let duration = now.saturating_sub(record.accepted);
        Self {
            connection: record.id,
            listener: record.listener,
            cluster: record.upstream.cluster.name.to_string(),
            service: record.upstream.id().to_string(),
            name: record.name.clone(),
            client: record.client,
            upstream: record.endpoint().address,
            bytes_up: record.bytes_up(),
            bytes_down: record.bytes_down(),
            duration_ms: u64::try_from(duration.as_millis()).unwrap_or(u64::MAX),
        }
    }
}

/// Writes the listing; of one cluster if one is named.
pub(super) fn write(
    connections: &[Connection],
    cluster: Option<&str>,
    format: OutputFormat,
    out: &mut dyn Write,
) -> io::Result<()> {
    let of_it = |connection: &&Connection| cluster.is_none_or(|name| connection.cluster == name);
    let connections: Vec<&Connection> = connections.iter().filter(of_it).collect();
    match format {
        OutputFormat::Json => {
            serde_json::to_writer(&mut *out, &connections)?;
            out.write_all(b"\n")
        }
        OutputFormat::Table => {
            let header = ["CLUSTER", "LISTENER", "CLIENT", "UPSTREAM", "UP", "DOWN", "AGE", "NAME"];
            let rows: Vec<_> = connections.iter().map(|connection| connection.row()).collect();
            out.write_all(table::render(header, &rows).as_bytes())
        }
    }
}

impl Connection {
    fn row(&self) -> [String; 8] {
        [
            self.cluster.clone(),
            self.listener.to_string(),
            self.client.to_string(),
            self.upstream.to_string(),
            bytes(self.bytes_up),
            bytes(self.bytes_down),
            age(self.duration_ms),
            self.name.as_deref().unwrap_or("-").to_owned(),
        ]
    }
}
