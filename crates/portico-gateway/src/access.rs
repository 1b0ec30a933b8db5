//! The access line: one for each connection, refused or ended, on standard output.
//!
//! Workers hand finished lines to a thread of its own through a bounded queue: a terminal or log collector that stalls
//! costs lines, which are counted, but never a byte of a connection.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;

use crate::record::{ConnectionId, End, Listener, Record};
use crate::refusal::{Refusal, Side};
use crate::upstream::Upstream;
use crate::worker::Shared;

/// Lines that wait for the writer: a tenth of a second at 40,000 connections a second.
const QUEUE: usize = 4_096;

/// How access lines look.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AccessFormat {
    /// None are written.
    #[default]
    Off,
    /// `key=value` pairs.
    Text,
    /// One JSON object a line.
    Json,
}

/// Where access lines go.
#[derive(Debug)]
pub struct AccessLog {
    format: AccessFormat,
    queue: Option<SyncSender<String>>,
    dropped: AtomicU64,
}

impl AccessLog {
    /// Starts the writer, unless `format` is off.
    pub fn start(format: AccessFormat) -> io::Result<Self> {
        let queue = match format {
            AccessFormat::Off => None,
            AccessFormat::Text | AccessFormat::Json => {
                let (sender, receiver) = sync_channel(QUEUE);
                std::thread::Builder::new()
                    .name("access-log".into())
                    .spawn(move || {
                        // A closed standard output ends the log, not the gateway.
                        if let Err(error) = write_lines(&receiver, io::stdout()) {
                            tracing::error!(
                                %error,
                                "standard output takes no more access lines; from now on they are dropped and counted"
                            );
                        }
                    })?;
                Some(sender)
            }
        };
        Ok(Self { format, queue, dropped: AtomicU64::default() })
    }

    /// Lines lost because the reader of standard output was too slow.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Relaxed)
    }

    pub(crate) fn write<'a>(&self, line: impl FnOnce() -> Line<'a>) {
        let Some(queue) = &self.queue else { return };
        if queue.try_send(line().format(self.format)).is_err() {
            self.dropped.fetch_add(1, Relaxed);
        }
    }
}

/// Writes lines as they come, many at once when many wait. Ends with the queue, or when `output` fails.
fn write_lines(lines: &Receiver<String>, output: impl Write) -> io::Result<()> {
    let mut output = io::BufWriter::new(output);
    while let Ok(line) = lines.recv() {
        output.write_all(line.as_bytes())?;
        while let Ok(line) = lines.try_recv() {
            output.write_all(line.as_bytes())?;
        }
        output.flush()?;
    }
    Ok(())
}

/// What an access line says. Field names are the ones logs and metrics use.
#[derive(Debug, Serialize)]
pub(crate) struct Line<'a> {
    time: Timestamp,
    listener: Listener,
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    service: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    client: SocketAddr,
    #[serde(skip_serializing_if = "Option::is_none")]
    upstream: Option<SocketAddr>,
    bytes_up: u64,
    bytes_down: u64,
    duration_ms: u64,
    side: Side,
    reason: &'static str,
    connection: ConnectionId,
}

/// A client that was not connected.
pub(crate) struct Refused<'a> {
    pub(crate) id: ConnectionId,
    pub(crate) listener: Listener,
    pub(crate) client: SocketAddr,
    pub(crate) name: Option<&'a str>,
    pub(crate) upstream: Option<&'a Upstream>,
    pub(crate) accepted: Duration,
    pub(crate) refusal: Refusal,
}

impl<'a> Line<'a> {
    pub(crate) fn ended(shared: &Shared, record: &'a Record, end: End) -> Self {
        Self {
            time: Timestamp::now(),
            listener: record.listener,
            cluster: Some(record.upstream.cluster.name.as_str()),
            service: Some(record.upstream.id().to_string()),
            name: record.name.as_deref(),
            client: record.client,
            upstream: Some(record.endpoint().address),
            bytes_up: record.bytes_up(),
            bytes_down: record.bytes_down(),
            duration_ms: millis(shared.now().saturating_sub(record.accepted)),
            side: end.side(),
            reason: end.reason(),
            connection: record.id,
        }
    }

    pub(crate) fn refused(shared: &Shared, refused: &Refused<'a>) -> Self {
        Self {
            time: Timestamp::now(),
            listener: refused.listener,
            cluster: refused.upstream.map(|upstream| upstream.cluster.name.as_str()),
            service: refused.upstream.map(|upstream| upstream.id().to_string()),
            name: refused.name,
            client: refused.client,
            upstream: None,
            bytes_up: 0,
            bytes_down: 0,
            duration_ms: millis(shared.now().saturating_sub(refused.accepted)),
            side: refused.refusal.side(),
            reason: refused.refusal.reason(),
            connection: refused.id,
        }
    }

    fn format(&self, format: AccessFormat) -> String {
        let mut text = match format {
            AccessFormat::Json => serde_json::to_string(self).unwrap_or_default(),
            AccessFormat::Off | AccessFormat::Text => self.to_text(),
        };
        text.push('\n');
        text
    }

    fn to_text(&self) -> String {
        let mut text = format!("{:.3} listener={} client={}", self.time, self.listener, self.client);
        // Names come from the client: quoted and escaped, so that none can forge a field or a line.
        let name = self.name.map(|name| format!("{name:?}"));
        let upstream = self.upstream.map(|address| address.to_string());
        let optional = [
            ("cluster", self.cluster),
            ("service", self.service.as_deref()),
            ("name", name.as_deref()),
            ("upstream", upstream.as_deref()),
        ];
        for (key, value) in optional {
            if let Some(value) = value {
                // Writing to a String cannot fail.
                let _ = write!(text, " {key}={value}");
            }
        }
        let Self { bytes_up, bytes_down, duration_ms, reason, connection, .. } = self;
        let side = match self.side {
            Side::Downstream => "downstream",
            Side::Upstream => "upstream",
            Side::Gateway => "gateway",
        };
        let _ = write!(
            text,
            " bytes_up={bytes_up} bytes_down={bytes_down} duration_ms={duration_ms} side={side} reason={reason} connection={connection}"
        );
        text
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line() -> Line<'static> {
        Line {
            time: "2026-01-02T03:04:05.678Z".parse().unwrap(),
            listener: Listener::Sni,
            cluster: None,
            service: None,
            name: Some("evil\" side=upstream\nnext"),
            client: "198.51.100.7:1234".parse().unwrap(),
            upstream: None,
            bytes_up: 0,
            bytes_down: 0,
            duration_ms: 3,
            side: Side::Downstream,
            reason: "unknown",
            connection: ConnectionId(u64::MAX),
        }
    }

    #[test]
    fn a_line_of_text_has_its_fields_in_a_fixed_order() {
        let line = Line { name: Some("a.example.com"), cluster: Some("a"), ..line() };
        assert_eq!(
            line.to_text(),
            "2026-01-02T03:04:05.678Z listener=sni client=198.51.100.7:1234 cluster=a name=\"a.example.com\" \
             bytes_up=0 bytes_down=0 duration_ms=3 side=downstream reason=unknown connection=ffffffffffffffff"
        );
    }

    #[test]
    fn the_id_of_a_connection_is_the_same_in_text_and_json() {
        let json: serde_json::Value = serde_json::from_str(&line().format(AccessFormat::Json)).unwrap();
        assert_eq!(json["connection"], "ffffffffffffffff");
        assert!(line().to_text().ends_with(" connection=ffffffffffffffff"));
    }

    #[test]
    fn a_closed_output_ends_the_log() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let (sender, lines) = sync_channel(1);
        sender.send("a line\n".to_owned()).unwrap();
        assert_eq!(write_lines(&lines, Closed).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn a_name_cannot_forge_a_field_or_a_line() {
        for format in [AccessFormat::Text, AccessFormat::Json] {
            let text = line().format(format);
            assert_eq!(text.lines().count(), 1, "{text}");
            assert!(text.contains("evil\\\""), "{text}");
        }
    }
}
