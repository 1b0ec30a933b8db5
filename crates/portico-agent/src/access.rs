//! The access line of the agent: one for each connection of a pod, refused or ended. The fields are those of
//! the gateway's line where they mean the same.

use std::fmt::Write as _;
use std::net::SocketAddr;

use jiff::Timestamp;
use portico_net::{ConnectionId, access};
use serde::Serialize;

/// One line.
#[derive(Debug, Serialize)]
pub(crate) struct Line<'a> {
    pub(crate) time: Timestamp,
    pub(crate) forward: SocketAddr,
    pub(crate) client: SocketAddr,
    /// The authority asked for.
    pub(crate) name: &'a str,
    /// The gateway as configured, if one carried it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) gateway: Option<&'a str>,
    /// The address of the gateway, or of the proxy that leads there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) upstream: Option<SocketAddr>,
    pub(crate) bytes_up: u64,
    pub(crate) bytes_down: u64,
    pub(crate) duration_ms: u64,
    pub(crate) side: &'static str,
    pub(crate) reason: &'static str,
    /// With which status a gateway refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) status: Option<u16>,
    pub(crate) connection: ConnectionId,
}

impl access::Line for Line<'_> {
    fn to_text(&self) -> String {
        let Self { forward, client, name, bytes_up, bytes_down, duration_ms, side, reason, .. } = self;
        // Writing to a String cannot fail.
        let mut text = format!("{:.3} forward={forward} client={client} name={name:?}", self.time);
        if let (Some(gateway), Some(upstream)) = (self.gateway, self.upstream) {
            let _ = write!(text, " gateway={gateway} upstream={upstream}");
        }
        let _ = write!(
            text,
            " bytes_up={bytes_up} bytes_down={bytes_down} duration_ms={duration_ms} side={side} \
             reason={reason}"
        );
        if let Some(status) = self.status {
            let _ = write!(text, " status={status}");
        }
        let _ = write!(text, " connection={}", self.connection);
        text
    }
}

#[cfg(test)]
mod tests {
    use portico_net::access::{AccessFormat, formatted};

    use super::*;

    #[test]
    fn a_line_of_text_has_its_fields_in_a_fixed_order() {
        let line = Line {
            time: "2026-01-02T03:04:05.678Z".parse().unwrap(),
            forward: "100.64.30.10:6443".parse().unwrap(),
            client: "10.1.2.3:40000".parse().unwrap(),
            name: "api.example.com:443",
            gateway: Some("tls://gateway.example.com:8088"),
            upstream: Some("192.0.2.1:8088".parse().unwrap()),
            bytes_up: 1,
            bytes_down: 2,
            duration_ms: 3,
            side: "downstream",
            reason: "closed",
            status: None,
            connection: ConnectionId(255),
        };
        assert_eq!(
            formatted(&line, AccessFormat::Text),
            "2026-01-02T03:04:05.678Z forward=100.64.30.10:6443 client=10.1.2.3:40000 \
             name=\"api.example.com:443\" gateway=tls://gateway.example.com:8088 upstream=192.0.2.1:8088 \
             bytes_up=1 bytes_down=2 duration_ms=3 side=downstream reason=closed connection=ff\n"
        );
        let refused = Line {
            gateway: None,
            upstream: None,
            reason: "refused",
            side: "upstream",
            status: Some(403),
            ..line
        };
        let json: serde_json::Value = serde_json::from_str(&formatted(&refused, AccessFormat::Json)).unwrap();
        assert_eq!((&json["status"], &json["connection"]), (&403.into(), &"ff".into()));
        assert!(json.get("gateway").is_none());
    }
}
