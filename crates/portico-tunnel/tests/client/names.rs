//! A name server on loopback that says what a test wants.

#![allow(dead_code, unreachable_pub, reason = "each test program uses its own part of this")]
#![allow(clippy::unwrap_used, reason = "the helpers of tests fail like tests")]

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use hickory_resolver::proto::op::{Message, MessageType, ResponseCode};
use hickory_resolver::proto::rr::rdata::A;
use hickory_resolver::proto::rr::{RData, Record, RecordType};
use tokio::net::UdpSocket;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// What it says of every name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Says {
    Addresses(Vec<Ipv4Addr>),
    /// The name is there and has no address.
    Nothing,
    /// Something is wrong.
    Failure,
    /// Not a word.
    Silence,
}

pub struct NameServer {
    pub address: SocketAddr,
    pub says: watch::Sender<Says>,
    asked: Arc<AtomicU32>,
    task: JoinHandle<()>,
}

impl NameServer {
    pub async fn start(says: Says) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let (says, asked) = (watch::Sender::new(says), Arc::new(AtomicU32::new(0)));
        let task = tokio::spawn(serve(socket, says.subscribe(), Arc::clone(&asked)));
        Self { address, says, asked, task }
    }

    /// Questions for IPv4 addresses so far.
    pub fn asked(&self) -> u32 {
        self.asked.load(SeqCst)
    }
}

impl Drop for NameServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(socket: UdpSocket, says: watch::Receiver<Says>, asked: Arc<AtomicU32>) {
    loop {
        let mut question = [0; 512];
        let (len, from) = socket.recv_from(&mut question).await.unwrap();
        let mut message = Message::from_vec(&question[..len]).unwrap();
        message.metadata.message_type = MessageType::Response;
        let query = message.queries[0].clone();
        let for_v4 = query.query_type() == RecordType::A;
        asked.fetch_add(u32::from(for_v4), SeqCst);
        match says.borrow().clone() {
            Says::Addresses(addresses) => {
                for address in addresses.into_iter().filter(|_| for_v4) {
                    let record = Record::from_rdata(query.name().clone(), 1, RData::A(A(address)));
                    message.add_answer(record);
                }
            }
            Says::Nothing => {}
            Says::Failure => message.metadata.response_code = ResponseCode::ServFail,
            Says::Silence => continue,
        }
        socket.send_to(&message.to_vec().unwrap(), from).await.unwrap();
    }
}
