//! The front door of hosted Kubernetes control planes: the command line.
//!
//! [`cli`] says what can be asked for, [`verb`] does it, one file a verb. `check` and `routes` look at a
//! directory once ([`offline`]); `ports`, `firewall` and `capacity` ask the port model ([`requirements`]).
//! [`daemon`] runs a verb that waits for something. It has the runtime, and for a verb that stays the
//! signals, admin listener and drain.
//!
//! The library crates decide on the meaning of objects and the way of bytes. Here is only the part that a
//! user touches.

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
