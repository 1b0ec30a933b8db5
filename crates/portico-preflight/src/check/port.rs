//! A port of this machine: free, or taken, and by what.

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};

use socket2::{Domain, Socket, Type};

use crate::observation::Observation;
use crate::transport::Transport;

/// A TCP socket that listens (`TCP_LISTEN` in /proc/net/tcp, proc(5)).
const LISTENS: &str = "0A";

/// Tries to bind the port. Finds out which program has it, if that fails.
pub async fn check(address: IpAddr, transport: Transport) -> Observation {
    let look = move || match bind(address, transport) {
        Ok(()) => Observation::Free,
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            let by = owner(transport).unwrap_or_else(|| "the kernel, or a program in a container".into());
            Observation::Taken { by: by.into() }
        }
        Err(error) => Observation::not_tried(format_args!("{address} cannot be bound here: {error}")),
    };
    // It may read /proc of every process.
    tokio::task::spawn_blocking(look).await.unwrap_or_else(Observation::not_tried)
}

/// Binds and lets go. Nothing listens meanwhile.
fn bind(address: IpAddr, transport: Transport) -> io::Result<()> {
    let (kind, port) = match transport {
        Transport::Tcp(port) => (Type::STREAM, port),
        Transport::Udp(port) => (Type::DGRAM, port),
        // Several raw sockets may receive a protocol.
        Transport::IpInIp => return Ok(()),
    };
    let address = SocketAddr::new(address, port);
    let socket = Socket::new(Domain::for_address(address), kind, None)?;
    if kind == Type::STREAM {
        // Connections that ended recently do not count; sockets that listen do.
        socket.set_reuse_address(true)?;
    }
    socket.bind(&address.into())
}

/// The program that has the port, with its process id.
fn owner(transport: Transport) -> Option<String> {
    let (tables, is_tcp) = match transport {
        Transport::Tcp(_) => (["/proc/net/tcp", "/proc/net/tcp6"], true),
        _ => (["/proc/net/udp", "/proc/net/udp6"], false),
    };
    let port = transport.port()?;
    let inodes: Vec<u64> = tables
        .iter()
        .filter_map(|table| fs::read_to_string(table).ok())
        .filter_map(|table| inode(&table, port, is_tcp))
        .collect();
    let links: Vec<String> =
        inodes.iter().filter(|inode| **inode != 0).map(|inode| format!("socket:[{inode}]")).collect();
    if links.is_empty() {
        return None;
    }
    fs::read_dir("/proc").ok()?.flatten().find_map(|process| {
        let pid: u32 = process.file_name().to_str()?.parse().ok()?;
        let mut open = fs::read_dir(process.path().join("fd")).ok()?.flatten();
        let has = open.any(|file| {
            let link = fs::read_link(file.path()).unwrap_or_default();
            links.iter().any(|wanted| link.as_os_str() == wanted.as_str())
        });
        let name = fs::read_to_string(process.path().join("comm")).ok()?;
        has.then(|| format!("{} (process {pid})", name.trim()))
    })
}

/// Returns the inode of the socket that has the port, from a table of proc(5).
fn inode(table: &str, port: u16, is_tcp: bool) -> Option<u64> {
    let wanted = format!(":{port:04X}");
    table.lines().skip(1).find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (local, state, inode) = (fields.get(1)?, fields.get(3)?, fields.get(9)?);
        let has = local.ends_with(&wanted) && (!is_tcp || *state == LISTENS);
        has.then(|| inode.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_port_that_is_taken_names_the_program() {
        // An address of its own: nothing else takes the port once it is free.
        let here = IpAddr::from([127, 77, 0, 1]);
        let listener = TcpListener::bind((here, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let Observation::Taken { by } = check(here, Transport::Tcp(port)).await else {
            panic!("it is taken")
        };
        assert!(by.ends_with(&format!("(process {})", std::process::id())), "{by}");
        drop(listener);
        assert_eq!(check(here, Transport::Tcp(port)).await, Observation::Free);
    }

    #[test]
    fn only_sockets_that_listen_have_a_tcp_port() {
        let table =
            "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:2382 00000000:0000 01 00000000:00000000 00:00000000 00000000     0        0 1 1
   1: 00000000:2382 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1
";
        assert_eq!(inode(table, 0x2382, true), Some(4711));
        assert_eq!(inode(table, 0x2382, false), Some(1));
        assert_eq!(inode(table, 1, true), None);
        assert_eq!(inode("cut\n short", 1, true), None);
    }
}
