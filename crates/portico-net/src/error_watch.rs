//! Sees a reset on a socket that nobody reads.
//!
//! While back-pressure keeps us from reading one side, its data waits in the kernel and readiness says nothing new. Errors are a
//! readiness of their own; without this a pair whose unread side resets would stay for ever.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{Interest, Ready};
use tokio::net::TcpStream;

/// Set up by [`poll`](Self::poll), taken down by [`stop`](Self::stop): a tunnel that is read normally pays one pointer.
#[derive(Default)]
pub struct ErrorWatch(Option<Pin<Box<dyn Future<Output = io::Result<Ready>> + Send>>>);

impl ErrorWatch {
    /// Ready when the socket has failed.
    pub fn poll(&mut self, stream: &Arc<TcpStream>, cx: &mut Context<'_>) -> Poll<()> {
        let watch = self.0.get_or_insert_with(|| {
            let stream = Arc::clone(stream);
            Box::pin(async move { stream.ready(Interest::ERROR).await })
        });
        watch.as_mut().poll(cx).map(drop)
    }

    /// Watches no more, and holds the socket no more.
    pub fn stop(&mut self) {
        self.0 = None;
    }
}
