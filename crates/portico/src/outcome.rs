//! How a verb ends: the exit codes of the command line contract, and the way to print.

use std::borrow::Cow;
use std::io::{self, Write};
use std::process::ExitCode;

use portico_api::text;

use crate::logging::{Lines, LogFormat};

/// What a verb that ran has to say. That it could not run is an error, and exit code 2, as clap's for wrong
/// usage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Done, or the answer is "yes".
    Done,
    /// The answer is "no": a check failed.
    No,
}

impl From<Outcome> for ExitCode {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Done => Self::SUCCESS,
            Outcome::No => Self::from(1),
        }
    }
}

/// Wrong usage or configuration.
pub(crate) fn misconfigured() -> ExitCode {
    ExitCode::from(2)
}

/// Says on standard error why a verb could not run: each cause once, though many messages already end in
/// theirs. In the form of the log, but past its filter: this line is the last, and `RUST_LOG` may want none.
pub(crate) fn complain(error: &anyhow::Error, format: LogFormat) {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    let mut line = match format {
        LogFormat::Text => format!("portico: {}", plain(&text)),
        LogFormat::Json => serde_json::json!({
            "timestamp": jiff::Timestamp::now(),
            "level": "ERROR",
            "message": text,
            "target": "portico",
        })
        .to_string(),
    };
    line.push('\n');
    // If this fails, no channel is left to report it on.
    let _ = Lines.write_all(line.as_bytes());
}

/// Writes to standard output. A reader that left early, such as `head`, is no error.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(plain(text).as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// The text that a terminal only shows. Lines and tabs stay, other control characters are seen and not
/// obeyed. The author of an object would else write to the screen of its reader.
fn plain(text: &str) -> Cow<'_, str> {
    let is_obeyed = |letter: char| text::is_obeyed(letter) && !matches!(letter, '\n' | '\t');
    if text.contains(is_obeyed) { text.replace(is_obeyed, "\u{fffd}").into() } else { text.into() }
}

#[cfg(test)]
mod tests {
    use super::plain;

    #[test]
    fn no_object_writes_to_the_terminal_of_its_reader() {
        assert_eq!(plain("a\tb\nc\n"), "a\tb\nc\n");
        assert_eq!(plain("dc \u{1b}[2J\u{9b}1m\r"), "dc \u{fffd}[2J\u{fffd}1m\u{fffd}");
        assert_eq!(plain("\u{202e}elttes"), "\u{fffd}elttes");
    }
}
