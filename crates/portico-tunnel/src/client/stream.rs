//! An open stream: the gateway answered 200, and the API server at its other end waits for the first byte.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::{RecvStream, SendStream};
use portico_net::Socket;

use super::endpoints::Endpoint;
use super::tunnel::StreamGuard;
use crate::activity::Activity;
use crate::bridge::Bridge;
use crate::handler::{Meter, Side};

/// A stream that is open. Dropping it resets it.
#[derive(Debug)]
pub struct Stream {
    to_gateway: SendStream<Bytes>,
    from_gateway: RecvStream,
    activity: Arc<Activity>,
    guard: StreamGuard,
    idle: Option<Duration>,
    /// Bytes of the client that were sent already.
    sent: usize,
}

impl Stream {
    pub(super) fn new(
        to_gateway: SendStream<Bytes>,
        from_gateway: RecvStream,
        activity: Arc<Activity>,
        guard: StreamGuard,
        idle: Option<Duration>,
        sent: usize,
    ) -> Self {
        Self { to_gateway, from_gateway, activity, guard, idle, sent }
    }

    /// Returns the gateway that it goes through.
    #[must_use]
    pub fn endpoint(&self) -> Endpoint {
        self.guard.endpoint()
    }

    /// Carries bytes between `socket` and the control plane until both have ended or one of them fails, with
    /// half-close and reset in both directions. `meter` counts the bytes and records how it ended; the socket
    /// is downstream.
    pub fn carry(
        self,
        socket: impl Socket + 'static,
        mut meter: impl Meter,
    ) -> impl Future<Output = ()> + Send {
        let Self { to_gateway, from_gateway, activity, guard, idle, sent } = self;
        if sent > 0 {
            meter.carried(sent, 0);
        }
        let stream = (to_gateway, from_gateway);
        let bridge = Bridge::new(Side::Upstream, stream, socket, meter, activity, None, idle);
        async move {
            bridge.run().await;
            drop(guard);
        }
    }
}
