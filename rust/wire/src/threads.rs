//! Named threads with small stacks, and a lock with a deadline.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

pub(crate) use kvloft_core::sync::locked;
use kvloft_core::{Error, Result};

const STACK_BYTES: usize = 512 << 10;

/// Starts a thread named `kvloft-{name}`. Returns `Io` if the thread cannot be started.
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let thread = std::thread::Builder::new().name(format!("kvloft-{name}")).stack_size(STACK_BYTES);
    thread.spawn(work).map_err(|error| Error::io("cannot start a kvloft thread", error))
}

/// A lock that is acquired with a deadline. The guard can be moved to another thread.
#[derive(Debug, Default)]
pub(crate) struct TimedLock {
    is_locked: Mutex<bool>,
    unlocked: Condvar,
}

#[derive(Debug)]
pub(crate) struct TimedGuard(Arc<TimedLock>);

impl TimedLock {
    /// Acquires the lock. Returns None if the deadline passes first.
    pub(crate) fn lock(self: &Arc<Self>, deadline: Instant) -> Option<TimedGuard> {
        let is_locked = locked(&self.is_locked);
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self.unlocked.wait_timeout_while(is_locked, left, |is_locked| *is_locked);
        let (mut is_locked, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let is_ours = !std::mem::replace(&mut *is_locked, true);
        drop(is_locked);
        is_ours.then(|| TimedGuard(Arc::clone(self)))
    }
}

impl Drop for TimedGuard {
    fn drop(&mut self) {
        *locked(&self.0.is_locked) = false;
        self.0.unlocked.notify_one();
    }
}
