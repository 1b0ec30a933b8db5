//! `/doors`: the connections by each kind of listener for each cluster, and the last clients. They show the
//! operator whether a way in may close. They show people which clients still have to move to the other.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use portico_admin::listing::OutputFormat;
use portico_admin::table::{self, age};
use portico_api::listener::ListenerKind;
use portico_api::names::Tenant;
use portico_gateway::{Cluster, DoorSnapshot, Gateway, LAST_CLIENTS};
use serde::Serialize;

/// The doors of one cluster.
#[derive(Debug, Serialize)]
pub(super) struct Doors {
    cluster: String,
    /// From when on it is counted: nothing is known of before.
    since: Timestamp,
    /// Those by which anything came.
    doors: Vec<Door>,
}

/// One kind of listener.
#[derive(Debug, Serialize)]
struct Door {
    listener: ListenerKind,
    open: u64,
    opened: u64,
    used: u64,
    /// Since the last connection that was a use; 0 while one is open.
    #[serde(skip_serializing_if = "Option::is_none")]
    unused_seconds: Option<u64>,
    /// Those with connections open before the others, and of these the latest first; a bounded number.
    clients: Vec<Client>,
}

#[derive(Debug, Serialize)]
struct Client {
    address: IpAddr,
    open: u64,
    unused_seconds: u64,
}

/// Connections open now, by client.
type Open = BTreeMap<IpAddr, u64>;

/// The doors of every cluster, by name.
pub(super) fn list(gateway: Option<&Gateway>) -> Vec<Doors> {
    let Some(gateway) = gateway else { return Vec::new() };
    let mut open: HashMap<(Tenant, ListenerKind), Open> = HashMap::new();
    for record in gateway.connections() {
        let door = (record.upstream.cluster.name.clone(), record.listener.kind());
        *open.entry(door).or_default().entry(record.client.ip()).or_default() += 1;
    }
    let now = gateway.shared().now();
    let mut clusters = gateway.shared().route_store.clusters();
    clusters.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    let mut doors = |cluster: &Cluster| {
        let counted = ListenerKind::ALL.into_iter().zip(cluster.doors());
        let in_use = counted.filter(|(_, door)| door.opened > 0 || door.used > 0);
        let door = |(listener, door): (ListenerKind, DoorSnapshot)| {
            let open_by = open.remove(&(cluster.name.clone(), listener)).unwrap_or_default();
            let since = |last: Duration| now.saturating_sub(last).as_secs();
            let unused = if door.open > 0 { Some(0) } else { door.last.map(since) };
            let clients = clients(cluster, listener, open_by, now);
            let (open, opened, used) = (door.open, door.opened, door.used);
            Door { listener, open, opened, used, unused_seconds: unused, clients }
        };
        in_use.map(door).collect()
    };
    let of = |cluster: &Arc<Cluster>| Doors {
        cluster: cluster.name.to_string(),
        since: cluster.since,
        doors: doors(cluster),
    };
    clusters.iter().map(of).collect()
}

fn clients(cluster: &Cluster, listener: ListenerKind, open: Open, now: Duration) -> Vec<Client> {
    let mut last = cluster.last_clients(listener);
    last.retain(|client| !open.contains_key(&client.address));
    last.sort_unstable_by_key(|client| std::cmp::Reverse(client.last));
    let open = open.into_iter().map(|(address, open)| Client { address, open, unused_seconds: 0 });
    let unused = |last: u32| now.as_secs().saturating_sub(last.into());
    let gone = last.into_iter().map(|client| Client {
        address: client.address,
        open: 0,
        unused_seconds: unused(client.last),
    });
    open.chain(gone).take(LAST_CLIENTS).collect()
}

/// Writes the listing; of one cluster if one is named.
pub(super) fn write(
    doors: &[Doors],
    cluster: Option<&str>,
    format: OutputFormat,
    out: &mut dyn Write,
) -> io::Result<()> {
    let of_it = |doors: &&Doors| cluster.is_none_or(|name| doors.cluster == name);
    let doors: Vec<&Doors> = doors.iter().filter(of_it).collect();
    match format {
        OutputFormat::Json => {
            serde_json::to_writer(&mut *out, &doors)?;
            out.write_all(b"\n")
        }
        OutputFormat::Table => {
            let header = ["CLUSTER", "LISTENER", "OPEN", "OPENED", "UNUSED", "CLIENTS"];
            let rows = doors.iter().flat_map(|of| of.doors.iter().map(|door| door.row(&of.cluster)));
            out.write_all(table::render(header, &rows.collect::<Vec<_>>()).as_bytes())
        }
    }
}

impl Door {
    fn row(&self, cluster: &str) -> [String; 6] {
        let unused = self.unused_seconds.map_or("-".to_owned(), |seconds| age(seconds.saturating_mul(1_000)));
        let clients: Vec<String> = self.clients.iter().map(|client| client.address.to_string()).collect();
        [
            cluster.to_owned(),
            self.listener.to_string(),
            self.open.to_string(),
            self.opened.to_string(),
            unused,
            if clients.is_empty() { "-".to_owned() } else { clients.join(",") },
        ]
    }
}
