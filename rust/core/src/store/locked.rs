//! What the store, its leases and its disk threads share: the books behind one lock, and how to wait for them.

use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::store::config::ArenaInfo;
use crate::store::disk::opener::{Opener, Opening};
use crate::store::state::State;
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::tier::LocalTier;

/// Longest sleep of a thread that waits for the disk before it looks again.
const WAIT_SLICE: Duration = Duration::from_millis(20);

/// Time since some moment before; it never goes back.
pub type Clock = Box<dyn Fn() -> Duration + Send + Sync>;

pub(crate) struct Locked {
    pub(crate) state: Mutex<State>,
    /// There are jobs.
    pub(crate) work: Condvar,
    /// A job ended.
    pub(crate) idle: Condvar,
    /// Time to look at limits, or the end.
    pub(crate) tend: Condvar,
    /// None while it is not open. It changes only while no job is under way; its lock is taken last.
    pub(crate) disk: Mutex<Option<Arc<dyn LocalTier>>>,
    pub(crate) opener: Option<Arc<Opener>>,
    /// A first try that takes long, for a disk thread to wait for.
    pub(crate) late: Mutex<Option<Opening>>,
    pub(crate) clock: Clock,
    pub(crate) arena: ArenaInfo,
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

impl Locked {
    /// The tier, while it is open.
    pub(crate) fn tier(&self) -> Option<Arc<dyn LocalTier>> {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the tier; returns the one before.
    pub(crate) fn change_tier(&self, new: Option<Arc<dyn LocalTier>>) -> Option<Arc<dyn LocalTier>> {
        std::mem::replace(&mut *self.disk.lock().unwrap_or_else(PoisonError::into_inner), new)
    }

    /// The books, with the time; None from a panic under the lock on.
    pub(crate) fn lock(&self) -> Option<MutexGuard<'_, State>> {
        let mut state = self.state.lock().ok()?;
        state.set_time((self.clock)());
        Some(state)
    }

    /// Works on the books, then forgets a slice of what is to be forgotten and wakes the disk threads if there is something to
    /// do. None after a failure.
    pub(crate) fn with_state<T>(&self, work: impl FnOnce(&mut State) -> T) -> Option<T> {
        let _wake = WakeOnPanic(&self.work);
        let mut state = self.lock()?;
        let result = work(&mut state);
        if state.is_removing() {
            state.remove_slice();
        }
        let has_jobs = state.disk.has_jobs();
        drop(state);
        if has_jobs {
            self.work.notify_all();
        }
        Some(result)
    }

    /// As `with_state`, but None for a closed store too.
    pub(crate) fn with_open_state<T>(&self, work: impl FnOnce(&mut State) -> T) -> Option<T> {
        self.with_state(|state| (!state.closed).then(|| work(state))).flatten()
    }

    /// Waits until `done` says so, the deadline, or `done` has no hope (None); true if done. False at once after a failure.
    pub(crate) fn wait(&self, deadline: Instant, done: impl Fn(&State) -> Option<bool>) -> bool {
        loop {
            let Some(mut state) = self.lock() else { return false };
            let left = deadline.saturating_duration_since(Instant::now());
            if state.is_removing() && !left.is_zero() {
                state.remove_slice();
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

impl fmt::Debug for Locked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locked").field("arena", &self.arena).field("disk", &self.disk).finish_non_exhaustive()
    }
}
