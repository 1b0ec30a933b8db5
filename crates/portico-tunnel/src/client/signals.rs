//! What the tasks of a client wait for, fired by its tunnels and by each other.

use tokio::sync::Notify;

/// All on one thread.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    /// A tunnel came up, or came back.
    pub(crate) arrived: Notify,
    /// A full tunnel has place for one more stream. Wakes one who waits, where `arrived` wakes all.
    pub(crate) freed: Notify,
    /// A tunnel is not live any more, or is full.
    pub(crate) left: Notify,
    /// A tunnel or the answer of a name server has come or gone: what could be better is to be looked at again.
    pub(crate) changed: Notify,
}
