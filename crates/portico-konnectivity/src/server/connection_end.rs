//! Every way in which an established connection ends.

use portico_net::{End, Side};

/// Why a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConnectionEnd {
    /// The frontend closed it first.
    FrontendClosed,
    /// The endpoint closed it first; the frontend has all that it sent.
    EndpointClosed,
    /// The frontend reset it, or broke off.
    FrontendLost,
    /// The endpoint reset it.
    EndpointReset,
    /// The agent is gone, or broke the connection off.
    AgentLost,
    /// The frontend took nothing for too long.
    NotRead,
    /// `--connection-buffer` was full.
    BufferFull,
    /// The memory for all connections was used up.
    Memory,
}

impl ConnectionEnd {
    /// All, with their names in metrics, in the order of the counters.
    pub(crate) const ALL: [(Self, &'static str); 8] = [
        (Self::FrontendClosed, "frontend_closed"),
        (Self::EndpointClosed, "endpoint_closed"),
        (Self::FrontendLost, "frontend_lost"),
        (Self::EndpointReset, "endpoint_reset"),
        (Self::AgentLost, "agent_lost"),
        (Self::NotRead, "not_read"),
        (Self::BufferFull, "buffer_full"),
        (Self::Memory, "memory"),
    ];

    /// The label value for metrics and the log.
    #[must_use]
    pub(crate) fn as_str(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    /// What the bridge of a connection reports. The frontend is downstream. `is_endpoint_reset`: the agent
    /// says that it was the endpoint.
    pub(crate) fn of_bridge(end: End, is_endpoint_reset: bool) -> Self {
        match end {
            End::Closed { first: Side::Downstream } => Self::FrontendClosed,
            End::Closed { first: Side::Upstream } => Self::EndpointClosed,
            End::Reset { by: Side::Downstream } => Self::FrontendLost,
            End::Reset { by: Side::Upstream } if is_endpoint_reset => Self::EndpointReset,
            End::Reset { by: Side::Upstream } | End::Idle | End::Cut => Self::AgentLost,
            End::Memory => Self::Memory,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_end_has_its_own_counter_and_word() {
        for (index, (end, word)) in ConnectionEnd::ALL.into_iter().enumerate() {
            assert_eq!((end as usize, end.as_str()), (index, word));
        }
    }
}
