//! What gateways think of our identity, and who asks them.

use std::sync::Arc;
use std::time::Duration;

use http::uri;
use tokio::time::sleep;

use super::backoff::random;
use super::pool::Pool;
use super::tunnel::{IdentityState, Tunnel};

/// Between two times a gateway that does not accept our identity is asked whether it does by now.
const ASK_AGAIN: Duration = Duration::from_secs(10);

impl Pool {
    /// Has the gateway say what it thinks of our identity, before the first pod needs to know; and again while it does not accept it, for
    /// what it knows of us may be older than what we show.
    pub(super) async fn show_identity(self: Arc<Self>, tunnel: Arc<Tunnel>) {
        let gateway = self.name_of(&tunnel);
        let authority = match uri::Authority::try_from(&*self.settings.authority) {
            Ok(authority) => authority,
            Err(error) => {
                tracing::error!(authority = %self.settings.authority, %error, "not an authority");
                return;
            }
        };
        let mut known = None;
        loop {
            let Ok(token) = self.token() else {
                tracing::error!("the token cannot be sent: it holds characters that no header may have");
                return;
            };
            let asked = tunnel.refresh_identity(authority.clone(), token.as_ref(), &self.settings).await;
            if let Err(error) = asked {
                tracing::debug!(%gateway, %error, "the gateway was not asked about our identity");
                return;
            }
            let identity = tunnel.identity();
            match &identity {
                IdentityState::Refused { status, reason } if known.as_ref() != Some(&identity) => {
                    tracing::error!(%gateway, %status, %reason, "the gateway does not accept our identity");
                }
                IdentityState::Refused { .. } => {}
                IdentityState::Accepted | IdentityState::Unknown => {
                    if known.is_some() {
                        tracing::info!(%gateway, "the gateway accepts our identity now");
                    }
                    return;
                }
            }
            known = Some(identity);
            tokio::select! {
                () = sleep(ASK_AGAIN.mul_f64(0.5 + random())) => {}
                () = tunnel.closed() => return,
            }
        }
    }
}
