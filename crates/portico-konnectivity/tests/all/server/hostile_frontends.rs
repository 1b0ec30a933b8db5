//! Frontends that lie and flood, and strangers at their TCP port. Beside each of them one that does no harm
//! goes on.

use std::sync::atomic::Ordering::Relaxed;

use portico_konnectivity::server::Mode;
use portico_lab::frames;
use portico_wire::konnectivity::{ConnectId, PROXY_PATH, Packet};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::client::TlsStream;

use super::hostile::{HALF_HELLO, SILENT, allow_descriptors, flood, floods, is_closed, opening, says, storm};
use super::support::*;

/// A frontend by gRPC, and the agent that has its connection.
struct Bystander {
    agent: Agent,
    frontend: Stream,
    of_agent: ConnectId,
    of_frontend: ConnectId,
}

impl Bystander {
    async fn new(rig: &Rig, mut frontend: Stream) -> Self {
        let mut agent = rig.agent("a").await;
        let (of_frontend, of_agent) = established(&mut agent, &mut frontend, 1).await;
        Self { agent, frontend, of_agent, of_frontend }
    }

    async fn goes_on(&mut self) {
        self.frontend.data(self.of_frontend, b"ping").await;
        let came = self.agent.stream.packet().await;
        assert_eq!(came, Packet::Data { connection: self.of_agent, payload: "ping".into() });
    }
}

async fn over_tls(rig: &Rig) -> TlsStream<TcpStream> {
    rig.tls_to(rig.server.frontend_address().unwrap()).await.unwrap()
}

async fn floods_and_is_given_up(mut hostile: impl AsyncRead + AsyncWrite + Unpin, frame: &[u8]) {
    hostile.write_all(&opening(PROXY_PATH, &[])).await.unwrap();
    let sent = flood(hostile, frame).await;
    assert!(sent < 40_000, "{sent} frames {:?}", &frame[..9]);
}

#[tokio::test]
async fn a_frontend_that_floods_frames_is_given_up() {
    let rig = Rig::start(Mode::Grpc).await;
    let mut bystander = Bystander::new(&rig, rig.proxy().await).await;
    for frame in floods() {
        floods_and_is_given_up(UnixStream::connect(&rig.socket).await.unwrap(), &frame).await;
        bystander.goes_on().await;
    }
}

#[tokio::test]
async fn so_is_one_with_a_certificate_over_tcp() {
    let rig = Rig::over_tls(Mode::Grpc, |_| {}).await;
    let mut bystander = Bystander::new(&rig, proxy_over(over_tls(&rig).await).await).await;
    for frame in floods() {
        floods_and_is_given_up(over_tls(&rig).await, &frame).await;
        bystander.goes_on().await;
    }
}

#[tokio::test]
async fn strangers_at_the_port_of_frontends_make_room_for_those_with_a_certificate() {
    allow_descriptors();
    for said in [&b""[..], HALF_HELLO] {
        let rig = Rig::over_tls(Mode::Grpc, |_| {}).await;
        let mut bystander = Bystander::new(&rig, proxy_over(over_tls(&rig).await).await).await;
        let mut strangers = Vec::new();
        for _ in 0..SILENT {
            strangers.push(says(rig.server.frontend_address().unwrap(), said).await);
        }
        let mut late = proxy_over(over_tls(&rig).await).await;
        established(&mut bystander.agent, &mut late, 2).await;
        // The first to come are the first to go.
        for stranger in strangers.drain(..SILENT - 1_024) {
            patiently(is_closed(stranger)).await;
        }
        bystander.goes_on().await;
    }
}

#[tokio::test]
async fn a_frontend_whose_message_is_too_long_or_no_packet_loses_its_own_connection_alone() {
    let rig = Rig::start(Mode::Grpc).await;
    let mut bystander = Bystander::new(&rig, rig.proxy().await).await;
    // Lengths of 4 GiB and of three bytes.
    let lies = [&[0, 0xff, 0xff, 0xff, 0xff][..], &[0, 0, 0, 0, 3, 0xff, 0xff, 0xff]];
    for (lost, lie) in (1_u32..).zip(lies) {
        let mut liar = rig.proxy().await;
        let (_, of_agent) = established(&mut bystander.agent, &mut liar, 1 + i64::from(lost)).await;
        liar.lies(lie).await;
        assert_eq!(bystander.agent.stream.packet().await, Packet::CloseRequest(of_agent));
        assert_eq!(rig.ends(), [("frontend_lost", u64::from(lost))]);
        bystander.goes_on().await;
    }
}

#[tokio::test]
async fn streams_that_a_frontend_opens_and_resets_leave_nothing_and_hold_up_nobody() {
    let rig = Rig::start(Mode::Grpc).await;
    let mut bystander = Bystander::new(&rig, rig.proxy().await).await;
    let mut hostile = UnixStream::connect(&rig.socket).await.unwrap();
    hostile.write_all(&frames::opening(&[])).await.unwrap();
    storm(hostile, PROXY_PATH, &[], async || bystander.goes_on().await).await;
    until(|| rig.status.counters().proxy_streams.load(Relaxed) == 1).await;
    assert!(rig.status.memory().0 < 1 << 20);
    bystander.goes_on().await;
}
