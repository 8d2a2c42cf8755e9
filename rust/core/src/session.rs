//! What the scheduler half may ask of a store, wherever that is, and what one engine has in flight in it.
//!
//! A session is asked with roots and keys and answers with numbers, so that it can cross a socket: leases and reservations are
//! its own and end with it. Paged blocks and reports of ranks are the engine's, and [`EngineSession`] keeps them on its side.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::Result;
use crate::batch::{BlocksByTier, ChunkBatch, invalid};
use crate::key::ChunkKey;
use crate::store::{
    LeasedFrame, Lookup, Prefix, Progress, ReadLease, Reservation, SaveRange, Store, StoreConfig, WriteLease,
};
use crate::tickets::Tickets;

/// Number of a read lease, never used again by its session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseId(pub u64);

/// How a worker maps the frames.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArenaInfo {
    /// What [`crate::io::Arena::open`] takes.
    pub path: String,
    /// Bytes of one frame.
    pub frame_bytes: u64,
    /// Frames in host memory.
    pub num_frames: u32,
}

/// A store as one engine sees it. Dropping a session aborts its reservations and releases its leases (I5).
///
/// A session that lost its store answers with misses.
pub trait Session: Send + Sync + fmt::Debug {
    /// How a worker maps the frames.
    fn arena(&self) -> &ArenaInfo;
    /// How much of the prefix is stored. No side effect (I9).
    fn lookup(&self, prefix: Prefix<'_>) -> Lookup;
    /// Pins what is in host of the stored part of a prefix and starts to read the rest, as far as frames can be had.
    fn acquire(&self, prefix: Prefix<'_>) -> LeaseId;
    /// How much is ready and how much is still being read. Nothing for a lease that ended.
    fn poll(&self, lease: LeaseId) -> Progress;
    /// Every chunk that is ready now, in order.
    fn frames(&self, lease: LeaseId) -> Vec<LeasedFrame>;
    /// Unpins; again does nothing.
    fn release(&self, lease: LeaseId);
    /// Reserves what is missing of a range; and how many chunks could not be had. Tickets count up.
    fn reserve(&self, prefix: Prefix<'_>, range: SaveRange) -> Result<(Vec<Reservation>, u32)>;
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
    /// Saves take no frames from this one on from now on: workers cannot copy to them yet.
    fn limit_frames(&self, num_frames: u32);
    /// What a person should see in the log since the last call, each once.
    fn take_events(&self) -> Vec<String>;
    /// Waits until every visible chunk that will get to disk is there; false at the deadline.
    fn flush(&self, timeout: Duration) -> bool;
    /// Ends reservations and stops serving; leases end by themselves.
    fn close(&self, timeout: Duration);
}

fn lock<T>(books: &Mutex<T>) -> MutexGuard<'_, T> {
    books.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug, Default)]
struct Leases {
    writes: HashMap<u64, WriteLease>,
    reads: HashMap<LeaseId, Arc<ReadLease>>,
    next: u64,
}

/// The store of this process.
#[derive(Debug)]
pub struct Local {
    // Before the store, so that what is left ends first.
    leases: Mutex<Leases>,
    store: Store,
    arena: ArenaInfo,
}

impl Local {
    /// As [`Store::open`].
    pub fn open(config: &StoreConfig) -> Result<Self> {
        Store::open(config).map(Self::over)
    }

    /// A session with `store`, which it owns.
    pub fn over(store: Store) -> Self {
        let arena = ArenaInfo {
            path: store.arena_path().to_owned(),
            frame_bytes: store.frame_bytes(),
            num_frames: store.num_frames(),
        };
        Self { leases: Mutex::default(), store, arena }
    }

    fn lease(&self, lease: LeaseId) -> Option<Arc<ReadLease>> {
        lock(&self.leases).reads.get(&lease).cloned()
    }

    /// The reservations of `tickets` that are still open. What is dropped of them aborts, so not under the lock.
    fn take(&self, tickets: &[u64]) -> Vec<WriteLease> {
        let mut leases = lock(&self.leases);
        tickets.iter().filter_map(|ticket| leases.writes.remove(ticket)).collect()
    }
}

impl Session for Local {
    fn arena(&self) -> &ArenaInfo {
        &self.arena
    }

    fn lookup(&self, prefix: Prefix<'_>) -> Lookup {
        self.store.lookup(prefix)
    }

    fn acquire(&self, prefix: Prefix<'_>) -> LeaseId {
        let lease = Arc::new(self.store.acquire(prefix));
        let mut leases = lock(&self.leases);
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
        let released = lock(&self.leases).reads.remove(&lease);
        drop(released);
    }

    fn reserve(&self, prefix: Prefix<'_>, range: SaveRange) -> Result<(Vec<Reservation>, u32)> {
        let reserved = self.store.reserve(prefix, range)?;
        let rows: Vec<_> = reserved.leases.iter().map(|lease| *lease.reservation()).collect();
        lock(&self.leases).writes.extend(reserved.leases.into_iter().map(|lease| (lease.reservation().ticket, lease)));
        Ok((rows, reserved.num_dropped))
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

    fn limit_frames(&self, num_frames: u32) {
        self.store.limit_frames(num_frames);
    }

    fn take_events(&self) -> Vec<String> {
        self.store.take_events()
    }

    fn flush(&self, timeout: Duration) -> bool {
        self.store.flush(timeout)
    }

    fn close(&self, timeout: Duration) {
        let open = std::mem::take(&mut lock(&self.leases).writes);
        drop(open);
        self.store.close(timeout);
    }
}

/// What one report of a rank did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Report {
    /// Chunks that became visible.
    pub num_visible: u32,
    /// Chunks that some rank could not write.
    pub num_failed: usize,
}

/// A session, and what one engine has in flight in it.
#[derive(Debug)]
pub struct EngineSession {
    session: Box<dyn Session>,
    tickets: Mutex<Tickets>,
}

impl EngineSession {
    /// Each of `num_ranks` reports every ticket once.
    pub fn new(session: Box<dyn Session>, num_ranks: u32) -> Self {
        Self { session, tickets: Mutex::new(Tickets::new(num_ranks)) }
    }

    /// The store behind it.
    pub fn session(&self) -> &dyn Session {
        &*self.session
    }

    /// What a lease covers of blocks `begin` and on, into those that `table` names from there.
    pub fn load(&self, lease: LeaseId, table: &[i32], begin: u32) -> (ChunkBatch, BlocksByTier) {
        ChunkBatch::of_loads(&self.session.frames(lease), table, begin)
    }

    /// Reserves frames for what is missing of `range`, to be filled from the blocks that `table` names, which begins with the
    /// range's first; and how many chunks could not be had. They are in flight from here on.
    pub fn reserve(
        &self,
        prefix: Prefix<'_>,
        range: SaveRange,
        table: &[i32],
        first: u32,
    ) -> Result<(Arc<ChunkBatch>, u32)> {
        let (reserved, num_dropped) = self.session.reserve(prefix, range)?;
        let made = ChunkBatch::of_saves(&reserved, table, first).and_then(|(saves, without_kv)| {
            let saves = Arc::new(saves);
            let is_added = lock(&self.tickets).add(&saves);
            is_added.then_some((saves, without_kv)).ok_or_else(|| invalid("tickets of a store do not count up"))
        });
        let (saves, without_kv) = made.inspect_err(|_| {
            self.give_back(&reserved.iter().map(|chunk| chunk.ticket).collect::<Vec<_>>());
        })?;
        self.give_back(&without_kv);
        Ok((saves, num_dropped))
    }

    /// Once `ticket` is committed, `key` is not needed any more.
    pub fn supersede(&self, ticket: u64, key: ChunkKey) {
        lock(&self.tickets).supersede(ticket, key);
    }

    /// Takes in one rank's report.
    pub fn settle(&self, saved: &[u64], failed: &[u64]) -> Report {
        let settled = lock(&self.tickets).settle(saved, failed);
        self.give_back(&settled.aborted);
        if !settled.superseded.is_empty() {
            self.session.discard(&settled.superseded);
        }
        let is_any = !settled.committed.is_empty();
        let num_visible = if is_any { self.session.commit(&settled.committed) } else { 0 };
        Report { num_visible, num_failed: settled.aborted.len() }
    }

    /// Gives reservations back that no rank will report.
    pub fn abort(&self, tickets: &[u64]) {
        let known = lock(&self.tickets).forget(tickets);
        self.give_back(&known);
    }

    /// Gives back everything that is in flight.
    pub fn abort_all(&self) {
        let known = lock(&self.tickets).forget_all();
        self.give_back(&known);
    }

    fn give_back(&self, tickets: &[u64]) {
        if !tickets.is_empty() {
            self.session.abort(tickets);
        }
    }

    /// Forgets everything, also what is being saved.
    pub fn clear(&self) {
        lock(&self.tickets).fail_all();
        self.session.clear();
    }

    /// Saves that some rank has not reported.
    pub fn num_in_flight(&self) -> usize {
        lock(&self.tickets).len()
    }

    /// Those of `blocks` that a save in flight reads; every such block for None.
    pub fn being_read(&self, blocks: Option<&[i32]>) -> Vec<i32> {
        let tickets = lock(&self.tickets);
        blocks.map_or_else(|| tickets.read_blocks(), |blocks| tickets.read_among(blocks))
    }
}
