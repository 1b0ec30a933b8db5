//! What is open through the tunnel, and what asks for more of it.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use portico_lab::{Host, Kubectl, say, wait};

use super::agents::{Agent, Agents};
use super::story::Story;
use crate::support::SOON;

/// Streams of each agent that a step needs.
const EACH: usize = 2;
/// The most that are opened until each agent has so many: the server picks at random.
const MOST: usize = 24;
/// Between two attempts of one that asks again and again.
const BETWEEN: Duration = Duration::from_millis(300);
/// One attempt.
const PATIENCE: &str = "20";

/// `kubectl exec -i`, each by a known agent.
pub(crate) struct Streams(Vec<(Agent, Mutex<Exec>)>);

impl Streams {
    /// Opens streams until each agent carries some.
    pub(crate) fn open(story: &Story, agents: &Agents) -> Self {
        let mut streams = Vec::new();
        while streams.len() < MOST {
            let [one, other] = agents.ready(story);
            let count = || [&one, &other].map(|agent| agent.connections(story).unwrap());
            let before = count();
            let exec = Exec::start(story.kubectl(), &[], "web");
            let after = count();
            let agent = match (after[0].saturating_sub(before[0]), after[1].saturating_sub(before[1])) {
                (1, 0) => one,
                (0, 1) => other,
                // A connection that the API server keeps for later came or went meanwhile.
                _ => continue,
            };
            streams.push((agent, Mutex::new(exec)));
            let carried = |agent: &Agent| streams.iter().filter(|(by, _)| by.is(agent)).count();
            if agents.ready(story).iter().all(|agent| carried(agent) >= EACH) {
                return Self(streams);
            }
        }
        panic!("{MOST} streams, and an agent with fewer than {EACH} of them");
    }

    /// The streams of the agent still carry bytes both ways.
    pub(crate) fn beat_of(&self, agent: &Agent) {
        for exec in self.of(agent) {
            assert!(exec.lock().unwrap().beat(), "a stream of an agent that goes on has ended");
        }
    }

    /// The streams of the agent end.
    pub(crate) fn ended_of(&self, agent: &Agent) {
        for exec in self.of(agent) {
            assert!(!exec.lock().unwrap().beat(), "a stream of an agent that was killed carries bytes");
        }
    }

    fn of(&self, agent: &Agent) -> impl Iterator<Item = &Mutex<Exec>> {
        self.0.iter().filter(|(by, _)| by.is(agent)).map(|(_, exec)| exec)
    }
}

/// A `cat` in a pod.
pub(crate) struct Exec {
    child: Child,
    to_pod: ChildStdin,
    from_pod: BufReader<ChildStdout>,
}

impl Exec {
    /// By kubectl with these flags.
    pub(crate) fn start(kubectl: &Kubectl, flags: &[&str], pod: &str) -> Self {
        let mut command = kubectl.command(&[flags, &["exec", "-i", pod, "--", "cat"]].concat()).unwrap();
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = piped.spawn().unwrap();
        let to_pod = child.stdin.take().unwrap();
        let from_pod = BufReader::new(child.stdout.take().unwrap());
        let mut exec = Self { child, to_pod, from_pod };
        assert!(exec.beat(), "exec does not begin");
        exec
    }

    /// Whether a line comes back. A stream that hangs is ended by the lab's limit on a story.
    pub(crate) fn beat(&mut self) -> bool {
        let mut back = String::new();
        let sent = self.to_pod.write_all(b"beat\n").and_then(|()| self.to_pod.flush());
        sent.is_ok() && self.from_pod.read_line(&mut back).is_ok() && back == "beat\n"
    }
}

impl Drop for Exec {
    fn drop(&mut self) {
        // It may have ended, which is just as well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One new connection through the tunnel, with one request.
fn request(kubectl: &Kubectl, client: &Host) -> Result<()> {
    let command: Command = kubectl.command(&["exec", "web", "--", "echo", "here"])?;
    let mut words: Vec<String> = ["timeout", PATIENCE].map(str::to_owned).to_vec();
    // What the command has for its host is put before it once more by the host itself.
    let arguments = command.get_args().map(|word| word.to_string_lossy().into_owned());
    words.extend(arguments.skip_while(|word| !word.ends_with("/kubectl")));
    let answer = client.run(&words.iter().map(String::as_str).collect::<Vec<_>>())?;
    ensure!(answer == "here\n", "exec answered {answer:?}");
    Ok(())
}

/// Asks again and again, without waiting for earlier attempts, until one is answered. Tells how long that
/// took.
pub(crate) fn new_requests_work(story: &Story, cause: &str) {
    let start = Instant::now();
    let (answered, answer) = mpsc::channel();
    let took = loop {
        assert!(start.elapsed() < SOON, "no new request was answered since {cause}");
        let (kubectl, client, answered) = (story.kubectl().clone(), story.client.clone(), answered.clone());
        std::thread::spawn(move || {
            if request(&kubectl, &client).is_ok() {
                // Later ones have no receiver.
                let _ = answered.send(start.elapsed());
            }
        });
        if let Ok(took) = answer.recv_timeout(BETWEEN) {
            break took;
        }
    };
    say(format_args!("{cause}: first answer after {:.1} s", took.as_secs_f64()));
    // And not by luck.
    for _ in 0..4 {
        wait::until("a further request to be answered", SOON, || request(story.kubectl(), &story.client))
            .unwrap();
    }
}

/// New requests, one after the other, until asked how that went.
pub(crate) struct Knocking {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(usize, Vec<String>)>,
}

impl Knocking {
    pub(crate) fn start(story: &Story) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, kubectl, client) = (Arc::clone(&stop), story.kubectl().clone(), story.client.clone());
        let thread = std::thread::spawn(move || {
            let (mut answered, mut failures) = (0, Vec::new());
            while !stopped.load(Ordering::Relaxed) && failures.len() < 10 {
                match request(&kubectl, &client) {
                    Ok(()) => answered += 1,
                    Err(error) => failures.push(format!("{error:#}")),
                }
            }
            (answered, failures)
        });
        Self { stop, thread }
    }

    /// Ends it. Every single one must have been answered.
    pub(crate) fn all_were_answered(self, meanwhile: &str) {
        self.stop.store(true, Ordering::Relaxed);
        let (answered, failures) = self.thread.join().unwrap();
        assert!(failures.is_empty() && answered > 0, "{meanwhile}: {answered} answered, then {failures:#?}");
        say(format_args!("{meanwhile}: {answered} new requests, each of them answered"));
    }
}
