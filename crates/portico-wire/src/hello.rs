//! The ClientHello: which name a TLS client asks for, read without taking part in the handshake.
//!
//! For the gateway's SNI listener, which passes the bytes on untouched. Follows RFC 8446 sections 4.1.2
//! (message) and 5.1 (records), RFC 6066 section 3 (server name) and RFC 7301 (ALPN). Hellos of TLS 1.0 to
//! 1.2 have the same shape. With Encrypted ClientHello the name is the outer one: the only one anybody but
//! the addressee can see.
//!
//! Two layers answer differently. The record layer may say "need more": bytes are still on their way. The
//! message is only read once it is whole, so a length inside it that overruns it is malformed, never a reason
//! to wait.
//!
//! It is strict where two readers could disagree about the route (two names, a name with control characters,
//! trailing bytes). It is lenient where it is the control plane's business (cipher suites, unknown
//! extensions, GREASE).

use std::borrow::Cow;

use crate::reader::Reader;
use crate::{Malformed, Parse};

/// Most bytes of a ClientHello, record headers included, that are read before giving up: 16 KiB, as in Envoy.
/// A hello with a post-quantum key share is 1.5 to 2 KiB. One with a large session ticket or several such key
/// shares has a few KiB more. Every waiting client may hold this much.
pub const MAX_HELLO: usize = 16 * 1024;

/// Bytes of a record header: content type, version, length.
const RECORD_HEADER: usize = 5;
/// Bytes of a handshake header: message type, length.
const MESSAGE_HEADER: usize = 4;
/// Most bytes in a plaintext record (RFC 8446, section 5.1).
const MAX_RECORD: usize = 1 << 14;
/// A DNS name in text has 253 bytes and perhaps a trailing dot; 255 is where OpenSSL draws the line.
const MAX_SERVER_NAME: usize = 255;

const CONTENT_TYPE_HANDSHAKE: u8 = 22;
const MESSAGE_CLIENT_HELLO: u8 = 1;
const EXTENSION_SERVER_NAME: u16 = 0;
const EXTENSION_ALPN: u16 = 16;
const EXTENSION_SUPPORTED_VERSIONS: u16 = 43;
const NAME_TYPE_HOST_NAME: u8 = 0;
const TLS_1_3: [u8; 2] = [3, 4];

/// The fields of a ClientHello that the gateway needs. Borrows from the bytes unless the message was spread
/// over several records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientHello<'a> {
    /// The name asked for, as sent: printable ASCII without spaces, in any case, perhaps with a trailing
    /// dot, never empty. `None` if the client sent no name.
    pub server_name: Option<Cow<'a, str>>,
    /// The application protocols offered, the preferred one first.
    pub alpn: Alpn<'a>,
    /// The highest version up to TLS 1.2; the one an [alert](crate::alert::fatal) should carry.
    pub legacy_version: u16,
    /// The version in the header of the first record: TLS 1.0 from most clients.
    pub record_version: u16,
    /// Does the client offer TLS 1.3?
    pub supports_tls13: bool,
    /// Bytes of the records that the hello took. What follows is early data.
    pub len: usize,
}

/// The protocol names of the ALPN extension, checked: a list of names of 1 to 255 bytes. Empty if there was
/// none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Alpn<'a>(Cow<'a, [u8]>);

impl Alpn<'_> {
    /// The names, the preferred one first. They are bytes: a client may offer anything.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let mut names = Reader::new(&self.0);
        std::iter::from_fn(move || names.vec8())
    }
}

/// Reads the ClientHello at the start of `bytes`, which are all bytes received so far.
///
/// Each call starts anew. A caller that reads often should hold a [`Progress`] instead. Otherwise a client
/// that sends its hello byte by byte in tiny records makes the work grow with the square of its size.
pub fn parse(bytes: &[u8]) -> Parse<ClientHello<'_>> {
    Progress::default().parse(bytes)
}

/// How far the records of one ClientHello have been checked. Twelve bytes to keep between reads.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// Where the first record begins that was not whole at the last call.
    next_record: u32,
    /// Bytes of the message in the whole records before it.
    message_bytes: u32,
    /// The first bytes of the message, which may be spread over records as well.
    header: MessageHeader,
}

impl Progress {
    /// Like [`parse`], but goes on where the last call stopped. `bytes` are again all bytes received so far.
    pub fn parse<'a>(&mut self, bytes: &'a [u8]) -> Parse<ClientHello<'a>> {
        match self.walk(bytes) {
            Ok(Some(message_len)) => match self.read_message(bytes, message_len) {
                Ok(hello) => Parse::Complete(hello),
                Err(malformed) => Parse::Malformed(malformed),
            },
            Ok(None) => Parse::NeedMore,
            Err(malformed) => Parse::Malformed(malformed),
        }
    }

    /// Walks over whole records until the message in them is whole too. Returns its length.
    fn walk(&mut self, bytes: &[u8]) -> Result<Option<usize>, Malformed> {
        loop {
            let start = self.next_record as usize;
            let have = self.message_bytes as usize;
            if let Some(wanted) = self.header.wanted(have)
                && have == wanted
            {
                return Ok(Some(wanted));
            }

            if start + RECORD_HEADER >= MAX_HELLO {
                return Err(TOO_LONG);
            }
            let here = bytes.get(start..).unwrap_or_default();
            let Some(payload_len) = record_len(here, start)? else { return Ok(None) };
            let end = start + RECORD_HEADER + payload_len;
            if end > MAX_HELLO {
                return Err(TOO_LONG);
            }

            let payload = &here[RECORD_HEADER..here.len().min(RECORD_HEADER + payload_len)];
            self.header.fill(have, payload);
            self.header.check(have + payload.len(), have + payload_len)?;
            if payload.len() < payload_len {
                return Ok(None);
            }
            self.next_record = end as u32;
            self.message_bytes += payload_len as u32;
        }
    }

    /// Reads the message, whose records are all whole.
    fn read_message<'a>(&self, bytes: &'a [u8], message_len: usize) -> Result<ClientHello<'a>, Malformed> {
        let len = self.next_record as usize;
        let records = bytes.get(..len).ok_or(SHRUNK)?;
        let record_version = u16::from_be_bytes([records[1], records[2]]);
        if len == RECORD_HEADER + message_len {
            let body = Body::read(&records[RECORD_HEADER + MESSAGE_HEADER..])?;
            return Ok(ClientHello {
                server_name: body.server_name.map(Cow::Borrowed),
                alpn: Alpn(Cow::Borrowed(body.alpn)),
                legacy_version: body.legacy_version,
                record_version,
                supports_tls13: body.supports_tls13,
                len,
            });
        }
        let message = join_records(records, message_len);
        let body = Body::read(message.get(MESSAGE_HEADER..).ok_or(SHRUNK)?)?;
        Ok(ClientHello {
            server_name: body.server_name.map(|name| Cow::Owned(name.to_owned())),
            alpn: Alpn(Cow::Owned(body.alpn.to_vec())),
            legacy_version: body.legacy_version,
            record_version,
            supports_tls13: body.supports_tls13,
            len,
        })
    }
}

const TOO_LONG: Malformed = Malformed::because("the ClientHello is longer than 16 KiB");
/// The caller of [`Progress::parse`] came back with other bytes than before.
const SHRUNK: Malformed = Malformed::because("bytes of the ClientHello that were here before are gone");

/// Checks as much of a record header as is here. Returns the length of the record once it is known.
/// `start` is where the record begins: the first one is met by whatever a stranger sends.
fn record_len(record: &[u8], start: usize) -> Result<Option<usize>, Malformed> {
    let mut reader = Reader::new(record);
    match reader.u8() {
        None => return Ok(None),
        Some(CONTENT_TYPE_HANDSHAKE) => {}
        Some(first) if start == 0 && first & 0x80 != 0 => {
            return Err(Malformed::because(
                "this is no TLS record, or an SSL 2.0 hello, which nobody should send",
            ));
        }
        Some(_) if start == 0 => return Err(Malformed::because("the first bytes are not TLS")),
        Some(_) => return Err(Malformed::because("a record of another type is inside the ClientHello")),
    }
    match reader.u8() {
        None => return Ok(None),
        Some(3) => {}
        Some(_) => return Err(Malformed::because("the record has no known TLS version")),
    }
    // The minor version is not checked: RFC 8446 section 5.1 asks to ignore it, and clients disagree about
    // it.
    let (Some(_minor), Some(len)) = (reader.u8(), reader.u16()) else { return Ok(None) };
    match usize::from(len) {
        0 => Err(Malformed::because("a handshake record is empty")),
        len if len > MAX_RECORD => Err(Malformed::because("a record is longer than TLS allows")),
        len => Ok(Some(len)),
    }
}

/// The four bytes at the start of a handshake message: its type and its length.
#[derive(Clone, Copy, Debug, Default)]
struct MessageHeader([u8; MESSAGE_HEADER]);

impl MessageHeader {
    /// Takes over what `payload`, which begins `have` bytes into the message, holds of the header.
    fn fill(&mut self, have: usize, payload: &[u8]) {
        for (slot, byte) in self.0.iter_mut().skip(have).zip(payload) {
            *slot = *byte;
        }
    }

    /// How long the message is with its header, once `have` bytes of it are known.
    fn wanted(self, have: usize) -> Option<usize> {
        let [_, high, middle, low] = self.0;
        (have >= MESSAGE_HEADER).then(|| MESSAGE_HEADER + u32::from_be_bytes([0, high, middle, low]) as usize)
    }

    /// Checks what can be known early. `visible` bytes of the message are here; with the current record it
    /// will have `announced`.
    fn check(self, visible: usize, announced: usize) -> Result<(), Malformed> {
        if visible > 0 && self.0[0] != MESSAGE_CLIENT_HELLO {
            return Err(Malformed::because("the first handshake message is not a ClientHello"));
        }
        match self.wanted(visible) {
            Some(wanted) if wanted > MAX_HELLO - RECORD_HEADER => Err(TOO_LONG),
            Some(wanted) if wanted < announced => {
                Err(Malformed::because("more bytes follow the ClientHello in its last record"))
            }
            _ => Ok(()),
        }
    }
}

/// Copies the message out of its records. Off the hot path: clients that split a hello over records are rare.
fn join_records(records: &[u8], message_len: usize) -> Vec<u8> {
    let mut message = Vec::with_capacity(message_len);
    let mut reader = Reader::new(records);
    while let (Some(_type_and_version), Some(payload)) = (reader.take(3), reader.vec16()) {
        message.extend_from_slice(payload);
    }
    message
}

/// The fields of a whole ClientHello message that matter here.
#[derive(Default)]
struct Body<'a> {
    legacy_version: u16,
    server_name: Option<&'a str>,
    alpn: &'a [u8],
    supports_tls13: bool,
}

impl<'a> Body<'a> {
    /// Reads the message after its header. It is whole: nothing here can need more.
    fn read(message: &'a [u8]) -> Result<Self, Malformed> {
        const SHORT: Malformed = Malformed::because("a length in the ClientHello points past its end");
        let mut reader = Reader::new(message);
        let mut body = Self { legacy_version: reader.u16().ok_or(SHORT)?, ..Self::default() };
        if body.legacy_version >> 8 != 3 {
            return Err(Malformed::because("the ClientHello has no known TLS version"));
        }
        let _random = reader.array::<32>().ok_or(SHORT)?;
        if reader.vec8().ok_or(SHORT)?.len() > 32 {
            return Err(Malformed::because("the session id is longer than 32 bytes"));
        }
        let cipher_suites = reader.vec16().ok_or(SHORT)?;
        if cipher_suites.is_empty() || cipher_suites.len() % 2 != 0 {
            return Err(Malformed::because("the list of cipher suites is empty or has half an entry"));
        }
        if reader.vec8().ok_or(SHORT)?.is_empty() {
            return Err(Malformed::because("the list of compression methods is empty"));
        }
        if reader.is_empty() {
            return Ok(body); // TLS 1.0 knows hellos without extensions.
        }
        let extensions = reader.vec16().ok_or(SHORT)?;
        if !reader.is_empty() {
            return Err(Malformed::because("bytes follow the extensions of the ClientHello"));
        }
        body.read_extensions(extensions)?;
        Ok(body)
    }

    /// Reads the extensions that matter and steps over all others.
    fn read_extensions(&mut self, extensions: &'a [u8]) -> Result<(), Malformed> {
        const SHORT: Malformed = Malformed::because("an extension points past the end of the ClientHello");
        let mut seen = SeenExtensions::default();
        let mut reader = Reader::new(extensions);
        while !reader.is_empty() {
            let kind = reader.u16().ok_or(SHORT)?;
            let data = reader.vec16().ok_or(SHORT)?;
            match kind {
                EXTENSION_SERVER_NAME => {
                    first_time(&mut seen.server_name)?;
                    self.server_name = read_server_name(data)?;
                }
                EXTENSION_ALPN => {
                    first_time(&mut seen.alpn)?;
                    self.alpn = read_alpn(data)?;
                }
                EXTENSION_SUPPORTED_VERSIONS => {
                    first_time(&mut seen.supported_versions)?;
                    self.supports_tls13 = read_supported_versions(data)?;
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Which of the extensions that matter were met already.
#[derive(Default)]
struct SeenExtensions {
    server_name: bool,
    alpn: bool,
    supported_versions: bool,
}

/// An extension that comes twice is forbidden (RFC 8446, section 4.2), and of two names the control plane
/// might believe the other one.
fn first_time(seen: &mut bool) -> Result<(), Malformed> {
    if std::mem::replace(seen, true) {
        return Err(Malformed::because("an extension comes twice"));
    }
    Ok(())
}

/// Reads the `server_name` extension: a list with at most one name of type `host_name`.
fn read_server_name(data: &[u8]) -> Result<Option<&str>, Malformed> {
    const SHORT: Malformed = Malformed::because("a length in the server_name extension is wrong");
    let mut reader = Reader::new(data);
    let mut names = Reader::new(reader.vec16().ok_or(SHORT)?);
    if !reader.is_empty() || names.is_empty() {
        return Err(SHORT);
    }
    let mut found = None;
    while !names.is_empty() {
        let kind = names.u8().ok_or(SHORT)?;
        // RFC 6066: names of types yet to come begin with such a length too, so they can be stepped over.
        let name = names.vec16().ok_or(SHORT)?;
        if kind != NAME_TYPE_HOST_NAME {
            continue;
        }
        if found.is_some() {
            return Err(Malformed::because("the client asks for two server names"));
        }
        found = Some(check_server_name(name)?);
    }
    Ok(found)
}

/// A server name is printable ASCII without spaces; whether it is a name anybody has is for the routes to
/// say.
fn check_server_name(name: &[u8]) -> Result<&str, Malformed> {
    if name.is_empty() {
        return Err(Malformed::because("the server name is empty"));
    }
    if name.len() > MAX_SERVER_NAME {
        return Err(Malformed::because("the server name is longer than 255 bytes"));
    }
    if !name.iter().all(u8::is_ascii_graphic) {
        return Err(Malformed::because("the server name has bytes that are not printable ASCII"));
    }
    std::str::from_utf8(name).map_err(|_| Malformed::because("the server name is not ASCII"))
}

/// Checks the ALPN extension and returns the list of names in it, each with its length in front.
fn read_alpn(data: &[u8]) -> Result<&[u8], Malformed> {
    const SHORT: Malformed = Malformed::because("a length in the ALPN extension is wrong");
    let mut reader = Reader::new(data);
    let list = reader.vec16().ok_or(SHORT)?;
    if !reader.is_empty() || list.is_empty() {
        return Err(SHORT);
    }
    let mut names = Reader::new(list);
    while !names.is_empty() {
        if names.vec8().ok_or(SHORT)?.is_empty() {
            return Err(Malformed::because("a protocol name in the ALPN extension is empty"));
        }
    }
    Ok(list)
}

/// Reads the `supported_versions` extension: is TLS 1.3 among them?
fn read_supported_versions(data: &[u8]) -> Result<bool, Malformed> {
    const SHORT: Malformed = Malformed::because("a length in the supported_versions extension is wrong");
    let mut reader = Reader::new(data);
    let (versions, odd) = reader.vec8().ok_or(SHORT)?.as_chunks::<2>();
    if !reader.is_empty() || versions.is_empty() || !odd.is_empty() {
        return Err(SHORT);
    }
    Ok(versions.contains(&TLS_1_3))
}

#[cfg(test)]
mod tests;
