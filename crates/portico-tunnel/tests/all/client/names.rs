//! A name server on loopback that says what a test wants.

#![allow(dead_code, reason = "the test programs of three crates have this, and each uses its own part")]
#![allow(clippy::unwrap_used, reason = "the helpers of tests fail like tests")]

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use hickory_resolver::proto::op::{Message, MessageType, ResponseCode};
use hickory_resolver::proto::rr::rdata::{A, AAAA};
use hickory_resolver::proto::rr::{RData, Record, RecordType};
use tokio::net::UdpSocket;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// What it says of every name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Says {
    Addresses(Vec<IpAddr>),
    /// The name is there and has no address.
    Nothing,
    /// There is no such name.
    Unknown,
    /// Something is wrong.
    Failure,
    /// Nothing.
    Silence,
}

pub(crate) struct NameServer {
    pub(crate) address: SocketAddr,
    pub(crate) says: watch::Sender<Says>,
    asked: Arc<AtomicU32>,
    last: Arc<Mutex<String>>,
    task: JoinHandle<()>,
}

impl NameServer {
    /// Its answers hold for a second.
    pub(crate) async fn start(says: Says) -> Self {
        Self::with_ttl(1, says).await
    }

    /// Its answers hold for so many seconds.
    pub(crate) async fn with_ttl(ttl: u32, says: Says) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let (says, asked, last) = (watch::Sender::new(says), Arc::default(), Arc::default());
        let task = tokio::spawn(serve(socket, ttl, says.subscribe(), Arc::clone(&asked), Arc::clone(&last)));
        Self { address, says, asked, last, task }
    }

    /// Questions for IPv4 addresses so far.
    pub(crate) fn asked(&self) -> u32 {
        self.asked.load(SeqCst)
    }

    /// The name that was asked for last.
    pub(crate) fn last(&self) -> String {
        self.last.lock().unwrap().clone()
    }
}

impl Drop for NameServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(
    socket: UdpSocket,
    ttl: u32,
    says: watch::Receiver<Says>,
    asked: Arc<AtomicU32>,
    last: Arc<Mutex<String>>,
) {
    loop {
        let mut question = [0; 512];
        let (len, from) = socket.recv_from(&mut question).await.unwrap();
        let mut message = Message::from_vec(&question[..len]).unwrap();
        message.metadata.message_type = MessageType::Response;
        let query = message.queries[0].clone();
        let kind = query.query_type();
        *last.lock().unwrap() = query.name().to_ascii();
        asked.fetch_add(u32::from(kind == RecordType::A), SeqCst);
        match says.borrow().clone() {
            Says::Addresses(addresses) => {
                let data = addresses.into_iter().map(|address| match address {
                    IpAddr::V4(address) => RData::A(A(address)),
                    IpAddr::V6(address) => RData::AAAA(AAAA(address)),
                });
                for data in data.filter(|data| data.record_type() == kind) {
                    message.add_answer(Record::from_rdata(query.name().clone(), ttl, data));
                }
            }
            Says::Nothing => {}
            Says::Unknown => message.metadata.response_code = ResponseCode::NXDomain,
            Says::Failure => message.metadata.response_code = ResponseCode::ServFail,
            Says::Silence => continue,
        }
        socket.send_to(&message.to_vec().unwrap(), from).await.unwrap();
    }
}
