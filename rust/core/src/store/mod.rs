//! The store: lookup, lease, reserve, commit.
//!
//! One index over the tiers behind one lock. No call waits for a disk but those that say so. A store that failed inside
//! (a panic under the lock) answers with misses from then on. It must not know Python, tokens' meaning or what pages hold.

mod ages;
mod books;
mod breaker;
mod changes;
mod config;
mod disk;
mod evict;
mod forget;
mod inner;
mod jobs;
mod lease;
mod limits;
mod load;
mod lookup;
mod owners;
mod quota;
mod recover;
mod save;
mod share;
mod state;
mod stats;
mod tend;
#[cfg(any(test, feature = "faults"))]
mod tests;
mod threads;

use std::sync::{Arc, OnceLock, PoisonError};
use std::time::{Duration, Instant};

pub use ages::erase_expired;
use books::Clearing;
pub use changes::{Changes, Listener, Tiers};
pub use config::{ArenaInfo, DiskSettings, StoreConfig};
pub use evict::{Evict, Evicted, erase_closed};
use inner::Inner;
pub use inner::{Clock, Opener};
pub use lease::{ReadLease, WriteLease};
use limits::{Bases, Table};
pub use limits::{Limits, Quota, TenantLimits};
pub use load::{LeasedFrame, Progress, TierName};
pub use lookup::{Anchors, Prefix};
pub use owners::Kept;
pub use quota::Tenant;
pub use save::{Got, Reservation, SaveRange, ToSave};
pub use share::Way;
use state::State;

use crate::key::ChunkKey;
use crate::pool::Pool;
use crate::sync::thread::JoinHandle;
use crate::sync::{Condvar, Mutex};
use crate::tier::disk::{DiskRoot, DiskTier};
use crate::tier::host::HostTier;
use crate::{ErrorKind, Result};

/// Longest wait for disk threads that are inside a job when the store ends.
const LAST_JOB_TIMEOUT: Duration = Duration::from_millis(800);
/// Longest wait of `clear` for the disk; it is cleared later where that is not enough.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(5);
/// Chunks on disk that the index has room for from the start.
const MAX_RESERVED: usize = 1 << 24;

/// Host arena, optional disk tier and index of one process. All methods take `&self` and may be called from any thread.
///
/// Dropping it stops the disk threads after their job at hand; what was not on disk by then is not there.
#[derive(Debug)]
pub struct Store {
    inner: Arc<Inner>,
    threads: Mutex<Vec<JoinHandle<()>>>,
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
    /// In order of the prefix; of attached chunks the first block is their place in what was asked.
    pub leases: Vec<WriteLease>,
    /// The first chunk without a frame or a parent, and all behind it.
    pub num_dropped: u32,
}

impl Store {
    /// Takes the memory and opens the disk tier. `InvalidConfig` names the setting that is wrong; `Io` if the system refuses
    /// memory or threads. A disk tier that cannot be opened for another reason (another owner, an I/O error) is an event, and
    /// is tried again while the store serves from host memory.
    pub fn open(config: &StoreConfig) -> Result<Self> {
        let opener = Self::opener(config, &Arc::default())?;
        Self::with_tier(config, opener, Self::clock())
    }

    /// Of time since the machine was booted, suspended or not: what is too old after a day is so, too, if most of it was slept.
    fn clock() -> Clock {
        let now = || {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
            Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
        };
        let start = now();
        Box::new(move || now().saturating_sub(start))
    }

    /// What opens the disk tier, if there is one.
    fn opener(config: &StoreConfig, root: &Arc<DiskRoot>) -> Result<Option<Opener>> {
        let Some(settings) = &config.disk else { return Ok(None) };
        config.num_frames()?; // before a directory is made for a store that cannot be
        let (tier, root) = (settings.tier(config)?, Arc::clone(root));
        Ok(Some(Box::new(move || {
            let (disk, found) = DiskTier::open_beside(&tier, &root)?;
            Ok((Arc::new(disk), found))
        })))
    }

    /// As [`Self::open`], with another clock, and another disk for which `config.disk` says how many threads and chunks it has.
    #[doc(hidden)]
    pub fn with_tier(config: &StoreConfig, opener: Option<Opener>, clock: Clock) -> Result<Self> {
        Self::build(config, None, opener, clock)
    }

    fn build(
        config: &StoreConfig,
        share: Option<(&Arc<Pool>, Option<u32>)>,
        opener: Option<Opener>,
        clock: Clock,
    ) -> Result<Self> {
        let num_frames = config.num_frames()?;
        let host = match share {
            None => HostTier::create(config.frame_bytes, num_frames)?,
            Some((pool, percent)) => HostTier::join(pool, percent, config.frame_bytes, num_frames)?,
        };
        let arena = ArenaInfo {
            path: host.arena().path(),
            id: host.arena().id()?,
            frame_bytes: config.frame_bytes,
            num_frames,
        };
        let settings = config.disk.as_ref().filter(|_| opener.is_some());
        let cap_bytes = settings.map_or(0, |disk| disk.cap_bytes);
        let num_slots = usize::try_from(cap_bytes / config.frame_bytes).unwrap_or(usize::MAX);
        let policy = |capacity| config.eviction.policy(capacity);
        let mut state = State::new(host, config.blocks_per_chunk, policy(num_frames as usize), policy(num_slots));
        // A table that grows later would hold everybody up. Memory that is not used is not touched.
        state.index.reserve(num_frames as usize + num_slots.min(MAX_RESERVED));
        let num_threads = settings.map_or(0, |disk| disk.num_threads);
        state.disk.num_threads = num_threads as usize;
        state.opened_s = u32::try_from(config.now_s).unwrap_or(u32::MAX);
        state.set_time(clock());
        let bases = Bases { host: 0, disk: cap_bytes / config.frame_bytes };
        state.owners.limits = Table::new(&config.limits, config.frame_bytes, bases);
        state.look_at_bases();
        let disk = OnceLock::new();
        match opener.as_ref().map(|open| open()) {
            None => {}
            Some(Ok((tier, found))) => {
                state.attach(found);
                while state.recover_some() {}
                disk.get_or_init(|| tier);
            }
            Some(Err(error)) if error.kind() == ErrorKind::InvalidConfig => return Err(error),
            Some(Err(error)) => state.postpone(threads::FIRST_REOPEN, &error.to_string()),
        }
        let inner = Arc::new(Inner {
            state: Mutex::new(state),
            work: Condvar::new(),
            idle: Condvar::new(),
            tend: Condvar::new(),
            disk,
            opener,
            clock,
            arena,
        });
        // Dropped with what threads it has, should one more not start.
        let mut store = Self { inner, threads: Mutex::default() };
        let threads = store.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
        for nth in 0..num_threads {
            threads.push(threads::spawn(&store.inner, nth)?);
        }
        if config.limits.is_set() {
            threads.push(tend::spawn(&store.inner)?);
        }
        Ok(store)
    }

    /// How another process of this user maps the frames.
    pub fn arena(&self) -> &ArenaInfo {
        &self.inner.arena
    }

    /// How much of the prefix is stored: full chunks, then the longest tail behind them; of a disk that is left alone, nothing.
    /// Asking is free (I9).
    pub fn lookup<'a>(&self, prefix: impl Into<Prefix<'a>>) -> Lookup {
        self.lookup_many(&[prefix.into()]).pop().unwrap_or_default()
    }

    /// The same of many, at one moment.
    pub fn lookup_many(&self, prefixes: &[Prefix<'_>]) -> Vec<Lookup> {
        let find = |state: &mut State| prefixes.iter().map(|prefix| state.find(prefix)).collect();
        let found: Option<Vec<_>> = self.inner.with_open_books(find);
        let of = |(host_blocks, stored_blocks)| Lookup { host_blocks, stored_blocks };
        found.unwrap_or_else(|| vec![(0, 0); prefixes.len()]).into_iter().map(of).collect()
    }

    /// How many of a prefix's `anchors` are stored and known: ends of some full chunks, in blocks, with their keys, in order. Behind
    /// a known one a prefix needs no other keys (see [`Prefix::first`]).
    pub fn anchors(&self, anchors: &[(u32, ChunkKey)]) -> Anchors {
        self.inner.with_open_books(|state| state.anchors(anchors)).unwrap_or_default()
    }

    /// Pins what is in host of the stored part of a prefix, and wants the rest of it from disk. A read takes a frame when it
    /// begins; the lease ends before a chunk that no frame can be had for, or that cannot be read.
    pub fn acquire<'a>(&self, prefix: impl Into<Prefix<'a>>) -> ReadLease {
        self.acquire_all(&[prefix.into()])
    }

    /// The same of many, as one lease: it counts blocks of all of them.
    pub fn acquire_all(&self, prefixes: &[Prefix<'_>]) -> ReadLease {
        let hold = |state: &mut State| prefixes.iter().map(|prefix| state.acquire(prefix)).collect();
        ReadLease::new(Arc::clone(&self.inner), self.inner.with_open_books(hold))
    }

    /// Reserves frames for those chunks of `range` that are neither in host nor being filled.
    ///
    /// It stops at the first that cannot be had. `InvalidConfig` if the prefix has not got the range.
    pub fn reserve<'a>(&self, prefix: impl Into<Prefix<'a>>, range: SaveRange) -> Result<Reserved> {
        let (leases, got) = self.reserve_many(None, &[(prefix.into(), range).into()])?;
        Ok(Reserved { leases, num_dropped: got[0].num_dropped })
    }

    /// As [`Self::reserve`] for many: the leases of all, one prefix's after the other's, and how many are whose. With a `limit`,
    /// saves take frames below it only from now on. Nothing is reserved if one prefix has not got its range.
    pub fn reserve_many(&self, limit: Option<u32>, asked: &[ToSave<'_>]) -> Result<(Vec<WriteLease>, Vec<Got>)> {
        let reserved = self.inner.with_open_books(|state| {
            if let Some(limit) = limit {
                state.host.limit(limit);
            }
            asked.iter().try_for_each(|each| each.range.check(&each.prefix, state.per_chunk))?;
            state.warm(asked);
            let mut reserved = Vec::with_capacity(asked.len());
            let got = asked.iter().map(|each| state.reserve(each, &mut reserved)).collect();
            Ok((reserved, got))
        });
        let none = || asked.iter().map(|each| Got { num_reserved: 0, num_dropped: each.range.num_chunks() }).collect();
        let (reserved, got) = reserved.unwrap_or_else(|| Ok((Vec::new(), none())))?;
        let lease = |(id, reservation)| WriteLease::new(Arc::clone(&self.inner), id, reservation);
        Ok((reserved.into_iter().map(lease).collect(), got))
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
    /// their last pin. Returns how many are forgotten already; what hangs on a large one is forgotten piece by piece.
    pub fn discard(&self, keys: &[ChunkKey]) -> u64 {
        self.inner.with_books(|state| state.discard(keys)).unwrap_or(0)
    }

    /// Forgets everything in every tier. Pinned and reserved frames are freed when their owners end.
    ///
    /// Nothing is found from the moment it is called. It waits some seconds at most for the disk, so that nothing comes back
    /// after a restart either; a disk that does not answer is cleared later, and an event says so.
    pub fn clear(&self) {
        self.inner.with_books(State::clear);
        let cleared = |state: &State| {
            let is_cleared = state.disk.clearing == Clearing::No;
            (is_cleared || !state.disk.is_hopeless(state.now)).then_some(is_cleared)
        };
        if !self.inner.wait(Instant::now() + CLEAR_TIMEOUT, cleared) {
            self.inner.with_books(|state| {
                state.tell("the disk tier is not cleared yet; until it is, a restart finds its chunks".to_owned());
            });
        }
    }

    /// Whether a clear has not reached the disk yet.
    pub fn is_clearing(&self) -> bool {
        self.inner.with_books(|state| state.disk.clearing != Clearing::No).unwrap_or(false)
    }

    /// Saves take frames below `num_frames` only from now on: workers cannot copy to the others yet. Reads from disk take any.
    pub fn limit_frames(&self, num_frames: u32) {
        self.inner.with_books(|state| state.host.limit(num_frames));
    }

    /// What a person should see in the log since the last call, oldest first: each once, and not many.
    pub fn take_events(&self) -> Vec<String> {
        let mut events = self.inner.with_books(|state| std::mem::take(&mut state.events)).unwrap_or_default();
        events.extend(self.inner.disk.get().map(|disk| disk.take_events()).unwrap_or_default());
        events
    }

    /// Counters and gauges by name; all 0 after an internal failure.
    pub fn stats(&self) -> Vec<(&'static str, u64)> {
        self.inner.books().map(|state| state.stats()).unwrap_or_default().named()
    }

    /// Waits until every visible chunk that will get to disk is there and every forgotten one is not; false at the deadline, or
    /// as soon as it cannot be met because the disk is left alone for longer.
    pub fn flush(&self, timeout: Duration) -> bool {
        let (start, start_time) = (Instant::now(), (self.inner.clock)());
        let deadline = start_time.saturating_add(timeout);
        let settled = |state: &State| {
            let is_settled = state.disk.is_settled();
            (is_settled || !state.disk.is_hopeless(deadline)).then_some(is_settled)
        };
        self.inner.wait(start.checked_add(timeout).unwrap_or(start + Duration::from_secs(1 << 30)), settled)
    }

    /// Stops serving (lookups miss, reservations are dropped), writes what still has to get to disk until the timeout, and
    /// stops the disk threads; one that hangs is left behind, and ends by itself. Leases end as before. Again does nothing.
    pub fn close(&self, timeout: Duration) {
        self.inner.with_books(|state| state.closed = true);
        self.flush(timeout);
        self.inner.with_books(|state| state.disk.stopping = true);
        self.inner.work.notify_all();
        self.inner.tend.notify_all();
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        threads::join(threads, LAST_JOB_TIMEOUT);
        if let Some(disk) = self.inner.disk.get() {
            disk.close();
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.close(Duration::ZERO);
    }
}
