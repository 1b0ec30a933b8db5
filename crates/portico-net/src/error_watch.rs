//! Sees a reset on a socket that is not being read.
//!
//! While back-pressure keeps an engine from reading one side, the bytes of that side wait in the kernel and
//! its read readiness says nothing new. Errors are a readiness of their own: without this watch a pair whose
//! unread side resets would stay for ever.

use std::ops::Deref;
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::stream::Socket;

/// Starts with the first [`poll`](Self::poll), ends with [`stop`](Self::stop). A connection that is read
/// normally pays one pointer.
#[derive(Default)]
pub struct ErrorWatch<'a>(Option<Pin<Box<dyn Future<Output = ()> + Send + 'a>>>);

impl<'a> ErrorWatch<'a> {
    /// Ready when the socket behind `handle` has failed. The watch keeps a clone of the handle until it
    /// stops.
    pub fn poll<H>(&mut self, handle: &H, cx: &mut Context<'_>) -> Poll<()>
    where
        H: Deref<Target: Socket> + Clone + Send + Sync + 'a,
    {
        let watch = self.0.get_or_insert_with(|| {
            let handle = H::clone(handle);
            Box::pin(async move { handle.failed().await })
        });
        watch.as_mut().poll(cx)
    }

    /// Like [`Self::poll`] for a peer that ended its direction: ready also when it [is gone](Socket::gone).
    pub fn poll_gone<H>(&mut self, handle: &H, cx: &mut Context<'_>) -> Poll<()>
    where
        H: Deref<Target: Socket> + Clone + Send + Sync + 'a,
    {
        let watch = self.0.get_or_insert_with(|| {
            let handle = H::clone(handle);
            Box::pin(async move { handle.gone().await })
        });
        watch.as_mut().poll(cx)
    }

    /// Ends the watch and lets go of the socket.
    pub fn stop(&mut self) {
        self.0 = None;
    }
}
