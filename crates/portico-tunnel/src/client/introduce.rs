//! What gateways think of our identity: asked before the first pod needs to know, when the identity is renewed, when a gateway refuses a
//! stream for it, and again while it does not accept it, for what it knows of us may be older than what we show.
//!
//! The answer to `OPTIONS *` decides, and not that to a CONNECT: a gateway may accept us and still refuse a name with 403, again and again,
//! which is not to make an agent unready. Only where a gateway does not know the question its refusals count.
//!
//! A tunnel that was retired shows a new token too, as long as it has streams: they may outlive the old one by hours. After GOAWAY no request
//! is possible (RFC 9113 section 6.8), so the streams of a gateway that stops end with the last token that was shown to it.

use std::sync::Arc;
use std::time::Duration;

use http::uri;
use tokio::time::{Instant, sleep_until};

use super::backoff::random;
use super::pool::Pool;
use super::tunnel::{IdentityState, RequestError, Tunnel};

/// Between two times a gateway is asked, unless there is something new to show.
const ASK_AGAIN: Duration = Duration::from_secs(10);

impl Pool {
    /// Keeps the tunnel's identity true until no request can be sent on it.
    pub(super) async fn introduce(self: Arc<Self>, tunnel: Arc<Tunnel>) {
        let gateway = self.name_of(&tunnel);
        let authority = match uri::Authority::try_from(&*self.settings.authority) {
            Ok(authority) => authority,
            Err(error) => {
                tracing::error!(authority = %self.settings.authority, %error, "not an authority");
                return;
            }
        };
        let mut written = None;
        loop {
            let asked = self.ask_about_us(&tunnel, &authority).await;
            let unanswered = match &asked {
                Ok(()) => false,
                Err(RequestError::Unsendable(error)) => {
                    tracing::error!(%error, "our token cannot be sent: it holds characters that no header may have");
                    false
                }
                Err(_) if !tunnel.takes_requests() => return,
                Err(error) => {
                    tracing::debug!(%gateway, %error, "the gateway was not asked about our identity");
                    true
                }
            };
            let identity = tunnel.identity();
            match &identity {
                IdentityState::Refused { status, reason } if written.as_ref() != Some(&identity) => {
                    tracing::error!(%gateway, %status, %reason, "the gateway does not accept our identity");
                    written = Some(identity.clone());
                }
                IdentityState::Refused { .. } => {}
                IdentityState::Accepted | IdentityState::Unknown => {
                    if written.take().is_some() {
                        tracing::info!(%gateway, "the gateway accepts our identity now");
                    }
                }
            }
            let settled = !unanswered && written.is_none();
            let soonest = Instant::now() + ASK_AGAIN.mul_f64(0.5 + random());
            tokio::select! {
                () = tunnel.closed() => return,
                () = tunnel.renewed.notified() => {}
                () = async {
                    if settled {
                        tunnel.doubted.notified().await;
                    }
                    sleep_until(soonest).await;
                } => {}
            }
        }
    }

    async fn ask_about_us(
        &self,
        tunnel: &Arc<Tunnel>,
        authority: &uri::Authority,
    ) -> Result<(), RequestError> {
        let token = self.token().map_err(http::Error::from)?;
        tunnel.refresh_identity(authority.clone(), token.as_ref(), &self.settings).await
    }
}
