//! All that the store's one lock guards. Data, and what is asked of all of it; whatever moves a chunk is above.
//!
//! `host`, `disk` and `entries` are the small moves, `filling`, `frames`, `slots` and `forget` are made of those, and everything
//! else (save, load, disk threads) of both. `frames_reserved + frames_visible + free = all` (I8).

use std::collections::BTreeSet;
use std::time::Duration;

use crate::evict::{ChunkId, Policy};
use crate::index::Index;
use crate::store::change_log::ChangeLog;
use crate::store::disk::work::DiskWork;
use crate::store::host::drains::Drains;
use crate::store::host::waiters::Waiters;
use crate::store::stats::{Evicted, Stats};
use crate::store::tenants::table::TenantTable;
use crate::tier::host::{Grid, HostTier};
use crate::units::micros;

/// Chunks forgotten by one call: some 0.2 ms.
const SLICE: usize = 256;
/// Most lines for people that wait to be taken.
const MAX_EVENTS: usize = 64;

/// The top of a tree that is walked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Subtree {
    pub(crate) id: ChunkId,
    pub(crate) generation: u32,
    pub(crate) why: Cause,
}

/// Who asked for it, for the counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    Discard,
    Clear,
    Evict,
    Age,
}

/// When trees expire: first chunks, and others that expire before their parents.
#[derive(Debug, Default)]
pub(crate) struct Expiries(pub(crate) BTreeSet<(u32, ChunkId)>);

/// The index, the tiers' books and the policies.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) index: Index,
    pub(crate) host: HostTier,
    pub(crate) host_policy: Box<dyn Policy>,
    pub(crate) disk: DiskWork,
    pub(crate) disk_policy: Box<dyn Policy>,
    pub(crate) stats: Stats,
    /// Time since the store was opened, as the last caller read it.
    pub(crate) now: Duration,
    /// Seconds of Unix time now, and when the store was opened.
    pub(crate) unix_s: u32,
    pub(crate) opened_s: u32,
    pub(crate) closed: bool,
    /// What a person should see.
    pub(crate) events: Vec<String>,
    /// Keys of chunks that came to a tier or left one; None unless the store is watched.
    pub(crate) watch: Option<ChangeLog>,
    /// Children that came to host before their parent was visible.
    pub(crate) waiters: Waiters,
    /// Chunks to forget with all below them: a stack, walked in slices.
    pub(crate) removals: Vec<Subtree>,
    /// Chunks forgotten by one call.
    pub(crate) slice: usize,
    /// Forgotten by `evict` so far.
    pub(crate) evicted: Evicted,
    pub(crate) tenants: TenantTable,
    pub(crate) expiries: Expiries,
    /// Slabs that are emptied for other stores.
    pub(crate) drains: Drains,
    next_ticket: u64,
}

impl State {
    /// Without a disk, until one is attached.
    pub(crate) fn new(host: HostTier, host_policy: Box<dyn Policy>, disk_policy: Box<dyn Policy>) -> Self {
        Self {
            index: Index::default(),
            host,
            host_policy,
            disk: DiskWork::default(),
            disk_policy,
            stats: Stats::default(),
            now: Duration::ZERO,
            unix_s: 0,
            opened_s: 0,
            closed: false,
            events: Vec::new(),
            watch: None,
            waiters: Waiters::default(),
            removals: Vec::new(),
            slice: SLICE,
            evicted: Evicted::default(),
            tenants: TenantTable::default(),
            expiries: Expiries::default(),
            drains: Drains::default(),
            next_ticket: 1,
        }
    }

    pub(crate) fn new_ticket(&mut self) -> u64 {
        self.next_ticket += 1;
        self.next_ticket - 1
    }

    /// Notes what a person should see; what is too much is dropped.
    pub(crate) fn log(&mut self, event: String) {
        if self.events.len() < MAX_EVENTS {
            self.events.push(event);
        }
    }

    /// Looks at the time: operations that hang open the breakers.
    pub(crate) fn set_time(&mut self, now: Duration) {
        self.now = self.now.max(now);
        self.unix_s = self.opened_s.saturating_add(u32::try_from(self.now.as_secs()).unwrap_or(u32::MAX));
        if self.disk.find_hangs(self.now) {
            self.log("the disk tier hangs, and is left alone for a while".to_owned());
        }
    }

    /// Every number, as it is now.
    pub(crate) fn stats(&self) -> Stats {
        let (host, disk) = (&self.host, &self.disk);
        let (frames_total, frames_free) = host.num_frames();
        let not_counted = if disk.wants_reads() { micros(self.now.saturating_sub(disk.reading_since)) } else { 0 };
        Stats {
            frames_total,
            frames_share: host.grid().map_or(frames_total, Grid::share),
            frames_reserved: frames_total - frames_free - self.stats.frames_visible,
            frames_free,
            entries: self.index.len() as u64,
            evicted: self.evicted.num_chunks,
            salts: self.tenants.num_salts(),
            disk_pending: disk.num_unwritten,
            disk_read_busy_us: self.stats.disk_read_busy_us + not_counted,
            disk_broken: disk.is_broken().into(),
            disk_trips: disk.read_breaker.num_trips + disk.write_breaker.num_trips,
            reads_pending: disk.num_queued_reads,
            ..self.stats
        }
    }

    /// The chunk came to a tier or left one, or its key does not lead to it any more.
    pub(crate) fn note_change(&mut self, id: ChunkId) {
        if let Some(watch) = &mut self.watch {
            watch.push(self.index[id].key);
        }
    }

    /// Anything may have changed.
    pub(crate) fn note_all(&mut self) {
        self.watch.iter_mut().for_each(ChangeLog::lose);
    }
}
