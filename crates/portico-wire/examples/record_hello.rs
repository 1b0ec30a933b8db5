//! Records the ClientHello of a real TLS client, for the corpus.
//!
//! ```text
//! record_hello OUT_FILE PROGRAM [ARGUMENT...]
//! ```
//!
//! Listens on a free loopback port and starts the program; `{port}` in its arguments becomes that port. The
//! parser of this crate reads the hello, whose bytes go to the file. The client is refused with the alert
//! that the gateway would send. What was read is printed: a line for `corpus/expected.tsv`. What the client
//! says about the alert goes to stderr as it is.

use std::env;
use std::error::Error;
use std::fs;
use std::io::{Read, Write, stdout};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use portico_wire::hello::{self, MAX_HELLO};
use portico_wire::{Parse, alert};

/// Long enough for a browser's first start.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let usage = "usage: record_hello OUT_FILE PROGRAM [ARGUMENT...]";
    let out_file = arguments.next().ok_or(usage)?;
    let program = arguments.next().ok_or(usage)?;

    let listener = TcpListener::bind("127.0.0.1:0")?;
    listener.set_nonblocking(true)?;
    let port = listener.local_addr()?.port().to_string();
    let mut client = Command::new(&program)
        .args(arguments.map(|argument| argument.replace("{port}", &port)))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .map_err(|error| format!("cannot start {program}: {error}"))?;

    let recorded = record(&listener, &mut client);
    client.kill()?;
    client.wait()?;
    let bytes = recorded.map_err(|error| format!("{program}: {error}"))?;
    fs::write(&out_file, &bytes).map_err(|error| format!("cannot write {out_file}: {error}"))?;
    let name = Path::new(&out_file).file_name().unwrap_or_default().to_string_lossy().into_owned();
    writeln!(stdout(), "{name}\t{}", describe(&bytes)?)?;
    Ok(())
}

/// Takes connections until one of them sends a hello. (A browser may open some that stay silent.)
fn record(listener: &TcpListener, client: &mut Child) -> Result<Vec<u8>, Box<dyn Error>> {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        match listener.accept() {
            Ok((stream, _)) => match read_hello(stream)? {
                Some(bytes) => {
                    give_time_to_complain(client)?;
                    return Ok(bytes);
                }
                None => continue,
            },
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Err(format!("no hello within {} s", PATIENCE.as_secs()).into())
}

/// Reads a hello and refuses it. `None`: the client hung up first.
fn read_hello(mut stream: TcpStream) -> Result<Option<Vec<u8>>, Box<dyn Error>> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut bytes = Vec::new();
    let mut buffer = vec![0; MAX_HELLO];
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(None),
            count => bytes.extend_from_slice(&buffer[..count]),
        }
        match hello::parse(&bytes) {
            Parse::NeedMore => {}
            Parse::Malformed(malformed) => {
                return Err(format!("{malformed}: {}", bytes.escape_ascii()).into());
            }
            Parse::Complete(hello) => {
                let refusal = alert::fatal(alert::Description::UnrecognizedName, hello.legacy_version);
                let len = hello.len;
                stream.write_all(&refusal)?;
                bytes.truncate(len);
                return Ok(Some(bytes));
            }
        }
    }
}

/// Lets the client print what it made of the alert before it is ended.
fn give_time_to_complain(client: &mut Child) -> Result<(), Box<dyn Error>> {
    let deadline = Instant::now() + Duration::from_secs(3);
    while client.try_wait()?.is_none() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// The columns of `expected.tsv` after the file name: server name, protocols, TLS 1.3, records.
fn describe(bytes: &[u8]) -> Result<String, Box<dyn Error>> {
    let hello = hello::parse(bytes).complete().ok_or("the hello was whole a moment ago")?;
    let alpn: Vec<String> = hello.alpn.iter().map(|name| name.escape_ascii().to_string()).collect();
    let or_dash = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
    let newest = match hello.supports_tls13 {
        true => "1.3".to_owned(),
        false => format!("1.{}", (hello.legacy_version & 0xff).saturating_sub(1)),
    };
    let name = or_dash(hello.server_name.as_deref().unwrap_or_default());
    Ok(format!("{name}\t{}\t{newest}\t{}", or_dash(&alpn.join(",")), count_records(bytes)))
}

fn count_records(mut bytes: &[u8]) -> usize {
    let mut count = 0;
    while let [_, _, _, high, low, rest @ ..] = bytes {
        bytes = rest.get(usize::from(u16::from_be_bytes([*high, *low]))..).unwrap_or_default();
        count += 1;
    }
    count
}
