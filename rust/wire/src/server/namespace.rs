//! A namespace on a server: its store (opened when the first engine connects), its engines, and
//! its lookup, load and save counters.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kvloft_core::Result;
use kvloft_core::key::{namespace_hex, namespace_id};
use kvloft_core::pool::Pool;
use kvloft_core::session::Local;
use kvloft_core::store::{Store, StoreConfig};

use crate::protocol::Hello;
use crate::protocol::admin::Stats;
use crate::server::config::ServerConfig;
use crate::threads::locked;

#[derive(Debug)]
pub(crate) struct Namespace {
    pub(crate) hello: Hello,
    /// None until the store is opened for the first engine.
    store: OnceLock<Arc<Store>>,
    opening: Mutex<()>,
    engines: Mutex<EngineCount>,
    /// Counters, summed over all engines that have ever joined the namespace.
    pub(crate) counters: Counters,
}

/// Number of engines in a namespace, and the time at which that number last changed.
#[derive(Debug)]
struct EngineCount {
    num: usize,
    changed: Instant,
}

/// An engine's membership in a namespace, including its reservations and leases.
#[derive(Debug)]
pub(crate) struct Membership {
    pub(crate) namespace: Arc<Namespace>,
    pub(crate) local: Local,
}

impl Namespace {
    pub(crate) fn new(hello: &Hello) -> Self {
        let (store, opening) = (OnceLock::new(), Mutex::default());
        let engines = Mutex::new(EngineCount { num: 0, changed: Instant::now() });
        Self { hello: hello.clone(), store, opening, engines, counters: Counters::default() }
    }

    /// Returns the first 16 hex digits of the namespace: its id in logs and `kvloft status`, and
    /// the name of its disk directory.
    pub(crate) fn id(&self) -> String {
        namespace_id(&self.hello.namespace)
    }

    pub(crate) fn store(&self) -> Option<&Arc<Store>> {
        self.store.get()
    }

    pub(crate) fn is_for(&self, hello: &Hello) -> bool {
        self.hello.namespace == hello.namespace && self.hello.frame_sizes == hello.frame_sizes
    }

    pub(crate) fn has_multiple_engines(&self) -> bool {
        locked(&self.engines).num > 1
    }

    pub(crate) fn has_engines(&self) -> bool {
        locked(&self.engines).num > 0
    }

    /// Returns the time at which the namespace became idle. Returns None if the namespace has an
    /// engine, or if removed chunks are still on disk, because closing and reopening the store
    /// would bring them back.
    pub(crate) fn idle_since(&self) -> Option<Instant> {
        let changed = Some(locked(&self.engines))
            .filter(|engines| engines.num == 0)
            .map(|engines| engines.changed);
        changed.filter(|_| !self.store().is_some_and(|store| store.must_stay_open()))
    }

    pub(crate) fn percent(&self, config: &ServerConfig) -> Option<u32> {
        let name = namespace_hex(&self.hello.namespace);
        config
            .shares
            .iter()
            .find(|(prefix, _)| name.starts_with(prefix))
            .map(|(_, percent)| *percent)
    }

    pub(crate) fn open(&self, pool: &Arc<Pool>, config: &ServerConfig) -> Result<Arc<Store>> {
        let _guard = locked(&self.opening);
        if let Some(store) = self.store.get() {
            return Ok(Arc::clone(store));
        }
        let store = Arc::new(Store::open_in(
            &store_config(&self.hello, config),
            pool,
            self.percent(config),
        )?);
        Ok(Arc::clone(self.store.get_or_init(|| store)))
    }

    /// Adds an engine. The first engine entitles the namespace to a share of memory.
    pub(crate) fn add_engine(&self) {
        let mut engines = locked(&self.engines);
        *engines = EngineCount { num: engines.num + 1, changed: Instant::now() };
        if let (1, Some(store)) = (engines.num, self.store()) {
            store.set_active(true);
        }
    }

    pub(crate) fn remove_engine(&self) {
        let mut engines = locked(&self.engines);
        *engines = EngineCount { num: engines.num - 1, changed: Instant::now() };
        if let (0, Some(store)) = (engines.num, self.store()) {
            store.set_active(false);
        }
    }

    pub(crate) fn close(&self, timeout: Duration) {
        if let Some(store) = self.store() {
            store.close(timeout);
        }
    }
}

/// Returns the current Unix time in seconds.
pub fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

pub(crate) fn store_config(hello: &Hello, config: &ServerConfig) -> StoreConfig {
    let mut disk = config.disk.clone();
    if let Some(disk) = &mut disk {
        disk.description.clone_from(&hello.description);
    }
    StoreConfig {
        frame_sizes: hello.frame_sizes.clone(),
        host_bytes: config.host_bytes,
        eviction: config.eviction,
        available_bytes: None, // checked in `Namespaces::join`
        namespace: hello.namespace,
        disk,
        now_s: unix_s(),
        limits: config.limits.clone(),
    }
}

/// Identifies a counter. Engines report the last two counters.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Count {
    Lookups,
    LookupChunks,
    /// Number of chunks found in any tier.
    LookupChunksFound,
    LoadChunks,
    SaveChunks,
    /// Number of calls that got no response in time.
    LateCalls,
    /// Number of chunks whose saves were delayed by late calls.
    LateChunks,
}

/// Names of the counters in the status, in the same order as [`Count`].
const NAMES: [&str; 7] = [
    "lookups",
    "lookup_chunks",
    "lookup_chunks_found",
    "load_chunks",
    "save_chunks",
    "late_calls",
    "late_chunks",
];

/// Counters of one engine, or of all engines that have ever joined a namespace.
#[derive(Debug, Default)]
pub(crate) struct Counters([AtomicU64; NAMES.len()]);

impl Counters {
    pub(crate) fn add(&self, count: Count, num: u64) {
        self.0[count as usize].fetch_add(num, Ordering::Relaxed);
    }

    pub(crate) fn get(&self, count: Count) -> u64 {
        self.0[count as usize].load(Ordering::Relaxed)
    }

    pub(crate) fn stats(&self) -> Stats {
        let value = |number: &AtomicU64| number.load(Ordering::Relaxed);
        NAMES.iter().zip(&self.0).map(|(name, number)| ((*name).into(), value(number))).collect()
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        // Replacing `local` releases its reservations and leases before the engine is removed.
        if let Some(store) = self.namespace.store() {
            self.local = Local::of(Arc::clone(store));
        }
        self.namespace.remove_engine();
    }
}
