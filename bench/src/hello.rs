//! The ClientHello every bench client opens with, and the order to the backend hidden in it.
//!
//! No proxy terminates TLS here: all of them look for the server name (RFC 6066 section 3) and pass the bytes
//! on. So the hello is real in every field a proxy may look at. It is about as long as a Go 1.24 client's,
//! with an X25519MLKEM768 key share. Its 32 random bytes tell the backend what to do with the connection.
//! Called by [`crate::load`] and [`crate::backend`].

/// Length of most answers to a hello: a ServerHello with the rest of a resumed flight, one segment.
pub(crate) const ANSWER_BYTES: usize = 512;
/// Where the random bytes start: record header (5), handshake header (4), legacy version (2).
const RANDOM_AT: usize = 11;
/// Length of an X25519MLKEM768 client share (draft-ietf-tls-ecdhe-mlkem): 1,184 bytes of ML-KEM and 32 of
/// X25519.
const HYBRID_SHARE: usize = 1216;

/// What the backend does with a connection after it has answered the hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Nothing more: wait for the end.
    Answer,
    /// Send back whatever arrives.
    Echo,
    /// Send this many bytes.
    Send(u64),
    /// Take this many bytes, then answer with one byte.
    Take(u64),
    /// Nothing more: end the connection.
    AnswerAndEnd,
    /// Nothing more, and the answer is a single byte, so that a client that has read it leaves nothing
    /// unread.
    AnswerOneByte,
}

impl Order {
    /// Length of the backend's answer to the hello.
    pub(crate) fn answer_bytes(self) -> usize {
        match self {
            Self::AnswerOneByte => 1,
            _ => ANSWER_BYTES,
        }
    }

    fn to_random(self) -> [u8; 32] {
        // Any fixed filler will do: no proxy looks at the random.
        let mut random = [0x5a; 32];
        let (code, count) = match self {
            Self::Answer => (1, 0),
            Self::Echo => (2, 0),
            Self::Send(bytes) => (3, bytes),
            Self::Take(bytes) => (4, bytes),
            Self::AnswerAndEnd => (5, 0),
            Self::AnswerOneByte => (6, 0),
        };
        random[0] = code;
        random[1..9].copy_from_slice(&count.to_be_bytes());
        random
    }

    fn from_random(random: &[u8]) -> Option<Self> {
        let count = u64::from_be_bytes(random.get(1..9)?.try_into().ok()?);
        match random[0] {
            1 => Some(Self::Answer),
            2 => Some(Self::Echo),
            3 => Some(Self::Send(count)),
            4 => Some(Self::Take(count)),
            5 => Some(Self::AnswerAndEnd),
            6 => Some(Self::AnswerOneByte),
            _ => None,
        }
    }
}

/// A ClientHello for `host` in one TLS record.
pub(crate) fn client_hello(host: &str, order: Order) -> Vec<u8> {
    let mut extensions = Vec::with_capacity(1600);
    extension(&mut extensions, 0, &server_name(host));
    extension(&mut extensions, 23, &[]); // extended_master_secret
    extension(&mut extensions, 10, &[0, 6, 0x11, 0xec, 0, 0x1d, 0, 0x17]); // groups: hybrid, x25519, P-256
    extension(&mut extensions, 13, &[0, 6, 0x08, 0x04, 0x04, 0x03, 0x08, 0x07]); // signature algorithms
    extension(&mut extensions, 16, b"\x00\x0c\x02h2\x08http/1.1"); // ALPN
    extension(&mut extensions, 43, &[4, 3, 4, 3, 3]); // versions: 1.3, 1.2
    extension(&mut extensions, 51, &key_shares());

    let mut body = vec![3, 3]; // legacy version
    body.extend_from_slice(&order.to_random());
    body.push(32); // legacy session id, as every TLS 1.3 client in compatibility mode sends
    body.extend_from_slice(&[0x33; 32]);
    with_length(&mut body, &[0x13, 1, 0x13, 2, 0x13, 3, 0xc0, 0x2b, 0xc0, 0x2f]); // cipher suites
    body.extend_from_slice(&[1, 0]); // no compression
    with_length(&mut body, &extensions);

    let mut hello = vec![0x16, 3, 1]; // handshake record
    let mut handshake = vec![1, 0]; // ClientHello, and the high byte of a three byte length
    with_length(&mut handshake, &body);
    with_length(&mut hello, &handshake);
    hello
}

/// The order in `bytes` and the length of the hello; `None` while it is not there in full or is no bench
/// hello.
pub(crate) fn read_order(bytes: &[u8]) -> Option<(Order, usize)> {
    let length = 5 + usize::from(u16::from_be_bytes(bytes.get(3..5)?.try_into().ok()?));
    if bytes.len() < length {
        return None;
    }
    Some((Order::from_random(bytes.get(RANDOM_AT..RANDOM_AT + 32)?)?, length))
}

fn server_name(host: &str) -> Vec<u8> {
    let mut entry = vec![0]; // host_name
    with_length(&mut entry, host.as_bytes());
    let mut list = Vec::with_capacity(entry.len() + 2);
    with_length(&mut list, &entry);
    list
}

fn key_shares() -> Vec<u8> {
    let mut shares = vec![0x11, 0xec];
    with_length(&mut shares, &[0x77; HYBRID_SHARE]);
    shares.extend_from_slice(&[0, 0x1d]);
    with_length(&mut shares, &[0x78; 32]);
    let mut list = Vec::with_capacity(shares.len() + 2);
    with_length(&mut list, &shares);
    list
}

fn extension(into: &mut Vec<u8>, kind: u16, body: &[u8]) {
    into.extend_from_slice(&kind.to_be_bytes());
    with_length(into, body);
}

fn with_length(into: &mut Vec<u8>, body: &[u8]) {
    let length = u16::try_from(body.len()).expect("every part of a bench hello is shorter than 64 KiB");
    into.extend_from_slice(&length.to_be_bytes());
    into.extend_from_slice(body);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_survives_the_hello() {
        let orders = [
            Order::Answer,
            Order::Echo,
            Order::Send(1 << 33),
            Order::Take(7),
            Order::AnswerAndEnd,
            Order::AnswerOneByte,
        ];
        for order in orders {
            let hello = client_hello("a.seed.example.com", order);
            assert_eq!(read_order(&hello), Some((order, hello.len())));
        }
    }

    #[test]
    fn a_hello_is_read_only_when_it_is_there_in_full() {
        let hello = client_hello("a.seed.example.com", Order::Echo);
        for cut in 0..hello.len() {
            assert_eq!(read_order(&hello[..cut]), None, "cut at {cut}");
        }
    }
}
