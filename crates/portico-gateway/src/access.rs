//! The access line of the gateway: one for each connection, refused or ended.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use jiff::Timestamp;
use portico_net::ConnectionId;
use portico_net::access::{self, millis};
use serde::Serialize;

use crate::outcome::{End, Refusal, Side};
use crate::record::{Listener, Record};
use crate::upstream::Upstream;

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
    /// Lines of other refused clients of the same cluster that were left out since the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    left_out: Option<u64>,
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
    pub(crate) fn ended(now: Duration, record: &'a Record, end: End) -> Self {
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
            duration_ms: millis(now.saturating_sub(record.accepted)),
            side: end.side(),
            reason: end.reason(),
            connection: record.id,
            left_out: None,
        }
    }

    pub(crate) fn refused(now: Duration, refused: &Refused<'a>, left_out: u64) -> Self {
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
            duration_ms: millis(now.saturating_sub(refused.accepted)),
            side: refused.refusal.side(),
            reason: refused.refusal.reason(),
            connection: refused.id,
            left_out: (left_out > 0).then_some(left_out),
        }
    }
}

impl access::Line for Line<'_> {
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
        let side = self.side.as_str();
        let _ = write!(
            text,
            " bytes_up={bytes_up} bytes_down={bytes_down} duration_ms={duration_ms} side={side} \
             reason={reason} connection={connection}"
        );
        if let Some(left_out) = self.left_out {
            let _ = write!(text, " left_out={left_out}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use portico_net::access::{AccessFormat, Line as _, formatted};

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
            left_out: None,
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
    fn lines_that_were_left_out_are_counted_in_the_next() {
        let line = Line { left_out: Some(980), ..line() };
        assert!(line.to_text().ends_with(" left_out=980"));
    }

    #[test]
    fn the_id_of_a_connection_is_the_same_in_text_and_json() {
        let json: serde_json::Value = serde_json::from_str(&formatted(&line(), AccessFormat::Json)).unwrap();
        assert_eq!(json["connection"], "ffffffffffffffff");
        assert!(line().to_text().ends_with(" connection=ffffffffffffffff"));
    }

    #[test]
    fn a_name_cannot_forge_a_field_or_a_line() {
        for format in [AccessFormat::Text, AccessFormat::Json] {
            let text = formatted(&line(), format);
            assert_eq!(text.lines().count(), 1, "{text}");
            assert!(text.contains("evil\\\""), "{text}");
        }
    }
}
