//! A gateway that answers as a test wants: HTTP/2 in plain text over a real socket.

use std::net::SocketAddr;

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::{Method, Request, Response, StatusCode};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};

/// What a CONNECT gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// 200, and the stream is the test's.
    Open,
    /// That status, and a sentence.
    Refuse(StatusCode),
    /// RST_STREAM.
    Reset,
    /// Nothing, until the test sets another answer.
    Wait,
}

/// A stream as the API server at its end sees it.
pub(crate) struct Upstream {
    pub(crate) send: SendStream<Bytes>,
    pub(crate) receive: RecvStream,
}

impl Upstream {
    /// The next bytes of the pod; none at the end of its direction.
    pub(crate) async fn read(&mut self) -> Bytes {
        let Some(data) = self.receive.data().await else { return Bytes::new() };
        let data = data.unwrap();
        self.receive.flow_control().release_capacity(data.len()).unwrap();
        data
    }

    pub(crate) fn write(&mut self, text: &'static str) {
        self.send.send_data(Bytes::from_static(text.as_bytes()), false).unwrap();
    }

    /// Ends this direction.
    pub(crate) fn finish(&mut self) {
        self.send.send_data(Bytes::new(), true).unwrap();
    }

    pub(crate) fn reset(&mut self) {
        self.send.send_reset(Reason::CONNECT_ERROR);
    }
}

pub(crate) struct Gateway {
    pub(crate) address: SocketAddr,
    pub(crate) answers: watch::Sender<Answer>,
    opened: mpsc::UnboundedReceiver<Upstream>,
    task: JoinHandle<()>,
}

impl Gateway {
    pub(crate) async fn start(answer: Answer) -> Self {
        Self::with_streams(answer, 100).await
    }

    /// One that allows so many streams.
    pub(crate) async fn with_streams(answer: Answer, streams: u32) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Self::on(listener, answer, streams)
    }

    /// One that accepts on this socket.
    pub(crate) fn on(listener: TcpListener, answer: Answer, streams: u32) -> Self {
        let address = listener.local_addr().unwrap();
        let (sender, opened) = mpsc::unbounded_channel();
        let answers = watch::Sender::new(answer);
        let to_connections = answers.clone();
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                connections.spawn(serve(socket, to_connections.subscribe(), streams, sender.clone()));
            }
        });
        Self { address, answers, opened, task }
    }

    /// The next stream that was opened.
    pub(crate) async fn upstream(&mut self) -> Upstream {
        self.opened.recv().await.unwrap()
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(
    socket: TcpStream,
    answers: watch::Receiver<Answer>,
    streams: u32,
    opened: mpsc::UnboundedSender<Upstream>,
) {
    let mut builder = h2::server::Builder::new();
    let mut connection = builder.max_concurrent_streams(streams).handshake(socket).await.unwrap();
    while let Some(Ok((request, respond))) = connection.accept().await {
        tokio::spawn(answer(request, respond, answers.clone(), opened.clone()));
    }
}

async fn answer(
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    mut answers: watch::Receiver<Answer>,
    opened: mpsc::UnboundedSender<Upstream>,
) {
    let status = if request.method() == Method::OPTIONS {
        // The agent asks whether its identity is accepted.
        StatusCode::NO_CONTENT
    } else {
        let Ok(answer) = answers.wait_for(|answer| *answer != Answer::Wait).await.map(|answer| *answer)
        else {
            return;
        };
        match answer {
            Answer::Refuse(status) => status,
            Answer::Reset => return respond.send_reset(Reason::REFUSED_STREAM),
            Answer::Open | Answer::Wait => StatusCode::OK,
        }
    };
    let response = Response::builder().status(status).body(()).unwrap();
    // The agent may have given up.
    let Ok(mut send) = respond.send_response(response, false) else { return };
    if status == StatusCode::OK {
        let _ = opened.send(Upstream { send, receive: request.into_body() });
    } else {
        let _ = send.send_data(Bytes::from_static(b"as the test wants it"), true);
    }
}
