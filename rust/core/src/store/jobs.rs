//! What disk threads should do next, and what comes of it. Under the lock, without I/O.
//!
//! Loads wait for reads, so reads go first; then slots are freed, then frames are written, oldest first. A slot is freed only
//! while nothing is written: a chunk under way to disk may hang on the one that was there (it was forgotten since).

use super::books::{Attached, Clearing, Direction, UnderWay};
use super::state::State;
use crate::evict::{ChunkId, Removal};
use crate::index::{Presence, Wish};
use crate::io::Frame;
use crate::key::ChunkKey;
use crate::tier::disk::{DiskMeta, SlotId};
use crate::tier::host::HostTier;
use crate::{Error, ErrorKind};

/// Slots freed by one job: few enough that a read need not wait long for a thread.
const FREE_BATCH: usize = 32;
/// Seconds until what could not be read or freed is tried again.
const AGAIN_AFTER_S: u32 = 60;

/// What came of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Written {
    /// It is there.
    In(SlotId),
    /// No slot could be had: all are in use by chunks that may not go now.
    NoRoom,
    /// The system refused; a slot that is still ours is used for another chunk.
    Failed(Option<SlotId>),
}

/// What came of a read: `num_refused` tries failed otherwise than by proven damage.
#[derive(Debug)]
pub(super) struct ReadEnd {
    pub(super) outcome: Result<(), Error>,
    pub(super) num_refused: u64,
}

/// One piece of I/O. Frames are lent to it.
#[derive(Debug)]
pub(super) enum Job {
    Read { id: ChunkId, slot: SlotId, key: ChunkKey, frame: Frame },
    Write { id: ChunkId, meta: DiskMeta, frame: Frame, spare: Option<SlotId> },
    Free(Vec<SlotId>),
    Clear,
}

impl State {
    /// The next job with its number, if there is one that may run now. `end_job` must follow.
    pub(super) fn next_job(&mut self) -> Option<(u64, Job)> {
        let now = self.now;
        let is_forgetting = self.is_forgetting();
        let books = self.disk.as_mut()?;
        if books.attached != Attached::Yes || books.stopping {
            return None;
        }
        let may_write = books.writes.may_begin(now);
        let (direction, job) = match books.clearing {
            Clearing::Running => return None,
            // Slots of chunks that are still to be forgotten must not become trash behind it.
            Clearing::Wanted if is_forgetting || !books.under_way.is_empty() || !may_write => return None,
            Clearing::Wanted => {
                books.clearing = Clearing::Running;
                books.trash.clear();
                books.stuck.clear();
                (Direction::Write, Job::Clear)
            }
            Clearing::No => {
                let may_read = books.reading.may_begin(now);
                let read = if may_read { self.next_read() } else { None };
                match read {
                    Some(job) => (Direction::Read, job),
                    None if may_write => (Direction::Write, self.next_free().or_else(|| self.next_write())?),
                    None => return None,
                }
            }
        };
        let ticket = self.new_ticket();
        self.disk_books().begin(ticket, direction, now);
        Some((ticket, job))
    }

    /// A job is done and its outcome entered: the tier did it, refused it, or neither.
    pub(super) fn end_job(&mut self, ticket: u64, is_well: Option<bool>) {
        let now = self.now;
        let books = self.disk_books();
        let Some(at) = books.under_way.iter().position(|job| job.ticket == ticket) else { return };
        let UnderWay { direction, hangs, .. } = books.under_way.swap_remove(at);
        if hangs && is_well == Some(true) {
            // What hung answers: so does the other direction, as far as this one knew.
            books.reading.end(is_well, now);
            books.writes.end(is_well, now);
            return self.tell("the disk tier answers again".to_owned());
        }
        let breaker = books.breaker(direction);
        let before = breaker.is_open();
        breaker.end(is_well, now);
        let after = breaker.is_open();
        if before != after {
            let does = if direction == Direction::Read { "read" } else { "write" };
            let what = if after { "fails, and is left alone for a while" } else { "works again" };
            self.tell(format!("the disk tier: to {does} {what}"));
        }
    }

    /// Looks at the time: operations that hang open the breakers.
    pub(crate) fn set_time(&mut self, now: std::time::Duration) {
        self.now = self.now.max(now);
        let now = self.now;
        if self.disk.as_mut().is_some_and(|books| books.find_hangs(now)) {
            self.tell("the disk tier hangs, and is left alone for a while".to_owned());
        }
    }

    fn next_read(&mut self) -> Option<Job> {
        while let Some((id, generation)) = self.disk_books().reads.pop_front() {
            if !self.index.is_same(id, generation) || !self.index[id].is_queued() {
                continue;
            }
            let entry = self.index[id];
            let has_parent = entry.parent.is_none_or(|parent| self.index[parent].has_frame());
            if let (Presence::Here(slot), true) = (entry.disk, has_parent)
                && let Some(place) = self.take_frame_under(entry.parent, HostTier::take_any)
            {
                self.disk_books().num_queued -= 1;
                self.give_frame(id, place);
                let frame = self.host.lend(place).expect("a frame that was free is not lent (I4)");
                return Some(Job::Read { id, slot, key: entry.key, frame });
            }
            // No frame can be had: the leases that want it end before it.
            self.fail_host(id);
        }
        None
    }

    fn next_free(&mut self) -> Option<Job> {
        let now = self.now;
        let books = self.disk_books();
        if now >= books.stuck_until {
            books.trash.append(&mut books.stuck);
        }
        if books.writing > 0 || books.trash.is_empty() {
            return None;
        }
        let rest = books.trash.len().saturating_sub(FREE_BATCH);
        books.freeing += 1;
        Some(Job::Free(books.trash.split_off(rest)))
    }

    fn next_write(&mut self) -> Option<Job> {
        let books = self.disk_books();
        if !books.trash.is_empty() || !books.found.is_empty() {
            return None;
        }
        while let Some((id, generation)) = self.disk_books().queue.pop_front() {
            if !self.index.is_same(id, generation) || self.index[id].wish != Wish::Queued || !self.parent_is_on_disk(id)
            {
                continue;
            }
            let entry = &self.index[id];
            let meta =
                DiskMeta { key: entry.key, parent: entry.parent_key, num_blocks: entry.num_blocks, depth: entry.depth };
            if let Presence::Here(frame) = entry.host
                && let Some(frame) = self.host.lend(frame)
            {
                self.index[id].wish = Wish::Writing;
                self.hold(id);
                self.begin_disk(id);
                let books = self.disk_books();
                books.writing += 1;
                return Some(Job::Write { id, meta, frame, spare: books.spare.pop() });
            }
            self.unwant(id);
        }
        None
    }

    /// Whether a queued chunk may be written now. If not, it stands behind its parent, which is on its way there or away.
    fn parent_is_on_disk(&mut self, id: ChunkId) -> bool {
        let Some(parent) = self.index[id].parent else { return true };
        if self.index[parent].disk.is_here() {
            return true;
        }
        self.index[id].wish = Wish::Behind;
        self.disk_books().behind.entry(parent).or_default().push(id);
        if self.index[parent].wish == Wish::None && self.index[parent].disk.is_absent() {
            // It left the disk, or could not be written when it was new; it is in host, for its child is.
            self.index[parent].wish = Wish::Queued;
            let generation = self.index[parent].generation();
            let books = self.disk_books();
            books.num_dirty += 1;
            books.queue.push_front((parent, generation));
        }
        false
    }

    /// A read ended. What could not be read stays on disk for another try later; only proven damage is forgotten, with what
    /// hangs on it: none of that is visible in host, for a chunk that is read is not.
    pub(super) fn end_read(&mut self, id: ChunkId, frame: Frame, end: &ReadEnd, micros: u64) {
        let num_bytes = frame.bytes().len() as u64;
        self.host.give_back(frame);
        self.counters.disk_read_us += micros;
        self.counters.disk_read_errors += end.num_refused;
        let is_damaged = end.outcome.as_ref().is_err_and(|error| error.kind() == ErrorKind::Corrupt);
        self.counters.disk_verify_failures += u64::from(is_damaged);
        if end.outcome.is_ok() {
            self.counters.disk_reads += 1;
            self.counters.disk_bytes_read += num_bytes;
        }
        if self.index[id].detached {
            return self.abandon(id);
        }
        if end.outcome.is_ok() {
            self.fill(id);
            return;
        }
        if is_damaged {
            self.doom(id);
        } else {
            let now_s = u32::try_from(self.now.as_secs()).unwrap_or(u32::MAX);
            self.index[id].unreadable_until_s = now_s.saturating_add(AGAIN_AFTER_S);
        }
        self.fail_host(id);
    }

    /// A write ended: in a slot, or not at all.
    pub(super) fn end_write(&mut self, id: ChunkId, frame: Frame, outcome: Written, micros: u64) {
        let num_bytes = frame.bytes().len() as u64;
        self.host.give_back(frame);
        self.counters.disk_write_us += micros;
        self.index[id].wish = Wish::None;
        self.disk_books().num_dirty -= 1;
        self.disk_books().writing -= 1;
        match outcome {
            Written::In(slot) => {
                self.counters.disk_writes += 1;
                self.counters.disk_bytes_written += num_bytes;
                if self.index[id].detached {
                    self.leave_disk(id, Removal::Dropped);
                    self.disk_books().trash.push(slot);
                } else {
                    self.arrive_on_disk(id, slot);
                    self.sync_disk(id);
                    self.wake_behind(id);
                }
            }
            Written::NoRoom => self.counters.disk_dropped += 1,
            Written::Failed(spare) => {
                self.counters.disk_write_errors += 1;
                self.disk_books().spare.extend(spare);
            }
        }
        if !matches!(outcome, Written::In(_)) {
            self.leave_disk(id, Removal::Dropped);
            self.drop_behind(id);
        }
        self.unhold(id);
    }

    /// Slots were freed, but for some, which are tried again later.
    pub(super) fn end_free(&mut self, not_freed: Vec<SlotId>) {
        self.counters.disk_write_errors += u64::from(!not_freed.is_empty());
        let retry_at = self.now + std::time::Duration::from_secs(AGAIN_AFTER_S.into());
        let books = self.disk_books();
        books.freeing -= 1;
        if !not_freed.is_empty() {
            books.stuck.extend(not_freed);
            books.stuck_until = retry_at;
        }
    }

    /// The disk is empty, or that is still wanted.
    pub(super) fn end_clear(&mut self, cleared: bool) {
        self.disk_books().clearing = if cleared { Clearing::No } else { Clearing::Wanted };
        if !cleared {
            self.counters.disk_write_errors += 1;
            self.tell(
                "the disk tier could not be cleared; it is tried again, and until then a restart finds it".to_owned(),
            );
        }
    }

    /// Nothing more will be read or written but the jobs at hand; leases that wait for reads end short.
    pub(super) fn stop(&mut self) {
        self.closed = true;
        if let Some(books) = &mut self.disk {
            books.stopping = true;
        }
    }
}
