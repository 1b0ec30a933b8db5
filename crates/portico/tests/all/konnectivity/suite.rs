//! Upstream's own integration tests, with our agent in the place of theirs.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use portico_lab::{Host, Lab};

use super::site::upstream;

/// In these the endpoint answers, or the request is cancelled, in the moment that the client's deadline ends.
/// Either may come first. Upstream's own agent, as a program, fails the second 9 times of 120, ours 20; ours
/// fails the first one time of 320 on a busy machine.
const RACING: [&str; 2] =
    ["TestProxyHandle_RequestDeadlineExceeded_GRPC", "TestProxyHandle_TunnelContextCancelled_GRPC"];

/// A defect fails each time; the race does not.
const ATTEMPTS: usize = 6;

/// What one run of the suite printed.
struct Run {
    passed: bool,
    output: String,
    log: String,
}

impl Run {
    fn verdicts(&self) -> String {
        let verdicts = self.output.lines().filter(|line| line.trim_start().starts_with("--- "));
        verdicts.collect::<Vec<_>>().join("\n")
    }

    /// The verdicts, what failed tests say of themselves, and the end of what the programs say.
    fn report(&self) -> String {
        let said = self.output.lines().filter(|line| line.trim_start().contains("_test.go:"));
        let said = said.collect::<Vec<_>>().join("\n");
        let skipped = self.log.lines().count().saturating_sub(40);
        let end = self.log.lines().skip(skipped).collect::<Vec<_>>().join("\n");
        format!("{}\n{said}\n{end}", self.verdicts())
    }
}

/// The suite chooses ports by freeing them: on a host of its own nobody else takes them.
struct Suite {
    host: Host,
    agent: PathBuf,
}

impl Suite {
    fn on(host: Host, folder: &Path) -> Self {
        // The suite takes a program, not a program with a verb.
        let agent = folder.join("agent");
        let script = format!("#!/bin/sh\nexec {} konnectivity agent \"$@\"\n", env!("CARGO_BIN_EXE_portico"));
        fs::write(&agent, script).unwrap();
        fs::set_permissions(&agent, fs::Permissions::from_mode(0o755)).unwrap();
        Self { host, agent }
    }

    fn run(&self, choice: [&str; 2]) -> Run {
        let mut suite = self.host.command(upstream("suite")).unwrap();
        suite.args(["-test.v", "-test.timeout=10m"]).args(choice).arg("-agent-path").arg(&self.agent);
        let output = suite.output().unwrap();
        Run {
            passed: output.status.success(),
            output: String::from_utf8_lossy(&output.stdout).into_owned(),
            log: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

/// Two tests dial 198.18.0.254 and expect silence: what is sent there goes to a machine that is not there.
fn make_silent(lab: &Lab, host: &Host) {
    let nobody = lab.free_address().unwrap().to_string();
    let device = host.run(&["ip", "-o", "route", "get", &nobody]).unwrap();
    let mut words = device.split_whitespace().skip_while(|&word| word != "dev");
    let device = words.nth(1).unwrap();
    let neighbour = ["lladdr", "02:00:00:00:00:01", "nud", "permanent", "dev", device];
    host.run(&[&["ip", "neigh", "replace", &nobody], &neighbour[..]].concat()).unwrap();
    host.run(&["ip", "route", "replace", "198.18.0.0/15", "via", &nobody]).unwrap();
}

#[test]
fn upstreams_integration_tests_pass_with_our_agent() {
    let folder = tempfile::tempdir().unwrap();
    let lab = Lab::start("suite").unwrap();
    let host = lab.host("loopback").unwrap();
    make_silent(&lab, &host);
    let suite = Suite::on(host, folder.path());

    let all_else = suite.run(["-test.skip", &format!("^({})$", RACING.join("|"))]);
    assert!(all_else.passed, "{}", all_else.report());
    let passed = all_else.verdicts().matches("--- PASS").count();
    assert!(passed > 22, "few tests ran:\n{}", all_else.report());

    for test in RACING {
        let choice = format!("^{test}$");
        let mut reports = Vec::new();
        let passed = (0..ATTEMPTS).any(|_| {
            let run = suite.run(["-test.run", &choice]);
            reports.push(run.report());
            run.passed && run.verdicts().contains(test)
        });
        assert!(passed, "{test} failed {ATTEMPTS} times:\n{}", reports.join("\n"));
    }
}
