//! A store's life: what it is made of, how it is opened, and how it ends.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::pool::Pool;
use crate::store::config::{ArenaInfo, StoreConfig};
use crate::store::disk::opener::{Opener, Opening};
use crate::store::disk::threads;
use crate::store::locked::{Clock, Locked};
use crate::store::state::State;
use crate::store::tenants::limits::{Bases, Table};
use crate::store::tenants::sweeper;
use crate::sync::thread::JoinHandle;
use crate::sync::{Condvar, Mutex};
use crate::tier::disk::{DiskRoot, DiskTier};
use crate::tier::host::HostTier;
use crate::{ErrorKind, Result};

/// Longest wait for disk threads that are inside a job when the store ends.
const LAST_JOB_TIMEOUT: Duration = Duration::from_millis(800);
/// Longest that an engine waits for its disk, which may hang, before it has host memory alone.
const FIRST_TIMEOUT: Duration = Duration::from_secs(10);
/// The same beside others, on a server: its other calls wait meanwhile.
const FIRST_TIMEOUT_BESIDE: Duration = Duration::from_secs(1);
/// Chunks on disk that the index has room for from the start.
const MAX_RESERVED: usize = 1 << 24;

/// Host arena, optional disk tier and index of one process. All methods take `&self` and may be called from any thread.
///
/// Dropping it stops the disk threads after their job at hand; what was not on disk by then is not there.
#[derive(Debug)]
pub struct Store {
    pub(crate) inner: Arc<Locked>,
    pub(crate) threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Store {
    /// Takes the memory and opens the disk tier. `InvalidConfig` names the setting that is wrong; `Io` if the system refuses
    /// memory or threads. A disk tier that cannot be opened for another reason (another owner, an I/O error) is an event, and
    /// is tried again while the store serves from host memory; one that takes long to open is waited for for ten seconds.
    pub fn open(config: &StoreConfig) -> Result<Self> {
        let opener = Self::opener(config, &Arc::default())?;
        Self::with_tier(config, opener, Self::clock())
    }

    /// As [`Self::open`], with another clock, and another disk for which `config.disk` says how many threads and chunks it has.
    #[doc(hidden)]
    pub fn with_tier(config: &StoreConfig, opener: Option<Opener>, clock: Clock) -> Result<Self> {
        Self::build(config, None, opener, clock)
    }

    /// Of time since the machine was booted, suspended or not: what is too old after a day is so, too, if most of it was slept.
    pub(crate) fn clock() -> Clock {
        let now = || {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
            Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
        };
        let start = now();
        Box::new(move || now().saturating_sub(start))
    }

    /// What opens the disk tier, if there is one.
    pub(crate) fn opener(config: &StoreConfig, root: &Arc<DiskRoot>) -> Result<Option<Opener>> {
        let Some(settings) = &config.disk else { return Ok(None) };
        config.num_frames()?; // before a directory is made for a store that cannot be
        let (tier, root) = (settings.tier(config)?, Arc::clone(root));
        Ok(Some(Box::new(move || {
            let (disk, found) = DiskTier::open_beside(&tier, &root)?;
            Ok((Arc::new(disk), found))
        })))
    }

    pub(crate) fn build(
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
            lifeline: None,
        };
        let settings = config.disk.as_ref().filter(|_| opener.is_some());
        let cap_bytes = settings.map_or(0, |disk| disk.cap_bytes);
        let num_slots = usize::try_from(cap_bytes / config.frame_bytes).unwrap_or(usize::MAX);
        let policy = |capacity| config.eviction.policy(capacity);
        let mut state = State::new(host, policy(num_frames as usize), policy(num_slots));
        state.index.reserve(num_frames as usize + num_slots.min(MAX_RESERVED));
        let num_threads = settings.map_or(0, |disk| disk.num_threads);
        state.disk.num_threads = num_threads as usize;
        state.opened_s = u32::try_from(config.now_s).unwrap_or(u32::MAX);
        state.set_time(clock());
        let bases = Bases { host: 0, disk: cap_bytes / config.frame_bytes };
        state.tenants.limits = Table::new(&config.limits, config.frame_bytes, bases);
        state.update_bases();
        let (mut disk, opener) = (None, opener.map(Arc::new));
        let opening = opener.as_ref().map(Opening::begin).transpose()?;
        let timeout = if share.is_some() { FIRST_TIMEOUT_BESIDE } else { FIRST_TIMEOUT };
        let first = opening.as_ref().and_then(|opening| opening.wait(timeout));
        let late = Mutex::new(opening.filter(|_| first.is_none()));
        match first {
            None if opener.is_some() => state.open_later(timeout),
            None => {}
            Some(Ok((tier, found))) => {
                state.attach(found);
                while state.recover_some() {}
                disk = Some(tier);
            }
            Some(Err(error)) if error.kind() == ErrorKind::InvalidConfig => return Err(error),
            Some(Err(error)) => state.postpone(threads::FIRST_REOPEN, &error.to_string()),
        }
        let inner = Arc::new(Locked {
            state: Mutex::new(state),
            work: Condvar::new(),
            idle: Condvar::new(),
            tend: Condvar::new(),
            disk: Mutex::new(disk),
            opener,
            late,
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
            threads.push(sweeper::spawn(&store.inner)?);
        }
        Ok(store)
    }

    /// Waits until every visible chunk that will get to disk is there and every forgotten one is not; false at the deadline, or
    /// as soon as it cannot be met because the disk is left alone for longer.
    pub fn flush(&self, timeout: Duration) -> bool {
        let (start, start_time) = (Instant::now(), (self.inner.clock)());
        let deadline = start_time.saturating_add(timeout);
        let settled = |state: &State| {
            let is_settled = state.disk.is_settled();
            (is_settled || !state.disk.cannot_settle_by(deadline)).then_some(is_settled)
        };
        self.inner.wait(start.checked_add(timeout).unwrap_or(start + Duration::from_secs(1 << 30)), settled)
    }

    /// Stops serving (lookups miss, reservations are dropped), writes what still has to get to disk until the timeout, and
    /// stops the disk threads; one that hangs is left behind, and ends by itself. Leases end as before. Again does nothing.
    pub fn close(&self, timeout: Duration) {
        self.inner.with_state(|state| state.closed = true);
        self.flush(timeout);
        self.inner.with_state(|state| state.disk.stopping = true);
        self.inner.work.notify_all();
        self.inner.tend.notify_all();
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        threads::join(threads, LAST_JOB_TIMEOUT);
        if let Some(disk) = self.inner.tier() {
            disk.close();
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.close(Duration::ZERO);
    }
}
