//! User and password of the proxy in an argument, where every user of the machine reads them.
//!
//! The program starts itself once more, without them in its arguments and with them in the variable of the
//! same meaning. /proc/PID/environ is for the same user and root only. The PID stays. The configuration of a
//! supervisor, such as a manifest, still shows them, so the log says what to do instead.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use portico_dial::{CREDENTIALS_VARIABLE, without_credentials};

use crate::logging;

/// The flag that takes a URL.
const FLAG: &str = "--proxy";

/// Returns if the arguments hold no user and password, or if they have to stay.
pub(super) fn hide() {
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    let Some(pair) = take_out(&mut arguments) else { return };
    tracing::warn!(
        "--proxy holds user and password: every user of this machine can read arguments. Moving them to \
         {CREDENTIALS_VARIABLE} of this process; put USER:PASSWORD into a file and give --proxy-credentials"
    );
    let Some(name) = arguments.first() else { return };
    let failed = match std::env::current_exe() {
        Ok(program) => {
            logging::flush();
            let mut again = Command::new(program);
            again.arg0(name).args(&arguments[1..]).env(CREDENTIALS_VARIABLE, pair).exec()
        }
        Err(error) => error,
    };
    tracing::warn!(error = %failed, "cannot start once more: user and password stay among the arguments");
}

/// Replaces the URL by one without user and password, and returns those.
fn take_out(arguments: &mut [OsString]) -> Option<String> {
    let at = arguments.iter().position(|argument| {
        let argument = argument.to_string_lossy();
        argument.strip_prefix(FLAG).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
    })?;
    let (before, at) = if arguments[at] == FLAG { ("", at + 1) } else { ("--proxy=", at) };
    let url = arguments.get(at)?.to_str()?.strip_prefix(before)?;
    let (without, pair) = without_credentials(url)?;
    arguments[at] = format!("{before}{without}").into();
    Some(pair)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_and_password_are_taken_out_of_both_spellings() {
        for (line, expected) in [
            ("agent --proxy=http://u:p@h:1 --linger", "agent --proxy=http://h:1 --linger"),
            (
                "agent --proxy-ca ca --proxy u:p@h:1 --linger",
                "agent --proxy-ca ca --proxy http://h:1 --linger",
            ),
        ] {
            let mut arguments: Vec<OsString> = line.split(' ').map(Into::into).collect();
            assert_eq!(take_out(&mut arguments).as_deref(), Some("u:p"));
            assert_eq!(arguments.join(" ".as_ref()), expected);
        }
    }

    #[test]
    fn arguments_without_them_stay() {
        for line in ["agent --proxy env", "agent --proxy", "agent --gateway a@b", "agent --proxy=http://h:1"]
        {
            let mut arguments: Vec<OsString> = line.split(' ').map(Into::into).collect();
            assert_eq!(take_out(&mut arguments), None);
            assert_eq!(arguments.join(" ".as_ref()), line);
        }
    }
}
