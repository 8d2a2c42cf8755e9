//! The disk tier's books: what should get to disk, what is being read, what is to be freed, and how well the tier is.
//!
//! Data and questions about it alone; `disk`, `load` and `jobs` move it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use super::breaker::{Breaker, HANG_AFTER};
use crate::evict::{ChunkId, Policy};
use crate::key::ChunkKey;
use crate::tier::disk::{DiskEntry, SlotId};

/// Where a wish to forget everything stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Clearing {
    No,
    /// As soon as no other job is under way and everything is forgotten in host.
    Wanted,
    Running,
}

/// Whether there is a tier behind the books.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Attached {
    Yes,
    /// It could not be opened; a disk thread opens it then.
    NotBefore(Duration),
    Opening,
}

/// What a job is to the tier: its two directions fail on their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    Write,
}

#[derive(Debug)]
pub(super) struct UnderWay {
    pub(super) ticket: u64,
    pub(super) direction: Direction,
    started: Duration,
    /// It opened the breakers already.
    pub(super) hangs: bool,
}

/// What the lock guards of the disk tier.
#[derive(Debug)]
pub(crate) struct DiskBooks {
    pub(super) policy: Box<dyn Policy>,
    pub(super) attached: Attached,
    /// Why it could not be opened, as a person was told last.
    pub(super) told: String,
    /// Chunks to write, with their generation; those that are not `Queued` any more are skipped.
    pub(super) queue: VecDeque<(ChunkId, u32)>,
    /// Chunks that wait for their parent to be written.
    pub(super) behind: HashMap<ChunkId, Vec<ChunkId>>,
    /// Chunks that should get to disk.
    pub(super) num_dirty: u64,
    /// Chunks to read, with their generation; those that are not queued any more are skipped.
    pub(super) reads: VecDeque<(ChunkId, u32)>,
    pub(super) num_queued: u64,
    /// Slots to free.
    pub(super) trash: Vec<SlotId>,
    /// Slots that could not be freed; they are trash again at `stuck_until`.
    pub(super) stuck: Vec<SlotId>,
    pub(super) stuck_until: Duration,
    /// Reserved slots without a chunk, left by writes that failed.
    pub(super) spare: Vec<SlotId>,
    pub(super) clearing: Clearing,
    /// Threads that do jobs, one at a time each.
    pub(super) num_threads: usize,
    pub(super) under_way: Vec<UnderWay>,
    /// Of those, writes, and jobs that free slots.
    pub(super) writing: u32,
    pub(super) freeing: u32,
    /// Forgotten chunks that are on disk until a job with them ends.
    pub(super) num_lingering: u64,
    pub(super) stopping: bool,
    /// Chunks on disk.
    pub(super) used: u64,
    /// Slots of the files and their bytes, as a disk thread last saw them.
    pub(super) slots: u64,
    pub(super) bytes: u64,
    /// What opening found and is not entered yet, first ones last; and keys that were discarded meanwhile.
    pub(super) found: Vec<DiskEntry>,
    pub(super) unwelcome: HashSet<ChunkKey>,
    pub(super) reading: Breaker,
    pub(super) writes: Breaker,
}

impl DiskBooks {
    pub(super) fn new(policy: Box<dyn Policy>) -> Self {
        Self {
            policy,
            attached: Attached::Opening,
            told: String::new(),
            queue: VecDeque::new(),
            behind: HashMap::new(),
            num_dirty: 0,
            reads: VecDeque::new(),
            num_queued: 0,
            trash: Vec::new(),
            stuck: Vec::new(),
            stuck_until: Duration::ZERO,
            spare: Vec::new(),
            clearing: Clearing::No,
            num_threads: usize::MAX,
            under_way: Vec::new(),
            writing: 0,
            freeing: 0,
            num_lingering: 0,
            stopping: false,
            used: 0,
            slots: 0,
            bytes: 0,
            found: Vec::new(),
            unwelcome: HashSet::new(),
            reading: Breaker::default(),
            writes: Breaker::default(),
        }
    }

    /// Whether all that should be on disk is there, and nothing that should not.
    pub(super) fn is_settled(&self) -> bool {
        let nothing_to_free = self.trash.is_empty() && self.stuck.is_empty() && self.freeing == 0;
        let nothing_to_forget = self.num_lingering == 0 && self.clearing == Clearing::No && self.found.is_empty();
        self.num_dirty == 0 && nothing_to_free && nothing_to_forget
    }

    /// Whether it cannot settle before `deadline`: no tier, or one that is left alone for longer.
    pub(super) fn is_hopeless(&self, deadline: Duration) -> bool {
        let is_stuck = !self.stuck.is_empty() && self.stuck_until > deadline;
        let is_absent = matches!(self.attached, Attached::NotBefore(time) if time > deadline);
        self.stopping || is_absent || is_stuck || self.writes.retry_at() > deadline
    }

    pub(super) fn is_clearing(&self) -> bool {
        self.clearing != Clearing::No
    }

    pub(super) fn has_jobs(&self) -> bool {
        let wants = !self.queue.is_empty() || self.num_queued > 0 || !self.trash.is_empty() || !self.found.is_empty();
        wants || self.clearing == Clearing::Wanted || self.stopping
    }

    /// Whether reads may be asked for now.
    pub(super) fn answers(&self, now: Duration) -> bool {
        self.attached == Attached::Yes && !self.stopping && self.reading.accepts(now) && !self.all_hang()
    }

    /// Whether no thread is left that could probe: what is asked for would wait for a job that may never end.
    fn all_hang(&self) -> bool {
        self.under_way.iter().filter(|job| job.hangs).count() >= self.num_threads
    }

    pub(super) fn is_broken(&self) -> bool {
        self.attached != Attached::Yes || self.reading.is_open() || self.writes.is_open()
    }

    /// Whether a chunk is read or written now.
    pub(super) fn breaker(&mut self, direction: Direction) -> &mut Breaker {
        match direction {
            Direction::Read => &mut self.reading,
            Direction::Write => &mut self.writes,
        }
    }

    pub(super) fn begin(&mut self, ticket: u64, direction: Direction, now: Duration) {
        self.breaker(direction).begin();
        self.under_way.push(UnderWay { ticket, direction, started: now, hangs: false });
    }

    /// Opens both breakers for each operation that hangs, once; returns whether one was found.
    pub(super) fn find_hangs(&mut self, now: Duration) -> bool {
        let mut found = false;
        for job in &mut self.under_way {
            if !job.hangs && now.saturating_sub(job.started) >= HANG_AFTER {
                job.hangs = true;
                found = true;
            }
        }
        if found {
            self.reading.trip(now);
            self.writes.trip(now);
        }
        found
    }
}
