//! Beside clients without an identity that mean harm: do requests of others wait longer, and how much memory
//! is held?
//!
//! Each proxy is started anew for each attack. Requests are measured at rest, then beside the attack. By SNI
//! all proxies take part; by the tunnel those that have one, through their own agent, whose connection was
//! there before. No proxy asks for a certificate: Envoy's gateway admits everybody then, as KKP's does, and
//! has its overload manager with a heap of 256 MiB; Portico asks for a token.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use rustls::ClientConfig;

use super::Bench;
use crate::hello::{Order, client_hello};
use crate::hole::BlackHole;
use crate::load::attack::{Attack, Kind, Target};
use crate::load::beside::{Findings, Slice};
use crate::load::{greet_all, pingpong};
use crate::pki::Pki;
use crate::process;
use crate::proxy::Running;
use crate::proxy::agent::Pair;
use crate::report::{Bar, Row, quantile};

const CLUSTERS: usize = 20;
/// The one whose API server is silent; a start waits for the first and the last.
const SILENT: usize = 10;
/// An attack has come to its height by then.
const HEIGHT: Duration = Duration::from_secs(1);
/// Length of the part that is recorded, in slices of other rows.
const SLICES: u32 = 3;
/// A p99 beside an attack, against the same at rest.
const FACTOR: f64 = 2.0;
/// Visits are long beside those of other rows, and attacks are many: one for so many rounds.
const ROUNDS_A_VISIT: usize = 5;

/// Latency and memory beside each attack.
pub(crate) fn rows(bench: &Bench) -> Result<Vec<Row>> {
    let hole = BlackHole::open(bench.backend_port())?;
    let first = bench.clusters(1);
    let pki = Pki::make(bench.dir.join("pki"), first.iter().map(|cluster| &*cluster.id))?;
    let stranger = Arc::new(pki.stranger()?);
    let mut rows = Vec::new();
    for kind in Kind::ALL {
        let mut table = Table::new(kind);
        for number in 0..bench.proxies.len() {
            let Some(subject) = Subject::start(bench, number, kind, &pki, &hole)? else { continue };
            subject.visit(bench, kind, &stranger, &mut table)?;
        }
        rows.extend([table.connections, table.round_trips, table.memory]);
    }
    Ok(rows)
}

/// A proxy under attack.
struct Subject {
    number: u8,
    name: &'static str,
    running: Attacked,
    hello: Vec<u8>,
}

enum Attacked {
    BySni(Running),
    ByTunnel(Box<Pair>),
}

impl Subject {
    /// `None` if this proxy has nothing that could be attacked so.
    fn start(bench: &Bench, number: usize, kind: Kind, pki: &Pki, hole: &BlackHole) -> Result<Option<Self>> {
        let plain = bench.proxies[number].as_ref();
        let open = plain.open_to_strangers(pki);
        let proxy = open.as_deref().unwrap_or(plain);
        let mut clusters = bench.clusters(CLUSTERS);
        clusters[SILENT].backend = hole.address();
        let hello = client_hello(&clusters[0].host, Order::Answer);
        let name = format!("hostile-{}", kind as usize);
        let running = || bench.start_proxy(proxy, number, clusters, &name);
        let running = match (kind, proxy.agent()) {
            (Kind::SilentBySni, _) => Attacked::BySni(running()?),
            (_, None) => return Ok(None),
            (_, Some(agent)) => Attacked::ByTunnel(Box::new(Pair::start(agent, running()?)?)),
        };
        Ok(Some(Self { number: u8::try_from(number)?, name: proxy.name(), running, hello }))
    }

    fn visit(
        &self,
        bench: &Bench,
        kind: Kind,
        stranger: &Arc<ClientConfig>,
        table: &mut Table,
    ) -> Result<()> {
        let (gateway, door) = match &self.running {
            Attacked::BySni(running) => (running.pid(), running.site.sni),
            Attacked::ByTunnel(pair) => (pair.gateway(), pair.way.listen),
        };
        let greeting = client_hello(&bench.clusters(1)[0].host, Order::Echo);
        let hellos = std::slice::from_ref(&self.hello);
        let length = bench.rounds.slice * SLICES;
        for visit in 0..bench.rounds.count.div_ceil(ROUNDS_A_VISIT) {
            let established =
                greet_all(door, &vec![greeting.clone(); pingpong::CONNECTIONS], pingpong::CONNECTIONS)?;
            let slice = |attack: Option<Attack>| -> Result<(Findings, Result<u64>)> {
                let mut slice = Slice::begin(door, hellos, &established, None)?;
                slice.run(HEIGHT)?;
                slice.record();
                slice.run(length)?;
                // Ends before the slice does, or its last requests would be counted as beside it.
                let begun = attack.map_or(Ok(0), Attack::end);
                Ok((slice.finish()?, begun))
            };
            let (rest, _) = slice(None)?;
            process::forget_peak(gateway)?;
            let before = process::peak(gateway)?;
            let source = Ipv4Addr::new(127, 10 + kind as u8, self.number, u8::try_from(visit)?);
            let attack = Attack::start(kind, source, self.target(bench, kind, stranger))?;
            let beside = slice(Some(attack)).and_then(|(beside, begun)| {
                table.add(self.name, &rest, &beside)?;
                Ok(begun)
            });
            match beside {
                Ok(begun) => eprintln!("  {}: {} connections, {}", self.name, begun?, kind.name()),
                Err(error) => {
                    table.broken(self.name, &error);
                    return Ok(());
                }
            }
            let grown = process::peak(gateway)?.saturating_sub(before);
            table.memory.add(self.name, grown as f64 / 1e6);
        }
        Ok(())
    }

    fn target(&self, bench: &Bench, kind: Kind, stranger: &Arc<ClientConfig>) -> Target {
        let address = match &self.running {
            Attacked::BySni(running) => running.site.sni,
            Attacked::ByTunnel(pair) => pair.way.gateway,
        };
        // Refusals come at once for a name that is not there.
        let authority = match kind {
            Kind::WaitingReviews => bench.clusters(CLUSTERS)[SILENT].authority.clone(),
            _ => "nothing.example.com:443".to_owned(),
        };
        Target { address, authority, tls: Arc::clone(stranger) }
    }
}

/// The lines of one attack.
struct Table {
    connections: Row,
    round_trips: Row,
    memory: Row,
}

impl Table {
    fn new(kind: Kind) -> Self {
        let line = |what: &str| {
            let name = format!("{what} beside {}", kind.name());
            Row::new(name, "p99 ÷ at rest", Bar::AtMost(FACTOR))
        };
        Self {
            connections: line("new connection"),
            round_trips: line("round trip"),
            memory: Row::new(format!("memory for {}", kind.name()), "MB at most", Bar::Open),
        }
    }

    fn add(&mut self, proxy: &'static str, rest: &Findings, beside: &Findings) -> Result<()> {
        self.connections.add(proxy, p99(&beside.connections)? / p99(&rest.connections)?);
        self.round_trips.add(proxy, p99(&beside.round_trips)? / p99(&rest.round_trips)?);
        self.connections.count_failures(proxy, beside.failures);
        Ok(())
    }

    /// A proxy that dies or cuts connections has no figure, but a reason, and holds no bar.
    fn broken(&mut self, proxy: &'static str, error: &anyhow::Error) {
        eprintln!("  {proxy}: {error:#}");
        for row in [&mut self.connections, &mut self.round_trips, &mut self.memory] {
            row.samples.remove(proxy);
            row.fail(proxy, "breaks");
        }
    }
}

fn p99(times: &[Duration]) -> Result<f64> {
    let seconds: Vec<_> = times.iter().map(Duration::as_secs_f64).collect();
    quantile(&seconds, 0.99).context("no request of a slice was answered")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_that_breaks_in_its_last_visit_has_no_figure_and_holds_no_bar() {
        let mut table = Table::new(Kind::HalfFrames);
        table.connections.add("Portico", 1.0);
        table.broken("Portico", &anyhow::anyhow!("the proxy ended an established connection"));
        for row in [table.connections, table.round_trips] {
            assert_eq!((row.median("Portico"), row.holds()), (None, Some(false)));
        }
    }
}
