//! The values of etcd's own flags: its name, its data, its ring, its certificates. Written once, for both.

use std::path::PathBuf;

use anyhow::Context;
use portico_dial::ClientTlsFiles;

use super::join::Own;

/// The command of etcd.
#[derive(Debug)]
pub(crate) struct Arguments {
    pub(crate) command: Vec<String>,
    pub(crate) data_dir: PathBuf,
    pub(crate) own: Own,
    /// Where this member itself is asked: the first URL that it advertises to clients.
    pub(crate) endpoint: String,
}

impl Arguments {
    pub(crate) fn of(command: &[String]) -> anyhow::Result<Self> {
        let value = |flag: &str| value(command, flag).map(str::to_owned);
        let data_dir = value("data-dir").context("etcd has no --data-dir=FOLDER: say where its data is")?;
        let name = value("name").unwrap_or_else(|| "default".to_owned());
        let peer_url = value("initial-advertise-peer-urls").unwrap_or_default();
        let list = value("initial-cluster").unwrap_or_else(|| format!("{name}={peer_url}"));
        let member = |text: &str| text.split_once('=').map(|(name, url)| (name.to_owned(), url.to_owned()));
        let ring = list.split(',').map(member).collect::<Option<Vec<_>>>();
        let ring = ring.with_context(|| format!("--initial-cluster={list}: write NAME=URL, by commas"))?;
        let clients = value("advertise-client-urls").unwrap_or_else(|| "http://127.0.0.1:2379".to_owned());
        let endpoint = clients.split(',').next().unwrap_or_default().to_owned();
        Ok(Self {
            command: command.to_vec(),
            data_dir: data_dir.into(),
            own: Own { name, peer_url, ring },
            endpoint,
        })
    }

    /// What other members know this one by. Nothing where etcd is spoken to in the clear.
    pub(crate) fn tls(&self) -> Option<ClientTlsFiles> {
        let file = |flag: &str| value(&self.command, flag).map(PathBuf::from);
        Some(ClientTlsFiles {
            certificate: Some(file("cert-file")?),
            key: Some(file("key-file")?),
            ca: Some(file("trusted-ca-file")?),
        })
    }

    /// Gives a flag another value.
    pub(crate) fn set(&mut self, flag: &str, value: &str) {
        let prefix = format!("--{flag}=");
        self.command.retain(|argument| !argument.starts_with(&prefix));
        self.command.push(prefix + value);
    }
}

fn value<'a>(command: &'a [String], flag: &str) -> Option<&'a str> {
    command.iter().find_map(|argument| argument.strip_prefix("--")?.strip_prefix(flag)?.strip_prefix('='))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_that_is_set_is_there_once() {
        let command = ["etcd", "--name=a", "--data-dir=/d", "--initial-cluster=a=http://a,b=http://b"];
        let mut arguments = Arguments::of(&command.map(str::to_owned)).unwrap();
        assert_eq!(arguments.own.ring.len(), 2);
        arguments.set("initial-cluster", "a=http://a");
        assert_eq!(arguments.command, ["etcd", "--name=a", "--data-dir=/d", "--initial-cluster=a=http://a"]);
        assert!(arguments.tls().is_none());
    }

    #[test]
    fn a_command_without_a_folder_is_refused() {
        let error = Arguments::of(&["etcd".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("--data-dir=FOLDER"), "{error}");
    }
}
