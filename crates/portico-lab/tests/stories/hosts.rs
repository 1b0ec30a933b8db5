//! Hosts, firewalls and teardown: the lab without Kubernetes.

use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

use anyhow::Result;
use portico_lab::firewall::{Direction, Firewall, Traffic, Verdict};
use portico_lab::{Host, Lab, Process, lab, wait};

const SOON: Duration = Duration::from_secs(20);

/// What a lab leaves. Its number is not given out again before all others were.
const NOTHING: [&str; 0] = [];

/// A web server on a host, ready to answer `hello`.
fn web_server(host: &Host, port: u16) -> Process {
    let dir = host.dir().join("www");
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("index.html"), "hello\n").unwrap();
    let home = dir.display().to_string();
    let listen = format!("{}:{port}", host.address());
    let server =
        host.spawn("httpd", "busybox", ["httpd", "-f", "-p", listen.as_str(), "-h", home.as_str()]).unwrap();
    wait::until("the web server to listen", SOON, || {
        server.check()?;
        get(host, host.address(), port)
    })
    .unwrap();
    server
}

/// What a host reads from a web server, or curl's complaint.
fn get(from: &Host, address: Ipv4Addr, port: u16) -> Result<String> {
    from.run(&["curl", "-sS", "--max-time", "2", &format!("http://{address}:{port}/index.html")])
}

#[test]
fn hosts_reach_each_other_and_the_machine_reaches_them() {
    let lab = Lab::start("reach").unwrap();
    let (a, b) = (lab.host("a").unwrap(), lab.host("b").unwrap());
    let _server = web_server(&b, 8080);
    assert_eq!(get(&a, b.address(), 8080).unwrap(), "hello\n");
    TcpStream::connect((b.address(), 8080)).expect("the machine is on the lab's network");
}

#[test]
fn a_host_reaches_nothing_outside_of_its_lab() {
    let lab = Lab::start("outside").unwrap();
    let (other_lab, host) = (Lab::start("outside-too").unwrap(), lab.host("a").unwrap());
    let other = other_lab.host("a").unwrap();
    let _server = web_server(&other, 8080);
    let error = get(&host, other.address(), 8080).unwrap_err().to_string();
    assert!(error.contains("curl"), "{error}");
}

#[test]
fn a_name_given_by_the_lab_resolves_on_every_host() {
    let lab = Lab::start("names").unwrap();
    let (a, b) = (lab.host("a").unwrap(), lab.host("b").unwrap());
    lab.name_resolves("api.example.com", Ipv4Addr::new(192, 0, 2, 1)).unwrap();
    lab.name_resolves("api.example.com", b.address()).unwrap();
    let _server = web_server(&b, 8080);
    let answer = a.run(&["curl", "-sS", "--max-time", "5", "http://api.example.com:8080/index.html"]);
    assert_eq!(answer.unwrap(), "hello\n");
    assert!(a.run(&["getent", "hosts", "other.example.com"]).is_err());
}

#[test]
fn a_firewall_drops_or_rejects_until_it_is_lifted() {
    let lab = Lab::start("firewall").unwrap();
    let (a, b) = (lab.host("a").unwrap(), lab.host("b").unwrap());
    let _servers = (web_server(&b, 8080), web_server(&b, 9090));

    let to_web = Traffic::all(Direction::In).with(a.address()).to_port(8080);
    let wall = Firewall::stop(&b, &to_web, Verdict::Drop).unwrap();
    let error = get(&a, b.address(), 8080).unwrap_err().to_string();
    assert!(error.contains("timed out") || error.contains("timeout"), "{error}");
    assert_eq!(get(&a, b.address(), 9090).unwrap(), "hello\n", "another port is another matter");
    wall.lift().unwrap();
    assert_eq!(get(&a, b.address(), 8080).unwrap(), "hello\n");

    let from_here = Traffic::all(Direction::Out).with(b.address()).to_port(8080);
    let wall = Firewall::stop(&a, &from_here, Verdict::Reject).unwrap();
    let error = get(&a, b.address(), 8080).unwrap_err().to_string();
    assert!(error.contains("refused") || error.contains("connect"), "{error}");
    drop(wall);
    assert_eq!(get(&a, b.address(), 8080).unwrap(), "hello\n");

    let _in = Firewall::allow_in_only(&b, &[9090]).unwrap();
    assert!(get(&a, b.address(), 8080).is_err());
    assert_eq!(get(&a, b.address(), 9090).unwrap(), "hello\n");
    let _out = Firewall::allow_out_only(&a, &[443]).unwrap();
    assert!(get(&a, b.address(), 9090).is_err());
}

#[test]
fn an_unplugged_host_is_silent_until_it_is_plugged_in_again() {
    let lab = Lab::start("unplug").unwrap();
    let (a, b) = (lab.host("a").unwrap(), lab.host("b").unwrap());
    let _server = web_server(&b, 8080);
    b.unplug().unwrap();
    assert!(get(&a, b.address(), 8080).is_err());
    b.plug().unwrap();
    wait::until("b to answer again", SOON, || get(&a, b.address(), 8080)).unwrap();
}

#[test]
fn labs_run_side_by_side_without_meeting() {
    let (one, two) = (Lab::start("one").unwrap(), Lab::start("two").unwrap());
    assert_ne!(one.number(), two.number());
    let (a, b) = (one.host("same-name").unwrap(), two.host("same-name").unwrap());
    let (first, second) = (web_server(&a, 8080), web_server(&b, 8080));
    drop((one, a, first));
    second.check().unwrap();
    assert_eq!(get(&b, b.address(), 8080).unwrap(), "hello\n", "the end of one lab is not felt by another");
}

#[test]
fn a_process_that_ends_early_fails_with_the_end_of_its_log() {
    let lab = Lab::start("early").unwrap();
    let host = lab.host("a").unwrap();
    let process = host.spawn("doomed", "sh", ["-c", "echo no such luck; exit 3"]).unwrap();
    let error = format!("{:#}", process.wait_for_log("all is well", SOON).unwrap_err());
    assert!(error.contains("exit status: 3") && error.contains("no such luck"), "{error}");
}

/// A lab with a process that detached itself, as container shims do, and a mount.
fn a_busy_lab(name: &str) -> (Lab, Host, Process, u8) {
    let lab = Lab::start(name).unwrap();
    let host = lab.host("busy").unwrap();
    let mount = format!("mkdir {0}/m && mount -t tmpfs lab {0}/m", host.dir().display());
    host.run(&["sh", "-c", &mount]).unwrap();
    host.run(&["sh", "-c", "setsid -f sleep 3600 >/dev/null 2>&1"]).unwrap();
    let server = web_server(&host, 8080);
    let number = lab.number();
    let processes =
        lab::remains_of(number).unwrap().iter().filter(|what| what.starts_with("process")).count();
    assert!(processes >= 3, "mount holder, web server and the detached one");
    (lab, host, server, number)
}

#[test]
fn a_dropped_lab_leaves_nothing() {
    let (lab, host, server, number) = a_busy_lab("leaves-nothing");
    drop((server, host, lab));
    assert_eq!(lab::remains_of(number).unwrap(), NOTHING);
}

#[test]
fn a_panic_takes_the_lab_down_too() {
    let story = std::thread::spawn(|| {
        let (_lab, _host, _server, number) = a_busy_lab("panics");
        std::panic::panic_any(number);
    });
    let number = *story.join().unwrap_err().downcast::<u8>().unwrap();
    assert_eq!(lab::remains_of(number).unwrap(), NOTHING);
}

#[test]
fn what_a_killed_lab_left_is_taken_down_by_a_clean_up() {
    const ROLE: &str = "PORTICO_LAB_TEST_DIES";
    if std::env::var_os(ROLE).is_some() {
        // The child's part: to die without a chance to clean up, number on standard output.
        let (_lab, _host, _server, number) = a_busy_lab("killed");
        println!("number={number}");
        std::process::abort();
    }
    let this = std::env::current_exe().unwrap();
    let test = "hosts::what_a_killed_lab_left_is_taken_down_by_a_clean_up";
    let child = std::process::Command::new(this)
        .args(["--exact", test, "--nocapture"])
        .env(ROLE, "1")
        .stderr(std::process::Stdio::null())
        .output()
        .unwrap();
    let output = String::from_utf8_lossy(&child.stdout).into_owned();
    let number = output.lines().find_map(|line| line.split_once("number=")).expect("the child had a lab").1;
    let number: u8 = number.parse().unwrap();
    assert_ne!(lab::remains_of(number).unwrap(), NOTHING, "there should be something to clean up");
    lab::clean_up_dead().unwrap();
    assert_eq!(lab::remains_of(number).unwrap(), NOTHING);
}
