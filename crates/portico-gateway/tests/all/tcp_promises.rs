//! What TCP promises its users survives the gateway: order, half-close, resets, and that one side's silence
//! is not the end.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;

use crate::support::*;
use portico_gateway::Gateway;

const HOST: &str = "a.example.com";

fn exposed() -> (Arc<Gateway>, Endpoint) {
    let gateway = start(config());
    let endpoint = Endpoint::new();
    Service::new("a", &[endpoint.address]).host(HOST).expose(&gateway);
    (gateway, endpoint)
}

/// Bytes that differ at every place a copy could go wrong.
fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|index| (index.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

/// Fills `stream` until its peer takes no more.
fn fill(stream: &TcpStream) -> usize {
    stream.set_nonblocking(true).unwrap();
    let mut written = 0;
    let mut idle = 0;
    // Full for good only when it stays full while the gateway had every chance to move bytes on.
    while idle < 50 {
        match (&*stream).write(&[7; 65536]) {
            Ok(count) => {
                written += count;
                idle = 0;
            }
            Err(_) => {
                idle += 1;
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
        }
    }
    stream.set_nonblocking(false).unwrap();
    written
}

#[test]
fn the_hello_and_all_that_follows_arrive_untouched() {
    let (gateway, endpoint) = exposed();
    let (mut client, mut server) = pair(&gateway, &endpoint, HOST);
    client.write_all(b"to the server").unwrap();
    assert_eq!(read_exactly(&mut server, 13), b"to the server");
    server.write_all(b"to the client").unwrap();
    assert_eq!(read_exactly(&mut client, 13), b"to the client");
}

#[test]
fn a_client_that_closes_its_direction_still_gets_the_answer() {
    let (gateway, endpoint) = exposed();
    let (mut client, mut server) = pair(&gateway, &endpoint, HOST);
    client.write_all(b"request").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_to_end(&mut server), b"request");
    server.write_all(b"answer").unwrap();
    drop(server);
    assert_eq!(read_to_end(&mut client), b"answer");
    wait_until_empty(&gateway);
}

#[test]
fn a_server_that_closes_its_direction_still_gets_the_rest() {
    let (gateway, endpoint) = exposed();
    let (mut client, mut server) = pair(&gateway, &endpoint, HOST);
    server.write_all(b"bye").unwrap();
    server.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_to_end(&mut client), b"bye");
    client.write_all(b"last words").unwrap();
    drop(client);
    assert_eq!(read_to_end(&mut server), b"last words");
    wait_until_empty(&gateway);
}

#[test]
fn bytes_before_a_close_arrive_however_many() {
    let (gateway, endpoint) = exposed();
    for length in [1, 16 * 1024, 64 * 1024, 64 * 1024 + 1, 3_000_000] {
        let (mut client, mut server) = pair(&gateway, &endpoint, HOST);
        let sent = pattern(length);
        let expected = sent.clone();
        let writer = std::thread::spawn(move || client.write_all(&sent).unwrap());
        assert_eq!(read_to_end(&mut server), expected);
        writer.join().unwrap();
    }
    wait_until_empty(&gateway);
}

#[test]
fn the_end_of_a_large_transfer_arrives_though_its_sender_keeps_the_connection_open() {
    let (gateway, endpoint) = exposed();
    let (mut client, mut server) = pair(&gateway, &endpoint, HOST);
    for length in [16 << 20, 1_000, 16 << 20, 1] {
        let sent = pattern(length);
        let expected = sent.clone();
        let writer = {
            let mut server = server.try_clone().unwrap();
            std::thread::spawn(move || server.write_all(&sent).unwrap())
        };
        assert_eq!(read_exactly(&mut client, length), expected);
        writer.join().unwrap();
        client.write_all(b"ok").unwrap();
        assert_eq!(read_exactly(&mut server, 2), b"ok");
    }
}

#[test]
fn sixty_megabytes_arrive_whole_both_ways_at_once() {
    const LENGTH: usize = 60_000_000;
    let (gateway, endpoint) = exposed();
    let (client, server) = pair(&gateway, &endpoint, HOST);
    let send = |stream: &TcpStream| {
        let mut stream = stream.try_clone().unwrap();
        std::thread::spawn(move || {
            stream.write_all(&pattern(LENGTH)).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
        })
    };
    let receive = |stream: &TcpStream| {
        let mut stream = stream.try_clone().unwrap();
        std::thread::spawn(move || assert!(read_to_end(&mut stream) == pattern(LENGTH), "bytes differ"))
    };
    let all = [send(&client), send(&server), receive(&client), receive(&server)];
    all.into_iter().for_each(|thread| thread.join().unwrap());
    wait_until_empty(&gateway);
}

#[test]
fn a_reset_by_the_client_reaches_the_server() {
    let (gateway, endpoint) = exposed();
    let (client, mut server) = pair(&gateway, &endpoint, HOST);
    reset(client);
    assert_reset(&mut server);
    wait_until_empty(&gateway);
}

#[test]
fn a_reset_by_the_server_reaches_the_client() {
    let (gateway, endpoint) = exposed();
    let (mut client, server) = pair(&gateway, &endpoint, HOST);
    reset(server);
    assert_reset(&mut client);
    wait_until_empty(&gateway);
}

#[test]
fn bytes_before_a_reset_arrive_before_it() {
    let (gateway, endpoint) = exposed();
    let (mut client, mut server) = pair(&gateway, &endpoint, HOST);
    client.write_all(&pattern(50_000)).unwrap();
    reset(client);
    assert_eq!(read_exactly(&mut server, 50_000), pattern(50_000));
    assert_reset(&mut server);
    wait_until_empty(&gateway);
}

#[test]
fn a_client_reset_is_noticed_while_the_server_does_not_read() {
    let (gateway, endpoint) = exposed();
    let (client, server) = pair(&gateway, &endpoint, HOST);
    assert!(fill(&client) > 0);
    reset(client);
    wait_until_empty(&gateway);
    drop(server);
}

#[test]
fn a_server_reset_is_noticed_while_the_client_does_not_read() {
    let (gateway, endpoint) = exposed();
    let (client, server) = pair(&gateway, &endpoint, HOST);
    assert!(fill(&server) > 0);
    reset(server);
    wait_until_empty(&gateway);
    drop(client);
}

#[test]
fn a_reset_is_noticed_while_both_sides_are_blocked() {
    let (gateway, endpoint) = exposed();
    let (client, server) = pair(&gateway, &endpoint, HOST);
    assert!(fill(&server) > 0 && fill(&client) > 0);
    reset(client);
    wait_until_empty(&gateway);
    drop(server);
}

#[test]
fn a_reset_after_a_half_close_is_passed_on_although_nobody_reads_there_any_more() {
    let (gateway, endpoint) = exposed();
    let (client, mut server) = pair(&gateway, &endpoint, HOST);
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_to_end(&mut server), b"");
    reset(client);
    wait_until_empty(&gateway);
    // The server's own direction was open: it learns of the reset when it uses it.
    eventually("writing fails", || (&server).write(b"x").is_err());
}

#[test]
fn a_stalled_reader_gets_everything_once_it_reads_again() {
    let (gateway, endpoint) = exposed();
    let (mut client, server) = pair(&gateway, &endpoint, HOST);
    let sent = fill(&server);
    drop(server);
    let mut received = Vec::new();
    client.read_to_end(&mut received).unwrap();
    assert_eq!(received.len(), sent);
    drop(client);
    wait_until_empty(&gateway);
}
