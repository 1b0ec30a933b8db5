//! The HTTP server behind every admin listener: bounded in every direction, whatever it answers.
//!
//! One request a connection. A scrape every some seconds gains nothing from an open connection. A bound on
//! the life of a connection is a bound on everything.
//!
//! A probe must be answered whatever else is connected: a kubelet restarts a process that does not answer. So
//! no connection waits for a slot. A new one evicts another (`evicted_for`): first one of the client with the
//! most connections, and of those one that has sent no request. A long answer evicts another long one the
//! same way, because each holds what it lists until its client has read it.

use std::convert::Infallible;
use std::future::pending;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hyper::body::{Body as _, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use thiserror::Error;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinHandle, yield_now};
use tokio::time::{Instant, sleep, timeout};

use crate::body::{Body, MOST_LONG, whole};

/// Connections held at once. A few Prometheis, a few probes, a few people; the rest is slack for clients that
/// say nothing.
const MOST_CONNECTIONS: usize = 64;
/// How long a client may take to send its request: one packet, sent once more if it got lost.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// How long one connection may take from its first to its last byte: a slow scrape of 10,000 clusters, and no
/// more.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);
/// Rest after a failed accept(2). A failure nearly always means that descriptors are out, and trying at once
/// would burn the core.
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// Between two log lines about that.
const WARN_INTERVAL: Duration = Duration::from_secs(10);

/// Between two attempts to bind the address while a predecessor still holds it.
const BIND_AGAIN: Duration = Duration::from_millis(200);

/// The admin address cannot be bound.
#[derive(Debug, Error)]
#[error("cannot listen on {address}; {remedy}")]
pub struct ListenError {
    /// The address asked for.
    pub address: SocketAddr,
    /// What to do.
    pub remedy: &'static str,
    /// The error of the system.
    pub source: io::Error,
}

/// What a client gets.
pub type Answer = Response<Body>;

/// The pages of an admin listener: the answer to a path and a query. Only GET and HEAD come this far.
pub trait Pages: Send + Sync + 'static {
    /// The answer to `request`.
    fn answer(&self, request: &Request<Incoming>) -> impl Future<Output = Answer> + Send;
}

/// Opens the listener that [`serve`] serves.
pub async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await
}

/// Which listener is meant, in logs and errors.
#[derive(Debug, Clone, Copy)]
pub struct Name {
    /// As logs name it.
    pub listener: &'static str,
    /// What the operator can do if its address cannot be had.
    pub remedy: &'static str,
}

impl Name {
    /// The listener of `--admin-listen`.
    pub const ADMIN: Self =
        Self { listener: "admin", remedy: "choose another address with --admin-listen, or off" };
}

/// Serves `pages` at `address` from now on, if there is one. With `waits`, an address in use is one that a
/// predecessor will let go of.
pub async fn start(
    name: Name,
    address: Option<SocketAddr>,
    pages: Arc<impl Pages>,
    waits: bool,
) -> Result<JoinHandle<()>, ListenError> {
    let Some(address) = address else { return Ok(tokio::spawn(pending())) };
    match bind(address).await {
        Ok(listener) => {
            if let Ok(address) = listener.local_addr() {
                tracing::info!(listener = %name.listener, %address, "listening");
            }
            Ok(tokio::spawn(async move { match serve(listener, pages).await {} }))
        }
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && waits => {
            tracing::info!(%address, "the admin address is in use, probably by a predecessor; waiting");
            Ok(tokio::spawn(async move {
                loop {
                    sleep(BIND_AGAIN).await;
                    if let Ok(listener) = bind(address).await {
                        match serve(listener, Arc::clone(&pages)).await {}
                    }
                }
            }))
        }
        Err(source) => Err(ListenError { address, remedy: name.remedy, source }),
    }
}

/// A connection that is held.
#[derive(Debug)]
struct OpenConnection {
    number: u64,
    client: IpAddr,
    state: State,
    task: AbortHandle,
}

/// How far a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Its request is awaited.
    Waiting,
    /// Its answer is there as a whole.
    Short,
    /// Its answer is written piece by piece.
    Long,
}

/// The connections of one listener, in the order they came.
#[derive(Debug, Default)]
struct Connections(Mutex<Vec<OpenConnection>>);

impl Connections {
    fn lock(&self) -> MutexGuard<'_, Vec<OpenConnection>> {
        // Nothing in here can be left half done by a panic elsewhere.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves one more; another may have to go for it.
    fn add(self: &Arc<Self>, number: u64, stream: TcpStream, client: IpAddr, pages: Arc<impl Pages>) {
        let mut held = self.lock();
        held.retain(|connection| !connection.task.is_finished());
        if held.len() >= MOST_CONNECTIONS
            && let Some(evicted) = evicted_for(held.iter(), client)
        {
            held.retain(|connection| connection.stays_without(evicted));
        }
        let serving = serve_connection(stream, pages, Arc::clone(self), number);
        let task = tokio::spawn(async { drop(timeout(CONNECTION_TIMEOUT, serving).await) }).abort_handle();
        held.push(OpenConnection { number, client, state: State::Waiting, task });
    }

    /// Ends a connection that has sent no request. Returns false if there is none.
    fn make_room(&self) -> bool {
        let mut held = self.lock();
        held.retain(|connection| !connection.task.is_finished());
        let oldest = held.iter().position(|connection| connection.state == State::Waiting);
        let evicted = oldest.map(|index| held.remove(index));
        if let Some(connection) = &evicted {
            connection.task.abort();
        }
        evicted.is_some()
    }

    /// The request of a connection has come, and its answer is of this kind.
    fn answers(&self, number: u64, state: State) {
        let mut held = self.lock();
        let Some(index) = held.iter().position(|connection| connection.number == number) else { return };
        let client = held[index].client;
        if state == State::Long {
            held.retain(|connection| !connection.task.is_finished());
            let long = || held.iter().filter(|connection| connection.state == State::Long);
            if long().count() >= MOST_LONG
                && let Some(evicted) = evicted_for(long(), client)
            {
                held.retain(|connection| connection.stays_without(evicted));
            }
        }
        if let Some(own) = held.iter_mut().find(|connection| connection.number == number) {
            own.state = state;
        }
    }
}

impl OpenConnection {
    /// Ends the connection if it is the one that is evicted. Returns whether it stays.
    fn stays_without(&self, evicted: u64) -> bool {
        if self.number == evicted {
            self.task.abort();
        }
        self.number != evicted
    }
}

/// Serves until dropped.
pub async fn serve(listener: TcpListener, pages: Arc<impl Pages>) -> Infallible {
    let connections = Arc::new(Connections::default());
    let (mut number, mut warned) = (0, None);
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                connections.add(number, stream, peer.ip(), Arc::clone(&pages));
                number += 1;
                // Requests that are there already are answered before the next connection takes a slot.
                yield_now().await;
            }
            Err(error) => {
                let now = Instant::now();
                if warned.is_none_or(|last| now.duration_since(last) >= WARN_INTERVAL) {
                    warned = Some(now);
                    tracing::warn!(%error, "the admin listener cannot accept a connection");
                }
                // A probe waits behind connections that hold what it lacks.
                if connections.make_room() {
                    yield_now().await;
                } else {
                    sleep(ACCEPT_REST).await;
                }
            }
        }
    }
}

/// The number of the connection to end when `client` needs a slot and none is free. It is a connection of the
/// client that would hold the most. Among those, connections without a request go first. Among equals the
/// oldest goes.
fn evicted_for<'a>(
    held: impl DoubleEndedIterator<Item = &'a OpenConnection> + Clone,
    client: IpAddr,
) -> Option<u64> {
    let of = |other: IpAddr| held.clone().filter(|connection| connection.client == other).count();
    let weight = |connection: &&OpenConnection| {
        let more = usize::from(connection.client == client);
        (of(connection.client) + more, connection.state == State::Waiting)
    };
    // `max_by_key` returns the last of equals. Walked from the newest, that is the oldest.
    held.clone().rev().max_by_key(weight).map(|connection| connection.number)
}

async fn serve_connection(
    stream: TcpStream,
    pages: Arc<impl Pages>,
    connections: Arc<Connections>,
    number: u64,
) {
    let service = service_fn(move |request| {
        // Before the answer is made. A connection whose answer takes a while must not be evicted as one that
        // waits.
        connections.answers(number, State::Short);
        let (pages, connections) = (Arc::clone(&pages), Arc::clone(&connections));
        async move {
            let answer = answer(&*pages, &request).await;
            if answer.body().size_hint().exact().is_none() {
                connections.answers(number, State::Long);
            }
            Ok::<_, Infallible>(answer)
        }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_TIMEOUT)
        .keep_alive(false)
        // A client may end its side after the request, as `nc -N` does, and still read the answer.
        .half_close(true)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = connection.await {
        tracing::debug!(%error, "a connection to the admin listener ended");
    }
}

async fn answer(pages: &impl Pages, request: &Request<Incoming>) -> Answer {
    if matches!(*request.method(), Method::GET | Method::HEAD) {
        return pages.answer(request).await;
    }
    let mut refused = text(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD are served here\n".into());
    refused.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
    refused
}

/// A page for people.
pub fn text(code: StatusCode, text: String) -> Answer {
    let mut answer = typed("text/plain; charset=utf-8", whole(text));
    *answer.status_mut() = code;
    answer
}

/// A page of a type.
pub fn typed(content_type: &'static str, body: Body) -> Answer {
    let mut answer = Response::new(body);
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    answer
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::runtime::Handle;
    use tokio::sync::Notify;

    use super::*;
    use crate::body::stream;

    /// Connections of clients in the order they came, with a question mark where the request is still
    /// awaited.
    async fn held(clients: &[&str]) -> Vec<OpenConnection> {
        let connection = |(number, client): (usize, &&str)| OpenConnection {
            number: number as u64,
            client: client.trim_end_matches('?').parse().unwrap(),
            state: if client.ends_with('?') { State::Waiting } else { State::Short },
            task: tokio::spawn(std::future::pending::<()>()).abort_handle(),
        };
        clients.iter().enumerate().map(connection).collect()
    }

    async fn leaves(clients: &[&str], client: &str) -> Option<u64> {
        evicted_for(held(clients).await.iter(), client.parse().unwrap())
    }

    #[tokio::test]
    async fn for_want_of_descriptors_the_oldest_without_a_request_ends_and_no_other() {
        let connections = Connections(Mutex::new(held(&["::1", "::2?", "::3?"]).await));
        let ended = [(); 3].map(|()| connections.make_room());
        assert_eq!(ended, [true, true, false]);
        assert_eq!(connections.lock().iter().map(|held| held.number).collect::<Vec<_>>(), [0]);
    }

    #[tokio::test]
    async fn of_long_answers_few_are_held_and_the_client_with_the_most_loses_the_oldest() {
        let connections = Connections(Mutex::new(held(&["::1", "::2", "::2", "::2", "::3", "::4"]).await));
        for number in 0..4 {
            connections.answers(number, State::Long);
        }
        let numbers = || connections.lock().iter().map(|held| held.number).collect::<Vec<_>>();
        assert_eq!(numbers(), [0, 1, 2, 3, 4, 5], "there was room");
        connections.answers(4, State::Long);
        assert_eq!(numbers(), [0, 2, 3, 4, 5]);
        connections.answers(5, State::Short);
        assert_eq!(numbers(), [0, 2, 3, 4, 5], "a short answer takes no room");
    }

    /// Answers without end.
    struct Endless;

    impl Pages for Endless {
        async fn answer(&self, _: &Request<Incoming>) -> Answer {
            typed(
                "text/plain",
                stream(|out| {
                    loop {
                        out.write_all(&[b'x'; 1024])?;
                    }
                }),
            )
        }
    }

    #[tokio::test]
    async fn long_answers_that_nobody_reads_make_room_for_the_next_one() {
        let listener = bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(async move { match serve(listener, Arc::new(Endless)).await {} });
        let mut clients = Vec::new();
        for _ in 0..MOST_LONG + 2 {
            let mut client = TcpStream::connect(address).await.unwrap();
            client.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
            client.read_exact(&mut [0]).await.unwrap();
            clients.push(client);
        }
        for client in &mut clients[..2] {
            // It ends, or is reset. Its beginning may be long: the kernel holds that.
            let _ = client.read_to_end(&mut Vec::new()).await;
        }
        for client in &mut clients[2..] {
            client.read_exact(&mut vec![0; 16 << 20]).await.unwrap();
        }
        serving.abort();
    }

    /// Begins to write its answer when it is told to.
    struct Waits(Arc<Notify>);

    impl Pages for Waits {
        async fn answer(&self, _: &Request<Incoming>) -> Answer {
            let (begin, runtime) = (Arc::clone(&self.0), Handle::current());
            let write = move |out: &mut dyn std::io::Write| {
                runtime.block_on(begin.notified());
                out.write_all(b"all of it")
            };
            typed("text/plain", stream(write))
        }
    }

    #[tokio::test]
    async fn a_client_that_ends_its_side_gets_the_whole_answer() {
        let listener = bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let begin = Arc::<Notify>::default();
        let pages = Arc::new(Waits(Arc::clone(&begin)));
        let serving = tokio::spawn(async move { match serve(listener, pages).await {} });
        client.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        client.shutdown().await.unwrap();
        begin.notify_one();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.ends_with("all of it\r\n0\r\n\r\n"), "{answer}");
        serving.abort();
    }

    #[tokio::test]
    async fn the_client_with_the_most_connections_loses_one_to_a_new_one() {
        assert_eq!(leaves(&["::1?", "::2", "::2", "::2"], "::9").await, Some(1));
        assert_eq!(leaves(&["::1?", "::1?", "::2", "::2"], "::2").await, Some(2), "a flood displaces itself");
    }

    #[tokio::test]
    async fn a_client_without_a_request_makes_room_first_and_the_oldest_of_them() {
        assert_eq!(leaves(&["::1", "::1?", "::1?"], "::1").await, Some(1));
        assert_eq!(leaves(&["::1", "::2", "::3?"], "::4").await, Some(2));
        assert_eq!(leaves(&["::1", "::2", "::3"], "::4").await, Some(0));
    }
}
