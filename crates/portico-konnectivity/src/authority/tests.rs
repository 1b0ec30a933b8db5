use bytes::{BufMut, Bytes};
use http::Request;
use tokio::io::{AsyncWriteExt, DuplexStream};
use tokio::time::timeout;

use super::*;

/// The first and the second request that the library of Go sends on a connection. In one pair the path of the
/// socket is percent-encoded. In the other it is written as it is, as older versions do. The second request
/// names the authority by its entry in the table.
const REQUESTS: [[&str; 2]; 2] = [
    [
        "8386458f635d87f3eb716cee62158d761fcfaf41a254584a922a2c3d6d8cb65454950a8b0f53d551489377327d2c82d9\
         dcb62e8393a9535f8b1d75d0620d263d4c4d65647a8a9acac8b4c7602bbccae040027465864d833505b11f",
        "8386c2c1c0bfbe",
    ],
    [
        "8386458f635d87f3eb716cee62158d761fcfaf419e60a9231d6d8cb65454950c753d551489377327d2c82d9dcb62e839\
         3a953f5f8b1d75d0620d263d4c4d65647a8a9acac8b4c7602bbccae040027465864d833505b11f",
        "8386c2c1c0bfbe",
    ],
];

const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

const PREFACE_AND_SETTINGS: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// What never takes so long.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(60);

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.put_uint(payload.len() as u64, 3);
    bytes.put_slice(&[kind, flags]);
    bytes.put_u32(stream);
    bytes.put_slice(payload);
    bytes
}

fn headers(stream: u32, block: &[u8]) -> Vec<u8> {
    frame(HEADERS, END_HEADERS, stream, block)
}

/// The next requests that h2 reads from the sent bytes, and an error where there is one.
struct Server {
    client: DuplexStream,
    connection: h2::server::Connection<Authority<DuplexStream>, Bytes>,
    /// Streams that are dropped are reset.
    open: Vec<(Request<h2::RecvStream>, h2::server::SendResponse<Bytes>)>,
}

impl Server {
    async fn new() -> Self {
        let (mut client, server) = tokio::io::duplex(1 << 20);
        client.write_all(PREFACE_AND_SETTINGS).await.unwrap();
        let connection = h2::server::handshake(Authority::new(server)).await.unwrap();
        Self { client, connection, open: Vec::new() }
    }

    async fn send(&mut self, bytes: &[u8]) {
        self.client.write_all(bytes).await.unwrap();
    }

    async fn accept(&mut self) -> Result<&Request<h2::RecvStream>, h2::Error> {
        let accepted = timeout(PATIENCE, self.connection.accept()).await.unwrap().unwrap()?;
        self.open.push(accepted);
        Ok(&self.open[self.open.len() - 1].0)
    }

    async fn accepts_a_call(&mut self) {
        let request = self.accept().await.unwrap();
        assert_eq!(request.uri(), "http://s/ProxyService/Proxy");
        assert_eq!(request.headers()["user-agent"], "grpc-go/1.83.0");
        assert_eq!(request.headers()["te"], "trailers");
    }
}

#[tokio::test]
async fn the_path_of_a_socket_is_an_authority_that_h2_takes() {
    for [first, second] in REQUESTS {
        let mut server = Server::new().await;
        server.send(&headers(1, &unhex(first))).await;
        server.accepts_a_call().await;
        server.send(&headers(3, &unhex(second))).await;
        server.accepts_a_call().await;
    }
}

/// Without the step in front, h2 refuses them. Once it does not any more, this module can go.
#[tokio::test]
async fn h2_alone_refuses_it() {
    for [first, _] in REQUESTS {
        let (mut client, server) = tokio::io::duplex(1 << 20);
        client.write_all(PREFACE_AND_SETTINGS).await.unwrap();
        client.write_all(&headers(1, &unhex(first))).await.unwrap();
        client.shutdown().await.unwrap();
        let mut connection = h2::server::handshake(server).await.unwrap();
        assert!(!matches!(connection.accept().await, Some(Ok(_))));
    }
}

#[tokio::test]
async fn a_block_may_come_in_several_frames_and_byte_by_byte() {
    let block = unhex(REQUESTS[0][0]);
    for cut in [0, 1, 20, 21, 22, 57, block.len()] {
        let mut server = Server::new().await;
        let bytes = [frame(HEADERS, 0, 1, &block[..cut]), frame(CONTINUATION, END_HEADERS, 1, &block[cut..])]
            .concat();
        let (client, mut connection) = (&mut server.client, server.connection);
        let send = async {
            for byte in &bytes {
                client.write_all(&[*byte]).await.unwrap();
                tokio::task::yield_now().await;
            }
        };
        let (_, accepted) = tokio::join!(send, connection.accept());
        assert_eq!(accepted.unwrap().unwrap().0.uri(), "http://s/ProxyService/Proxy", "cut at {cut}");
    }
}

#[tokio::test]
async fn padding_and_priority_are_left_out() {
    let block = unhex(REQUESTS[0][0]);
    let mut server = Server::new().await;
    let padded = [&[3, 0, 0, 0, 0, 16][..], &block, &[0; 3]].concat();
    server.send(&frame(HEADERS, END_HEADERS | PADDED | PRIORITY, 1, &padded)).await;
    server.accepts_a_call().await;
}

#[tokio::test]
async fn what_is_no_header_block_passes_as_it_is() {
    let mut server = Server::new().await;
    let data = vec![7; 16_000];
    let mut bytes = headers(1, &unhex(REQUESTS[0][0]));
    bytes.extend(frame(0, 0, 1, &data));
    bytes.extend(frame(6, 0, 0, b"pingping"));
    bytes.extend(frame(0, 0, 1, &data));
    bytes.extend(headers(3, &unhex(REQUESTS[0][1])));
    server.send(&bytes).await;
    server.accepts_a_call().await;
    server.accepts_a_call().await;
    let body = server.open[0].0.body_mut();
    let (mut driver, mut received) = (server.connection, 0);
    while received < 2 * data.len() {
        tokio::select! {
            chunk = body.data() => received += chunk.unwrap().unwrap().len(),
            _ = driver.accept() => panic!("the connection ended"),
        }
    }
}
