//! Large transfers borrow pipes; none is left behind. In a process of its own, because it counts the pipes of
//! the process.

use std::io::Write;

use crate::support::*;

const HOST: &str = "a.example.com";

#[test]
fn no_pipe_is_left_of_transfers_that_ended() {
    alone("pipes::no_pipe_is_left_of_transfers_that_ended", transfer_and_count);
}

fn transfer_and_count() {
    let gateway = start(config());
    let endpoint = Endpoint::new();
    Service::new("a", &[endpoint.address]).host(HOST).expose(&gateway);
    // The first transfer makes pipes, which are kept.
    let round = |bytes: usize| {
        let (mut client, mut server) = pair(&gateway, &endpoint, HOST);
        let writer = std::thread::spawn(move || server.write_all(&vec![7; bytes]).unwrap());
        assert_eq!(read_to_end(&mut client).len(), bytes);
        writer.join().unwrap();
        drop(client);
        wait_until_empty(&gateway);
    };
    let open = || std::fs::read_dir(format!("/proc/{}/fd", std::process::id())).unwrap().flatten();
    let pipes = || open().filter(|fd| is_pipe(&fd.path())).count();
    round(2_000_000);
    let before = pipes();
    for _ in 0..50 {
        round(2_000_000);
    }
    assert_eq!(pipes(), before);
}

fn is_pipe(descriptor: &std::path::Path) -> bool {
    std::fs::read_link(descriptor).is_ok_and(|target| target.to_string_lossy().starts_with("pipe:"))
}
