//! Changes a machine's files when its kubelet is to reach the API server by another address.
//!
//! A kubelet reads `kubelet.conf` when it starts, and never again. A [`Move`] is in two halves with the proof
//! between them: before it `kubelet.conf` changes, after it all else that names the address. So there is one
//! file to put back if the proof fails. [`Paths::before_move`] has the former content, and is there exactly
//! as long as a move is unfinished. Whatever ends the program, a second move finishes, or undoes.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use portico_yaml::{Content, Documents, Node};
use serde_json::Value;
use thiserror::Error;

use super::machine::{NewFile, Paths, SECRET};

/// Where a kubeconfig names its server, if it has one cluster.
const OF_KUBECONFIG: &str = "/clusters/0/cluster/server";
/// Where the record of joining names it.
const OF_RECORD: &str = "/server";

/// The port where kubelets tell how they are, if their configuration names no other.
const HEALTH_PORT: u64 = 10_248;

/// The files of a machine, as they are.
#[derive(Debug, Clone, Copy)]
pub struct Present<'a> {
    /// [`Paths::kubeconfig`].
    pub kubeconfig: &'a str,
    /// [`Paths::before_move`], if a move is unfinished.
    pub before: Option<&'a str>,
    /// [`Paths::bootstrap`]: an administrator may have removed it, with the token.
    pub bootstrap: Option<&'a str>,
    /// [`Paths::record`].
    pub record: &'a str,
}

/// One change of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// It is written, or replaced.
    Write(NewFile),
    /// It is removed.
    Remove(PathBuf),
}

/// What becomes of them, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Move {
    /// The server that all goes back to if the proof fails.
    pub from: String,
    /// What the kubelet will read.
    pub kubeconfig: String,
    /// Before the kubelet is started anew.
    pub begin: Vec<Step>,
    /// After the proof has succeeded.
    pub finish: Vec<Step>,
    /// Instead of `finish`, if the proof fails: before the kubelet is started once more.
    pub back: Vec<Step>,
    /// After `back`, once the kubelet was started once more.
    pub undone: Vec<Step>,
}

/// Why a file cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadFile {
    /// The text is no YAML, and so no JSON.
    #[error("{}: line {line} is no YAML", path.display())]
    Yaml {
        /// The file.
        path: PathBuf,
        /// Where.
        line: u32,
    },
    /// Neither kubelets nor `portico join` write this.
    #[error("{}: it names not exactly one server", path.display())]
    Server {
        /// The file.
        path: PathBuf,
    },
}

/// The steps for the kubelet to reach the API server by `server`. `None` if it is done.
///
/// # Errors
/// A file is not as the kubelet or `portico join` write it.
pub fn plan(present: &Present<'_>, server: &str, paths: &Paths) -> Result<Option<Move>, BadFile> {
    let kubeconfig = Naming::read(&paths.kubeconfig(), present.kubeconfig, OF_KUBECONFIG)?;
    let bootstrap = present.bootstrap.map(|text| Naming::read(&paths.bootstrap(), text, OF_KUBECONFIG));
    let record = Naming::read(&paths.record(), present.record, OF_RECORD)?;
    let others: Vec<Naming<'_>> = bootstrap.transpose()?.into_iter().chain([record]).collect();
    let is_there = kubeconfig.server() == server && others.iter().all(|file| file.server() == server);
    if is_there && present.before.is_none() {
        return Ok(None);
    }
    let unfinished = present.before.map(|text| Naming::read(&paths.before_move(), text, OF_KUBECONFIG));
    let unfinished = unfinished.transpose()?;

    let new = kubeconfig.with(server);
    let remove = Step::Remove(paths.before_move());
    let mut begin = Vec::new();
    if unfinished.is_none() {
        begin.push(write(&paths.before_move(), present.kubeconfig));
    }
    begin.push(write(&paths.kubeconfig(), &new));
    let mut finish: Vec<Step> = others.iter().filter_map(|file| file.led_to(server)).collect();
    finish.push(remove.clone());

    let before = unfinished.as_ref().unwrap_or(&kubeconfig);
    let from = before.server().to_owned();
    let back = vec![write(&paths.kubeconfig(), before.text)];
    // A move that was ended late may have changed them; this one does so after the proof alone.
    let changed = others.iter().filter(|_| unfinished.is_some());
    let mut undone: Vec<Step> = changed.filter_map(|file| file.led_to(&from)).collect();
    undone.push(remove);
    Ok(Some(Move { from, kubeconfig: new, begin, finish, back, undone }))
}

/// The server that a kubeconfig of a kubelet names.
pub fn server_of(kubeconfig: &str) -> Option<String> {
    let file = Naming::read(Path::new(""), kubeconfig, OF_KUBECONFIG).ok()?;
    Some(file.server().to_owned())
}

/// Where a kubelet with this configuration tells on its machine how it is. `None` if it does not.
pub fn health(config: &Value) -> Option<SocketAddr> {
    let port = config["healthzPort"].as_u64().unwrap_or(HEALTH_PORT);
    let port = u16::try_from(port).ok().filter(|&port| port != 0)?;
    let address = config["healthzBindAddress"].as_str().and_then(|address| address.parse().ok());
    Some(SocketAddr::new(address.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)), port))
}

fn write(path: &Path, content: &str) -> Step {
    Step::Write(NewFile { path: path.to_owned(), content: content.to_owned(), mode: SECRET })
}

/// A file that names the API server once.
struct Naming<'a> {
    path: PathBuf,
    text: &'a str,
    value: Value,
    /// Where in it the server is.
    pointer: &'static str,
    /// In which line that is, counted from 1.
    line: u32,
}

impl<'a> Naming<'a> {
    fn read(path: &Path, text: &'a str, pointer: &'static str) -> Result<Self, BadFile> {
        let path = path.to_owned();
        let root = match Documents::new(text).next() {
            Some(Ok(root)) => root,
            Some(Err(error)) => return Err(BadFile::Yaml { path, line: error.line }),
            None => return Err(BadFile::Server { path }),
        };
        let found = if pointer == OF_RECORD { root.get("server") } else { only_server(&root) };
        match found.filter(|node| node.as_str().is_some()).map(|node| node.line) {
            Some(line) => Ok(Self { path, text, value: root.to_value(), pointer, line }),
            None => Err(BadFile::Server { path }),
        }
    }

    /// As people and `portico join` write it, without the slash at the end.
    fn server(&self) -> &str {
        self.written().trim_end_matches('/')
    }

    fn written(&self) -> &str {
        self.value.pointer(self.pointer).and_then(Value::as_str).unwrap_or_default()
    }

    /// What has to be written for the file to name this server.
    fn led_to(&self, server: &str) -> Option<Step> {
        (self.server() != server).then(|| write(&self.path, &self.with(server)))
    }

    /// The text with another server, and all else as it is. Where that cannot be done in one line, as in a
    /// file that is one line, the same content is written anew.
    fn with(&self, server: &str) -> String {
        if self.server() == server {
            return self.text.to_owned();
        }
        let mut wanted = self.value.clone();
        if let Some(field) = wanted.pointer_mut(self.pointer) {
            *field = Value::String(server.to_owned());
        }
        let lines = self.text.split_inclusive('\n').zip(1..);
        let changed: String = lines
            .map(|(line, number)| match number == self.line {
                true => line.replacen(self.written(), server, 1),
                false => line.to_owned(),
            })
            .collect();
        let read = Documents::new(&changed).next().and_then(Result::ok);
        if read.is_some_and(|root| root.to_value() == wanted) {
            return changed;
        }
        let is_json = serde_json::from_str::<Value>(self.text).is_ok();
        if is_json { format!("{wanted:#}\n") } else { portico_yaml::write(&wanted) }
    }
}

fn only_server(kubeconfig: &Node) -> Option<&Node> {
    match &kubeconfig.get("clusters")?.content {
        Content::List(all) => match &all[..] {
            [one] => one.get("cluster")?.get("server"),
            _ => None,
        },
        _ => None,
    }
}

#[cfg(test)]
mod tests;
