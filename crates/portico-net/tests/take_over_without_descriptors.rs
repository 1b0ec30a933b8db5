//! A process that cannot accept its successor goes on, and accepts it later. A program of its own: it takes
//! every descriptor there is.

#![allow(clippy::unwrap_used, reason = "a test may")]

use std::fs::File;
use std::os::fd::OwnedFd;

use portico_net::takeover::Offer;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, send,
    socket_with,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

fn successor(path: &std::path::Path) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
}

#[tokio::test]
async fn a_successor_that_cannot_be_accepted_for_want_of_descriptors_is_accepted_later() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("agent.sock");
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(64), ..limit }).unwrap();
    let offer = Offer::new(&path).unwrap();
    let successor = successor(&path);
    let mut all = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        all.push(file);
    }
    let mut serving = std::pin::pin!(offer.serve(None, || Ok(Vec::new())));
    let looked = async {
        // The runtime asks the kernel what is ready once in 61 turns.
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        biased;
        () = &mut serving => panic!("served no one, and ended"),
        () = looked => {}
    }
    assert!(!offer.has_successor(), "there was a descriptor left");
    all.clear();
    let mut message = [0; 64];
    let received = async {
        while recv(&successor, &mut message[..], RecvFlags::DONTWAIT).is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        () = &mut serving => panic!("nobody was ready"),
        received = tokio::time::timeout(std::time::Duration::from_secs(30), received) => received.unwrap(),
    }
    send(&successor, b"ready", SendFlags::NOSIGNAL).unwrap();
    serving.await;
}
