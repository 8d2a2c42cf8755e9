//! The store's state with its lock, condition variables, clock and disk tier. Also defines the
//! leases, which share ownership of the state and so can outlive their `Store`.
//!
//! Leases are guards: dropping a write lease aborts the save, and dropping a read lease unpins its
//! frames (I5).

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::Result;
use crate::evict::ChunkId;
use crate::store::config::ArenaInfo;
use crate::store::load::{Held, LeasedFrame, Progress};
use crate::store::save::Reservation;
use crate::store::state::State;
use crate::sync::{Condvar, Mutex, MutexGuard, locked};
use crate::tier::LocalTier;
use crate::tier::disk::DiskEntry;

/// Polling interval for callers that wait for the disk.
const WAIT_SLICE: Duration = Duration::from_millis(20);

/// A monotonic clock that returns the time since a fixed moment.
pub type Clock = Box<dyn Fn() -> Duration + Send + Sync>;

/// Opens the disk tier and returns it along with its chunks. The store retries after a failure.
pub type Opener = Box<dyn Fn() -> Result<(Arc<dyn LocalTier>, Vec<DiskEntry>)> + Send + Sync>;

pub(crate) struct Locked {
    pub(crate) state: Mutex<State>,
    /// Signaled when there are disk jobs.
    pub(crate) work: Condvar,
    /// Signaled when a disk job completes.
    pub(crate) idle: Condvar,
    /// Signaled when the store closes, to wake the sweeper.
    pub(crate) sweep: Condvar,
    /// None while the tier is not open. Set and cleared only while no job is in flight. This lock
    /// is always taken last.
    pub(crate) disk: Mutex<Option<Arc<dyn LocalTier>>>,
    pub(crate) opener: Option<Opener>,
    pub(crate) clock: Clock,
    pub(crate) arena: ArenaInfo,
}

/// Wakes the disk threads when a panic poisons the lock. Otherwise, idle threads would not exit
/// until their next poll.
struct WakeOnPanic<'a>(&'a Condvar);

impl Drop for WakeOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.notify_all();
        }
    }
}

impl Locked {
    pub(crate) fn tier(&self) -> Option<Arc<dyn LocalTier>> {
        locked(&self.disk).clone()
    }

    pub(crate) fn change_tier(
        &self,
        new: Option<Arc<dyn LocalTier>>,
    ) -> Option<Arc<dyn LocalTier>> {
        std::mem::replace(&mut *locked(&self.disk), new)
    }

    /// Locks the state and advances its clock. Returns None if a thread has panicked under the
    /// lock.
    pub(crate) fn lock(&self) -> Option<MutexGuard<'_, State>> {
        let mut state = self.state.lock().ok()?;
        state.set_time((self.clock)());
        Some(state)
    }

    /// Calls `work` under the lock, then removes a slice of pending trees, empties part of a slab
    /// if one of the store's size classes needs a slab, and wakes the disk threads if there are
    /// jobs. Returns None if a thread has panicked under the lock.
    pub(crate) fn with_state<T>(&self, work: impl FnOnce(&mut State) -> T) -> Option<T> {
        let _wake = WakeOnPanic(&self.work);
        let mut state = self.lock()?;
        let result = work(&mut state);
        if state.is_removing() {
            state.remove_slice();
        }
        if state.host.is_hungry() {
            state.release_slab();
        }
        let has_jobs = state.disk.has_jobs();
        drop(state);
        if has_jobs {
            self.work.notify_all();
        }
        Some(result)
    }

    /// Like [`Self::with_state`], but also returns None if the store is closed.
    pub(crate) fn with_open_state<T>(&self, work: impl FnOnce(&mut State) -> T) -> Option<T> {
        self.with_state(|state| (!state.closed).then(|| work(state))).flatten()
    }

    /// Waits while `done` returns `Some(false)`. Returns true once `done` returns `Some(true)`, and
    /// false if it returns None because the condition can no longer be met.
    ///
    /// Also returns false at the deadline, or immediately if a thread has panicked under the lock.
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
                outcome => return outcome.is_some(),
            }
            // `idle` is signaled only when a job completes, so poll for any other change.
            if left.is_zero() || self.idle.wait_timeout(state, left.min(WAIT_SLICE)).is_err() {
                return false;
            }
        }
    }
}

impl fmt::Debug for Locked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locked")
            .field("arena", &self.arena)
            .field("disk", &self.disk)
            .finish_non_exhaustive()
    }
}

/// Reserves a frame for one chunk until the lease is dropped or passed to
/// [`crate::store::Store::commit`].
#[derive(Debug)]
#[must_use = "dropping a write lease aborts it"]
pub struct WriteLease {
    /// None once the lease is committed.
    store: Option<Arc<Locked>>,
    id: ChunkId,
    reservation: Reservation,
}

impl WriteLease {
    pub(crate) fn new(store: Arc<Locked>, id: ChunkId, reservation: Reservation) -> Self {
        Self { store: Some(store), id, reservation }
    }

    /// Returns the chunk and its frame.
    pub fn reservation(&self) -> &Reservation {
        &self.reservation
    }

    pub(crate) fn is_of(&self, store: &Arc<Locked>) -> bool {
        self.store.as_ref().is_some_and(|own| Arc::ptr_eq(own, store))
    }

    pub(crate) fn id(&self) -> ChunkId {
        self.id
    }

    /// Ends the lease without aborting the save. The caller must then commit the chunk.
    pub(crate) fn disarm(mut self) -> ChunkId {
        self.store = None;
        self.id
    }
}

impl Drop for WriteLease {
    fn drop(&mut self) {
        if let Some(store) = self.store.take() {
            store.with_state(|state| state.abort(self.id));
        }
    }
}

/// Pins one or more prefixes. A prefix's last chunks may still be waiting for disk reads.
#[derive(Debug)]
#[must_use = "dropping a read lease unpins its frames"]
pub struct ReadLease {
    store: Arc<Locked>,
    /// None if the lease was released, or if the store was already closed or had failed when the
    /// lease was taken.
    held: Mutex<Option<Vec<Held>>>,
}

impl ReadLease {
    pub(crate) fn new(store: Arc<Locked>, held: Option<Vec<Held>>) -> Self {
        Self { store, held: Mutex::new(held) }
    }

    /// Returns the combined progress of all prefixes. Never blocks on I/O.
    pub fn poll(&self) -> Progress {
        self.with_held(|state, held| held.iter_mut().map(|held| state.poll(held)).sum())
    }

    /// Returns the frames of all ready chunks, in the order of the prefixes.
    pub fn frames(&self) -> Vec<LeasedFrame> {
        self.with_held(|state, held| match held {
            // Avoid a copy that would make this method 25% slower for a long prompt.
            [only] => state.frames(only),
            many => many.iter_mut().flat_map(|held| state.frames(held)).collect(),
        })
    }

    fn with_held<T: Default>(&self, what: impl FnOnce(&mut State, &mut [Held]) -> T) -> T {
        let mut held = locked(&self.held);
        held.as_mut()
            .and_then(|held| self.store.with_state(|state| what(state, held)))
            .unwrap_or_default()
    }

    /// Unpins the frames, just as dropping the lease does. A second call has no effect.
    pub fn release(&self) {
        let held = locked(&self.held).take();
        if let Some(held) = held {
            self.store.with_state(|state| held.into_iter().for_each(|held| state.release(held)));
        }
    }
}

impl Drop for ReadLease {
    fn drop(&mut self) {
        self.release();
    }
}
