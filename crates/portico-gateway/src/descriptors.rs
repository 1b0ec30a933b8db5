//! Whether file descriptors run short, so that accepting stops *before* they are out.
//!
//! A connection takes one when it is accepted and another when it is connected to its endpoint. Accepting for
//! as long as accept(2) succeeds would leave none for the second. Clients would be accepted and then refused,
//! although they could have waited in the kernel's queue. So a descriptor counts as used as soon as it is
//! promised, and one in [`RESERVED`] is kept for transfers, manifests and the admin listener.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};
use std::time::Duration;

use rustix::process::{Resource, getrlimit};

/// The share that is kept; nginx stops accepting at the same one.
const RESERVED: u64 = 8;

/// At most one line about missing descriptors in this time.
const WARN_EVERY: Duration = Duration::from_secs(10);

/// The descriptors of this process.
#[derive(Debug)]
pub(crate) struct Descriptors {
    /// Accepting ends here.
    most: AtomicU32,
    /// Accepted connections that have no endpoint yet.
    promised: AtomicU32,
    /// When the next line may be logged, in milliseconds since the start.
    next_warning: AtomicU64,
    /// Whether the last line about descriptors says that they are out.
    warned: AtomicBool,
    /// Accept loops that rest.
    resting: AtomicU32,
    /// Times one began to rest.
    rests: AtomicU64,
}

/// Accepting rests while this is held.
#[derive(Debug)]
pub(crate) struct Rest(Arc<Descriptors>);

/// A descriptor that an accepted connection will need, given back on drop.
#[derive(Debug)]
pub(crate) struct Promise(Arc<Descriptors>);

impl Default for Descriptors {
    fn default() -> Self {
        Self {
            most: AtomicU32::new(most()),
            promised: AtomicU32::default(),
            next_warning: AtomicU64::default(),
            warned: AtomicBool::default(),
            resting: AtomicU32::default(),
            rests: AtomicU64::default(),
        }
    }
}

impl Descriptors {
    /// Reserves a descriptor for the second half of a connection.
    pub(crate) fn promise(self: &Arc<Self>) -> Promise {
        self.promised.fetch_add(1, SeqCst);
        Promise(Arc::clone(self))
    }

    /// Whether they run short. `newest` must be just opened. The kernel gives the lowest free number, so all
    /// below it are in use. Promises are added.
    pub(crate) fn run_short(&self, newest: BorrowedFd<'_>) -> bool {
        let number = u32::try_from(newest.as_raw_fd()).unwrap_or(u32::MAX);
        number.saturating_add(self.promised.load(SeqCst)) >= self.most.load(Relaxed)
    }

    /// Whether they still run short. `any` is copied, and closed again, to see which number is free. The
    /// limit is read again, because it can be changed from outside.
    pub(crate) fn still_run_short(&self, any: BorrowedFd<'_>) -> bool {
        self.most.store(most(), Relaxed);
        // A copy that cannot be made says so, too.
        any.try_clone_to_owned().map_or(true, |copy| self.run_short(copy.as_fd()))
    }

    /// Whether it is time for another line in the log.
    pub(crate) fn may_warn(&self, now: Duration) -> bool {
        let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        let wait = u64::try_from(WARN_EVERY.as_millis()).unwrap_or(u64::MAX);
        let due = |at: u64| (at <= now).then_some(now.saturating_add(wait));
        let may = self.next_warning.fetch_update(Relaxed, Relaxed, due).is_ok();
        if may {
            self.warned.store(true, Relaxed);
        }
        may
    }

    /// Notes that an accept loop rests.
    pub(crate) fn rest(self: &Arc<Self>) -> Rest {
        self.resting.fetch_add(1, SeqCst);
        self.rests.fetch_add(1, Relaxed);
        Rest(Arc::clone(self))
    }

    /// Whether any accept loop rests now.
    pub(crate) fn are_short(&self) -> bool {
        self.resting.load(SeqCst) > 0
    }

    /// How often one began to.
    pub(crate) fn rests(&self) -> u64 {
        self.rests.load(Relaxed)
    }
}

impl Drop for Rest {
    fn drop(&mut self) {
        if self.0.resting.fetch_sub(1, SeqCst) == 1 && self.0.warned.swap(false, Relaxed) {
            tracing::info!("there are free file descriptors again; accepting goes on");
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.0.promised.fetch_sub(1, SeqCst);
    }
}

/// The number from which on descriptors are kept.
fn most() -> u32 {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    u32::try_from(limit - limit / RESERVED).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptors(most: u32) -> Arc<Descriptors> {
        let descriptors = Descriptors::default();
        descriptors.most.store(most, Relaxed);
        Arc::new(descriptors)
    }

    #[test]
    fn what_is_promised_counts_as_used_until_it_is_given_back() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let number = u32::try_from(file.as_raw_fd()).unwrap();
        let descriptors = descriptors(number + 2);
        let one = descriptors.promise();
        assert!(!descriptors.run_short(file.as_fd()));
        let another = descriptors.promise();
        assert!(descriptors.run_short(file.as_fd()));
        drop((one, another));
        assert!(!descriptors.run_short(file.as_fd()));
    }

    #[test]
    fn it_warns_once_in_a_while() {
        let descriptors = descriptors(0);
        assert!(descriptors.may_warn(Duration::ZERO));
        assert!(!descriptors.may_warn(WARN_EVERY - Duration::from_millis(1)));
        assert!(descriptors.may_warn(WARN_EVERY));
    }
}
