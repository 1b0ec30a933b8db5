//! The table of every way a connection ends. A row has the label value for metrics and the access line, and
//! the side that caused the end. It also has the client's answer in its own protocol.
//!
//! Every failure before the first byte is copied is a [`Refusal`]; whatever happens afterwards is an [`End`].
//! A new reason is a line here, its cause where it arises, and its provocation in `tests/all/outcomes.rs`,
//! which fails without one.

use portico_tunnel::reset::{self, DISMISSED, Reason};
use portico_wire::alert::Description;
use serde::Serialize;

/// The side that caused a failure: the first question of every incident.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// The client, or the network before the gateway.
    Downstream,
    /// The control plane, or the network behind the gateway.
    Upstream,
    /// This gateway: its limits or its table.
    Gateway,
}

impl Side {
    /// The label value for metrics and the access line. Stable.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Downstream => "downstream",
            Self::Upstream => "upstream",
            Self::Gateway => "gateway",
        }
    }
}

impl From<portico_net::Side> for Side {
    fn from(side: portico_net::Side) -> Self {
        match side {
            portico_net::Side::Downstream => Self::Downstream,
            portico_net::Side::Upstream => Self::Upstream,
        }
    }
}

/// One row of [`Refusal`].
struct Row {
    word: &'static str,
    side: Side,
    alert: Option<Description>,
    status: Option<u16>,
    goaway: Option<Reason>,
    message: &'static str,
}

/// Writes [`Refusal`] from its rows: `Variant: label value, side, TLS alert, HTTP status, code of GOAWAY,
/// sentence`.
macro_rules! refusals {
    ($(
        $(#[$doc:meta])*
        $variant:ident: $word:literal, $side:ident, $alert:expr, $status:expr, $goaway:expr,
            $message:literal;
    )*) => {
        /// Why a client was not connected.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Refusal {
            $($(#[$doc])* $variant,)*
        }

        impl Refusal {
            /// Every reason, for metrics that must exist before they first count.
            pub const ALL: [Self; [$($word),*].len()] = [$(Self::$variant),*];

            fn row(self) -> Row {
                match self {
                    $(Self::$variant => {
                        let side = Side::$side;
                        let (alert, status, goaway) = ($alert, $status, $goaway);
                        Row { word: $word, side, alert, status, goaway, message: $message }
                    })*
                }
            }
        }
    };
}

refusals! {
    /// The client left, or was gone, before it sent where it wants to go: port scans and TCP health checks.
    ClosedEarly: "closed_early", Downstream, None, None, None,
        "the client left before it said where it wants to go";
    /// The client sent nothing useful within the hello timeout.
    TooSlow: "too_slow", Downstream, None, Some(408), None,
        "the client did not say in time where it wants to go";
    /// The first bytes are no ClientHello, request or PROXY header, whichever was due.
    Malformed: "malformed", Downstream, None, Some(400), None,
        "the first bytes are not what this listener serves";
    /// A PROXY header from a hop that is not trusted, or a required one missing.
    ProxyHeader: "proxy_header", Downstream, None, None, None,
        "the PROXY header is missing, or its sender is not trusted";
    /// A ClientHello without a server name.
    NoServerName: "no_server_name", Downstream, Some(Description::UnrecognizedName), None, None,
        "the ClientHello carries no server name";
    /// A name, authority or port that no Service exposes.
    Unknown: "unknown", Downstream, Some(Description::UnrecognizedName), Some(404), None,
        "nothing is exposed under this name";
    /// Exposed, but no endpoint is ready.
    NotReady: "not_ready", Upstream, Some(Description::InternalError), Some(503), None,
        "exposed, but no endpoint is ready";
    /// Not on the cluster's allow list.
    NotAllowed: "not_allowed", Downstream, Some(Description::AccessDenied), Some(403), None,
        "the client's address is not on the allow list of this cluster";
    /// The identity shown opens another cluster.
    NotAuthorized: "not_authorized", Downstream, None, Some(403), None,
        "the client's identity opens nothing under this name";
    /// No identity was shown where one is needed, or none that is valid.
    Unauthenticated: "unauthenticated", Downstream, None, Some(401), None,
        "the client showed no identity that is valid here";
    /// The API server that knows what the token is worth could not be asked.
    ReviewFailed: "review_failed", Upstream, None, Some(503), None,
        "the API server that reviews the token could not be asked";
    /// Too many requests of the cluster or in all wait for a token review.
    MaxReviewsWaiting: "max_reviews_waiting", Gateway, None, Some(429), None,
        "too many requests wait for a token review; try again";
    /// The cluster has as many connections as its budget admits.
    MaxConnections: "max_connections", Gateway, Some(Description::InternalError), Some(429), None,
        "the cluster has reached its maximum of connections";
    /// The connections of the cluster hold as much of the gateway's descriptors or memory as is left.
    FairShare: "fair_share", Gateway, Some(Description::InternalError), Some(429), Some(DISMISSED),
        "the cluster holds as much of what the gateway can carry as is left for all others";
    /// The cluster gets more new connections a second than its budget admits.
    ConnectionRate: "connection_rate", Gateway, Some(Description::InternalError), Some(429), None,
        "the cluster has reached its maximum of new connections per second";
    /// It had not yet sent where it wants to go when its slot was needed for the next connection.
    MaxHandshakes: "max_handshakes", Gateway, None, None, None,
        "too many connections are still saying where they want to go";
    /// An unauthenticated connection that stayed so for too long, or whose slot was needed for the next one.
    MaxUnauthenticated: "unproven", Gateway, None, Some(429), Some(DISMISSED),
        "too many connections have not shown an identity that is accepted";
    /// A tunnel connection that sent frames which cost work and carry nothing, or one it did not finish. A
    /// request on one whose requests are cancelled in masses.
    Flood: "flood", Downstream, None, Some(429), Some(DISMISSED),
        "the connection sent more than any client needs, or did not finish what it began";
    /// Too many connections of the cluster wait for an endpoint to accept.
    MaxConnecting: "max_connecting", Gateway, Some(Description::InternalError), Some(503), None,
        "too many connections of this cluster wait for an endpoint to accept";
    /// Every endpoint tried refused or was unreachable.
    ConnectFailed: "connect_failed", Upstream, Some(Description::InternalError), Some(502), None,
        "no endpoint accepted the connection";
    /// No endpoint answered in time.
    ConnectTimedOut: "connect_timed_out", Upstream, Some(Description::InternalError), Some(504), None,
        "no endpoint answered in time";
    /// The endpoint is a listener of this gateway: the connection would come back in.
    OwnListener: "own_listener", Gateway, Some(Description::InternalError), Some(508), None,
        "the endpoint is a listener of this gateway";
    /// This process has no descriptor left for the upstream connection.
    OutOfDescriptors: "out_of_descriptors", Gateway, Some(Description::InternalError), Some(503), None,
        "the gateway is out of file descriptors";
    /// Another method than CONNECT.
    Method: "method", Downstream, None, Some(405), None,
        "only CONNECT is served here";
}

impl Refusal {
    /// The label value for metrics and the access line. Stable.
    pub fn reason(self) -> &'static str {
        self.row().word
    }

    /// The side that caused it.
    pub fn side(self) -> Side {
        self.row().side
    }

    /// The TLS alert a client of the SNI listener gets; `None` where it does not speak TLS, or is gone.
    pub fn alert(self) -> Option<Description> {
        self.row().alert
    }

    /// The HTTP status of the response to a CONNECT request; `None` where it gets none.
    pub fn status(self) -> Option<u16> {
        self.row().status
    }

    /// The error code of the GOAWAY that an HTTP/2 client gets, where its connection ends for this reason.
    /// The tunnel sends it, to which tests compare this.
    pub fn goaway(self) -> Option<u32> {
        self.row().goaway.map(u32::from)
    }

    /// The sentence for people.
    pub fn message(self) -> &'static str {
        self.row().message
    }
}

/// How a connection ended once bytes were flowing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Both sides closed in order; this one began.
    Closed(Side),
    /// This side reset it, and the other was reset too.
    Reset(Side),
    /// No byte moved for the idle timeout.
    Idle,
    /// Its endpoint left the Service, and `--departed-timeout` was over.
    EndpointRemoved,
    /// The credential it was opened with was revoked.
    Revoked,
    /// It held bytes that its receiver did not take while the memory budget of tunnels was used up.
    Memory,
    /// The gateway stopped, and the drain timeout was over.
    Drained,
    /// The task that served it was cancelled: the process ends.
    Cancelled,
}

impl End {
    /// Every way, in the order of [`Totals::ends`](crate::Totals::ends).
    pub const ALL: [Self; 10] = [
        Self::Closed(Side::Downstream),
        Self::Closed(Side::Upstream),
        Self::Reset(Side::Downstream),
        Self::Reset(Side::Upstream),
        Self::Idle,
        Self::EndpointRemoved,
        Self::Drained,
        Self::Cancelled,
        Self::Revoked,
        Self::Memory,
    ];

    /// Label value, side, and the code of the RST_STREAM that an HTTP/2 client gets. Without a code the
    /// stream ends with END_STREAM, by the client itself, or with its connection. A TCP client sees a reset
    /// unless it was closed in order, or idle with nothing on its way.
    fn row(self) -> (&'static str, Side, Option<u32>) {
        let cut = u32::from(reset::CUT);
        match self {
            Self::Closed(side) => ("closed", side, None),
            Self::Reset(Side::Upstream) => ("reset", Side::Upstream, Some(reset::BROKEN.into())),
            Self::Reset(side) => ("reset", side, None),
            Self::Idle => ("idle_timeout", Side::Gateway, Some(cut)),
            Self::EndpointRemoved => ("endpoint_departed", Side::Gateway, Some(cut)),
            Self::Revoked => ("revoked", Side::Gateway, Some(cut)),
            Self::Memory => ("memory", Side::Gateway, Some(reset::MEMORY.into())),
            Self::Drained => ("drain_timeout", Side::Gateway, Some(cut)),
            Self::Cancelled => ("cancelled", Side::Gateway, None),
        }
    }

    /// The label value for metrics and the access line. Stable.
    pub fn reason(self) -> &'static str {
        self.row().0
    }

    /// The side that ended it.
    pub fn side(self) -> Side {
        self.row().1
    }

    /// The error code of the RST_STREAM that an HTTP/2 client gets, if it gets one. The tunnel sends it, to
    /// which tests compare this.
    pub fn h2_code(self) -> Option<u32> {
        self.row().2
    }

    /// Its index in [`Self::ALL`].
    pub(crate) fn index(self) -> usize {
        // `Closed` and `Reset` by the gateway do not happen; every other value is in the list.
        Self::ALL.iter().position(|&end| end == self).unwrap_or(Self::ALL.len() - 1)
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
        for (index, end) in End::ALL.into_iter().enumerate() {
            assert_eq!(end.index(), index, "{end:?}");
        }
    }

    #[test]
    fn the_manual_has_the_status_and_goaway_of_each_reason() {
        let manual = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operations.md"));
        for refusal in Refusal::ALL {
            let row = manual.lines().find(|line| line.starts_with(&format!("| `{}` |", refusal.reason())));
            let seen = row.and_then(|row| row.split('|').nth(3)).expect("each reason has a row");
            let numbers = seen.split(|letter: char| !letter.is_ascii_digit());
            let statuses: Vec<u16> = numbers.filter_map(|number| number.parse().ok()).collect();
            match refusal.status() {
                Some(status) => assert!(statuses.contains(&status), "{refusal:?}: {seen}"),
                None => assert!(statuses.is_empty(), "{refusal:?}: {seen}"),
            }
            assert_eq!(seen.contains("GOAWAY"), refusal.goaway().is_some(), "{refusal:?}: {seen}");
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
