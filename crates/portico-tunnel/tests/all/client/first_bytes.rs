//! What a client says before the gateway has answered.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use http::{Method, Request, Response, StatusCode};
use portico_tunnel::client::Client;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::harness::{Pod, settings};
use crate::common::{UPSTREAM, patiently};

/// The beginning of a ClientHello.
const HELLO: &[u8] = &[22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3];

/// When a gateway says 200.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Answers {
    /// After so many bytes of the client came.
    After(usize),
    /// So too, but with the first request its connection breaks then.
    AfterBreaking(usize),
}

/// A gateway that passes on what comes on its streams, in order.
struct Gateway {
    address: SocketAddr,
    came: mpsc::UnboundedReceiver<Bytes>,
    _tasks: JoinSet<()>,
}

impl Gateway {
    async fn start(answers: Answers) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, came) = mpsc::unbounded_channel();
        let requests = Arc::new(AtomicU32::new(0));
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                connections.spawn(serve(socket, answers, sender.clone(), Arc::clone(&requests)));
            }
        });
        Self { address, came, _tasks: tasks }
    }

    /// The next bytes that came, `count` of them.
    async fn receive(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        while bytes.len() < count {
            bytes.extend(patiently(self.came.recv()).await.unwrap());
        }
        bytes
    }
}

async fn serve(
    socket: TcpStream,
    answers: Answers,
    came: mpsc::UnboundedSender<Bytes>,
    requests: Arc<AtomicU32>,
) {
    let mut connection = h2::server::handshake(socket).await.unwrap();
    let mut streams = JoinSet::new();
    loop {
        tokio::select! {
            accepted = connection.accept() => match accepted {
                Some(Ok((request, respond))) if request.method() == Method::CONNECT => {
                    let number = requests.fetch_add(1, SeqCst);
                    let breaks = number == 0 && matches!(answers, Answers::AfterBreaking(_));
                    streams.spawn(answer(request, respond, answers, breaks, came.clone()));
                }
                Some(Ok((_, mut respond))) => {
                    let accepted = Response::builder().status(StatusCode::NO_CONTENT).body(()).unwrap();
                    respond.send_response(accepted, true).unwrap();
                }
                _ => return,
            },
            Some(ended) = streams.join_next() => if ended.unwrap() { return },
        }
    }
}

/// Returns true if the connection is to break.
async fn answer(
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    answers: Answers,
    breaks: bool,
    came: mpsc::UnboundedSender<Bytes>,
) -> bool {
    let (Answers::After(first) | Answers::AfterBreaking(first)) = answers;
    let mut body = request.into_body();
    let mut count = 0;
    let mut _stream = (first == 0).then(|| respond.send_response(Response::new(()), false).unwrap());
    while let Some(Ok(bytes)) = body.data().await {
        count += bytes.len();
        came.send(bytes).unwrap();
        if count >= first && _stream.is_none() {
            if breaks {
                return true;
            }
            _stream = Some(respond.send_response(Response::new(()), false).unwrap());
        }
    }
    false
}

/// A pod's socket, and the agent's end of it.
async fn pod() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let pod = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    (pod, listener.accept().await.unwrap().0)
}

#[tokio::test]
async fn a_hello_comes_along_with_the_request() {
    let mut gateway = Gateway::start(Answers::After(HELLO.len())).await;
    let client = Client::start(settings(&[gateway.address]));
    let (mut socket, agent) = pod().await;
    socket.write_all(HELLO).await.unwrap();
    let stream = patiently(client.open_for(UPSTREAM, &agent)).await.unwrap();
    assert_eq!(gateway.receive(HELLO.len()).await, HELLO);
    let mut pod = Pod::between(stream, socket, agent);
    pod.socket.write_all(b"and the rest").await.unwrap();
    assert_eq!(gateway.receive(12).await, b"and the rest");
    // Its end is the gateway's: what was sent early is counted.
    drop(gateway);
    assert_eq!(pod.report().await.up, HELLO.len() + 12);
}

#[tokio::test]
async fn a_hello_is_sent_again_where_the_first_tunnel_breaks() {
    let mut gateway = Gateway::start(Answers::AfterBreaking(HELLO.len())).await;
    let client = Client::start(settings(&[gateway.address]));
    let (mut socket, agent) = pod().await;
    socket.write_all(HELLO).await.unwrap();
    let _stream = patiently(client.open_for(UPSTREAM, &agent)).await.unwrap();
    assert_eq!(gateway.receive(2 * HELLO.len()).await, [HELLO, HELLO].concat());
}

#[tokio::test]
async fn what_is_no_tls_comes_after_the_answer_and_before_the_rest() {
    let mut gateway = Gateway::start(Answers::After(0)).await;
    let client = Client::start(settings(&[gateway.address]));
    let (mut socket, agent) = pod().await;
    socket.write_all(b"GET ").await.unwrap();
    agent.readable().await.unwrap();
    let stream = patiently(client.open_for(UPSTREAM, &agent)).await.unwrap();
    let mut pod = Pod::between(stream, socket, agent);
    pod.socket.write_all(b"/version").await.unwrap();
    assert_eq!(gateway.receive(12).await, b"GET /version");
}
