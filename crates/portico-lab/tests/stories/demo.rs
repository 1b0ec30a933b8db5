//! `portico demo --kubernetes` as people start it: what it prints works when pasted, a second one is refused,
//! and Ctrl-C leaves nothing. Without workers: the story of the operator has those by the same code.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use portico_lab::{lab, programs};
use rustix::process::{Pid, Signal, kill_process};

/// The demo's process. Asked to end when dropped, so that a failed story leaves no lab.
struct Running(Child);

impl Running {
    fn interrupt(&mut self) -> Option<i32> {
        kill_process(Pid::from_child(&self.0), Signal::INT).unwrap();
        self.0.wait().unwrap().code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.0.try_wait().is_ok_and(|ended| ended.is_none()) {
            self.interrupt();
        }
    }
}

#[test]
fn what_the_demo_prints_works_and_ctrl_c_leaves_nothing() {
    // First, since they may have to be built.
    let portico = programs::portico().unwrap();
    programs::kube().unwrap();
    let _turn = crate::turn();
    let demo = || {
        let mut demo = Command::new(&portico);
        demo.args(["demo", "--kubernetes", "--no-workers"]).stdin(Stdio::null());
        demo.env("PORTICO_LAB", env!("CARGO_BIN_EXE_portico-lab"));
        demo
    };
    let mut running = Running(demo().stdout(Stdio::piped()).spawn().unwrap());
    let lines = BufReader::new(running.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut printed = Vec::new();
    for line in lines {
        let last = line.starts_with("Ctrl-C");
        printed.push(line);
        if last {
            break;
        }
    }
    assert!(printed.last().is_some_and(|line| line.starts_with("Ctrl-C")), "it has ended: {printed:#?}");

    let pasted: Vec<&str> = printed.iter().filter_map(|line| line.strip_prefix("  ")).collect();
    let (shell, lines) = pasted.split_first().unwrap();
    assert!(lines.len() > 8, "{printed:#?}");
    for line in lines {
        let output = Command::new(shell).args(["sh", "-c", line]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "`{line}`: {said}");
    }

    let second = demo().output().unwrap();
    let said = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(2), "{said}");
    assert!(said.contains("a demo runs on this machine already"), "{said}");

    assert_eq!(running.interrupt(), Some(0));
    let number = shell.split('/').find_map(|part| part.parse().ok()).unwrap();
    assert_eq!(
        lab::remains_of(number).unwrap(),
        [""; 0],
        "processes, namespaces, mounts and groups are gone"
    );
}
