//! The other direction: a responder is asked to send a probe to us, and says what it saw.

use std::net::SocketAddr;
use std::time::Duration;

use portico_api::text::one_line;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::{Limits, tcp};
use crate::observation::Observation;
use crate::probe::{LONGEST_LINE, Line, line};
use crate::transport::Transport;

/// What the answer may take beside the other side's own check.
const SLACK: Duration = Duration::from_secs(3);

/// Asks the first responder among these addresses of one machine to try `transport` towards us.
pub async fn check(via: &[SocketAddr], transport: Transport, limits: Limits) -> Observation {
    for address in via {
        let Ok(mut stream) = tcp::connect(*address, limits.answer).await else { continue };
        if let Ok(Some(_responder)) = tcp::listen(&mut stream, limits.banner).await {
            return match timeout(limits.answer + SLACK, ask(stream, transport)).await {
                Ok(Some(seen)) => seen,
                Ok(None) => Observation::not_tried(format_args!("the responder at {address} gave no answer")),
                Err(_) => Observation::not_tried(format_args!("the responder at {address} is too slow")),
            };
        }
    }
    Observation::not_tried("no responder answers there; start `portico preflight --listen` on that machine")
}

async fn ask(mut stream: TcpStream, transport: Transport) -> Option<Observation> {
    stream.write_all(format!("back {transport}\n").as_bytes()).await.ok()?;
    let mut bytes = Vec::with_capacity(LONGEST_LINE);
    loop {
        match line(&bytes) {
            Line::Complete(text) => return understand(text),
            Line::NeedMore => {}
            Line::Other => return None,
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    }
}

/// Reads an answer. What is in it reaches a terminal.
fn understand(text: &str) -> Option<Observation> {
    let clean = |text: Box<str>| one_line(&text, LONGEST_LINE).into();
    match serde_json::from_str(text).ok()? {
        Observation::Unreachable { by, why } => Some(Observation::Unreachable { by, why: clean(why) }),
        Observation::NotTried { why } => Some(Observation::NotTried { why: clean(why) }),
        seen @ (Observation::Answered { .. }
        | Observation::Refused { .. }
        | Observation::TimedOut { .. }
        | Observation::Reset
        | Observation::DeniedHere) => Some(seen),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_one_that_a_probe_can_have_and_cannot_write_to_the_terminal() {
        assert_eq!(
            understand(r#"{"kind":"answered","micros":7}"#),
            Some(Observation::Answered { micros: 7 })
        );
        let seen = understand(r#"{"kind":"not-tried","why":"a\u001b[2Jb"}"#).unwrap();
        assert_eq!(seen, Observation::NotTried { why: "a [2Jb".into() });
        for text in [r#"{"kind":"free"}"#, r#"{"kind":"?"}"#, "", "null"] {
            assert_eq!(understand(text), None, "{text:?}");
        }
    }
}
