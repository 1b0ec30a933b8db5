//! Programs built from a Go module below `lab/`, once, and kept below `target/lab` until the module changes.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::programs::{cache_dir, checkout, digest_of, find};
use crate::steps::say;

/// Between two lines of progress while Go compiles.
const PROGRESS: Duration = Duration::from_secs(10);

/// A module and what is built from it.
pub(crate) struct Module {
    /// The folder below `lab/`; the folder of what is built begins with it.
    pub(crate) name: &'static str,
    /// The files that say what is built, besides `go.mod` and `go.sum`.
    pub(crate) sources: &'static [&'static str],
    /// What is built, for people: "Kubernetes v1.34.4".
    pub(crate) title: String,
    /// How long that takes from nothing.
    pub(crate) cost: &'static str,
}

impl Module {
    /// Where the module is.
    pub(crate) fn source(&self) -> PathBuf {
        checkout().join("lab").join(self.name)
    }

    /// Where what is built from its sources as they are is, or will be: the name has their digest, so a stale
    /// build is never taken for a fresh one.
    pub(crate) fn folder(&self) -> Result<PathBuf> {
        let files = ["go.mod", "go.sum"].iter().chain(self.sources);
        let digest = digest_of(&files.map(|name| self.source().join(name)).collect::<Vec<_>>())?;
        Ok(cache_dir().join(format!("{}-{}", self.name, &digest[..12])))
    }

    /// The folder with what `build` has put into it, now or before. Several labs may ask at once: one builds,
    /// the others wait for it.
    pub(crate) fn built(&self, build: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        let (cache, dir) = (cache_dir(), self.folder()?);
        if dir.exists() {
            return Ok(dir);
        }
        fs::create_dir_all(&cache).with_context(|| format!("making {}", cache.display()))?;
        let lock = File::create(cache.join("build.lock")).context("opening the build lock")?;
        lock.lock().context("waiting for the build of another lab")?;
        if !dir.exists() {
            remove_stale(&cache, &format!("{}-", self.name))?;
            let half_done = cache.join(format!("{}-building", self.name));
            fs::create_dir(&half_done)?;
            say(format_args!("building {} once (from nothing: {})", self.title, self.cost));
            let start = Instant::now();
            build(&half_done)?;
            say(format_args!("built {} in {} s", self.title, start.elapsed().as_secs()));
            fs::rename(&half_done, &dir).context("moving the built programs into place")?;
        }
        Ok(dir)
    }

    /// Runs Go in the module, with a line of progress now and then.
    pub(crate) fn go(&self, args: &[&str]) -> Result<()> {
        let go = find("go").context(
            "the lab builds it from source, which takes Go 1.24 or newer: run scripts/setup test, then . \
             scripts/env.sh",
        )?;
        let start = Instant::now();
        let mut build = Command::new(go)
            .current_dir(self.source())
            .env("CGO_ENABLED", "0")
            // A toolchain that Go fetches by itself would be one that is not pinned.
            .env("GOTOOLCHAIN", "local")
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context("starting go")?;
        let stderr = build.stderr.take().context("go has no stderr")?;
        let (mut packages, mut reported, mut last_lines) = (0, Instant::now(), Vec::new());
        for line in BufReader::new(stderr).lines() {
            packages += 1;
            last_lines.push(line.context("reading the output of go")?);
            if last_lines.len() > 20 {
                last_lines.remove(0);
            }
            if reported.elapsed() >= PROGRESS {
                reported = Instant::now();
                say(format_args!(
                    "  {packages} packages compiled or fetched, {} s",
                    start.elapsed().as_secs()
                ));
            }
        }
        let status = build.wait().context("waiting for go")?;
        let (verb, source) = (args.first().unwrap_or(&""), self.source());
        ensure!(status.success(), "go {verb} in {} failed:\n{}", source.display(), last_lines.join("\n"));
        Ok(())
    }
}

/// Builds of sources that are no more, and what a broken build left, would fill the disk.
fn remove_stale(cache: &Path, prefix: &str) -> Result<()> {
    for entry in fs::read_dir(cache)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            fs::remove_dir_all(entry.path())
                .with_context(|| format!("removing {}", entry.path().display()))?;
        }
    }
    Ok(())
}
