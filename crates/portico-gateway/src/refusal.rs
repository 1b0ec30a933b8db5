//! Why a client was not connected: one word for metrics and the access line, one sentence for people, and what the client
//! is told on its own protocol.
//!
//! Every failure before the first byte is copied is a [`Refusal`]; whatever happens afterwards is an
//! [`End`](crate::record::End).

use portico_wire::alert::Description;
use serde::Serialize;

/// Whose doing a failure is: the first question of every incident.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// The client, or the network before us.
    Downstream,
    /// The control plane, or the network behind us.
    Upstream,
    /// This gateway: its limits or its table.
    Gateway,
}

/// Why a client was not connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Refusal {
    /// The client left, or was gone, before it said where it wants to go: port scans and TCP health checks.
    ClosedEarly,
    /// It said nothing useful within the hello timeout.
    TooSlow,
    /// Its first bytes are no ClientHello, request or PROXY header, whichever was due.
    Malformed,
    /// A PROXY header from a hop that is not trusted, or a required one missing.
    ProxyHeader,
    /// A ClientHello without a server name.
    NoServerName,
    /// A name or authority nobody exposes.
    Unknown,
    /// Exposed, but no endpoint is ready.
    NotReady,
    /// Not on the cluster's allow list.
    NotAllowed,
    /// The identity shown opens another cluster.
    NotAuthorized,
    /// No identity was shown where one is needed, or none that is valid.
    Unauthenticated,
    /// The API server that knows what the token is worth could not be asked.
    ReviewFailed,
    /// The cluster has as many connections as its budget admits.
    MaxConnections,
    /// The cluster gets more new connections a second than its budget admits.
    ConnectionRate,
    /// Too many connections of all clusters have not yet said where they want to go.
    MaxHandshakes,
    /// It had not proven who it is, and others that had not either needed its place.
    Unproven,
    /// Too many connections of the cluster wait for an endpoint to accept.
    MaxConnecting,
    /// Every endpoint tried refused or was unreachable.
    ConnectFailed,
    /// No endpoint answered in time.
    ConnectTimedOut,
    /// This process has no descriptor left for the upstream connection.
    OutOfDescriptors,
    /// Another method than CONNECT.
    Method,
    /// The gateway is stopping.
    Draining,
}

impl Refusal {
    /// Every reason, for metrics that must exist before they first count.
    pub const ALL: [Self; 21] = [
        Self::ClosedEarly,
        Self::TooSlow,
        Self::Malformed,
        Self::ProxyHeader,
        Self::NoServerName,
        Self::Unknown,
        Self::NotReady,
        Self::NotAllowed,
        Self::NotAuthorized,
        Self::Unauthenticated,
        Self::ReviewFailed,
        Self::MaxConnections,
        Self::ConnectionRate,
        Self::MaxHandshakes,
        Self::Unproven,
        Self::MaxConnecting,
        Self::ConnectFailed,
        Self::ConnectTimedOut,
        Self::OutOfDescriptors,
        Self::Method,
        Self::Draining,
    ];

    /// The word for metrics and the access line. Stable.
    pub fn reason(self) -> &'static str {
        match self {
            Self::ClosedEarly => "closed_early",
            Self::TooSlow => "too_slow",
            Self::Malformed => "malformed",
            Self::ProxyHeader => "proxy_header",
            Self::NoServerName => "no_server_name",
            Self::Unknown => "unknown",
            Self::NotReady => "not_ready",
            Self::NotAllowed => "not_allowed",
            Self::NotAuthorized => "not_authorized",
            Self::Unauthenticated => "unauthenticated",
            Self::ReviewFailed => "review_failed",
            Self::MaxConnections => "max_connections",
            Self::ConnectionRate => "connection_rate",
            Self::MaxHandshakes => "max_handshakes",
            Self::Unproven => "unproven",
            Self::MaxConnecting => "max_connecting",
            Self::ConnectFailed => "connect_failed",
            Self::ConnectTimedOut => "connect_timed_out",
            Self::OutOfDescriptors => "out_of_descriptors",
            Self::Method => "method",
            Self::Draining => "draining",
        }
    }

    /// The sentence a person reads.
    pub fn message(self) -> &'static str {
        match self {
            Self::ClosedEarly => "the client left before it said where it wants to go",
            Self::TooSlow => "the client did not say in time where it wants to go",
            Self::Malformed => "the first bytes are not what this listener serves",
            Self::ProxyHeader => "the PROXY header is missing, or its sender is not trusted",
            Self::NoServerName => "the ClientHello carries no server name",
            Self::Unknown => "nothing is exposed under this name",
            Self::NotReady => "exposed, but no endpoint is ready",
            Self::NotAllowed => "the client's address is not on the allow list of this cluster",
            Self::NotAuthorized => "the client's identity opens nothing under this name",
            Self::Unauthenticated => "the client showed no identity that is valid here",
            Self::ReviewFailed => "the API server that reviews the token could not be asked",
            Self::MaxConnections => "the cluster has reached its maximum of connections",
            Self::ConnectionRate => "the cluster has reached its maximum of new connections per second",
            Self::MaxHandshakes => "too many connections are still saying where they want to go",
            Self::Unproven => "too many connections have not shown an identity that is accepted",
            Self::MaxConnecting => "too many connections of this cluster wait for an endpoint to accept",
            Self::ConnectFailed => "no endpoint accepted the connection",
            Self::ConnectTimedOut => "no endpoint answered in time",
            Self::OutOfDescriptors => "the gateway is out of file descriptors",
            Self::Method => "only CONNECT is served here",
            Self::Draining => "the gateway is stopping",
        }
    }

    /// Whose doing it is.
    pub fn side(self) -> Side {
        match self {
            Self::ClosedEarly
            | Self::TooSlow
            | Self::Malformed
            | Self::ProxyHeader
            | Self::NoServerName
            | Self::Unknown
            | Self::NotAllowed
            | Self::NotAuthorized
            | Self::Unauthenticated
            | Self::Method => Side::Downstream,
            Self::ReviewFailed | Self::NotReady | Self::ConnectFailed | Self::ConnectTimedOut => {
                Side::Upstream
            }
            Self::MaxConnections
            | Self::ConnectionRate
            | Self::MaxHandshakes
            | Self::Unproven
            | Self::MaxConnecting
            | Self::OutOfDescriptors
            | Self::Draining => Side::Gateway,
        }
    }

    /// The TLS alert a client of the SNI listener gets; `None` where it is not speaking TLS, or is gone.
    pub fn alert(self) -> Option<Description> {
        match self {
            Self::ClosedEarly
            | Self::TooSlow
            | Self::Malformed
            | Self::ProxyHeader
            | Self::MaxHandshakes
            | Self::Unproven => None,
            Self::NoServerName | Self::Unknown => Some(Description::UnrecognizedName),
            Self::NotAllowed | Self::NotAuthorized | Self::Unauthenticated => Some(Description::AccessDenied),
            _ => Some(Description::InternalError),
        }
    }

    /// The HTTP status a CONNECT request gets.
    pub fn status(self) -> u16 {
        match self {
            Self::ClosedEarly | Self::Malformed | Self::ProxyHeader | Self::NoServerName => 400,
            Self::Unauthenticated => 401,
            Self::NotAllowed | Self::NotAuthorized => 403,
            Self::Unknown => 404,
            Self::Method => 405,
            Self::TooSlow => 408,
            Self::MaxConnections | Self::ConnectionRate | Self::MaxHandshakes | Self::Unproven => 429,
            Self::ConnectFailed => 502,
            Self::NotReady
            | Self::ReviewFailed
            | Self::MaxConnecting
            | Self::OutOfDescriptors
            | Self::Draining => 503,
            Self::ConnectTimedOut => 504,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_has_its_own_word_and_index() {
        for (index, refusal) in Refusal::ALL.into_iter().enumerate() {
            assert_eq!(refusal as usize, index, "{refusal:?}");
            let twins = Refusal::ALL.iter().filter(|other| other.reason() == refusal.reason()).count();
            assert_eq!(twins, 1, "{refusal:?}");
        }
    }

    #[test]
    fn clients_are_told_apart_by_alert_as_promised() {
        assert_eq!(Refusal::Unknown.alert(), Some(Description::UnrecognizedName));
        assert_eq!(Refusal::NotAllowed.alert(), Some(Description::AccessDenied));
        assert_eq!(Refusal::NotReady.alert(), Some(Description::InternalError));
        assert_eq!(Refusal::ConnectFailed.alert(), Some(Description::InternalError));
        assert_eq!(Refusal::Malformed.alert(), None);
        assert_eq!(Refusal::TooSlow.alert(), None);
    }
}
