//! The agents of this node, or those of them that may have connections by an address: the last one takes it
//! away.
//!
//! Each holds a shared lock of one file (flock(2)) from before it takes its address until it has no
//! connection any more. One that can lock the file for itself alone is the only one. The kernel ends the lock
//! of a process that dies.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tokio::time::{Instant, sleep};

/// Between two attempts to join while an agent that ends takes its address away, which takes milliseconds.
const PAUSE: Duration = Duration::from_millis(20);

/// How long to try.
const PATIENCE: Duration = Duration::from_secs(10);

/// This agent, as one of them. `None` where no other is expected.
#[derive(Debug)]
pub(super) struct Users(Option<File>);

impl Users {
    /// Joins them. The file is made if it is not there.
    ///
    /// # Errors
    /// The file cannot be made or locked, or another process keeps it locked for itself.
    pub(super) async fn join(path: Option<&Path>) -> io::Result<Self> {
        let Some(path) = path else { return Ok(Self(None)) };
        // A process that may open it may lock it.
        let file = File::options().create(true).truncate(false).write(true).mode(0o600).open(path)?;
        let users = Self(Some(file));
        users.share().await?;
        Ok(users)
    }

    /// Whether no other agent runs. Then none can join before this one ends, or shares the file again.
    pub(super) fn is_only(&self) -> bool {
        self.0.as_ref().is_none_or(|file| flock(file, FlockOperation::NonBlockingLockExclusive).is_ok())
    }

    /// Lets others join. After [`is_only`](Self::is_only) this agent may be none of them.
    pub(super) async fn share(&self) -> io::Result<()> {
        let Some(file) = &self.0 else { return Ok(()) };
        let begun = Instant::now();
        loop {
            match flock(file, FlockOperation::NonBlockingLockShared) {
                Err(Errno::WOULDBLOCK) if begun.elapsed() < PATIENCE => sleep(PAUSE).await,
                Err(Errno::WOULDBLOCK) => {
                    let why = "another process has kept it locked for 10 s: fuser -v names it";
                    return Err(io::Error::new(io::ErrorKind::WouldBlock, why));
                }
                locked => return Ok(locked?),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_that_others_run_beside_is_not_the_only_one_and_the_last_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let join = || Users::join(Some(&path));
        let (first, second) = (join().await.unwrap(), join().await.unwrap());
        assert!(!first.is_only());
        first.share().await.unwrap();
        assert!(!second.is_only(), "the other is one of them again");
        drop(second);
        assert!(first.is_only());
        let begun = Instant::now();
        let error = join().await.unwrap_err().to_string();
        assert!(error.contains("kept it locked for 10 s"), "{error}");
        assert!(begun.elapsed() >= PATIENCE, "the only one goes, and takes the address with it");
        drop(first);
        assert!(join().await.unwrap().is_only());
        assert!(Users::join(None).await.unwrap().is_only(), "without a file there are no others");
    }
}
