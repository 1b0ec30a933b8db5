//! Every reason why a pod's connection is not carried, and every way one ends.
//!
//! The names are those of metrics and access lines. They are stable. `tests/all/refusals.rs` provokes each
//! reason, and `tests/all/ends.rs` each end.

use portico_tunnel::client::OpenError;
use portico_tunnel::{End, Side, StatusCode};

/// Why a connection was ended before it was connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The agent carries as many connections as `--max-connections` allows.
    TooMany,
    /// As many connections wait for a tunnel as `--max-waiting` allows.
    TooManyWaiting,
    /// The gateway refused, with this status.
    Refused(StatusCode),
    /// No tunnel came up in time.
    NoTunnel,
    /// The tunnels that are up are full.
    Full,
    /// The gateways that were asked did not reply.
    Unanswered,
    /// The authority or the token cannot be put into a request.
    Unsendable,
    /// The agent stops.
    Stopping,
    /// The pod reset its connection while it waited.
    Left,
}

impl Refusal {
    /// The reasons, in the order of `Refusal::index`.
    pub const REASONS: [&'static str; 9] = [
        "too_many",
        "too_many_waiting",
        "refused",
        "no_tunnel",
        "full",
        "unanswered",
        "unsendable",
        "stopping",
        "left",
    ];

    pub(crate) fn index(self) -> usize {
        match self {
            Self::TooMany => 0,
            Self::TooManyWaiting => 1,
            Self::Refused(_) => 2,
            Self::NoTunnel => 3,
            Self::Full => 4,
            Self::Unanswered => 5,
            Self::Unsendable => 6,
            Self::Stopping => 7,
            Self::Left => 8,
        }
    }

    pub(crate) fn reason(self) -> &'static str {
        Self::REASONS[self.index()]
    }

    /// The status with which a gateway refused.
    pub(crate) fn status(self) -> Option<u16> {
        if let Self::Refused(status) = self { Some(status.as_u16()) } else { None }
    }

    /// The side that is the reason.
    pub(crate) fn side(self) -> &'static str {
        match self {
            Self::TooMany | Self::TooManyWaiting | Self::Unsendable | Self::Stopping => "agent",
            Self::Left => "downstream",
            Self::Refused(_) | Self::NoTunnel | Self::Full | Self::Unanswered => "upstream",
        }
    }
}

impl From<&OpenError> for Refusal {
    fn from(error: &OpenError) -> Self {
        match error {
            OpenError::Refused { status, .. } => Self::Refused(*status),
            OpenError::NoTunnel { .. } => Self::NoTunnel,
            OpenError::Full { .. } => Self::Full,
            OpenError::Unanswered { .. } => Self::Unanswered,
            OpenError::Unsendable(_) => Self::Unsendable,
            OpenError::Stopping => Self::Stopping,
        }
    }
}

/// Reason and side of each way in which a connection that was carried ends, in the order of `end_index`.
pub const ENDS: [(&str, &str); 8] = [
    ("closed", "downstream"),
    ("closed", "upstream"),
    ("reset", "downstream"),
    ("reset", "upstream"),
    ("idle_timeout", "agent"),
    ("drain_timeout", "agent"),
    ("cancelled", "agent"),
    ("memory", "agent"),
];

/// Returns the index in [`ENDS`]. `None` is a task that was dropped.
pub(crate) fn end_index(end: Option<End>) -> usize {
    match end {
        Some(End::Closed { first: Side::Downstream }) => 0,
        Some(End::Closed { first: Side::Upstream }) => 1,
        Some(End::Reset { by: Side::Downstream }) => 2,
        Some(End::Reset { by: Side::Upstream }) => 3,
        Some(End::Idle) => 4,
        Some(End::Cut) => 5,
        None => 6,
        Some(End::Memory) => 7,
    }
}
