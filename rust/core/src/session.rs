//! What the scheduler half may ask of a store, wherever that is.
//!
//! A session is asked with roots and keys and answers with numbers, so that it can cross a socket:
//! leases and reservations are its own and end with it. Paged blocks and reports of ranks are the
//! engine's: see `engine`.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use rustc_hash::FxHashMap;

use crate::Result;
use crate::key::ChunkKey;
use crate::numbered::Numbered;
use crate::store::{
    Anchors, Changes, Got, LeasedFrame, Listener, Lookup, Prefix, Progress, ReadLease, Reservation,
    Store, StoreConfig, ToSave, WriteLease,
};
pub use crate::store::{ArenaInfo, LifelineInfo};

/// Number of a read lease, never used again by its session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseId(pub u64);

/// A store as one engine sees it. Dropping a session aborts its reservations and releases its
/// leases (I5).
///
/// A session that lost its store answers with misses.
pub trait Session: Send + Sync + fmt::Debug {
    /// How a worker maps the frames; None while there is no store.
    fn arena(&self) -> Option<ArenaInfo>;
    /// Begins to use another store, if the one before is gone and another was found: true. Nothing
    /// of the old one is there then, and `arena` may be another. Only here does a session change
    /// its store, so that no plan has frames of two.
    fn renew(&self) -> bool {
        false
    }
    /// Returns how many leading units of the prefix are stored. No side effect (I9).
    fn lookup(&self, prefix: Prefix<'_>) -> Lookup {
        self.lookup_many(&[prefix]).pop().unwrap_or_default()
    }
    /// Looks up many prefixes in one call.
    fn lookup_many(&self, prefixes: &[Prefix<'_>]) -> Vec<Lookup>;
    /// Pins the stored chunks of a prefix in host memory and starts to read the rest, as far as
    /// frames are available.
    fn acquire(&self, prefix: Prefix<'_>) -> LeaseId {
        self.acquire_all(&[prefix])
    }
    /// Acquires many prefixes as one lease.
    fn acquire_all(&self, prefixes: &[Prefix<'_>]) -> LeaseId;
    /// How much is ready and how much is still being read, of all its prefixes together. Nothing
    /// for a lease that ended.
    fn poll(&self, lease: LeaseId) -> Progress;
    /// Every chunk that is ready now, prefix by prefix in order.
    fn frames(&self, lease: LeaseId) -> Vec<LeasedFrame>;
    /// Unpins; again does nothing.
    fn release(&self, lease: LeaseId);
    /// Reserves the missing chunks of a range; also returns how many got no frame. The numbers
    /// count up while the store lives; one that began anew has none of those that it gave out
    /// before.
    fn reserve(&self, prefix: Prefix<'_>, units: Range<u32>) -> Result<(Vec<Reservation>, u32)> {
        let (reserved, got) = self.reserve_many(&[(prefix, units).into()])?;
        Ok((reserved, got.first().map_or(0, |got| got.num_dropped)))
    }
    /// The same for many, in one question: chunks of the first, then of the next, and how many are
    /// whose. Nothing if one prefix has not got its range.
    fn reserve_many(&self, asked: &[ToSave<'_>]) -> Result<(Vec<Reservation>, Vec<Got>)>;
    /// Makes reserved chunks visible; returns how many became so.
    fn commit(&self, tickets: &[u64]) -> u32;
    /// Gives reserved frames back.
    fn abort(&self, tickets: &[u64]);
    /// Forgets chunks and what hangs on them in every tier; returns how many.
    fn discard(&self, keys: &[ChunkKey]) -> u64;
    /// Forgets everything in every tier.
    fn clear(&self);
    /// Counters and gauges by name.
    fn stats(&self) -> Vec<(Cow<'static, str>, u64)>;
    /// Saves take frames in the first `limit_bytes` of the arena only from now on: workers cannot
    /// copy to the others yet.
    fn limit_memory(&self, limit_bytes: u64);
    /// Returns the log lines since the last call.
    fn take_events(&self) -> Vec<String>;
    /// Records added and removed chunks from now on, as [`Store::watch`]; a second call does
    /// nothing.
    fn watch(&self, capacity: usize);
    /// As [`Listener::changes`]. While there is no store, or none that answers for a second,
    /// nothing that is asked for is there; until then there are no rows. Once nothing is there, and
    /// with the next answer, every earlier report may be wrong (`lost`).
    fn changes(&self, asked: &[ChunkKey], limit: usize) -> Changes;
    /// Waits until every visible chunk that will get to disk is there; false at the deadline.
    fn flush(&self, timeout: Duration) -> bool;
    /// Ends reservations and stops serving; leases end by themselves.
    fn close(&self, timeout: Duration);

    /// Whether the last reservation got no answer in time: what it dropped can be tried again at
    /// once.
    fn is_save_late(&self) -> bool {
        false
    }
}

#[derive(Debug, Default)]
struct Leases {
    /// By ticket.
    writes: Numbered<WriteLease>,
    reads: FxHashMap<LeaseId, Arc<ReadLease>>,
    next: u64,
}

/// The store of this process, or one's share in it.
#[derive(Debug)]
pub struct Local {
    // Before the store, so that open leases end first.
    leases: Mutex<Leases>,
    /// Bytes of the arena that this engine's workers can copy to; others of the store may have other
    /// limits.
    limit_bytes: AtomicU64,
    listener: OnceLock<Listener>,
    store: Arc<Store>,
}

impl Local {
    /// As [`Store::open`].
    pub fn open(config: &StoreConfig) -> Result<Self> {
        Ok(Self::of(Arc::new(Store::open(config)?)))
    }

    /// One of several sessions of `store`. Closing it closes the store; dropping it ends only its
    /// leases and reservations.
    pub fn of(store: Arc<Store>) -> Self {
        Self {
            leases: Mutex::default(),
            limit_bytes: AtomicU64::new(u64::MAX),
            listener: OnceLock::new(),
            store,
        }
    }

    /// Open reservations, and read leases.
    pub fn num_open(&self) -> (usize, usize) {
        let leases = self.leases();
        (leases.writes.len(), leases.reads.len())
    }

    /// As [`Store::anchors`].
    pub fn anchors(&self, anchors: &[(u32, ChunkKey)]) -> Anchors {
        self.store.anchors(anchors)
    }

    fn leases(&self) -> MutexGuard<'_, Leases> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lease(&self, lease: LeaseId) -> Option<Arc<ReadLease>> {
        self.leases().reads.get(&lease).cloned()
    }

    /// The reservations of `tickets` that are still open. Dropping one aborts it, so drop them
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

    fn reserve_many(&self, asked: &[ToSave<'_>]) -> Result<(Vec<Reservation>, Vec<Got>)> {
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

    fn take_events(&self) -> Vec<String> {
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
