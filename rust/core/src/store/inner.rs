//! What the store, its leases and its disk threads share: the books behind one lock, and how to wait for them.

use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::config::ArenaInfo;
use super::opening::{Opener, Opening};
use super::state::State;
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::tier::LocalTier;

/// Longest sleep of a thread that waits for the disk before it looks again.
const WAIT_SLICE: Duration = Duration::from_millis(20);

/// Time since some moment before; it never goes back.
pub type Clock = Box<dyn Fn() -> Duration + Send + Sync>;

pub(crate) struct Inner {
    pub(super) state: Mutex<State>,
    /// There are jobs.
    pub(super) work: Condvar,
    /// A job ended.
    pub(super) idle: Condvar,
    /// Time to look at limits, or the end.
    pub(super) tend: Condvar,
    /// None while it is not open. It changes only while no job is under way; its lock is taken last.
    pub(super) disk: Mutex<Option<Arc<dyn LocalTier>>>,
    pub(super) opener: Option<Arc<Opener>>,
    /// A first try that takes long, for a disk thread to wait for.
    pub(super) late: Mutex<Option<Opening>>,
    pub(super) clock: Clock,
    pub(super) arena: ArenaInfo,
}

/// Wakes the disk threads when a panic poisons the lock: they would wait for work that cannot come.
struct WakeOnPanic<'a>(&'a Condvar);

impl Drop for WakeOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.notify_all();
        }
    }
}

impl Inner {
    /// The tier, while it is open.
    pub(super) fn tier(&self) -> Option<Arc<dyn LocalTier>> {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the tier; returns the one before.
    pub(super) fn change_tier(&self, new: Option<Arc<dyn LocalTier>>) -> Option<Arc<dyn LocalTier>> {
        std::mem::replace(&mut *self.disk.lock().unwrap_or_else(PoisonError::into_inner), new)
    }

    /// The books, with the time; None from a panic under the lock on.
    pub(super) fn books(&self) -> Option<MutexGuard<'_, State>> {
        let mut state = self.state.lock().ok()?;
        state.set_time((self.clock)());
        Some(state)
    }

    /// Works on the books, then forgets a slice of what is to be forgotten and wakes the disk threads if there is something to
    /// do. None after a failure.
    pub(crate) fn with_books<T>(&self, work: impl FnOnce(&mut State) -> T) -> Option<T> {
        let _wake = WakeOnPanic(&self.work);
        let mut state = self.books()?;
        let result = work(&mut state);
        if state.is_forgetting() {
            state.forget_slice();
        }
        let has_jobs = state.disk.has_jobs();
        drop(state);
        if has_jobs {
            self.work.notify_all();
        }
        Some(result)
    }

    /// As `with_books`, but None for a closed store too.
    pub(super) fn with_open_books<T>(&self, work: impl FnOnce(&mut State) -> T) -> Option<T> {
        self.with_books(|state| (!state.closed).then(|| work(state))).flatten()
    }

    /// Waits until `done` says so, the deadline, or `done` has no hope (None); true if done. False at once after a failure.
    pub(super) fn wait(&self, deadline: Instant, done: impl Fn(&State) -> Option<bool>) -> bool {
        loop {
            let Some(mut state) = self.books() else { return false };
            let left = deadline.saturating_duration_since(Instant::now());
            if state.is_forgetting() && !left.is_zero() {
                state.forget_slice();
                continue;
            }
            match done(&state) {
                Some(false) => {}
                answer => return answer.is_some(),
            }
            // Only ends of jobs are announced; what else may change the answer is looked for now and then.
            if left.is_zero() || self.idle.wait_timeout(state, left.min(WAIT_SLICE)).is_err() {
                return false;
            }
        }
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inner").field("arena", &self.arena).field("disk", &self.disk).finish_non_exhaustive()
    }
}
