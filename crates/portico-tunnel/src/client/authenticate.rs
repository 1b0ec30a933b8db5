//! Asks gateways whether they accept our identity. It asks on every new tunnel, with every new token, and
//! when a gateway refuses a stream for it. While the identity is refused, the question is repeated: the
//! gateway may have known less than we show.
//!
//! The answer to `OPTIONS *` decides, not the one to CONNECT. A gateway may accept us and still refuse one
//! name with 403, which must not make an agent unready. Refusals of CONNECT count only where a gateway does
//! not know the question.
//!
//! A retired tunnel shows new tokens as long as it has streams, which may outlive the old token by hours.
//! After GOAWAY no request is possible (RFC 9113 section 6.8): the streams of a gateway that stops end with
//! the last token shown.

use std::sync::Arc;
use std::time::Duration;

use http::uri;
use portico_net::random;
use tokio::time::{Instant, sleep_until};

use super::tunnel::{IdentityState, RequestError, Tunnel};
use super::view::View;

/// Between two questions on one tunnel, give or take a half, unless there is a new token to show.
const ASK_AGAIN: Duration = Duration::from_secs(10);

/// Keeps the tunnel's identity state current until no request can be sent on it.
pub(super) async fn authenticate(view: Arc<View>, tunnel: Arc<Tunnel>) {
    let gateway = view.gateway_name(tunnel.origin.endpoint.gateway);
    let authority = match uri::Authority::try_from(&*view.settings.authority) {
        Ok(authority) => authority,
        Err(error) => {
            tracing::error!(authority = %view.settings.authority, %error, "not an authority");
            return;
        }
    };
    let mut logged = None;
    loop {
        let answered = match ask(&view, &tunnel, &authority).await {
            Ok(()) => true,
            Err(RequestError::Unsendable(error)) => {
                tracing::error!(%error, "our token cannot be sent: a header may not have its characters");
                true
            }
            Err(_) if !tunnel.takes_requests() => return,
            Err(error) => {
                tracing::debug!(%gateway, %error, "the gateway was not asked about our identity");
                false
            }
        };
        let identity = tunnel.identity();
        match &identity {
            IdentityState::Refused { status, reason } if logged.as_ref() != Some(&identity) => {
                tracing::error!(%gateway, %status, %reason, "the gateway does not accept our identity");
                logged = Some(identity.clone());
            }
            IdentityState::Refused { .. } => {}
            IdentityState::Accepted => {
                if logged.take().is_some() {
                    tracing::info!(%gateway, "the gateway accepts our identity now");
                }
            }
            // It answered something else than yes or no.
            IdentityState::Unknown => logged = None,
        }
        let is_final = answered && logged.is_none();
        let soonest = Instant::now() + ASK_AGAIN.mul_f64(0.5 + random());
        tokio::select! {
            () = tunnel.closed() => return,
            () = tunnel.token_renewed.notified() => {}
            () = async {
                if is_final {
                    tunnel.identity_stale.notified().await;
                }
                sleep_until(soonest).await;
            } => {}
        }
    }
}

async fn ask(view: &View, tunnel: &Arc<Tunnel>, authority: &uri::Authority) -> Result<(), RequestError> {
    let token = view.token().map_err(http::Error::from)?;
    tunnel.refresh_identity(authority.clone(), token.as_ref(), &view.settings).await
}
