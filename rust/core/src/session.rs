//! The scheduler-side interface to a store in this process or on a server.
//!
//! A session takes keys and returns numbers, so that calls can be sent over a socket. Leases and
//! reservations belong to the session and end with it. `engine` tracks paged blocks and rank
//! reports.

use std::borrow::Cow;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use rustc_hash::FxHashMap;

use crate::key::ChunkKey;
use crate::numbered::Numbered;
use crate::store::{
    Anchors, Changes, LeasedFrame, Listener, Lookup, Prefix, Progress, ReadLease, Reserved,
    SaveRequest, Store, StoreConfig, WriteLease,
};
pub use crate::store::{ArenaInfo, LifelineInfo};
use crate::{Event, Result};

/// The id of a read lease. A session never reuses an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseId(pub u64);

/// An engine's connection to a store. Dropping a session aborts its reservations and releases its
/// leases (I5).
///
/// While a session has no store, for example because the server exited, every lookup misses.
pub trait Session: Send + Sync + fmt::Debug {
    /// Returns the information that a worker needs to map the frames, or None if the session has no
    /// store.
    fn arena(&self) -> Option<ArenaInfo>;
    /// Switches to a new store if the old store is gone and a new store is available. Returns true
    /// if the session switched stores. The new store starts with empty host memory and may have a
    /// different `arena`.
    ///
    /// Only this method switches stores, and it is called between plans, so a plan never mixes two
    /// stores' frames.
    fn renew(&self) -> bool {
        false
    }
    /// Returns how many leading units of each prefix are stored. Has no side effects (I9).
    fn lookup_many(&self, prefixes: &[Prefix<'_>]) -> Vec<Lookup>;
    /// Pins the chunks of these prefixes that are in host memory, and queues reads for the chunks
    /// that are only on disk. Returns one lease that covers all prefixes.
    fn acquire_all(&self, prefixes: &[Prefix<'_>]) -> LeaseId;
    /// Returns how many of a lease's chunks are ready and how many are still being read, across all
    /// its prefixes. Returns zeros if the lease has ended.
    fn poll(&self, lease: LeaseId) -> Progress;
    /// Returns the frames of all ready chunks, in the order of the prefixes.
    fn frames(&self, lease: LeaseId) -> Vec<LeasedFrame>;
    /// Releases a lease. A second call has no effect.
    fn release(&self, lease: LeaseId);
    /// Reserves frames for each request's missing chunks. Reserves nothing if any request's units
    /// extend past the end of its prefix. Within a store, tickets always increase, but a new store
    /// may reuse the old store's tickets.
    fn reserve_many(&self, asked: &[SaveRequest<'_>]) -> Result<Vec<Reserved>>;
    /// Commits reservations. Returns how many chunks became visible.
    fn commit(&self, tickets: &[u64]) -> u32;
    /// Aborts reservations and frees their frames.
    fn abort(&self, tickets: &[u64]);
    /// Removes chunks and their descendants from every tier. Returns how many chunks this call
    /// removed. The rest of a large tree is removed later.
    fn discard(&self, keys: &[ChunkKey]) -> u64;
    /// Removes all chunks from every tier.
    fn clear(&self);
    /// Returns all counters and gauges by name.
    fn stats(&self) -> Vec<(Cow<'static, str>, u64)>;
    /// Restricts new reservations to frames in the first `limit_bytes` bytes of the arena. Called
    /// while workers cannot yet copy to the rest of the arena.
    fn limit_memory(&self, limit_bytes: u64);
    /// Returns the log lines added since the last call.
    fn take_events(&self) -> Vec<Event>;
    /// Starts recording added and removed chunks; see [`Store::watch`]. A second call has no
    /// effect.
    fn watch(&self, capacity: usize);
    /// Returns the recorded changes; see [`Listener::changes`]. While the store does not respond,
    /// returns no rows at first and, after one second, reports all requested chunks as removed.
    /// That report and the next report from a store both set `lost`, because all earlier reports
    /// may be outdated.
    fn changes(&self, asked: &[ChunkKey], limit: usize) -> Changes;
    /// Waits until all visible chunks are written to disk or dropped. Returns false on timeout.
    fn flush(&self, timeout: Duration) -> bool;
    /// Aborts all reservations and stops the store. Read leases remain valid until they are
    /// released.
    fn close(&self, timeout: Duration);

    /// Returns true if the last reservation timed out, in which case its chunks can be retried
    /// immediately.
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
    /// Highest ticket of any reservation so far. `newest_before` is its value at the last call to
    /// `release_stale_keys`.
    newest: u64,
    newest_before: u64,
}

/// A session with a store in this process.
#[derive(Debug)]
pub struct Local {
    // Declared before the store so that open leases are dropped first.
    leases: Mutex<Leases>,
    /// This engine's workers can copy only to the first `limit_bytes` bytes of the arena. Other
    /// sessions may have different limits.
    limit_bytes: AtomicU64,
    listener: OnceLock<Listener>,
    store: Arc<Store>,
}

impl Local {
    /// Opens a store; see [`Store::open`].
    pub fn open(config: &StoreConfig) -> Result<Self> {
        Ok(Self::of(Arc::new(Store::open(config)?)))
    }

    /// Opens a session with `store`, which can have multiple sessions. Closing a session closes the
    /// store, whereas dropping a session ends only its leases and reservations.
    pub fn of(store: Arc<Store>) -> Self {
        Self {
            leases: Mutex::default(),
            limit_bytes: AtomicU64::new(u64::MAX),
            listener: OnceLock::new(),
            store,
        }
    }

    /// Returns the number of open reservations and the number of read leases.
    pub fn num_open(&self) -> (usize, usize) {
        let leases = self.leases();
        (leases.writes.len(), leases.reads.len())
    }

    /// Lets other sessions save the chunks of this session's open reservations. The frames stay
    /// reserved.
    pub fn release_keys(&self) {
        let leases = self.leases();
        self.store.release_keys(leases.writes.iter().map(|(_, lease)| lease), false);
    }

    /// Like `release_keys`, but only for reservations that are older than the previous call to this
    /// method and that another save has waited for.
    pub fn release_stale_keys(&self) {
        let mut leases = self.leases();
        let newest = leases.newest;
        let before = std::mem::replace(&mut leases.newest_before, newest);
        let open = leases.writes.iter().take_while(|(ticket, _)| *ticket <= before);
        self.store.release_keys(open.map(|(_, lease)| lease), true);
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

    /// Removes and returns the open reservations with these tickets. The caller must not hold the
    /// lock when dropping a reservation, because dropping it aborts the save.
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

    fn reserve_many(&self, asked: &[SaveRequest<'_>]) -> Result<Vec<Reserved>> {
        let limit_bytes = Some(self.limit_bytes.load(Ordering::Relaxed));
        let reserved = self.store.reserve_many(limit_bytes, asked)?;
        let mut leases = self.leases();
        let Leases { writes, newest, .. } = &mut *leases;
        writes.reserve(reserved.iter().map(|each| each.chunks.len()).sum());
        let mut keep = |lease: WriteLease| {
            let reservation = *lease.reservation();
            *newest = reservation.ticket.max(*newest);
            writes.insert(reservation.ticket, lease);
            reservation
        };
        Ok(reserved.into_iter().map(|each| each.map(&mut keep)).collect())
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
