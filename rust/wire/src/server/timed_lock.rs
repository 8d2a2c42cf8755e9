//! A lock with a deadline, whose guard can move to another thread.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use crate::threads::locked;

/// A lock with a deadline.
#[derive(Debug, Default)]
pub(crate) struct TimedLock {
    is_locked: Mutex<bool>,
    unlocked: Condvar,
}

/// Releases the lock when dropped.
#[derive(Debug)]
pub(crate) struct TimedGuard(Arc<TimedLock>);

impl TimedLock {
    /// Takes the lock; returns None at the deadline.
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
