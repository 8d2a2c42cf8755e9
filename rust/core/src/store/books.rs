//! The disk tier's books: what should get to disk, what is being read, what is to be freed, and how well the tier is.
//!
//! Data and questions about it alone; `disk`, `load` and `jobs` move it.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::breaker::{Breaker, HANG_AFTER};
use super::shares::{Direction, Shares};
use crate::evict::ChunkId;
use crate::index::{Entry, Index};
use crate::key::ChunkKey;
use crate::tier::disk::{DiskEntry, SlotId};

/// Where a wish to forget everything stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Clearing {
    #[default]
    No,
    /// As soon as no other job is under way and everything is forgotten in host.
    Wanted,
    Running,
}

/// Whether there is a tier behind the books.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Attached {
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
pub(super) struct UnderWay {
    pub(super) ticket: u64,
    /// None for a check that the directory is there: shares do not count it.
    pub(super) direction: Option<Direction>,
    pub(super) started: Duration,
    /// Of `shares`.
    pub(super) charge: Duration,
    /// It opened the breakers already.
    pub(super) hangs: bool,
}

/// Chunks in order, with their generations. Those that ceased to be wanted are skipped when their turn comes.
#[derive(Debug, Default)]
pub(super) struct Queue(VecDeque<(ChunkId, u32)>);

impl Queue {
    /// Adds a chunk behind the others. About `num_wanted` should be there: a queue that grows beyond loses the rest.
    pub(super) fn push(&mut self, index: &Index, id: ChunkId, num_wanted: u64, is_wanted: fn(&Entry) -> bool) {
        self.0.push_back((id, index[id].generation));
        if self.0.len() as u64 > 2 * num_wanted + 64 {
            self.0.retain(|&(id, generation)| index.is_same(id, generation) && is_wanted(&index[id]));
        }
    }

    pub(super) fn push_first(&mut self, index: &Index, id: ChunkId) {
        self.0.push_front((id, index[id].generation));
    }

    pub(super) fn pop(&mut self, index: &Index, is_wanted: fn(&Entry) -> bool) -> Option<ChunkId> {
        let mut wanted = std::iter::from_fn(|| self.0.pop_front());
        wanted.find(|&(id, generation)| index.is_same(id, generation) && is_wanted(&index[id])).map(|(id, _)| id)
    }
}

/// What the lock guards of the disk tier; all empty where there is none.
#[derive(Debug, Default)]
pub(crate) struct DiskBooks {
    pub(super) attached: Attached,
    /// Why it could not be opened, as a person was told last.
    pub(super) told: String,
    /// Chunks to write.
    pub(super) queue: Queue,
    /// Chunks that wait for their parent to be written.
    pub(super) behind: FxHashMap<ChunkId, Vec<ChunkId>>,
    /// Chunks that should get to disk.
    pub(super) num_dirty: u64,
    /// Chunks to read.
    pub(super) reads: Queue,
    pub(super) num_queued: u64,
    /// Since when reads have been wanted without a read that ended; meaningless while none is wanted.
    pub(super) reading_since: Duration,
    /// Slots to free.
    pub(super) trash: Vec<SlotId>,
    /// Slots that could not be freed; they are trash again at `stuck_until`.
    pub(super) stuck: Vec<SlotId>,
    pub(super) stuck_until: Duration,
    pub(super) clearing: Clearing,
    /// Threads that do jobs, one at a time each; 0 where that is not known.
    pub(super) num_threads: usize,
    pub(super) under_way: Vec<UnderWay>,
    pub(super) shares: Shares,
    /// Of those, writes, and jobs that free slots.
    pub(super) writing: u32,
    pub(super) freeing: u32,
    /// Forgotten chunks that are on disk until a job with them ends.
    pub(super) num_lingering: u64,
    /// No more jobs; leases that wait for reads end short.
    pub(super) stopping: bool,
    /// What opening found and is not entered yet, first ones last; and keys that were discarded meanwhile.
    pub(super) found: Vec<DiskEntry>,
    pub(super) unwelcome: HashSet<ChunkKey>,
    pub(super) reading: Breaker,
    pub(super) writes: Breaker,
    /// When the directory is looked at next, and the earliest time for the next reopening after a removal.
    pub(super) look_at: Duration,
    pub(super) reopen_at: Duration,
}

impl DiskBooks {
    /// Whether all that should be on disk is there, and nothing that should not.
    pub(super) fn is_settled(&self) -> bool {
        let nothing_to_free = self.trash.is_empty() && self.stuck.is_empty() && self.freeing == 0;
        let nothing_to_enter = self.found.is_empty() && self.unwelcome.is_empty();
        let nothing_to_forget = self.num_lingering == 0 && self.clearing == Clearing::No;
        self.num_dirty == 0 && nothing_to_free && nothing_to_forget && nothing_to_enter
    }

    /// Whether it cannot settle before `deadline`: no tier, or one that is left alone for longer, or without an end.
    pub(super) fn is_hopeless(&self, deadline: Duration) -> bool {
        let is_stuck = !self.stuck.is_empty() && self.stuck_until > deadline && self.clearing == Clearing::No;
        let is_absent = matches!(self.attached, Attached::NotBefore(time) if time > deadline);
        self.stopping || is_absent || is_stuck || self.writes.retry_at > deadline || self.all_hang()
    }

    pub(super) fn has_jobs(&self) -> bool {
        let wants = !self.queue.0.is_empty() || self.num_queued > 0 || !self.trash.is_empty() || !self.found.is_empty();
        wants || self.clearing == Clearing::Wanted || self.stopping || self.attached == Attached::Removed
    }

    /// Whether there is a tier that is not open.
    pub(super) fn is_closed(&self) -> bool {
        matches!(self.attached, Attached::NotBefore(_) | Attached::Opening)
    }

    /// Whether there is a tier that takes no jobs because it is not open, or was removed.
    fn is_away(&self) -> bool {
        self.is_closed() || self.attached == Attached::Removed
    }

    /// Whether what the tier holds may not be known yet.
    pub(super) fn is_recovering(&self) -> bool {
        self.is_away() || !self.found.is_empty()
    }

    /// Whether reads may be asked for now.
    pub(super) fn answers(&self, now: Duration) -> bool {
        self.attached == Attached::Yes && !self.stopping && self.reading.accepts(now) && !self.all_hang()
    }

    /// Whether chunks wait to be read or are being read.
    pub(super) fn wants_reads(&self) -> bool {
        self.num_queued > 0 || self.under_way.iter().any(|job| job.direction == Some(Direction::Read))
    }

    /// Whether a chunk that waits to be written can expect to be: then it should not leave host memory before that.
    pub(super) fn takes_writes(&self, now: Duration) -> bool {
        self.attached == Attached::Yes && !self.stopping && self.writes.accepts(now) && !self.all_hang()
    }

    /// Whether no thread is left that could probe: what is asked for would wait for a job that may never end.
    fn all_hang(&self) -> bool {
        self.num_threads > 0 && self.under_way.iter().filter(|job| job.hangs).count() >= self.num_threads
    }

    pub(super) fn is_broken(&self) -> bool {
        self.is_away() || self.reading.is_open() || self.writes.is_open()
    }

    pub(super) fn breaker(&mut self, direction: Direction) -> &mut Breaker {
        match direction {
            Direction::Read => &mut self.reading,
            Direction::Write => &mut self.writes,
        }
    }

    pub(super) fn begin(&mut self, ticket: u64, direction: Direction, now: Duration) {
        self.breaker(direction).begin(ticket);
        let charge = self.shares.begin(direction);
        self.under_way.push(UnderWay { ticket, direction: Some(direction), started: now, charge, hangs: false });
    }

    pub(super) fn begin_look(&mut self, ticket: u64, now: Duration) {
        let charge = Duration::ZERO;
        self.under_way.push(UnderWay { ticket, direction: None, started: now, charge, hangs: false });
    }

    pub(super) fn is_looking(&self) -> bool {
        self.under_way.iter().any(|job| job.direction.is_none())
    }

    /// Opens both breakers for each operation that hangs, once; returns whether one was found.
    pub(super) fn find_hangs(&mut self, now: Duration) -> bool {
        let hangs = |job: &&mut UnderWay| !job.hangs && now.saturating_sub(job.started) >= HANG_AFTER;
        let found = self.under_way.iter_mut().filter(hangs).map(|job| job.hangs = true).count() > 0;
        if found {
            self.reading.trip(now);
            self.writes.trip(now);
        }
        found
    }
}
