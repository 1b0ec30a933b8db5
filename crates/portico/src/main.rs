//! The front door of hosted Kubernetes control planes: the command line.
//!
//! [`cli`] says what can be asked for, [`verb`] does it, one file a verb. `check` and `routes` look at a
//! directory once ([`offline`]); `ports`, `firewall` and `capacity` ask the port model ([`requirements`]). A
//! verb that waits for something is run by [`daemon`]: runtime, and if it stays signals, admin listener and
//! drain.
//!
//! What objects mean and how bytes move is decided in the library crates; here is only what a user touches.

mod allocator;
mod args;
mod cli;
mod daemon;
mod finding;
mod hosted;
mod listing;
mod logging;
mod memory_limit;
mod offline;
mod outcome;
mod requirements;
mod seed;
mod shell;
mod verb;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    allocator::set_up();
    let cli = cli::Cli::parse();
    let is_queued = !matches!(cli.verb, cli::Verb::Agent(_));
    let code = match logging::start(cli.log_format, is_queued).and_then(|()| cli.verb.run()) {
        Ok(outcome) => outcome.into(),
        Err(error) => {
            outcome::complain(&error, cli.log_format);
            outcome::misconfigured()
        }
    };
    logging::flush();
    code
}
