//! The client half: a few HTTP/2 connections to gateways, kept up whatever happens, and CONNECT streams over them.
//!
//! `address` is what an operator writes. As many `tunnel`s as asked for are kept up (`keep`; `backoff` waits), to different gateway addresses
//! where there are several (`names` asks, `candidates` chooses, `reach` connects, `driver` sees to the connection), and bettered while all is
//! well (`tend`); `introduce` shows each gateway who we are; `open` gives each new `stream` to the tunnel with the fewest. `pool` holds it all
//! together. A tunnel is
//! *live*, or *suspect* (silent after a PING: new streams go elsewhere, those it carries wait), or *draining* (GOAWAY, or replaced: new
//! streams go elsewhere, those it carries finish).
//!
//! The way to a gateway (names, corporate proxies, TLS) is in `dial`; the bytes of a stream are carried by the same
//! `bridge` as at the gateway.

mod address;
mod backoff;
mod candidates;
mod driver;
mod introduce;
mod keep;
mod names;
mod open;
mod pool;
mod reach;
mod settings;
mod signals;
mod status;
mod stream;
mod tend;
mod tunnel;

pub use address::{GatewayAddress, GatewayAddressError, Security};
pub use candidates::Place;
pub use open::OpenError;
pub use pool::Client;
pub use settings::ClientSettings;
pub use status::{Totals, TunnelStatus};
pub use stream::Stream;
pub use tunnel::{IdentityState, TunnelState};
