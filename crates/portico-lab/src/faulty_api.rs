//! A proxy before an API server that goes mute, refuses, denies or lies, as tests tell it.
//!
//! It is a client whose requests pass through it: no port, no certificate, and the real API server behind.

use std::future::pending;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::stream::{self, BoxStream, StreamExt, TryStreamExt};
use http::{Request, Response};
use http_body_util::{BodyDataStream, StreamBody};
use hyper::body::{Bytes, Frame};
use kube::Client;
use kube::client::Body;
use tower::service_fn;

type ResponseBody = StreamBody<BoxStream<'static, Result<Frame<Bytes>, <Body as hyper::body::Body>::Error>>>;

/// What the proxy does with requests.
#[derive(Debug, Clone, Default)]
pub struct Rules {
    /// Accepts requests and answers none; open watches fall silent, for ever.
    pub mute: bool,
    /// Requests whose URL has this text get this answer, so many times.
    pub answers: Vec<(&'static str, Answer, usize)>,
}

/// An answer that is not the API server's.
#[derive(Debug, Clone, Copy)]
pub enum Answer {
    /// A failure with this HTTP status.
    Status(u16),
    /// A list without objects, of a version that is yet to come.
    Empty,
}

/// A proxy before an API server.
#[derive(Debug, Clone, Default)]
pub struct FaultyApi(Arc<Mutex<Rules>>);

impl FaultyApi {
    /// Changes what it does with requests.
    pub fn rules<T>(&self, change: impl FnOnce(&mut Rules) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether every answer of its rules was given as often as it was to be.
    pub fn has_answered(&self) -> bool {
        self.rules(|rules| rules.answers.iter().all(|(_, _, left)| *left == 0))
    }

    /// A client whose requests pass here on their way to the API server of `direct`.
    pub fn client(&self, direct: &Client) -> Client {
        let (proxy, direct) = (self.clone(), direct.clone());
        let service = service_fn(move |request: Request<Body>| {
            let (proxy, direct) = (proxy.clone(), direct.clone());
            async move {
                let url = request.uri().to_string();
                if let Some(answer) = proxy.answer(&url).await {
                    return Ok(answer);
                }
                let response = direct.send(request).await?;
                Ok::<_, kube::Error>(response.map(|body| proxy.gated(body)))
            }
        });
        Client::new(service, "default")
    }

    async fn answer(&self, url: &str) -> Option<Response<ResponseBody>> {
        if self.rules(|rules| rules.mute) {
            pending::<()>().await;
        }
        let answer = self.rules(|rules| {
            let (_, answer, left) =
                rules.answers.iter_mut().find(|(text, _, left)| *left > 0 && url.contains(text))?;
            *left -= 1;
            Some(*answer)
        })?;
        let (status, body) = match answer {
            Answer::Status(code) => {
                let body = format!(
                    r#"{{"kind": "Status", "status": "Failure", "code": {code},
                        "reason": "X", "message": "no"}}"#
                );
                (code, body)
            }
            Answer::Empty => (200, r#"{"metadata": {"resourceVersion": "999999"}, "items": []}"#.to_owned()),
        };
        let body = stream::once(async { Ok(Frame::data(Bytes::from(body))) }).boxed();
        let mut response = Response::new(StreamBody::new(body));
        *response.status_mut() = http::StatusCode::from_u16(status).unwrap_or_default();
        Some(response)
    }

    /// A body that stops while the proxy is mute, and never goes on.
    fn gated(&self, body: Body) -> ResponseBody {
        let proxy = self.clone();
        let frames = BodyDataStream::new(body).then(move |data| {
            let mute = proxy.rules(|rules| rules.mute);
            async move {
                if mute {
                    pending::<()>().await;
                }
                data
            }
        });
        StreamBody::new(frames.map_ok(Frame::data).boxed())
    }
}
