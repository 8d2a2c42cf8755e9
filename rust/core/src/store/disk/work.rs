//! The disk tier's books: what should get to disk, what is being read, what is to be freed, and how well the tier is.
//!
//! Data and questions about it alone; `presence`, `load` and `jobs` change it.

use std::collections::HashSet;
use std::time::Duration;

use rustc_hash::FxHashMap;

use crate::evict::ChunkId;
use crate::key::ChunkKey;
use crate::store::disk::breaker::{Breaker, HANG_AFTER};
use crate::store::disk::queue::Queue;
use crate::store::disk::time_shares::{Direction, TimeShares};
use crate::tier::disk::{DiskEntry, SlotId};

/// Where a wish to forget everything stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Clearing {
    #[default]
    No,
    /// As soon as no other job is under way and everything is forgotten in host.
    Wanted,
    Running,
}

/// Whether there is a tier behind the books.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Attached {
    /// The store has none.
    #[default]
    Never,
    Yes,
    /// Its directory was removed. No job begins; once those under way end, its chunks are dropped, and it is opened again.
    Removed,
    /// It could not be opened; a disk thread opens it then.
    NotBefore(Duration),
    Opening,
}

#[derive(Debug)]
pub(crate) struct JobInFlight {
    pub(crate) ticket: u64,
    /// None for a check that the directory is there: shares do not count it.
    pub(crate) direction: Option<Direction>,
    pub(crate) started: Duration,
    /// Of `time_shares`.
    pub(crate) charge: Duration,
    /// It opened the breakers already.
    pub(crate) hangs: bool,
}

/// What the lock guards of the disk tier; all empty where there is none.
#[derive(Debug, Default)]
pub(crate) struct DiskWork {
    pub(crate) attached: Attached,
    /// Cause it could not be opened, as a person was told last.
    pub(crate) last_event: String,
    /// Chunks to write.
    pub(crate) write_queue: Queue,
    /// Chunks that wait for their parent to be written.
    pub(crate) blocked: FxHashMap<ChunkId, Vec<ChunkId>>,
    /// Chunks that should get to disk.
    pub(crate) num_unwritten: u64,
    /// Chunks to read.
    pub(crate) read_queue: Queue,
    pub(crate) num_queued_reads: u64,
    /// Since when reads have been wanted without a read that ended; meaningless while none is wanted.
    pub(crate) reading_since: Duration,
    /// Slots to free.
    pub(crate) to_free: Vec<SlotId>,
    /// Slots that could not be freed; they are trash again at `unfreed_until`.
    pub(crate) unfreed: Vec<SlotId>,
    pub(crate) unfreed_until: Duration,
    pub(crate) clearing: Clearing,
    /// Threads that do jobs, one at a time each; 0 where that is not known.
    pub(crate) num_threads: usize,
    pub(crate) in_flight: Vec<JobInFlight>,
    pub(crate) shares: TimeShares,
    /// Of those, writes, and jobs that free slots.
    pub(crate) writing: u32,
    pub(crate) freeing: u32,
    /// Forgotten chunks that are on disk until a job with them ends.
    pub(crate) num_detached_slots: u64,
    /// No more jobs; leases that wait for reads end short.
    pub(crate) stopping: bool,
    /// What opening found and is not entered yet, first ones last; and keys that were discarded meanwhile.
    pub(crate) found: Vec<DiskEntry>,
    pub(crate) rejected: HashSet<ChunkKey>,
    pub(crate) read_breaker: Breaker,
    pub(crate) write_breaker: Breaker,
    /// When the directory is looked at next, and the earliest time for the next reopening after a removal.
    pub(crate) check_at: Duration,
    pub(crate) reopen_at: Duration,
}

impl DiskWork {
    /// Whether all that should be on disk is there, and nothing that should not.
    pub(crate) fn is_settled(&self) -> bool {
        let nothing_to_free = self.to_free.is_empty() && self.unfreed.is_empty() && self.freeing == 0;
        let nothing_to_enter = self.found.is_empty() && self.rejected.is_empty();
        let nothing_to_forget = self.num_detached_slots == 0 && self.clearing == Clearing::No;
        self.num_unwritten == 0 && nothing_to_free && nothing_to_forget && nothing_to_enter
    }

    /// Whether it cannot settle before `deadline`: no tier, or one that is left alone for longer, or without an end.
    pub(crate) fn cannot_settle_by(&self, deadline: Duration) -> bool {
        let is_stuck = !self.unfreed.is_empty() && self.unfreed_until > deadline && self.clearing == Clearing::No;
        let is_absent = matches!(self.attached, Attached::NotBefore(time) if time > deadline);
        self.stopping || is_absent || is_stuck || self.write_breaker.retry_at > deadline || self.all_hang()
    }

    pub(crate) fn has_jobs(&self) -> bool {
        let wants = !self.write_queue.is_empty()
            || self.num_queued_reads > 0
            || !self.to_free.is_empty()
            || !self.found.is_empty();
        wants || self.clearing == Clearing::Wanted || self.stopping || self.attached == Attached::Removed
    }

    /// Whether there is a tier that is not open.
    pub(crate) fn is_closed(&self) -> bool {
        matches!(self.attached, Attached::NotBefore(_) | Attached::Opening)
    }

    /// Whether there is a tier that takes no jobs because it is not open, or was removed.
    fn is_away(&self) -> bool {
        self.is_closed() || self.attached == Attached::Removed
    }

    /// Whether what the tier holds may not be known yet.
    pub(crate) fn is_recovering(&self) -> bool {
        self.is_away() || !self.found.is_empty()
    }

    /// Whether reads may be asked for now.
    pub(crate) fn answers(&self, now: Duration) -> bool {
        self.attached == Attached::Yes && !self.stopping && self.read_breaker.accepts(now) && !self.all_hang()
    }

    /// Whether chunks wait to be read or are being read.
    pub(crate) fn wants_reads(&self) -> bool {
        self.num_queued_reads > 0 || self.in_flight.iter().any(|job| job.direction == Some(Direction::Read))
    }

    /// Whether a chunk that waits to be written can expect to be: then it should not leave host memory before that.
    pub(crate) fn takes_writes(&self, now: Duration) -> bool {
        self.attached == Attached::Yes && !self.stopping && self.write_breaker.accepts(now) && !self.all_hang()
    }

    /// Whether no thread is left that could probe: what is asked for would wait for a job that may never end.
    fn all_hang(&self) -> bool {
        self.num_threads > 0 && self.in_flight.iter().filter(|job| job.hangs).count() >= self.num_threads
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

    pub(crate) fn begin(&mut self, ticket: u64, direction: Direction, now: Duration) {
        self.breaker(direction).begin(ticket);
        let charge = self.shares.begin(direction);
        self.in_flight.push(JobInFlight { ticket, direction: Some(direction), started: now, charge, hangs: false });
    }

    pub(crate) fn begin_check(&mut self, ticket: u64, now: Duration) {
        let charge = Duration::ZERO;
        self.in_flight.push(JobInFlight { ticket, direction: None, started: now, charge, hangs: false });
    }

    pub(crate) fn is_checking(&self) -> bool {
        self.in_flight.iter().any(|job| job.direction.is_none())
    }

    /// Opens both breakers for each operation that hangs, once; returns whether one was found.
    pub(crate) fn find_hangs(&mut self, now: Duration) -> bool {
        let hangs = |job: &&mut JobInFlight| !job.hangs && now.saturating_sub(job.started) >= HANG_AFTER;
        let found = self.in_flight.iter_mut().filter(hangs).map(|job| job.hangs = true).count() > 0;
        if found {
            self.read_breaker.trip(now);
            self.write_breaker.trip(now);
        }
        found
    }
}
