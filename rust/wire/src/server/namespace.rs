//! One namespace of a server: a store, opened for the first engine that asks, and the engines' seats in it. It must not know the others.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kvloft_core::Result;
use kvloft_core::pool::Pool;
use kvloft_core::session::Local;
use kvloft_core::store::{Store, StoreConfig};

use crate::protocol::Hello;
use crate::server::counters::Tally;
use crate::settings::ServerConfig;

/// One namespace: a store, and who uses it.
#[derive(Debug)]
pub(crate) struct Space {
    pub(crate) hello: Hello,
    /// None until it could be opened.
    store: OnceLock<Arc<Store>>,
    opening: Mutex<()>,
    seats: Mutex<Seats>,
    /// Of all engines that it ever had.
    pub(crate) tally: Tally,
}

/// How many engines a namespace has, and when one came or went last.
#[derive(Debug)]
struct Seats {
    num: usize,
    changed: Instant,
}

/// An engine's place in a namespace, with all that it holds there.
#[derive(Debug)]
pub(crate) struct Seat {
    pub(crate) space: Arc<Space>,
    pub(crate) local: Local,
}

/// What people call a namespace, and its directory: 16 hex digits.
pub(crate) fn id(namespace: &[u8; 32]) -> String {
    hex(namespace)[..16].to_owned()
}

pub(crate) fn hex(namespace: &[u8; 32]) -> String {
    namespace
        .as_chunks::<8>()
        .0
        .iter()
        .map(|part| format!("{:016x}", u64::from_be_bytes(*part)))
        .collect::<Vec<_>>()
        .concat()
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Space {
    pub(crate) fn new(hello: &Hello) -> Self {
        let (store, opening) = (OnceLock::new(), Mutex::default());
        let seats = Mutex::new(Seats { num: 0, changed: Instant::now() });
        Self { hello: hello.clone(), store, opening, seats, tally: Tally::default() }
    }

    pub(crate) fn store(&self) -> Option<&Arc<Store>> {
        self.store.get()
    }

    pub(crate) fn is_for(&self, hello: &Hello) -> bool {
        let of = |hello: &Hello| (hello.namespace, hello.frame_bytes, hello.blocks_per_chunk);
        of(&self.hello) == of(hello)
    }

    pub(crate) fn has_seats(&self) -> bool {
        locked(&self.seats).num > 0
    }

    /// Since when it has no engine; None where it has one, or owes its disk a clear: what that forgot would be found again.
    pub(crate) fn idle_since(&self) -> Option<Instant> {
        let changed = Some(locked(&self.seats)).filter(|seats| seats.num == 0).map(|seats| seats.changed);
        changed.filter(|_| !self.is_clearing())
    }

    fn is_clearing(&self) -> bool {
        self.store().is_some_and(|store| store.is_clearing())
    }

    /// Percent of host memory that is set for it.
    pub(crate) fn percent(&self, config: &ServerConfig) -> Option<u32> {
        let name = hex(&self.hello.namespace);
        config.shares.iter().find(|(prefix, _)| name.starts_with(prefix)).map(|(_, percent)| *percent)
    }

    pub(crate) fn open(&self, pool: &Arc<Pool>, config: &ServerConfig) -> Result<Arc<Store>> {
        let _alone = locked(&self.opening);
        if let Some(store) = self.store.get() {
            return Ok(Arc::clone(store));
        }
        let store = Arc::new(Store::open_in(&store_config(&self.hello, config), pool, self.percent(config))?);
        Ok(Arc::clone(self.store.get_or_init(|| store)))
    }

    /// One engine more; the first gives the namespace a share again.
    pub(crate) fn sit(&self) {
        let mut seats = locked(&self.seats);
        *seats = Seats { num: seats.num + 1, changed: Instant::now() };
        if let (1, Some(store)) = (seats.num, self.store()) {
            store.set_active(true);
        }
    }

    pub(crate) fn leave(&self) {
        let mut seats = locked(&self.seats);
        *seats = Seats { num: seats.num - 1, changed: Instant::now() };
        if let (0, Some(store)) = (seats.num, self.store()) {
            store.set_active(false);
        }
    }

    pub(crate) fn close(&self, timeout: Duration) {
        if let Some(store) = self.store() {
            store.close(timeout);
        }
    }
}

/// Unix time, in seconds.
pub(crate) fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

pub(crate) fn store_config(hello: &Hello, config: &ServerConfig) -> StoreConfig {
    let mut disk = config.disk.clone();
    if let Some(disk) = &mut disk {
        disk.description.clone_from(&hello.description);
    }
    StoreConfig {
        frame_bytes: hello.frame_bytes,
        host_bytes: config.host_bytes,
        blocks_per_chunk: hello.blocks_per_chunk,
        eviction: config.eviction,
        available_bytes: config.available_bytes,
        namespace: hello.namespace,
        disk,
        now_s: unix_s(),
        limits: config.limits.clone(),
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        // What it holds ends before its seat is free.
        if let Some(store) = self.space.store() {
            self.local = Local::of(Arc::clone(store));
        }
        self.space.leave();
    }
}
