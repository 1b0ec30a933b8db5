//! What the code under test logs on the thread of a test.

use std::fmt::Debug;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{DefaultGuard, set_default};
use tracing::{Dispatch, Event, Metadata, Subscriber};

/// Collects nothing. Beside a second collector each thread is asked whether it wants a line. With one alone
/// the thread that comes by the line first is asked for all, and that may be another test's.
static BESIDE: LazyLock<Dispatch> =
    LazyLock::new(|| Dispatch::new(LogLines { wanted: |_| false, messages: Arc::default() }));

/// The messages of log lines, in their order.
#[derive(Debug, Clone)]
pub struct LogLines {
    wanted: fn(&Metadata<'_>) -> bool,
    messages: Arc<Mutex<Vec<String>>>,
}

impl LogLines {
    /// Collects the `wanted` lines that this thread logs, until the guard is dropped.
    pub fn collect(wanted: fn(&Metadata<'_>) -> bool) -> (Self, DefaultGuard) {
        LazyLock::force(&BESIDE);
        let lines = Self { wanted, messages: Arc::default() };
        (lines.clone(), set_default(lines))
    }

    /// Those so far.
    pub fn messages(&self) -> Vec<String> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Subscriber for LogLines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        (self.wanted)(metadata)
    }

    fn event(&self, event: &Event<'_>) {
        let mut message = Message::default();
        event.record(&mut message);
        self.messages.lock().unwrap_or_else(PoisonError::into_inner).push(message.0);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// The message of one event.
#[derive(Default)]
struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}
