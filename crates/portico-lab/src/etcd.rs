//! etcd, the store of one or more control planes.
//!
//! Several API servers share one etcd under different prefixes: that saves memory, and nothing that
//! Portico does can tell. Spoken in the clear: the lab's network is the test's own.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::host::Host;
use crate::process::Process;
use crate::{programs, wait};

const CLIENT_PORT: u16 = 2379;

/// A running etcd.
pub struct Etcd {
    process: Process,
    url: String,
}

impl Etcd {
    /// Starts etcd on a host and waits until it serves.
    pub fn start(host: &Host) -> Result<Etcd> {
        let data = host.dir().join("etcd");
        fs::create_dir_all(&data).with_context(|| format!("making {}", data.display()))?;
        let url = format!("http://{}:{CLIENT_PORT}", host.address());
        let process = host.spawn(
            "etcd",
            programs::find("etcd")?,
            [
                format!("--data-dir={}", data.display()),
                format!("--listen-client-urls={url}"),
                format!("--advertise-client-urls={url}"),
                "--listen-peer-urls=http://127.0.0.1:2380".to_owned(),
                "--logger=zap".to_owned(),
                // The lab's data need not survive a power cut, and syncing costs seconds in all.
                "--unsafe-no-fsync".to_owned(),
            ],
        )?;
        let health = format!("{url}/health");
        wait::until("etcd to serve", Duration::from_secs(60), || {
            process.check()?;
            let answer = host.run(&["curl", "-sS", "--max-time", "2", &health])?;
            if answer.contains("true") { Ok(()) } else { bail!("its health is {answer}") }
        })?;
        Ok(Etcd { process, url })
    }

    /// Where API servers reach it.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The program itself.
    pub fn process(&self) -> &Process {
        &self.process
    }
}
