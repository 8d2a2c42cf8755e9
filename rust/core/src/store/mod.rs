//! The store: lookup, lease, reserve, commit.
//!
//! One index over the tiers behind one lock. No call waits for a disk but those that say so. A store that failed inside
//! (a panic under the lock) answers with misses from then on. It must not know Python, tokens' meaning or what pages hold.

mod check;
mod config;
mod disk;
mod jobs;
mod load;
mod lookup;
mod save;
mod state;
mod stats;
mod threads;

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use config::{DiskSettings, StoreConfig};
pub(crate) use load::Held;
pub use load::{LeasedFrame, Progress, TierName};
use lookup::Chunks;
pub use save::{Reservation, SaveRange};
use state::State;
pub use stats::{Counters, Gauges};

use crate::Result;
use crate::key::{ChunkKey, KeyChain};
use crate::lease::{ReadLease, WriteLease};
use crate::tier::LocalTier;
use crate::tier::disk::{DiskEntry, DiskTier};
use crate::tier::host::HostTier;

/// Longest wait for a disk thread that is inside one read or write when the store ends.
const LAST_JOB_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest sleep of whoever waits for the disk before looking again.
const WAIT_SLICE: Duration = Duration::from_millis(20);
/// Longest wait of `clear` for the disk; it is cleared later where that is not enough.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(10);

/// Host arena, optional disk tier and index of one process. All methods take `&self` and may be called from any thread.
///
/// Dropping it stops the disk threads after their job at hand; what was not on disk by then is not there.
#[derive(Debug)]
pub struct Store {
    inner: Arc<Inner>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What the store, its leases and its disk threads share.
#[derive(Debug)]
pub(crate) struct Inner {
    state: Mutex<State>,
    /// There are jobs.
    work: Condvar,
    /// A job ended.
    idle: Condvar,
    disk: Option<Arc<dyn LocalTier>>,
    arena_path: String,
    frame_bytes: u64,
    num_frames: u32,
    blocks_per_chunk: u32,
}

impl Inner {
    /// The books; None for ever after a panic under the lock.
    fn books(&self) -> Option<MutexGuard<'_, State>> {
        self.state.lock().ok()
    }

    /// Works on the books, then wakes the disk threads if that left them something to do. None after a failure.
    pub(crate) fn with_books<T>(&self, work: impl FnOnce(&mut State) -> T) -> Option<T> {
        let mut state = self.books()?;
        let result = work(&mut state);
        let has_jobs = state.disk.as_ref().is_some_and(disk::DiskBooks::has_jobs);
        drop(state);
        if has_jobs {
            self.work.notify_all();
        }
        Some(result)
    }

    /// As `with_books`, but None for a closed store too.
    fn with_open_books<T>(&self, work: impl FnOnce(&mut State) -> T) -> Option<T> {
        self.with_books(|state| (!state.closed).then(|| work(state))).flatten()
    }

    /// Waits until `done` or the deadline; true if done. False at once after a failure.
    fn wait(&self, deadline: Instant, done: impl Fn(&State) -> bool) -> bool {
        let Some(mut state) = self.books() else { return false };
        while !done(&state) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            // Only ends of jobs are announced; what else may change the answer is looked for now and then.
            match self.idle.wait_timeout(state, left.min(WAIT_SLICE)) {
                Ok((books, _)) => state = books,
                Err(_) => return false,
            }
        }
        true
    }
}

/// What [`Store::lookup`] found, in blocks from position 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Lookup {
    /// In host memory.
    pub host_blocks: u32,
    /// In host memory or on disk.
    pub stored_blocks: u32,
}

/// What [`Store::reserve`] got: a lease for each chunk that has to be filled, and how many chunks could not be had.
#[derive(Debug, Default)]
pub struct Reserved {
    /// In order of the prefix.
    pub leases: Vec<WriteLease>,
    /// The first chunk without a frame or a parent, and all behind it.
    pub num_dropped: u32,
}

impl Store {
    /// Takes the memory and opens the disk tier. `InvalidConfig` names the setting that is wrong; `Busy` where another
    /// process owns the disk directory; `Io` if the system refuses.
    pub fn open(config: &StoreConfig) -> Result<Self> {
        let Some(settings) = &config.disk else { return Self::build(config, None, &[]) };
        config.num_frames()?; // before a directory is made for a store that cannot be
        let (disk, found) = DiskTier::open(settings.tier(config)?)?;
        Self::build(config, Some(Arc::new(disk)), &found)
    }

    /// As [`Self::open`], with another disk, which holds `found`; `config.disk` says how many threads and chunks it has.
    #[doc(hidden)]
    pub fn with_disk(config: &StoreConfig, disk: Arc<dyn LocalTier>, found: &[DiskEntry]) -> Result<Self> {
        Self::build(config, Some(disk), found)
    }

    fn build(config: &StoreConfig, disk: Option<Arc<dyn LocalTier>>, found: &[DiskEntry]) -> Result<Self> {
        let num_frames = config.num_frames()?;
        let host = HostTier::create(config.frame_bytes, num_frames)?;
        let arena_path = host.arena().path();
        let cap_bytes = config.disk.as_ref().map_or(0, |disk| disk.cap_bytes);
        let num_slots = usize::try_from(cap_bytes / config.frame_bytes).unwrap_or(usize::MAX);
        let disk_policy = disk.as_ref().map(|_| config.eviction.policy(num_slots));
        let mut state = State::new(host, config.eviction.policy(num_frames as usize), disk_policy);
        if disk.is_some() {
            state.recover(found, config.blocks_per_chunk);
        }
        let inner = Arc::new(Inner {
            state: Mutex::new(state),
            work: Condvar::new(),
            idle: Condvar::new(),
            disk,
            arena_path,
            frame_bytes: config.frame_bytes,
            num_frames,
            blocks_per_chunk: config.blocks_per_chunk,
        });
        // Dropped with what threads it has, should one more not start.
        let mut store = Self { inner, threads: Mutex::default() };
        for nth in 0..config.disk.as_ref().map_or(0, |disk| disk.num_threads) {
            let thread = threads::spawn(&store.inner, nth)?;
            store.threads.get_mut().unwrap_or_else(PoisonError::into_inner).extend(thread);
        }
        Ok(store)
    }

    /// Path that another process of this user may map, see [`crate::io::Arena::open`].
    pub fn arena_path(&self) -> &str {
        &self.inner.arena_path
    }

    /// Bytes of one frame.
    pub fn frame_bytes(&self) -> u64 {
        self.inner.frame_bytes
    }

    /// Frames in host memory.
    pub fn num_frames(&self) -> u32 {
        self.inner.num_frames
    }

    /// Blocks in a full chunk.
    pub fn blocks_per_chunk(&self) -> u32 {
        self.inner.blocks_per_chunk
    }

    fn chunks<'a>(&self, chain: &'a KeyChain) -> Chunks<'a> {
        Chunks::new(chain, self.inner.blocks_per_chunk)
    }

    /// How much of the chain is stored: full chunks, then the longest tail behind them. No side effect (I9).
    pub fn lookup(&self, chain: &KeyChain) -> Lookup {
        let chunks = self.chunks(chain);
        let Some(state) = self.inner.books().filter(|state| !state.closed) else { return Lookup::default() };
        let (host, any) = state.find(&chunks);
        Lookup { host_blocks: host.blocks(chunks.per_chunk()), stored_blocks: any.blocks(chunks.per_chunk()) }
    }

    /// Pins what is in host of the chain's stored prefix and starts to read the rest of it from disk, as far as frames can
    /// be had.
    pub fn acquire(&self, chain: &KeyChain) -> ReadLease {
        let chunks = self.chunks(chain);
        let held = self.inner.with_open_books(|state| state.acquire(&chunks));
        ReadLease::new(Arc::clone(&self.inner), held)
    }

    /// Reserves frames for those chunks of `range` that are neither in host nor being filled.
    ///
    /// It stops at the first that cannot be had. `InvalidConfig` if the chain has not got the range.
    pub fn reserve(&self, chain: &KeyChain, range: SaveRange) -> Result<Reserved> {
        let chunks = self.chunks(chain);
        let wanted = range.check(&chunks)?;
        let Some((reserved, num_dropped)) = self.inner.with_open_books(|state| state.reserve(&chunks, range)) else {
            return Ok(Reserved { leases: Vec::new(), num_dropped: wanted });
        };
        let lease = |(id, reservation)| WriteLease::new(Arc::clone(&self.inner), id, reservation);
        Ok(Reserved { leases: reserved.into_iter().map(lease).collect(), num_dropped })
    }

    /// Makes filled chunks visible; returns how many became so. One whose parent is gone is aborted; one whose parent is
    /// not visible yet becomes visible with it. Leases of another store are aborted.
    pub fn commit(&self, leases: impl IntoIterator<Item = WriteLease>) -> u32 {
        let (own, foreign): (Vec<_>, Vec<_>) = leases.into_iter().partition(|lease| lease.is_of(&self.inner));
        drop(foreign);
        let ids: Vec<_> = own.into_iter().map(WriteLease::disarm).collect();
        self.inner.with_books(|state| ids.into_iter().map(|id| state.commit(id)).sum()).unwrap_or(0)
    }

    /// Forgets chunks and all that hangs on them, in every tier. Pinned ones cannot be found any more and are freed with
    /// their last pin. Returns how many were forgotten.
    pub fn discard(&self, keys: &[ChunkKey]) -> u64 {
        self.inner.with_books(|state| state.discard(keys)).unwrap_or(0)
    }

    /// Forgets everything in every tier. Pinned and reserved frames are freed when their owners end.
    ///
    /// Nothing is found from the moment it is called. It waits for the disk, some seconds at most, so that nothing comes
    /// back after a restart either.
    pub fn clear(&self) {
        if self.inner.with_books(State::clear).is_some() {
            let cleared = |state: &State| state.disk.as_ref().is_none_or(|disk| !disk.is_clearing() || disk.stopping);
            self.inner.wait(Instant::now() + CLEAR_TIMEOUT, cleared);
        }
    }

    /// Counters and gauges by name; all 0 after an internal failure.
    pub fn stats(&self) -> Vec<(&'static str, u64)> {
        let (counters, gauges) =
            self.inner.books().map_or_else(Default::default, |state| (state.counters, state.gauges()));
        counters.named().into_iter().chain(gauges.named()).collect()
    }

    /// Waits until every visible chunk that will get to disk is there and every forgotten one is not; false at the deadline.
    pub fn flush(&self, timeout: Duration) -> bool {
        let settled = |state: &State| state.disk.as_ref().is_none_or(disk::DiskBooks::is_settled);
        let stopped = |state: &State| state.disk.as_ref().is_some_and(|disk| disk.stopping);
        self.inner.wait(deadline(timeout), |state| settled(state) || stopped(state))
            && self.inner.books().is_some_and(|state| settled(&state))
    }

    /// Stops serving (lookups miss, reservations are dropped), writes what still has to get to disk until the timeout, and
    /// stops the disk threads. Leases end as ever. Again does nothing.
    pub fn close(&self, timeout: Duration) {
        self.inner.with_books(|state| state.closed = true);
        self.flush(timeout);
        self.inner.with_books(State::stop);
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        threads::join(threads, LAST_JOB_TIMEOUT);
        if let Some(disk) = &self.inner.disk {
            disk.close();
        }
    }

    /// Counts everything again and compares; for tests. The error is the first contradiction.
    #[doc(hidden)]
    pub fn check(&self) -> Result<(), String> {
        self.inner.books().ok_or_else(|| "the store failed".to_owned())?.check()
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.close(Duration::ZERO);
    }
}

/// A deadline that may be asked for with any timeout.
fn deadline(timeout: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(timeout).unwrap_or(now + Duration::from_secs(1 << 30))
}

#[cfg(test)]
mod tests;
