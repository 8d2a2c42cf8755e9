//! [`Store`] and the methods that open, flush and close it.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::io::FRAME_ALIGN;
use crate::pool::Pool;
use crate::store::config::{ArenaInfo, StoreConfig};
use crate::store::disk::threads;
use crate::store::disk::work::DiskOpening;
use crate::store::locked::{Clock, Locked, Opener};
use crate::store::state::State;
use crate::store::tenants::limits::{Bases, Table};
use crate::store::tenants::sweeper;
use crate::sync::thread::JoinHandle;
use crate::sync::{Condvar, Mutex, join, locked};
use crate::tier::disk::{DiskRoot, DiskTier};
use crate::tier::host::HostTier;
use crate::{ErrorKind, Result};

/// How long a closing store waits for jobs still running on disk threads.
const LAST_JOB_TIMEOUT: Duration = Duration::from_millis(800);
/// How long an embedded store waits for the disk to open before it starts without a disk tier.
const FIRST_TIMEOUT: Duration = Duration::from_secs(10);
/// Like `FIRST_TIMEOUT`, but for a store on a server, where the wait blocks calls for other
/// namespaces.
const FIRST_TIMEOUT_ON_SERVER: Duration = Duration::from_secs(1);
/// Maximum number of on-disk chunks for which the index reserves memory up front.
const MAX_RESERVED: usize = 1 << 24;

/// The host arena, optional disk tier and index of one namespace. All methods are thread-safe.
///
/// Dropping the store stops each disk thread after its current job. Chunks not yet on disk are
/// lost.
#[derive(Debug)]
pub struct Store {
    pub(crate) inner: Arc<Locked>,
    pub(crate) threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Store {
    /// Allocates host memory and opens the disk tier. Waits up to ten seconds for the disk.
    ///
    /// If an I/O error or another process keeps the disk tier from opening, the store logs an
    /// event, serves from host memory and retries. Returns `InvalidConfig` with a message that
    /// names the invalid setting, or `Io` if memory cannot be allocated or a thread cannot be
    /// started.
    pub fn open(config: &StoreConfig) -> Result<Self> {
        Self::with_tier(config, None, Self::opener(config, &Arc::default())?, Self::clock())
    }

    /// Like [`Self::open`], but takes host memory from a pool that several stores can share. The
    /// store gets `percent` of the pool, or an equal share if `percent` is None.
    ///
    /// Ignores `config.host_bytes` and waits only one second for the disk. Also returns
    /// `InvalidConfig` if a frame does not fit in the pool's slabs.
    pub fn open_in(config: &StoreConfig, pool: &Arc<Pool>, percent: Option<u32>) -> Result<Self> {
        let opener = Self::opener(config, &pool.disk)?;
        Self::with_tier(config, Some((pool, percent)), opener, Self::clock())
    }

    /// Returns a clock that keeps running while the machine is suspended, so that chunks keep
    /// aging.
    fn clock() -> Clock {
        let now = || {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
            Duration::new(
                u64::try_from(now.tv_sec).unwrap_or(0),
                u32::try_from(now.tv_nsec).unwrap_or(0),
            )
        };
        let start = now();
        Box::new(move || now().saturating_sub(start))
    }

    fn opener(config: &StoreConfig, root: &Arc<DiskRoot>) -> Result<Option<Opener>> {
        let Some(settings) = &config.disk else { return Ok(None) };
        let (tier, root) = (settings.tier(config)?, Arc::clone(root));
        Ok(Some(Box::new(move || {
            let (disk, found) = DiskTier::open_in(&tier, &root)?;
            Ok((Arc::new(disk), found))
        })))
    }

    /// Like [`Self::open`] or [`Self::open_in`], but with the given clock and disk tier. Only the
    /// number of disk threads and the capacity are taken from `config.disk`.
    #[doc(hidden)]
    pub fn with_tier(
        config: &StoreConfig,
        share: Option<(&Arc<Pool>, Option<u32>)>,
        opener: Option<Opener>,
        clock: Clock,
    ) -> Result<Self> {
        let host_bytes = share.map_or(config.host_bytes, |(pool, _)| pool.size_bytes());
        let config = StoreConfig { host_bytes, ..config.clone() };
        config.check("host_size")?; // invalid settings must not create a directory
        let host = match share {
            None => HostTier::create(host_bytes, &config.frame_sizes)?,
            Some((pool, percent)) => HostTier::join(pool, percent, &config.frame_sizes)?,
        };
        let arena = ArenaInfo {
            path: host.arena().path(),
            id: host.arena().id()?,
            size_bytes: host.arena().size_bytes(),
            slab_bytes: host.member.pool.slab_bytes(),
            lifeline: None,
        };
        let mut state = configured(&config, host, opener.is_some())?;
        state.set_time(clock());
        let num_threads = state.disk.num_threads;
        let inner = Arc::new(Locked {
            state: Mutex::new(state),
            work: Condvar::new(),
            idle: Condvar::new(),
            sweep: Condvar::new(),
            disk: Mutex::default(),
            opener,
            clock,
            arena,
        });
        // If a thread fails to start, dropping the store stops the threads already running.
        let mut store = Self { inner, threads: Mutex::default() };
        let threads = store.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
        for nth in 0..num_threads {
            threads.push(threads::spawn(&store.inner, nth)?);
        }
        if config.limits.is_set() {
            threads.push(sweeper::spawn(&store.inner)?);
        }
        if num_threads > 0 {
            let is_alone = share.is_none();
            store.await_disk(if is_alone { FIRST_TIMEOUT } else { FIRST_TIMEOUT_ON_SERVER })?;
        }
        Ok(store)
    }

    /// Waits up to `timeout` for the first attempt to open the tier, then indexes the chunks it
    /// found. Returns `InvalidConfig` if the tier can never open with these settings.
    fn await_disk(&self, timeout: Duration) -> Result<()> {
        let is_over = |state: &State| Some(state.disk.first_opening.is_some());
        self.inner.wait(Instant::now() + timeout, is_over);
        let outcome = self.inner.with_state(|state| {
            state.report_slow_opening(timeout);
            while state.recover_some() {}
            state.disk.first_opening.take_if(|outcome| outcome.is_err())
        });
        match outcome.flatten() {
            Some(Err(error)) if error.kind() == ErrorKind::InvalidConfig => Err(error),
            _ => Ok(()),
        }
    }

    /// Waits until all visible chunks are written or dropped and all removed chunks are off the
    /// disk.
    ///
    /// Returns false on timeout, or earlier if the flush cannot finish in time, for example because
    /// writes are paused past the timeout.
    pub fn flush(&self, timeout: Duration) -> bool {
        let (start, start_time) = (Instant::now(), (self.inner.clock)());
        let deadline = start_time.saturating_add(timeout);
        let settled = |state: &State| {
            let is_settled = state.disk.is_settled();
            (is_settled || !state.disk.cannot_settle_by(deadline)).then_some(is_settled)
        };
        self.inner.wait(
            start.checked_add(timeout).unwrap_or(start + Duration::from_secs(1 << 30)),
            settled,
        )
    }

    /// Stops serving (lookups miss, saves get no frames), writes the remaining chunks to disk until
    /// the timeout, and stops the threads.
    ///
    /// A hung disk thread is detached and exits once its system call returns. Leases remain valid.
    /// A second call has no effect.
    pub fn close(&self, timeout: Duration) {
        self.inner.with_state(|state| state.closed = true);
        self.flush(timeout);
        self.inner.with_state(|state| state.disk.stopping = true);
        self.inner.work.notify_all();
        self.inner.sweep.notify_all();
        let threads = std::mem::take(&mut *locked(&self.threads));
        join(threads, Instant::now() + LAST_JOB_TIMEOUT);
        if let Some(disk) = self.inner.tier() {
            disk.close();
        }
    }
}

fn configured(config: &StoreConfig, host: HostTier, has_disk: bool) -> Result<State> {
    let disk = config.disk.as_ref().filter(|_| has_disk);
    let cap_bytes = disk.map_or(0, |disk| disk.cap_bytes);
    let num_frames = config.num_frames("host_size")? as usize;
    let num_slots = usize::try_from(cap_bytes / config.frame_sizes.average()).unwrap_or(usize::MAX);
    let policy = |capacity| config.eviction.policy(capacity);
    let mut state = State::new(host, policy(num_frames), policy(num_slots));
    state.index.reserve(num_frames + num_slots.min(MAX_RESERVED));
    state.disk.num_threads = disk.map_or(0, |disk| disk.num_threads) as usize;
    if disk.is_some() {
        state.disk.opening = DiskOpening::NotBefore(Duration::ZERO);
    }
    state.opened_s = u32::try_from(config.now_s).unwrap_or(u32::MAX);
    let bases = Bases { host: 0, disk: cap_bytes / FRAME_ALIGN };
    let frame_pages = config.frame_sizes.largest() / FRAME_ALIGN;
    state.tenants.limits = Table::new(&config.limits, frame_pages, bases);
    state.update_bases();
    Ok(state)
}

impl Drop for Store {
    fn drop(&mut self) {
        self.close(Duration::ZERO);
    }
}
