//! Where log lines go and how they look: stderr, as text or JSON, at the level of `RUST_LOG`.

use std::io::{self, IsTerminal};

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// What is logged where `RUST_LOG` says nothing: what an operator must know, and of libraries only their complaints.
const DEFAULT_FILTER: &str = "info,kube=warn,hyper=warn,h2=warn,rustls=warn,tower=warn";

/// Starts logging. Call once, before anything else happens.
pub(crate) fn start(format: LogFormat) -> anyhow::Result<()> {
    let filter = match std::env::var(EnvFilter::DEFAULT_ENV) {
        Ok(text) if !text.is_empty() => EnvFilter::try_new(&text).map_err(|error| {
            anyhow::anyhow!("RUST_LOG={text:?}: {error}; give for example info or portico=debug,info")
        })?,
        _ => EnvFilter::new(DEFAULT_FILTER),
    };
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    match format {
        LogFormat::Text => builder.with_ansi(io::stderr().is_terminal()).with_target(false).init(),
        LogFormat::Json => {
            builder.json().flatten_event(true).with_current_span(false).with_span_list(false).init()
        }
    }
    Ok(())
}
