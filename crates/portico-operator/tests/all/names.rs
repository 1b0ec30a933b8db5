//! A name server that says what a test wants.

use std::net::Ipv4Addr;
use std::sync::Arc;

use tokio::net::UdpSocket;
use tokio::sync::watch;

/// What a name server says of a name.
pub(crate) enum Says {
    Address(Ipv4Addr),
    /// There is no such name.
    Unknown,
    Nothing,
}

/// What it says now, by name.
pub(crate) type Zone = Arc<dyn Fn(&str) -> Says + Send + Sync>;

/// Answers questions by what `zone` says at the time.
pub(crate) async fn serve(socket: UdpSocket, zone: watch::Receiver<Zone>) -> std::io::Result<()> {
    // RFC 1035, 4.1: a header of 12 bytes, then the name as labels, its type and its class.
    const HEADER: usize = 12;
    let mut buffer = [0; 512];
    loop {
        let (len, from) = socket.recv_from(&mut buffer).await?;
        let question = &buffer[HEADER..len];
        let (mut name, mut at) = (String::new(), 0);
        while question[at] != 0 {
            let end = at + 1 + usize::from(question[at]);
            name += &format!("{}.", String::from_utf8_lossy(&question[at + 1..end]));
            at = end;
        }
        let question = &question[..at + 5];
        let is_ipv4 = question[at + 2] == 1;
        let (code, answer) = match zone.borrow()(&name) {
            Says::Address(address) if is_ipv4 => {
                // The name of the question, type A, class IN, a second, four bytes.
                let record = [0xc0, 0x0c, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4];
                (0, [&record[..], &address.octets()].concat())
            }
            Says::Address(_) => (0, Vec::new()),
            Says::Unknown => (3, Vec::new()),
            Says::Nothing => continue,
        };
        let answers = u8::from(!answer.is_empty());
        let head = [buffer[0], buffer[1], 0x81, 0x80 | code, 0, 1, 0, answers, 0, 0, 0, 0];
        socket.send_to(&[&head[..], question, &answer].concat(), from).await?;
    }
}
