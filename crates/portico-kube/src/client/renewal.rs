//! A client certificate that stands in files is read again when they change, as by client-go. A program whose
//! certificate is renewed needs no restart.
//!
//! Connections are left as well. An API server looks at the certificate of a connection for every request,
//! and a connection that is always busy would outlive its certificate.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::SystemTime;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper_util::client::legacy::connect::Connect;
use hyper_util::client::legacy::{Client, Error, ResponseFuture};
use kube::client::Body;
use kube::config::AuthInfo;
use tower::Service;

/// Sends requests with the certificate that the files hold. All clones of it are one.
#[derive(Clone)]
pub(super) enum Renewing<C, M> {
    /// The credential is in no files, as that of thousands of user clusters.
    Never(Client<C, Body>),
    Files(Arc<Mutex<Files<C, M>>>),
}

pub(super) struct Files<C, M> {
    paths: [PathBuf; 2],
    /// When they were written, as far as that is known.
    written: [Option<SystemTime>; 2],
    current: Client<C, Body>,
    /// They could not be used, and the log says so.
    failed: bool,
    /// Reads them.
    connections: M,
}

impl<C, M> Renewing<C, M>
where
    C: Clone,
    M: Fn() -> kube::Result<Client<C, Body>>,
{
    /// Sends requests by what `connections` makes; `user` says in which files the certificate is.
    pub(super) fn new(user: &AuthInfo, connections: M) -> kube::Result<Self> {
        let named = user.client_certificate.as_ref().zip(user.client_key.as_ref());
        let named =
            named.filter(|_| user.client_certificate_data.is_none() && user.client_key_data.is_none());
        let Some((certificate, key)) = named else { return Ok(Self::Never(connections()?)) };
        let paths = [certificate, key].map(PathBuf::from);
        // Before they are read: a change in between is seen at the next request.
        let written = written(&paths);
        let current = connections()?;
        Ok(Self::Files(Arc::new(Mutex::new(Files { paths, written, current, failed: false, connections }))))
    }

    fn current(&self) -> Client<C, Body> {
        match self {
            Self::Never(connections) => connections.clone(),
            Self::Files(files) => files.lock().unwrap_or_else(PoisonError::into_inner).current().clone(),
        }
    }
}

impl<C, M> Files<C, M>
where
    M: Fn() -> kube::Result<Client<C, Body>>,
{
    /// Leaves the connections once the files have changed. An unusable file changes nothing: certificate and
    /// key may be written one after the other.
    fn current(&mut self) -> &Client<C, Body> {
        let written = written(&self.paths);
        if written != self.written {
            match (self.connections)() {
                Ok(connections) => {
                    self.current = connections;
                    self.written = written;
                    self.failed = false;
                }
                // Tried again with the next request: what is wrong may pass without another change.
                Err(error) => {
                    let [certificate, key] = self.paths.each_ref().map(|path| path.display());
                    if !std::mem::replace(&mut self.failed, true) {
                        tracing::warn!(%error, %certificate, %key, "client certificate not read again");
                    }
                }
            }
        }
        &self.current
    }
}

fn written(paths: &[PathBuf; 2]) -> [Option<SystemTime>; 2] {
    paths.each_ref().map(|path| path.metadata().and_then(|metadata| metadata.modified()).ok())
}

impl<C, M> Service<Request<Body>> for Renewing<C, M>
where
    C: Connect + Clone + Send + Sync + 'static,
    M: Fn() -> kube::Result<Client<C, Body>>,
{
    type Response = Response<Incoming>;
    type Error = Error;
    type Future = ResponseFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> ResponseFuture {
        self.current().request(request)
    }
}
