//! All data guarded by the store's lock. The store's other files add methods to [`State`].

use std::collections::BTreeSet;
use std::time::Duration;

use crate::Event;
use crate::evict::{ChunkId, Policy};
use crate::index::Index;
use crate::store::change_log::ChangeLog;
use crate::store::disk::work::DiskWork;
use crate::store::host::{Drains, Waiters};
use crate::store::stats::{Evicted, Stats};
use crate::store::tenants::table::TenantTable;
use crate::tier::host::HostTier;
use crate::units::micros;

/// Default value of [`State::slice`]. A slice takes about 0.2 ms.
const SLICE: usize = 256;
/// Maximum number of log lines queued for [`super::Store::take_events`].
const MAX_EVENTS: usize = 64;

/// The root of a chunk tree under removal.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Subtree {
    pub(crate) id: ChunkId,
    pub(crate) generation: u32,
    pub(crate) cause: Cause,
}

/// Why a chunk is being removed. The cause selects the counter to increment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    Discard,
    Clear,
    Evict,
    Age,
    /// The save has not ended, and another save needs the key.
    Unfinished,
}

/// Expiry times of chunk trees. A tree starts at a chunk that has no parent or expires before its
/// parent.
#[derive(Debug, Default)]
pub(crate) struct Expiries(pub(crate) BTreeSet<(u32, ChunkId)>);

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) index: Index,
    pub(crate) host: HostTier,
    pub(crate) host_policy: Box<dyn Policy>,
    pub(crate) disk: DiskWork,
    pub(crate) disk_policy: Box<dyn Policy>,
    pub(crate) stats: Stats,
    /// Time since the store was opened, as of the last call to [`Self::set_time`].
    pub(crate) now: Duration,
    /// Unix time in seconds, as of the last call to [`Self::set_time`].
    pub(crate) unix_s: u32,
    /// Unix time when the store opened, in seconds.
    pub(crate) opened_s: u32,
    pub(crate) closed: bool,
    /// Queued log lines for the operator.
    pub(crate) events: Vec<Event>,
    /// The change log, or None while there is no listener.
    pub(crate) change_log: Option<ChangeLog>,
    /// Children that entered host memory while their parent was not visible.
    pub(crate) waiters: Waiters,
    /// Stack of trees to remove, processed slice by slice.
    pub(crate) removals: Vec<Subtree>,
    /// Maximum number of removal steps per call.
    pub(crate) slice: usize,
    /// Totals for all operator-requested evictions.
    pub(crate) evicted: Evicted,
    pub(crate) tenants: TenantTable,
    pub(crate) expiries: Expiries,
    pub(crate) drains: Drains,
    next_ticket: u64,
}

impl State {
    /// Creates an empty state without a disk tier.
    pub(crate) fn new(
        host: HostTier,
        host_policy: Box<dyn Policy>,
        disk_policy: Box<dyn Policy>,
    ) -> Self {
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
            change_log: None,
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

    /// Queues a line for the operator's log, or drops it if the queue is full.
    pub(crate) fn log(&mut self, event: Event) {
        if self.events.len() < MAX_EVENTS {
            self.events.push(event);
        }
    }

    /// Advances the clock. Opens the breakers if a disk operation is hung.
    pub(crate) fn set_time(&mut self, now: Duration) {
        self.now = self.now.max(now);
        self.unix_s =
            self.opened_s.saturating_add(u32::try_from(self.now.as_secs()).unwrap_or(u32::MAX));
        let was_hung = self.disk.hangs();
        if self.disk.find_hangs(self.now) && !was_hung {
            self.log(Event::problem(
                "disk tier: not responding; pausing it and retrying in the background",
            ));
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        let (host, disk) = (&self.host, &self.disk);
        let (frames_total, frames_free) = host.num_frames();
        let not_counted = if disk.wants_reads() {
            micros(self.now.saturating_sub(disk.reading_since))
        } else {
            0
        };
        Stats {
            frames_total,
            host_share_bytes: host.share_bytes(),
            host_used_bytes: host.used_bytes(),
            host_raw_bytes: host.raw_bytes(),
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

    /// Logs the key of a chunk that was added to or removed from a tier, or that lookups no longer
    /// find.
    pub(crate) fn note_change(&mut self, id: ChunkId) {
        if let Some(log) = &mut self.change_log {
            log.push(self.index[id].key);
        }
    }

    /// Marks all chunks as changed.
    pub(crate) fn note_all(&mut self) {
        self.change_log.iter_mut().for_each(ChangeLog::drop_all);
    }
}
