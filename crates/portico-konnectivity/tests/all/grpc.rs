//! Streams of messages, with a real h2 on the other side.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use h2::client::SendRequest;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderMap, HeaderValue, Response};
use portico_konnectivity::grpc::{self, Call, Error, Message, Receiver, Request, Sender, Status};
use portico_net::MemoryBudget;
use portico_tunnel::connection::Activity;
use portico_wire::konnectivity::CONNECT_PATH;
use portico_wire::konnectivity::status::Code;
use tokio::io::DuplexStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;

type Accepted = (http::Request<RecvStream>, SendResponse<Bytes>);

/// What never takes so long.
const PATIENCE: Duration = Duration::from_secs(60);

fn activity() -> Arc<Activity> {
    Arc::new(Activity::new(&MemoryBudget::new(64 << 20)))
}

fn memory() -> Vec<MemoryBudget> {
    vec![MemoryBudget::new(64 << 20)]
}

fn message(payload: &[u8]) -> Bytes {
    let mut bytes = BytesMut::new();
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(payload.len()).unwrap());
    bytes.put_slice(payload);
    bytes.freeze()
}

struct Pair {
    requests: SendRequest<Bytes>,
    server: h2::server::Connection<DuplexStream, Bytes>,
    client: JoinHandle<Result<(), h2::Error>>,
}

impl Pair {
    async fn new() -> Self {
        let (near, far) = tokio::io::duplex(64 * 1024);
        let (client, server) = tokio::join!(h2::client::handshake(near), h2::server::handshake(far));
        let (requests, connection) = client.unwrap();
        Self { requests, server: server.unwrap(), client: tokio::spawn(connection) }
    }

    fn request() -> Request {
        let mut metadata = HeaderMap::new();
        metadata.insert("agentid", HeaderValue::from_static("a"));
        Request { authority: "server.example.com".parse().unwrap(), path: CONNECT_PATH, metadata }
    }

    /// A call of ours, and what a server of plain h2 sees of it.
    async fn call(mut self) -> (Sender, grpc::Answer, Accepted, JoinHandle<Result<(), h2::Error>>) {
        let call = grpc::call(&mut self.requests, Self::request(), &activity(), &memory()).await;
        let (sender, answer) = call.unwrap();
        let accepted = self.server.accept().await.unwrap().unwrap();
        tokio::spawn(async move { while let Some(Ok(_)) = self.server.accept().await {} });
        (sender, answer, accepted, self.client)
    }

    /// A request of plain h2, as our server gets it.
    async fn accepted(
        mut self,
        content_type: &'static str,
    ) -> (h2::client::ResponseFuture, SendStream<Bytes>, Option<Call>) {
        let request = http::Request::post(format!("http://localhost{CONNECT_PATH}"));
        let request = request.header("content-type", content_type).body(()).unwrap();
        let (response, send) = self.requests.send_request(request, false).unwrap();
        let (request, respond) = self.server.accept().await.unwrap().unwrap();
        tokio::spawn(async move { while let Some(Ok(_)) = self.server.accept().await {} });
        (response, send, Call::accept(request, respond))
    }
}

/// Our server, and a client of plain h2.
async fn served() -> (Sender, Receiver, h2::client::ResponseFuture, SendStream<Bytes>) {
    let (response, send, call) = Pair::new().await.accepted("application/grpc").await;
    let (sender, receiver) = call.unwrap().start(HeaderMap::new(), &activity(), &memory()).unwrap();
    (sender, receiver, response, send)
}

async fn next(receiver: &mut Receiver) -> Option<Message> {
    timeout(PATIENCE, receiver.message()).await.unwrap().unwrap()
}

/// Sends as the window allows.
async fn send_all(stream: &mut SendStream<Bytes>, mut bytes: Bytes) {
    while !bytes.is_empty() {
        stream.reserve_capacity(bytes.len());
        let window = poll_fn(|cx| stream.poll_capacity(cx)).await.unwrap().unwrap();
        stream.send_data(bytes.split_to(window.min(bytes.len())), false).unwrap();
    }
}

#[tokio::test]
async fn a_call_carries_metadata_and_messages_both_ways() {
    let (mut sender, answer, (request, mut respond), _client) = Pair::new().await.call().await;
    assert_eq!(request.uri().path(), CONNECT_PATH);
    assert_eq!(request.headers()["agentid"], "a");
    assert_eq!(request.headers()["content-type"], "application/grpc");
    assert_eq!(request.headers()["te"], "trailers");
    let response = Response::builder().header("content-type", "application/grpc").header("serverid", "s");
    let mut to_client = respond.send_response(response.body(()).unwrap(), false).unwrap();
    let (metadata, mut receiver) = timeout(PATIENCE, answer.answered()).await.unwrap().unwrap();
    assert_eq!(metadata["serverid"], "s");

    sender.send(&message(b"up"), Bytes::new());
    sender.ready().await.unwrap();
    let mut from_client = request.into_body();
    assert_eq!(from_client.data().await.unwrap().unwrap(), message(b"up"));

    to_client.send_data(message(b"down"), false).unwrap();
    assert_eq!(next(&mut receiver).await.unwrap().bytes, "down");
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    to_client.send_trailers(trailers).unwrap();
    assert!(next(&mut receiver).await.is_none());
    assert!(next(&mut receiver).await.is_none(), "asked again, it still is the end");
}

#[tokio::test]
async fn messages_come_whole_wherever_frames_cut_them() {
    let payloads = [&b"first"[..], b"", b"third, longer than the others"];
    let all: Bytes = payloads.iter().flat_map(|payload| message(payload)).collect();
    for size in 1..=all.len() {
        let (_sender, mut receiver, _response, mut send) = served().await;
        for frame in all.chunks(size) {
            send.send_data(Bytes::copy_from_slice(frame), false).unwrap();
        }
        send.send_data(Bytes::new(), true).unwrap();
        for payload in payloads {
            assert_eq!(next(&mut receiver).await.unwrap().bytes, payload, "frames of {size}");
        }
        assert!(next(&mut receiver).await.is_none());
    }
}

#[tokio::test]
async fn a_message_larger_than_the_window_comes_whole() {
    let (_sender, mut receiver, _response, mut send) = served().await;
    let payload = vec![7; 4 << 20];
    let sent = tokio::spawn(async move { send_all(&mut send, message(&payload)).await });
    let got = next(&mut receiver).await.unwrap();
    assert_eq!(got.bytes.len(), 4 << 20);
    assert!(got.window <= 64 * 1024, "most was needed for the rest of it");
    sent.await.unwrap();
}

#[tokio::test]
async fn a_message_over_the_limit_or_compressed_ends_the_stream() {
    for wrong in [&[0, 0, 0x40, 0, 1][..], &[1, 0, 0, 0, 0]] {
        let (_sender, mut receiver, _response, mut send) = served().await;
        send.send_data(Bytes::copy_from_slice(wrong), false).unwrap();
        let error = timeout(PATIENCE, receiver.message()).await.unwrap().unwrap_err();
        assert!(matches!(error, Error::Malformed(_)), "{error}");
    }
}

#[tokio::test]
async fn a_sender_gets_window_back_only_for_what_was_passed_on() {
    let (_sender, mut receiver, _response, mut send) = served().await;
    // The window of the protocol's default, in one message a frame.
    for _ in 0..5 {
        send_all(&mut send, message(&[0; 13_000])).await;
    }
    let mut window = 0;
    for _ in 0..5 {
        window += next(&mut receiver).await.unwrap().window;
    }
    assert_eq!(window, 5 * 13_005);
    send.reserve_capacity(13_005);
    let more = async {
        while send.capacity() < 13_005 {
            poll_fn(|cx| send.poll_capacity(cx)).await;
        }
    };
    let mut more = std::pin::pin!(more);
    tokio::select! {
        biased;
        () = &mut more => panic!("window came back for messages that nobody has passed on"),
        () = yield_often() => {}
    }
    receiver.release(window);
    timeout(PATIENCE, more).await.unwrap();
}

/// Lets all tasks run until none has anything to do.
async fn yield_often() {
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_sender_waits_for_a_peer_that_does_not_read() {
    let (mut sender, _receiver, response, _send) = served().await;
    let mut body = response.await.unwrap().into_body();
    let mut sent = 0;
    while poll_fn(|cx| std::task::Poll::Ready(sender.poll_ready(cx))).await.is_ready() {
        sender.send(&message(&[0; 10_000])[..5], Bytes::from(vec![0; 10_000]));
        sent += 10_005;
    }
    assert!((65_535..65_535 + 20_000).contains(&sent), "{sent} bytes for a window of 65,535");
    let mut read = 0;
    let reading = async {
        while read < sent {
            let bytes = body.data().await.unwrap().unwrap();
            read += bytes.len();
            body.flow_control().release_capacity(bytes.len()).unwrap();
        }
    };
    timeout(PATIENCE, async { tokio::join!(reading, async { sender.ready().await.unwrap() }) })
        .await
        .unwrap();
}

#[tokio::test]
async fn a_status_says_why_a_stream_ended() {
    let status = Status::new(Code::UNKNOWN, "authentication failed: 100 % \u{fc}ber");
    // In trailers, and without a message before it.
    let (sender, _receiver, response, _send) = served().await;
    sender.finish(&status).unwrap();
    let mut body = response.await.unwrap().into_body();
    assert!(body.data().await.is_none());
    let trailers = body.trailers().await.unwrap().unwrap();
    assert_eq!(trailers["grpc-status"], "2");

    let (response, _send, call) = Pair::new().await.accepted("application/grpc+proto").await;
    call.unwrap().refuse(&status);
    let refused = response.await.unwrap();
    assert_eq!(refused.headers()["grpc-message"], trailers["grpc-message"]);

    let (_sender, answer, (_request, mut respond), _client) = Pair::new().await.call().await;
    let mut response = Response::builder().body(()).unwrap();
    *response.headers_mut() = refused.headers().clone();
    respond.send_response(response, true).unwrap();
    let error = timeout(PATIENCE, answer.answered()).await.unwrap().unwrap_err();
    assert!(matches!(&error, Error::Status(got) if *got == status), "{error}");
}

#[tokio::test]
async fn a_stream_that_breaks_off_is_no_orderly_end() {
    // Within a message.
    let (_sender, mut receiver, _response, mut send) = served().await;
    send.send_data(message(b"half").slice(..7), true).unwrap();
    assert!(matches!(receiver.message().await, Err(Error::Truncated(_))));
    // By a reset.
    let (_sender, mut receiver, _response, mut send) = served().await;
    send.send_data(message(b"one"), false).unwrap();
    assert!(next(&mut receiver).await.is_some());
    send.send_reset(Reason::CANCEL);
    let error = timeout(PATIENCE, receiver.message()).await.unwrap().unwrap_err();
    assert!(matches!(&error, Error::Http(error) if error.reason() == Some(Reason::CANCEL)), "{error}");
    // Without trailers.
    let (_sender, answer, (_request, mut respond), _client) = Pair::new().await.call().await;
    let response = Response::builder().header("content-type", "application/grpc").body(()).unwrap();
    let mut stream = respond.send_response(response, false).unwrap();
    stream.send_data(Bytes::new(), true).unwrap();
    let (_, mut receiver) = answer.answered().await.unwrap();
    assert!(matches!(receiver.message().await, Err(Error::Truncated(_))));
}

#[tokio::test]
async fn what_is_no_grpc_is_told_apart_on_both_sides() {
    let (response, _send, call) = Pair::new().await.accepted("text/plain").await;
    assert!(call.is_none());
    assert_eq!(response.await.unwrap().status(), 415);
    let (_sender, answer, (_request, mut respond), _client) = Pair::new().await.call().await;
    respond.send_response(Response::builder().status(404).body(()).unwrap(), true).unwrap();
    let error = answer.answered().await.unwrap_err();
    assert!(error.to_string().contains("HTTP status 404"), "{error}");
}
