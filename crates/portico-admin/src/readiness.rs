//! The answer to `/readyz`: one word for a probe, and with `?verbose` a line for each thing that was looked
//! at.
//!
//! A line starts with `[+]` for a check that passed, and with `[-]` for one that did not. `[!]` marks a
//! warning for the operator: it does not make the process unready.

use std::fmt::{Display, Write};

use hyper::StatusCode;

use crate::server::{Answer, text};

/// What was looked at. Ready if every check passed.
#[derive(Debug)]
pub struct Readiness {
    ready: bool,
    /// `None` if only the word is asked for.
    lines: Option<String>,
}

impl Readiness {
    /// Nothing was looked at yet. Lines are kept only if `verbose`.
    pub fn new(verbose: bool) -> Self {
        Self { ready: true, lines: verbose.then(String::new) }
    }

    /// Whether lines are kept. A check that costs something and cannot make a process unready may be left out
    /// if not.
    pub fn is_verbose(&self) -> bool {
        self.lines.is_some()
    }

    /// A check that decides about readiness.
    pub fn check(&mut self, name: &str, passed: bool, detail: impl Display) {
        self.ready &= passed;
        self.line(if passed { '+' } else { '-' }, format_args!("{name}: {detail}"));
    }

    /// Something that is as it should be.
    pub fn fine(&mut self, text: impl Display) {
        self.line('+', text);
    }

    /// Something that is not there yet, and does not decide.
    pub fn missing(&mut self, text: impl Display) {
        self.line('-', text);
    }

    /// Something that an operator should know, and does not decide.
    pub fn warn(&mut self, text: impl Display) {
        self.line('!', text);
    }

    fn line(&mut self, sign: char, text: impl Display) {
        if let Some(lines) = &mut self.lines {
            // Writing to a String cannot fail.
            let _ = writeln!(lines, "[{sign}] {text}");
        }
    }

    /// The lines, and the word at the end.
    pub fn into_text(self) -> String {
        let mut text = self.lines.unwrap_or_default();
        text.push_str(if self.ready { "ready\n" } else { "not ready\n" });
        text
    }

    /// Status 200 or 503 with the text.
    pub fn answer(self) -> Answer {
        let code = if self.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        text(code, self.into_text())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_failed_check_makes_a_process_unready_and_a_warning_does_not() {
        let mut readiness = Readiness::new(true);
        readiness.check("source", true, "every object has been read");
        readiness.warn("a file cannot be read");
        assert!(readiness.ready);
        readiness.check("accepting", false, "no listener is open yet");
        let text = readiness.into_text();
        assert_eq!(
            text,
            "[+] source: every object has been read\n[!] a file cannot be read\n[-] accepting: no listener \
             is open yet\nnot ready\n"
        );
    }

    #[test]
    fn a_probe_gets_one_word() {
        let mut readiness = Readiness::new(false);
        readiness.check("source", true, "every object has been read");
        assert_eq!(readiness.into_text(), "ready\n");
    }
}
