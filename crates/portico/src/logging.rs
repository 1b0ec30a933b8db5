//! Where log lines go and how they look: stderr, as text or JSON, at the level of `RUST_LOG`.
//!
//! A [`LineQueue`] writes them, so that a standard error that nobody reads holds up no connection. The agent
//! of a node does without: that is a thread more.

use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;

use anyhow::Context;
use clap::ValueEnum;
use portico_net::line_queue::{LineQueue, Trouble};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// The filter where `RUST_LOG` is not set. It passes the events that an operator must know, and the
/// complaints of libraries. Three libraries log nothing. The Kubernetes client says that a request failed
/// without saying which. The code that made the request reports each failure once, with the object and the
/// remedy. h2 and rustls complain of bytes that a peer has sent. A peer may send them as often as it likes.
const DEFAULT_FILTER: &str =
    "info,kube_client=off,kube_runtime=off,tower=warn,hyper=warn,hyper_util=warn,h2=off,rustls=off";

static QUEUE: OnceLock<LineQueue> = OnceLock::new();

/// Starts logging, through a queue if `is_queued`. Call once, before anything else happens.
pub(crate) fn start(format: LogFormat, is_queued: bool) -> anyhow::Result<()> {
    let text = match std::env::var("RUST_LOG") {
        Ok(text) if !text.is_empty() => text,
        _ => DEFAULT_FILTER.to_owned(),
    };
    // Levels by target. Filters on spans and fields would bring a regular expression engine into every
    // process.
    let filter: Targets = text.parse().map_err(|error| {
        anyhow::anyhow!("RUST_LOG={text:?}: {error}; give for example info or portico=debug,info")
    })?;
    if is_queued {
        let queue = LineQueue::start("log", io::stderr(), report).context("cannot start the log")?;
        QUEUE.get_or_init(|| queue);
    }
    let lines = tracing_subscriber::fmt::layer().with_writer(|| Lines);
    let subscriber = tracing_subscriber::registry().with(filter);
    match format {
        LogFormat::Text => {
            subscriber.with(lines.with_ansi(io::stderr().is_terminal()).with_target(false)).init();
        }
        LogFormat::Json => {
            let lines = lines.json().flatten_event(true).with_current_span(false).with_span_list(false);
            subscriber.with(lines).init();
        }
    }
    Ok(())
}

/// Waits until all lines are written, a second at most. Without this, those that still wait when the process
/// ends or becomes another program are lost.
pub(crate) fn flush() {
    if let Some(queue) = QUEUE.get() {
        queue.flush();
    }
}

fn report(trouble: Trouble) {
    match trouble {
        Trouble::Dropped(lines) => {
            tracing::warn!(
                lines,
                "log lines were dropped: standard error was not read fast enough, or failed"
            );
        }
        // There is no other channel to report it on.
        Trouble::Fails(_) | Trouble::Closed(_) => {}
    }
}

/// The output of the log, a line at a time.
pub(crate) struct Lines;

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        match QUEUE.get() {
            Some(queue) => queue.push(line.to_vec()),
            None => io::stderr().write_all(line)?,
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    #[test]
    fn by_default_portico_speaks_and_its_libraries_complain_but_not_the_kubernetes_client() {
        let filter: Targets = DEFAULT_FILTER.parse().unwrap();
        for (target, level, is_written) in [
            ("portico::control", Level::INFO, true),
            ("portico_source::kubernetes", Level::WARN, true),
            ("kube_client::client::builder", Level::ERROR, false),
            ("kube_runtime::watcher", Level::WARN, false),
            ("hyper_util::client::legacy::pool", Level::INFO, false),
            ("tower::buffer::worker", Level::WARN, true),
            ("h2::proto::ping_pong", Level::WARN, false),
            ("rustls::msgs::handshake", Level::WARN, false),
        ] {
            assert_eq!(filter.would_enable(target, &level), is_written, "{target} {level}");
        }
    }
}
