//! Disk tier state, guarded by the lock: queues, jobs in flight, breakers and whether the tier is
//! open.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use rustc_hash::FxHashMap;

use crate::Result;
use crate::evict::ChunkId;
use crate::index::{Entry, Index};
use crate::key::ChunkKey;
use crate::store::disk::breaker::{Breaker, HANG_AFTER};
use crate::store::disk::time_shares::{Direction, TimeShares};
use crate::tier::disk::{DiskEntry, SlotId};

/// A queue of chunks to read or write, with their generations. `pop` skips stale entries: chunks
/// that no longer need to be read or written.
#[derive(Debug, Default)]
pub(crate) struct Queue(VecDeque<(ChunkId, u32)>);

impl Queue {
    /// Appends a chunk. Drops stale entries once the queue has grown far beyond `num_wanted`.
    pub(crate) fn push(
        &mut self,
        index: &Index,
        id: ChunkId,
        num_wanted: u64,
        is_wanted: fn(&Entry) -> bool,
    ) {
        self.0.push_back((id, index[id].generation));
        if self.0.len() as u64 > 2 * num_wanted + 64 {
            self.0
                .retain(|&(id, generation)| index.is_same(id, generation) && is_wanted(&index[id]));
        }
    }

    pub(crate) fn push_first(&mut self, index: &Index, id: ChunkId) {
        self.0.push_front((id, index[id].generation));
    }

    pub(crate) fn pop(&mut self, index: &Index, is_wanted: fn(&Entry) -> bool) -> Option<ChunkId> {
        let mut wanted = std::iter::from_fn(|| self.0.pop_front());
        wanted
            .find(|&(id, generation)| index.is_same(id, generation) && is_wanted(&index[id]))
            .map(|(id, _)| id)
    }

    /// Returns true if the queue has no entries, stale or not.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Clearing {
    #[default]
    No,
    /// The clear starts once no other job is in flight and no tree is being removed.
    Wanted,
    Running,
}

/// Whether the disk tier is open, opening or closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum DiskOpening {
    #[default]
    NoTier,
    Open,
    /// The tier's directory was removed. No new job starts. Once all in-flight jobs have completed,
    /// the tier's chunks are dropped and the tier is reopened.
    Removed,
    /// A disk thread opens the tier no earlier than this time.
    NotBefore(Duration),
    Opening,
}

/// A job or check running on a disk thread.
#[derive(Debug)]
pub(crate) struct JobInFlight {
    pub(crate) ticket: u64,
    /// None for a directory check, which is not charged for disk time.
    pub(crate) direction: Option<Direction>,
    /// True if the job writes a chunk.
    pub(crate) writes_chunk: bool,
    pub(crate) started: Duration,
    /// Disk time that `time_shares` charged when the job started.
    pub(crate) charge: Duration,
    /// True if the job hung and opened the breakers.
    pub(crate) hangs: bool,
}

impl JobInFlight {
    /// Returns a check that starts now.
    fn new(ticket: u64, started: Duration) -> Self {
        let charge = Duration::ZERO;
        Self { ticket, direction: None, writes_chunk: false, started, charge, hangs: false }
    }
}

/// Disk tier state, which is empty if the store has no disk tier.
#[derive(Debug, Default)]
pub(crate) struct DiskWork {
    pub(crate) opening: DiskOpening,
    /// Outcome of the first attempt to open the tier, or None until that attempt ends.
    pub(crate) first_opening: Option<Result<()>>,
    /// The last logged reason why the tier is not open.
    pub(crate) last_event: String,
    /// Chunks in the `Queued` state.
    pub(crate) write_queue: Queue,
    /// Chunks in the `Blocked` state, by parent.
    pub(crate) blocked: FxHashMap<ChunkId, Vec<ChunkId>>,
    /// Blocked chunks whose parents could not be written, along with their generations. The writes
    /// of these chunks will be canceled.
    pub(crate) to_drop: Vec<(ChunkId, u32)>,
    /// True if the last search for a chunk to write was cut short.
    pub(crate) is_search_cut_short: bool,
    /// Number of chunks in the `Queued`, `Blocked` and `Writing` states.
    pub(crate) num_unwritten: u64,
    /// No write starts before this time, because another thread is still creating slots.
    pub(crate) writes_deferred_until: Duration,
    /// Chunks whose host state is `Queued`.
    pub(crate) read_queue: Queue,
    pub(crate) num_queued_reads: u64,
    /// Time at which the first pending read was queued or the last read completed, whichever is
    /// later. Meaningless while no reads are pending.
    pub(crate) reading_since: Duration,
    /// Slots to free next.
    pub(crate) to_free: Vec<SlotId>,
    /// Slots that could not be freed, and slots whose records could be neither read nor cleared
    /// when the tier opened. The next attempt to free them will be made at `unfreed_until`.
    pub(crate) unfreed: Vec<SlotId>,
    pub(crate) unfreed_until: Duration,
    /// True if the `unfreed` slots may hold removed chunks: since the tier opened, chunks were
    /// discarded, cleared or evicted by a user, or a slot could not be freed.
    pub(crate) unfreed_may_be_removed: bool,
    pub(crate) clearing: Clearing,
    /// Time until which bad sectors with removed chunks keep the store open. Set by a clear or a
    /// user-requested eviction until no removed chunk is left on disk.
    pub(crate) removal_deadline: Option<Duration>,
    /// Number of disk threads, or 0 if unknown.
    pub(crate) num_threads: usize,
    pub(crate) in_flight: Vec<JobInFlight>,
    pub(crate) time_shares: TimeShares,
    /// Number of running jobs that free slots.
    pub(crate) freeing: u32,
    /// Number of detached chunks that keep their slots until a job completes.
    pub(crate) num_detached_slots: u64,
    /// True while the store is closing. No job starts, and each lease is cut off before its first
    /// chunk that is still waiting to be read.
    pub(crate) stopping: bool,
    /// Chunks found when the tier opened but not indexed yet, in reverse order.
    pub(crate) found: Vec<DiskEntry>,
    /// Keys of chunks that must not be indexed, because they were discarded before indexing
    /// finished.
    pub(crate) rejected: HashSet<ChunkKey>,
    pub(crate) read_breaker: Breaker,
    pub(crate) write_breaker: Breaker,
    /// Time of the next directory check.
    pub(crate) check_at: Duration,
    /// Earliest time of the next reopen.
    pub(crate) reopen_at: Duration,
}

impl DiskWork {
    /// Returns true if no chunks are waiting to be written or indexed and no removed chunks remain
    /// on disk.
    pub(crate) fn is_settled(&self) -> bool {
        let nothing_to_index = self.found.is_empty() && self.rejected.is_empty();
        self.num_unwritten == 0 && !self.has_removed() && nothing_to_index
    }

    /// Returns true if any slots still hold removed chunks, which reopening the tier would bring
    /// back.
    pub(crate) fn has_removed(&self) -> bool {
        self.clearing != Clearing::No
            || !self.to_free.is_empty()
            || self.unfreed_may_be_removed && !self.unfreed.is_empty()
            || self.freeing > 0
            || self.num_detached_slots > 0
    }

    /// Returns true if slots must be freed before the next chunk is written.
    pub(crate) fn must_free(&self, now: Duration) -> bool {
        !self.to_free.is_empty() || !self.unfreed.is_empty() && now >= self.unfreed_until
    }

    /// Returns true if the tier cannot settle by `deadline`: the store is closing, all disk threads
    /// are hung, or the next attempt to open the tier, write or free slots comes after the
    /// deadline.
    pub(crate) fn cannot_settle_by(&self, deadline: Duration) -> bool {
        // Slots that cannot be freed must not stop chunks from being written.
        let is_stuck =
            self.has_only_unfreed() && !self.unfreed.is_empty() && self.unfreed_until > deadline;
        let is_absent = matches!(self.opening, DiskOpening::NotBefore(time) if time > deadline);
        self.stopping
            || is_absent
            || is_stuck
            || self.write_breaker.retry_at > deadline
            || self.all_hang()
    }

    /// Returns true if the tier is open and has no work except for the `unfreed` slots.
    pub(crate) fn has_only_unfreed(&self) -> bool {
        self.num_unwritten == 0
            && self.to_free.is_empty()
            && self.freeing == 0
            && self.found.is_empty()
            && self.clearing == Clearing::No
            && self.opening == DiskOpening::Open
    }

    pub(crate) fn has_jobs(&self) -> bool {
        let wants = !self.write_queue.is_empty()
            || self.num_queued_reads > 0
            || !self.to_free.is_empty()
            || !self.to_drop.is_empty()
            || !self.found.is_empty();
        wants
            || self.clearing == Clearing::Wanted
            || self.stopping
            || self.opening == DiskOpening::Removed
    }

    /// Returns true if the store's disk tier is not open yet.
    pub(crate) fn is_closed(&self) -> bool {
        matches!(self.opening, DiskOpening::NotBefore(_) | DiskOpening::Opening)
    }

    /// Returns true if the tier accepts no jobs because it is not open or its directory was
    /// removed.
    fn is_away(&self) -> bool {
        self.is_closed() || self.opening == DiskOpening::Removed
    }

    /// Returns true if some of the tier's chunks may not be indexed yet.
    pub(crate) fn is_recovering(&self) -> bool {
        self.is_away() || !self.found.is_empty()
    }

    pub(crate) fn accepts_reads(&self, now: Duration) -> bool {
        self.accepts(&self.read_breaker, now)
    }

    /// Returns true if any chunks are queued to be read or are being read.
    pub(crate) fn wants_reads(&self) -> bool {
        self.num_queued_reads > 0
            || self.in_flight.iter().any(|job| job.direction == Some(Direction::Read))
    }

    pub(crate) fn accepts_writes(&self, now: Duration) -> bool {
        self.accepts(&self.write_breaker, now)
    }

    fn accepts(&self, breaker: &Breaker, now: Duration) -> bool {
        self.opening == DiskOpening::Open
            && !self.stopping
            && breaker.accepts(now)
            && !self.all_hang()
    }

    /// Returns true if any job is hung.
    pub(crate) fn hangs(&self) -> bool {
        self.in_flight.iter().any(|job| job.hangs)
    }

    /// Returns true if all disk threads are hung, so that no thread can probe the tier.
    fn all_hang(&self) -> bool {
        self.num_threads > 0
            && self.in_flight.iter().filter(|job| job.hangs).count() >= self.num_threads
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.is_away() || self.read_breaker.is_open() || self.write_breaker.is_open()
    }

    pub(crate) fn breaker(&mut self, direction: Direction) -> &mut Breaker {
        match direction {
            Direction::Read => &mut self.read_breaker,
            Direction::Write => &mut self.write_breaker,
        }
    }

    pub(crate) fn begin(
        &mut self,
        ticket: u64,
        direction: Direction,
        writes_chunk: bool,
        now: Duration,
    ) {
        self.breaker(direction).begin(ticket);
        let charge = self.time_shares.begin(direction);
        let direction = Some(direction);
        self.in_flight.push(JobInFlight {
            direction,
            writes_chunk,
            charge,
            ..JobInFlight::new(ticket, now)
        });
    }

    pub(crate) fn begin_check(&mut self, ticket: u64, now: Duration) {
        self.in_flight.push(JobInFlight::new(ticket, now));
    }

    pub(crate) fn is_checking(&self) -> bool {
        self.in_flight.iter().any(|job| job.direction.is_none())
    }

    /// Marks newly hung jobs. If it finds any, opens both breakers and returns true.
    pub(crate) fn find_hangs(&mut self, now: Duration) -> bool {
        let mut found = false;
        for job in &mut self.in_flight {
            if !job.hangs && now.saturating_sub(job.started) >= HANG_AFTER {
                (job.hangs, found) = (true, true);
                // End the hung job's probe so that another thread can probe the tier.
                self.read_breaker.end_probe(job.ticket);
                self.write_breaker.end_probe(job.ticket);
            }
        }
        if found {
            self.read_breaker.trip(now);
            self.write_breaker.trip(now);
        }
        found
    }
}
