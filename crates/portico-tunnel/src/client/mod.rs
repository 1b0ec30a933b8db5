//! The client half of the tunnel: a few HTTP/2 connections to gateways, and CONNECT streams over them.
//!
//! One task, the `supervisor`, compares the tunnels that are wanted with those that are there. `state`
//! computes the next step, without I/O. It may resolve a name (`resolve`), connect to an endpoint, or retire
//! a tunnel. `endpoints` chooses the endpoint, `connect` connects to it, and `backoff` says when. `driver`
//! runs a connection and keeps the state of its `tunnel` current; `authenticate` shows the gateway our
//! identity on it. Events reach the supervisor over one bounded channel (`event`). `view` is what it shares
//! with the rest: `select` picks the tunnel for a new `stream`, `first_bytes` are sent along with its
//! request, `status` reports.
//!
//! A tunnel is *live*, *unresponsive* (no answer to a PING) or *draining* (GOAWAY, or replaced). Only live
//! tunnels get new streams; streams on the others go on.
//!
//! DNS, corporate proxies and TLS are in `portico-dial`. `bridge` carries the bytes of a stream, as at the
//! gateway.

mod address;
mod authenticate;
mod backoff;
mod connect;
mod driver;
mod endpoints;
mod event;
mod first_bytes;
mod resolve;
mod select;
mod settings;
mod state;
mod status;
mod stream;
mod supervisor;
mod tunnel;
mod view;

use std::sync::Arc;

pub use address::{GatewayAddress, GatewayAddressError, Security};
pub use endpoints::Endpoint;
pub use select::OpenError;
pub use settings::ClientSettings;
pub use status::{Totals, TunnelStatus};
pub use stream::Stream;
pub use tunnel::{IdentityState, TunnelState};

use portico_net::Socket;
use supervisor::Supervisor;
use tokio::net::TcpStream;
use view::View;

/// Tunnels to gateways. Clones are handles to the same tunnels.
#[derive(Debug, Clone)]
pub struct Client {
    view: Arc<View>,
}

impl Client {
    /// Starts the supervisor on the current runtime, which must be a current-thread one.
    #[must_use]
    pub fn start(settings: ClientSettings) -> Self {
        Self { view: Supervisor::start(settings) }
    }

    /// Opens a stream to `authority`, on a live tunnel with few streams. If that one breaks before it
    /// answers, another is asked. If there is none, the first that comes up is.
    pub async fn open(&self, authority: &str) -> Result<Stream, OpenError> {
        self.view.open(authority, None::<&TcpStream>).await
    }

    /// Like [`Self::open`], for a client from which nothing was read. A TLS handshake that it begins
    /// meanwhile is sent along with the request, so that a connection comes up one round trip sooner. It is
    /// sent again if the tunnel breaks before the answer. [`Stream::carry`] takes the same socket.
    pub async fn open_for(&self, authority: &str, client: &impl Socket) -> Result<Stream, OpenError> {
        self.view.open(authority, Some(client)).await
    }

    /// Returns every tunnel, and every attempt to connect one.
    #[must_use]
    pub fn status(&self) -> Vec<TunnelStatus> {
        self.view.status()
    }

    /// Returns the counters.
    #[must_use]
    pub fn totals(&self) -> Totals {
        *self.view.totals()
    }

    /// To be called when the token file has changed. Shows the new token on every tunnel, so that streams
    /// opened with the old one live on.
    pub fn token_changed(&self) {
        self.view.tunnels().iter().for_each(|tunnel| tunnel.token_renewed.notify_one());
    }

    /// To be called when the certificate or a CA has changed. New tunnels replace the old ones, whose streams
    /// finish.
    pub fn certificate_changed(&self) {
        self.view.renew();
    }

    /// Opens no more streams, and returns when the last one has ended and every tunnel is closed.
    pub async fn drain(&self) {
        self.view.stop();
        self.view.signals.supervisor_ended().await;
    }
}
