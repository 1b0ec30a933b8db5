//! Whatever bytes a client sends after the preface, authenticated or not: no panic, and the connection ends
//! when its client does. What it makes the server hold stays within a model of what may be held. In the end
//! it is nothing.
//!
//! The first byte says whether the client has authenticated, and whether it takes its answers. The others
//! come in pieces, cut where they have a value that the second byte says.
#![no_main]

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use portico_net::MemoryBudget;
use portico_tunnel::{
    BadRequest, End, Handler, Meter, Refusal, Request, Settings, StatusCode, Upstream, serve,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tokio::task::LocalSet;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Requests of a client that has not authenticated that the handler may see at once.
const FIRST_REQUESTS: usize = 16;

/// What an unauthenticated connection may be counted with. It is: the connection itself, its early data, an
/// unfinished frame with a header block before it, and its requests, each with a token and an authority.
const MOST_UNAUTHENTICATED: usize = 32 * 1024 + 65_535 + 2 * 16 * 1024 + FIRST_REQUESTS * (1024 + 16 * 1024);

/// What any connection may be counted with.
const MOST: usize = 32 << 20;

/// Clients whose first byte is odd authenticate with their first request for this authority.
const OPENS: &str = "a:1";

#[derive(Default)]
struct Model {
    authenticated: AtomicBool,
    under_way: AtomicUsize,
}

/// One request in the hands of the handler.
struct UnderWay<'a>(&'a Model);

impl<'a> UnderWay<'a> {
    fn new(model: &'a Model) -> Self {
        let before = model.under_way.fetch_add(1, Relaxed);
        assert!(before < FIRST_REQUESTS || model.authenticated.load(Relaxed), "{before} requests at once");
        Self(model)
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Relaxed);
    }
}

struct Count;

impl Meter for Count {
    fn carried(&mut self, _: usize, _: usize) {}
    fn ended(self, _: End) {}
}

impl Handler for Model {
    type Meter = Count;

    async fn connect(&self, request: &Request) -> Result<Upstream<Count>, Refusal> {
        let _under_way = UnderWay::new(self);
        tokio::task::yield_now().await;
        if &*request.authority != OPENS {
            return Err(Refusal::new(StatusCode::UNAUTHORIZED, "no"));
        }
        self.authenticated.store(true, Relaxed);
        // One that takes what comes, and ends with it.
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback is there");
        let stream = TcpStream::connect(listener.local_addr().expect("it is bound")).await;
        Ok(Upstream { stream: stream.expect("it listens"), meter: Count })
    }

    async fn verify(&self, _: &Request) -> Result<(), Refusal> {
        let _under_way = UnderWay::new(self);
        tokio::task::yield_now().await;
        Err(Refusal::new(StatusCode::UNAUTHORIZED, "no"))
    }

    fn is_authenticated(&self) -> bool {
        self.authenticated.load(Relaxed)
    }

    fn refused(&self, _: &BadRequest) -> StatusCode {
        StatusCode::BAD_REQUEST
    }

    fn plaintext_status(&self) -> StatusCode {
        StatusCode::FORBIDDEN
    }
}

thread_local! {
    static RUNTIME: Runtime = Builder::new_current_thread().enable_all().build().expect("a runtime is made");
}

async fn attack(input: &[u8]) {
    let [mode, cut, bytes @ ..] = input else { return };
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback is there");
    let mut client =
        TcpStream::connect(listener.local_addr().expect("it is bound")).await.expect("it listens");
    let (stream, _) = listener.accept().await.expect("the client is there");
    let memory = MemoryBudget::new(MOST);
    let settings = Settings { plaintext: true, memory: memory.clone(), ..Settings::default() };
    let model = Arc::new(Model::default());
    model.authenticated.store(mode & 1 == 0, Relaxed);
    let ended = Rc::new(Cell::new(false));
    let (over, served) = (Rc::clone(&ended), Arc::clone(&model));
    let server = tokio::task::spawn_local(async move {
        let _ = serve(stream, Bytes::new(), &settings, std::future::pending(), &served).await;
        over.set(true);
    });
    let held = || {
        let most = if model.authenticated.load(Relaxed) { MOST } else { MOST_UNAUTHENTICATED };
        assert!(memory.held() <= most, "{} bytes are held", memory.held());
    };
    // Fails once the server has ended the connection.
    let _ = client.write_all(PREFACE).await;
    for piece in bytes.split_inclusive(|byte| byte == cut) {
        if ended.get() || client.write_all(piece).await.is_err() {
            break;
        }
        tokio::task::yield_now().await;
        held();
        if mode & 2 != 0 {
            // One that takes its answers.
            let _ = client.try_read(&mut [0; 4096]);
        }
    }
    let _ = client.shutdown().await;
    let mut rest = Vec::new();
    let _ = client.take(1 << 24).read_to_end(&mut rest).await;
    server.await.expect("the server does not panic");
    // Its streams are tasks of their own, which end with it.
    for _ in 0..1_000 {
        if memory.held() == 0 {
            return;
        }
        tokio::task::yield_now().await;
    }
    panic!("{} bytes are still held", memory.held());
}

fuzz_target!(|input: &[u8]| {
    RUNTIME.with(|runtime| LocalSet::new().block_on(runtime, attack(input)));
});
