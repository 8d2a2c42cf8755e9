//! Opens a disk tier for the first time in a separate thread, so that an engine need not wait for a
//! disk that hangs.
//!
//! If that takes long, a disk thread waits for it instead.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::sync::thread;
use crate::sync::{Condvar, Mutex, locked};
use crate::tier::LocalTier;
use crate::tier::disk::DiskEntry;
use crate::{Error, ErrorKind, Result};

/// A disk tier and the chunks in it.
pub(crate) type Opened = (Arc<dyn LocalTier>, Vec<DiskEntry>);
/// Opens the disk tier. It is called again if it fails.
pub type Opener = Box<dyn Fn() -> Result<(Arc<dyn LocalTier>, Vec<DiskEntry>)> + Send + Sync>;

#[derive(Default)]
struct Outcome {
    tier: Mutex<Option<Result<Opened>>>,
    came: Condvar,
}

/// An attempt in progress.
pub(crate) struct Opening(Arc<Outcome>);

impl Opening {
    /// Starts to open the tier. `Io` if the system cannot start a thread.
    pub(crate) fn begin(opener: &Arc<Opener>) -> Result<Self> {
        let outcome = Arc::new(Outcome::default());
        let (opener, theirs) = (Arc::clone(opener), Arc::clone(&outcome));
        let work = move || {
            let tier = guarded(&**opener);
            *locked(&theirs.tier) = Some(tier);
            theirs.came.notify_all();
        };
        let thread = thread::Builder::new().name("kvloft-open".to_owned());
        thread.spawn(work).map_err(|error| Error::io("a disk thread cannot be started", error))?;
        Ok(Self(outcome))
    }

    /// Returns the outcome, once; None if it takes longer than `timeout`.
    pub(crate) fn wait(&self, timeout: Duration) -> Option<Result<Opened>> {
        let deadline = Instant::now() + timeout;
        let mut tier = locked(&self.0.tier);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if tier.is_some() || left.is_zero() {
                return tier.take();
            }
            (tier, _) =
                self.0.came.wait_timeout(tier, left).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Calls `work`, and turns a panic into an `Io` error.
pub(crate) fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(Error::new(ErrorKind::Io, "the disk tier panicked")))
}
