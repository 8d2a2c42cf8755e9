//! The store as the scheduler side uses it, in this process or on a server.
//!
//! A session takes roots and keys and returns numbers, so that it can cross a socket. Leases and
//! reservations belong to the session and end with it. Paged blocks and reports of ranks belong to
//! the engine: see `engine`.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use rustc_hash::FxHashMap;

use crate::key::ChunkKey;
use crate::numbered::Numbered;
use crate::store::{
    Anchors, Changes, LeasedFrame, Listener, Lookup, Prefix, Progress, ReadLease, Reservation,
    SaveCounts, SaveRequest, Store, StoreConfig, WriteLease,
};
pub use crate::store::{ArenaInfo, LifelineInfo};
use crate::{Event, Result};

/// The number of a read lease. A session never reuses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseId(pub u64);

/// One engine's connection to a store. Dropping a session aborts its reservations and releases its
/// leases (I5).
///
/// A session without a store, for example after its server ended, answers with misses.
pub trait Session: Send + Sync + fmt::Debug {
    /// How a worker maps the frames; None while there is no store.
    fn arena(&self) -> Option<ArenaInfo>;
    /// Switches to a new store if the old one is gone and a new one was found; returns true if so.
    /// Nothing of the old store is stored in the new one, and `arena` may differ. A session
    /// switches stores only here, so no plan mixes frames of two stores.
    fn renew(&self) -> bool {
        false
    }
    /// Returns how many leading units of the prefix are stored. No side effect (I9).
    fn lookup(&self, prefix: Prefix<'_>) -> Lookup {
        self.lookup_many(&[prefix]).pop().unwrap_or_default()
    }
    /// Looks up many prefixes in one call.
    fn lookup_many(&self, prefixes: &[Prefix<'_>]) -> Vec<Lookup>;
    /// Pins the stored chunks of a prefix in host memory and starts reads of the others, as far as
    /// frames are available.
    fn acquire(&self, prefix: Prefix<'_>) -> LeaseId {
        self.acquire_all(&[prefix])
    }
    /// Acquires many prefixes as one lease.
    fn acquire_all(&self, prefixes: &[Prefix<'_>]) -> LeaseId;
    /// Returns how many chunks are ready and how many are being read, over all prefixes of the
    /// lease. Zeros for a lease that ended.
    fn poll(&self, lease: LeaseId) -> Progress;
    /// Returns all ready chunks, prefix by prefix.
    fn frames(&self, lease: LeaseId) -> Vec<LeasedFrame>;
    /// Releases a lease; a second call does nothing.
    fn release(&self, lease: LeaseId);
    /// Reserves frames for the missing chunks of a range; also returns how many got no frame.
    /// Numbers ascend for the life of the store; a new store never reuses a number that this
    /// session received before.
    fn reserve(&self, prefix: Prefix<'_>, units: Range<u32>) -> Result<(Vec<Reservation>, u32)> {
        let (reserved, got) = self.reserve_many(&[(prefix, units).into()])?;
        Ok((reserved, got.first().map_or(0, |got| got.num_dropped)))
    }
    /// Reserves ranges of many prefixes in one call. Returns the reservations in order, and their
    /// number for each range. Reserves nothing if a prefix is shorter than its range.
    fn reserve_many(
        &self,
        asked: &[SaveRequest<'_>],
    ) -> Result<(Vec<Reservation>, Vec<SaveCounts>)>;
    /// Commits reservations; returns how many chunks became visible.
    fn commit(&self, tickets: &[u64]) -> u32;
    /// Aborts reservations and frees their frames.
    fn abort(&self, tickets: &[u64]);
    /// Removes chunks and all chunks below them from every tier; returns the number removed.
    fn discard(&self, keys: &[ChunkKey]) -> u64;
    /// Removes everything from every tier.
    fn clear(&self);
    /// Returns counters and gauges by name.
    fn stats(&self) -> Vec<(Cow<'static, str>, u64)>;
    /// Saves take frames in the first `limit_bytes` of the arena only from now on: workers cannot
    /// copy to the others yet.
    fn limit_memory(&self, limit_bytes: u64);
    /// Returns the log lines since the last call.
    fn take_events(&self) -> Vec<Event>;
    /// Records added and removed chunks from now on; see [`Store::watch`]. A second call does
    /// nothing.
    fn watch(&self, capacity: usize);
    /// Returns recorded changes; see [`Listener::changes`]. If no store answered for a second, all
    /// chunks in question count as removed; until then there are no rows. Then, and with the next
    /// answer, every earlier report may be wrong (`lost`).
    fn changes(&self, asked: &[ChunkKey], limit: usize) -> Changes;
    /// Waits until every visible chunk that will be written to disk is written; false at the
    /// deadline.
    fn flush(&self, timeout: Duration) -> bool;
    /// Aborts reservations and stops the store; leases end by themselves.
    fn close(&self, timeout: Duration);

    /// Returns true if the last reservation timed out: its chunks can be tried again immediately.
    fn is_save_late(&self) -> bool {
        false
    }
}

#[derive(Debug, Default)]
struct Leases {
    /// Reservations by ticket.
    writes: Numbered<WriteLease>,
    reads: FxHashMap<LeaseId, Arc<ReadLease>>,
    next: u64,
}

/// A session of a store in this process.
#[derive(Debug)]
pub struct Local {
    // Declared before the store, so that open leases are dropped first.
    leases: Mutex<Leases>,
    /// Bytes of the arena that this engine's workers can copy to; others of the store may have other
    /// limits.
    limit_bytes: AtomicU64,
    listener: OnceLock<Listener>,
    store: Arc<Store>,
}

impl Local {
    /// Opens a store; see [`Store::open`].
    pub fn open(config: &StoreConfig) -> Result<Self> {
        Ok(Self::of(Arc::new(Store::open(config)?)))
    }

    /// Opens one of several sessions of `store`. Closing it closes the store; dropping it ends only
    /// its leases and reservations.
    pub fn of(store: Arc<Store>) -> Self {
        Self {
            leases: Mutex::default(),
            limit_bytes: AtomicU64::new(u64::MAX),
            listener: OnceLock::new(),
            store,
        }
    }

    /// Returns the numbers of open reservations and read leases.
    pub fn num_open(&self) -> (usize, usize) {
        let leases = self.leases();
        (leases.writes.len(), leases.reads.len())
    }

    /// See [`Store::anchors`].
    pub fn anchors(&self, anchors: &[(u32, ChunkKey)]) -> Anchors {
        self.store.anchors(anchors)
    }

    fn leases(&self) -> MutexGuard<'_, Leases> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lease(&self, lease: LeaseId) -> Option<Arc<ReadLease>> {
        self.leases().reads.get(&lease).cloned()
    }

    /// Removes and returns the open reservations of `tickets`. Dropping one aborts it, so drop them
    /// without the lock.
    fn take(&self, tickets: &[u64]) -> Vec<WriteLease> {
        let mut leases = self.leases();
        let mut taken = Vec::with_capacity(tickets.len());
        taken.extend(tickets.iter().filter_map(|ticket| leases.writes.remove(*ticket)));
        taken
    }
}

impl Session for Local {
    fn arena(&self) -> Option<ArenaInfo> {
        Some(self.store.arena().clone())
    }

    fn lookup_many(&self, prefixes: &[Prefix<'_>]) -> Vec<Lookup> {
        self.store.lookup_many(prefixes)
    }

    fn acquire_all(&self, prefixes: &[Prefix<'_>]) -> LeaseId {
        let lease = Arc::new(self.store.acquire_all(prefixes));
        let mut leases = self.leases();
        let id = LeaseId(leases.next);
        leases.next += 1;
        leases.reads.insert(id, lease);
        id
    }

    fn poll(&self, lease: LeaseId) -> Progress {
        self.lease(lease).map(|lease| lease.poll()).unwrap_or_default()
    }

    fn frames(&self, lease: LeaseId) -> Vec<LeasedFrame> {
        self.lease(lease).map(|lease| lease.frames()).unwrap_or_default()
    }

    fn release(&self, lease: LeaseId) {
        let released = self.leases().reads.remove(&lease);
        drop(released);
    }

    fn reserve_many(
        &self,
        asked: &[SaveRequest<'_>],
    ) -> Result<(Vec<Reservation>, Vec<SaveCounts>)> {
        let (leases, got) =
            self.store.reserve_many(Some(self.limit_bytes.load(Ordering::Relaxed)), asked)?;
        let reserved = leases.iter().map(|lease| *lease.reservation()).collect();
        let writes = &mut self.leases().writes;
        writes.reserve(leases.len());
        for lease in leases {
            writes.insert(lease.reservation().ticket, lease);
        }
        Ok((reserved, got))
    }

    fn commit(&self, tickets: &[u64]) -> u32 {
        self.store.commit(self.take(tickets))
    }

    fn abort(&self, tickets: &[u64]) {
        drop(self.take(tickets));
    }

    fn discard(&self, keys: &[ChunkKey]) -> u64 {
        self.store.discard(keys)
    }

    fn clear(&self) {
        self.store.clear();
    }

    fn stats(&self) -> Vec<(Cow<'static, str>, u64)> {
        self.store.stats().into_iter().map(|(name, value)| (name.into(), value)).collect()
    }

    fn limit_memory(&self, limit_bytes: u64) {
        self.limit_bytes.store(limit_bytes, Ordering::Relaxed);
    }

    fn take_events(&self) -> Vec<Event> {
        self.store.take_events()
    }

    fn watch(&self, capacity: usize) {
        self.listener.get_or_init(|| self.store.watch(capacity));
    }

    fn changes(&self, asked: &[ChunkKey], limit: usize) -> Changes {
        self.listener
            .get()
            .map_or_else(|| Changes::of_none(asked), |listener| listener.changes(asked, limit))
    }

    fn flush(&self, timeout: Duration) -> bool {
        self.store.flush(timeout)
    }

    fn close(&self, timeout: Duration) {
        let open = std::mem::take(&mut self.leases().writes);
        drop(open);
        self.store.close(timeout);
    }
}
