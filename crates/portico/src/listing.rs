//! The listing of routes, one for `portico routes` and `/routes`: what would be exposed, where, by which object, to which
//! endpoints, and what stands in the way.

use std::io::{self, Write};

use portico_routes::route::RouteKey;
use portico_routes::rows::{RouteRow, RouteState};

use crate::outcome::OutputFormat;
use crate::table;

/// Endpoints shown in a cell of the table; JSON has all.
const MOST_ENDPOINTS: usize = 3;

/// Writes the listing.
pub(crate) fn write_routes(rows: &[RouteRow], format: OutputFormat, out: &mut dyn Write) -> io::Result<()> {
    match format {
        OutputFormat::Json => {
            serde_json::to_writer_pretty(&mut *out, rows)?;
            out.write_all(b"\n")
        }
        OutputFormat::Table => {
            let header = ["CLUSTER", "BY", "KEY", "SERVICE PORT", "STATE", "ALLOWED", "ENDPOINTS"];
            let rows: Vec<_> = rows.iter().map(row).collect();
            out.write_all(table::render(header, &rows).as_bytes())
        }
    }
}

fn row(row: &RouteRow) -> [String; 7] {
    let (by, key) = match &row.key {
        RouteKey::Port(port) => ("port", port.to_string()),
        RouteKey::Host(host) => ("host", host.to_string()),
        RouteKey::Authority(authority) => ("authority", authority.to_string()),
    };
    [
        row.cluster.to_string(),
        by.to_owned(),
        key,
        row.backend.to_string(),
        state(row),
        row.policy.allow.to_string(),
        endpoints(row),
    ]
}

fn state(row: &RouteRow) -> String {
    match &row.state {
        RouteState::Ready => "ready".to_owned(),
        RouteState::NotReady => "not ready".to_owned(),
        RouteState::Conflict { winner } => format!("conflict: {winner} has it"),
        RouteState::ListenersOff => "off: nodeport-proxy is disabled".to_owned(),
    }
}

fn endpoints(row: &RouteRow) -> String {
    let shown: Vec<String> = row.endpoints.iter().take(MOST_ENDPOINTS).map(ToString::to_string).collect();
    let hidden = row.endpoints.len() - shown.len();
    let not_ready = row.endpoints_total - row.endpoints.len();
    let mut text = if shown.is_empty() { "none ready".to_owned() } else { shown.join(",") };
    if hidden > 0 {
        text.push_str(&format!(" +{hidden}"));
    }
    if not_ready > 0 {
        text.push_str(&format!(" ({not_ready} not ready)"));
    }
    text
}
