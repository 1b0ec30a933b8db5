//! `portico agent ready`: asks the agent of this node whether it is ready.
//!
//! Pods on the host's network share its addresses. While a surge pod takes over from the old one, HTTP probes
//! of both would reach the pod with the admin address. The new pod would look ready because the old one is.
//! The old one would then be deleted too early. A probe that runs in the pod knows the pod's name.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use clap::Args;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use crate::outcome::{Outcome, print};

/// The default of `--admin-listen`.
pub(super) const ADMIN: &str = "127.0.0.1:8004";

/// How long the answer may take.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Longest answer that is read.
const LONGEST: u64 = 64 * 1024;

// `portico agent ready`.
#[derive(Debug, Args)]
pub(crate) struct Flags {
    /// The agent's --admin-listen
    #[arg(long, value_name = "ADDRESS", default_value = ADMIN)]
    admin: SocketAddr,
    /// Only the agent of this name counts [default: POD_NAME]
    #[arg(long, value_name = "NAME", env = "POD_NAME", hide_env_values = true)]
    instance: Option<Box<str>>,
}

/// Asks, and prints the answer.
pub(super) fn run(flags: &Flags) -> anyhow::Result<Outcome> {
    match ask(flags) {
        Ok((ready, text)) => {
            print(&text)?;
            Ok(if ready { Outcome::Done } else { Outcome::No })
        }
        Err(error) => {
            print(&format!("not ready: no answer from {}: {error}\n", flags.admin))?;
            Ok(Outcome::No)
        }
    }
}

fn ask(flags: &Flags) -> std::io::Result<(bool, String)> {
    let mut stream = TcpStream::connect_timeout(&flags.admin, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let instance = flags.instance.as_ref().map(|name| utf8_percent_encode(name, NON_ALPHANUMERIC));
    let instance = instance.map(|name| format!("&instance={name}")).unwrap_or_default();
    write!(stream, "GET /readyz?verbose{instance} HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.take(LONGEST).read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    Ok((head.starts_with("HTTP/1.1 200 "), body.to_owned()))
}
