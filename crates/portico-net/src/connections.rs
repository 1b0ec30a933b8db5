//! The connections of this machine, as the kernel lists them: of every program that shares its network.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// Where the kernel lists connections: those of the network that a process is in (proc_pid_net(5)).
const TABLES: [&str; 2] = ["/proc/self/net/tcp", "/proc/self/net/tcp6"];

/// Returns the TCP connections that lead to one of `targets`, or are about to. Each is a pair of the address
/// here and the target.
///
/// # Errors
/// The kernel's list cannot be read.
pub fn connections_to(targets: &BTreeSet<SocketAddr>) -> io::Result<BTreeSet<(SocketAddr, SocketAddr)>> {
    let mut found = BTreeSet::new();
    for table in TABLES {
        let failed = |error: io::Error| io::Error::new(error.kind(), format!("{table}: {error}"));
        let file = match File::open(table) {
            Ok(file) => BufReader::new(file),
            // There is no table of IPv6 where a kernel has none.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(failed(error)),
        };
        for line in file.lines() {
            found.extend(connection(&line.map_err(failed)?).filter(|(_, remote)| targets.contains(remote)));
        }
    }
    Ok(found)
}

/// A line of a table: the local and the remote address of a connection that is established, or being made.
fn connection(line: &str) -> Option<(SocketAddr, SocketAddr)> {
    let mut words = line.split_ascii_whitespace().skip(1);
    let (local, remote, state) = (words.next()?, words.next()?, words.next()?);
    // `include/net/tcp_states.h`: ESTABLISHED and SYN_SENT.
    let in_use = matches!(state, "01" | "02");
    in_use.then_some(())?;
    Some((socket(local)?, socket(remote)?))
}

/// An address as the kernel prints it: words of 32 bits as this machine has them in memory.
fn socket(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| {
        let word = u32::from_str_radix(address.get(at..at + 8)?, 16).ok()?;
        Some(word.to_ne_bytes())
    };
    let ip = match address.len() {
        8 => IpAddr::from(word(0)?),
        32 => {
            let words = [word(0)?, word(8)?, word(16)?, word(24)?];
            let octets: [u8; 16] = words.concat().try_into().ok()?;
            Ipv6Addr::from(octets).to_canonical()
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_endian = "little")]
    fn a_connection_is_read_as_the_kernel_prints_it() {
        let rest =
            "00000000:00000000 02:00000A5C 00000000     0        0 4242 2 0000000000000000 20 4 30 10 -1";
        let read = |addresses: &str, state: &str| {
            let found = connection(&format!("   7: {addresses} {state} {rest}"));
            found.map(|(local, remote)| format!("{local} {remote}"))
        };
        let four = "0705A8C0:C350 097100CB:7A02";
        assert_eq!(read(four, "01").unwrap(), "192.168.5.7:50000 203.0.113.9:31234");
        assert_eq!(read(four, "02"), read(four, "01"), "one that is being made");
        for ended in ["06", "08", "0A", "", "1"] {
            assert_eq!(read(four, ended), None, "{ended}");
        }
        let six = "B80D0120000000000000000001000000:C350 0000000000000000FFFF0000097100CB:7A02";
        assert_eq!(read(six, "01").unwrap(), "[2001:db8::1]:50000 203.0.113.9:31234");
        for bad in
            ["", "  sl  local_address rem_address   st", "0: 1:2 3:4 01", "0: é0000000:1 0705A8C0:1 01"]
        {
            assert_eq!(connection(bad), None, "{bad}");
        }
    }
}
