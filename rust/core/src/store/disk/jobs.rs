//! Chooses the next job of a disk thread and applies its outcome. Runs under the lock, without I/O.
//!
//! Reads and writes share disk time fairly (`time_shares`). Among writes, slots are freed first,
//! then chunks are written, oldest first. Slots are freed only while nothing is written, because a
//! chunk that is being written may be a child of the removed chunk whose slot is freed.

use std::time::Duration;

use crate::evict::{ChunkId, Removal};
use crate::index::{DiskEvent, DiskState, Entry, HostEvent, HostState};
use crate::io::Frame;
use crate::key::ChunkKey;
use crate::store::disk::time_shares::Direction;
use crate::store::disk::work::{Attached, Clearing, JobInFlight};
use crate::store::state::State;
use crate::store::tenants::quota::FrameSource;
use crate::tier::disk::{DiskMeta, SlotId};
use crate::tier::host::FrameFor;
use crate::units::micros;
use crate::{ErrorKind, Event, Result};

/// Slots freed by one job: few, so that reads do not wait long for a thread.
const FREE_BATCH: usize = 32;
/// Time until a failed read or free is retried.
const AGAIN_AFTER: Duration = Duration::from_secs(60);

/// One piece of I/O, which owns its frame until it ends.
#[derive(Debug)]
pub(crate) enum Job {
    Read {
        id: ChunkId,
        slot: SlotId,
        key: ChunkKey,
        frame: Frame,
    },
    Write {
        id: ChunkId,
        meta: DiskMeta,
        frame: Frame,
    },
    Free(Vec<SlotId>),
    /// Frees all slots, and these.
    Clear(Vec<SlotId>),
}

/// Outcome of a job.
#[derive(Debug)]
pub(crate) enum End {
    /// `num_refused` attempts failed for reasons other than proven damage.
    Read {
        id: ChunkId,
        frame: Frame,
        outcome: Result<()>,
        num_refused: u64,
    },
    Write {
        id: ChunkId,
        frame: Frame,
        outcome: Written,
    },
    /// Slots that could not be freed.
    Free(Vec<SlotId>),
    /// Slots that could not be freed, and whether the disk is empty.
    Clear(Vec<SlotId>, bool),
}

/// Outcome of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Written {
    /// The chunk is in this slot.
    In(SlotId),
    /// No slot is available: every chunk is in use, or the file system is full.
    NoRoom,
    /// Its tenant is at its quota, and none of its chunks may be evicted.
    NoQuota,
    /// The system refused. If a slot is given, it could not be freed either, and may hold the
    /// chunk's record.
    Failed(Option<SlotId>),
}

impl State {
    /// Returns the next job that may run now, with its ticket. `end_job` must follow.
    pub(crate) fn next_job(&mut self) -> Option<(u64, Job)> {
        let now = self.now;
        if self.disk.attached != Attached::Yes || self.disk.stopping {
            return None;
        }
        let (direction, job) = match self.disk.clearing {
            Clearing::No => self.next_of_both()?,
            // Chunks queued for removal must release their slots first.
            Clearing::Wanted
                if self.disk.write_breaker.may_begin(now)
                    && self.disk.in_flight.is_empty()
                    && !self.is_removing() =>
            {
                self.disk.clearing = Clearing::Running;
                let mut slots = std::mem::take(&mut self.disk.to_free);
                slots.append(&mut self.disk.unfreed);
                (Direction::Write, Job::Clear(slots))
            }
            Clearing::Wanted | Clearing::Running => return None,
        };
        let ticket = self.new_ticket();
        self.disk.begin(ticket, direction, now);
        Some((ticket, job))
    }

    /// Returns a job of the direction that is next, or else of the other one.
    fn next_of_both(&mut self) -> Option<(Direction, Job)> {
        let first = self.disk.time_shares.first();
        if let Some(job) = self.next_of(first) {
            return Some((first, job));
        }
        self.disk.time_shares.forfeit(first);
        self.next_of(first.other()).map(|job| (first.other(), job))
    }

    fn next_of(&mut self, direction: Direction) -> Option<Job> {
        if !self.disk.breaker(direction).may_begin(self.now) {
            return None;
        }
        match direction {
            Direction::Read => self.next_read(),
            Direction::Write => self.next_free().or_else(|| self.next_write()),
        }
    }

    /// Applies the outcome of a job, and reports it to the breaker.
    pub(crate) fn end_job(&mut self, ticket: u64, end: End) {
        let now = self.now;
        let Some(at) = self.disk.in_flight.iter().position(|job| job.ticket == ticket) else {
            return;
        };
        let JobInFlight { direction: Some(direction), started, charge, hangs, .. } =
            self.disk.in_flight.swap_remove(at)
        else {
            return;
        };
        let took = now.saturating_sub(started);
        self.disk.time_shares.end(direction, charge, took);
        let micros = micros(took);
        // Some(true): the tier did it. Some(false): it refused. None: neither.
        let is_well = match end {
            End::Read { id, frame, outcome, num_refused } => {
                self.stats.disk_read_us += micros;
                Some(self.end_read(id, frame, &outcome, num_refused))
            }
            End::Write { id, frame, outcome } => {
                self.stats.disk_write_us += micros;
                self.end_write(id, frame, outcome)
            }
            End::Free(not_freed) => Some(self.end_free(not_freed)),
            End::Clear(not_freed, is_cleared) => {
                let is_cleared = is_cleared && not_freed.is_empty();
                Some(self.end_clear(not_freed, is_cleared))
            }
        };
        if hangs && is_well == Some(true) {
            return self.end_hang(ticket);
        }
        let breaker = self.disk.breaker(direction);
        let before = breaker.is_open();
        breaker.end(ticket, is_well, now);
        let after = breaker.is_open();
        if before != after {
            let what = if direction == Direction::Read { "reads" } else { "writes" };
            if after {
                self.log(Event::problem(format!(
                    "disk tier: {what} are failing; pausing {what} and retrying in the background"
                )));
            } else {
                self.log(Event::recovery(format!("disk tier: {what} work again")));
            }
        }
    }

    pub(crate) fn end_hang(&mut self, ticket: u64) {
        self.disk.read_breaker.end(ticket, Some(true), self.now);
        self.disk.write_breaker.end(ticket, Some(true), self.now);
        self.log(Event::recovery("disk tier: responding again"));
    }

    fn next_read(&mut self) -> Option<Job> {
        while let Some(id) = self.disk.read_queue.pop(&self.index, Entry::is_to_read) {
            let entry = self.index[id];
            let has_parent =
                entry.parent.is_none_or(|parent| self.index[parent].host.may_have_children());
            let class = entry.disk.slot().map(SlotId::class).unwrap_or_default();
            let source = self.source_of(entry.tenant, class);
            if let (DiskState::Stored(slot), true) = (entry.disk, has_parent)
                && let Some(place) =
                    self.take_frame_under(entry.parent, source, (class, FrameFor::Read))
            {
                self.change_host(id, HostEvent::Read(place));
                let frame = self.host.lend(place).expect("a frame that was free is not lent (I4)");
                return Some(Job::Read { id, slot, key: entry.key, frame });
            }
            // No frame is available: the leases that wait for this chunk end before it.
            self.stats.quota_dropped += u64::from(source != FrameSource::Any);
            self.fail_host(id);
        }
        None
    }

    fn next_free(&mut self) -> Option<Job> {
        let work = &mut self.disk;
        if self.now >= work.unfreed_until {
            work.to_free.append(&mut work.unfreed);
        }
        if work.writing > 0 || work.to_free.is_empty() {
            return None;
        }
        let rest = work.to_free.len().saturating_sub(FREE_BATCH);
        work.freeing += 1;
        Some(Job::Free(work.to_free.split_off(rest)))
    }

    fn next_write(&mut self) -> Option<Job> {
        if !self.disk.to_free.is_empty() || !self.disk.found.is_empty() {
            return None;
        }
        while let Some(id) = self.disk.write_queue.pop(&self.index, Entry::is_to_write) {
            if !self.parent_is_on_disk(id) {
                continue;
            }
            let Entry { key, parent_key: parent, depth, host, saved_s, .. } = self.index[id];
            if let HostState::Visible(frame) = host
                && let Some(frame) = self.host.lend(frame)
            {
                self.hold(id);
                self.change_disk(id, DiskEvent::Write);
                let meta = DiskMeta { key, parent, depth, saved_s: saved_s.into() };
                return Some(Job::Write { id, meta, frame });
            }
            self.cancel_write(id);
        }
        None
    }

    /// Returns true if a queued chunk may be written now. If not, it is blocked until its parent is
    /// written.
    fn parent_is_on_disk(&mut self, id: ChunkId) -> bool {
        let Some(parent) = self.index[id].parent else { return true };
        if self.index[parent].disk.is_stored() {
            return true;
        }
        self.change_disk(id, DiskEvent::Block);
        self.disk.blocked.entry(parent).or_default().push(id);
        if self.index[parent].disk == DiskState::Absent {
            // The parent was removed from the disk or could not be written. It is in host memory,
            // because its child is.
            self.change_disk(parent, DiskEvent::Want);
            self.disk.write_queue.push_first(&self.index, parent);
        }
        false
    }

    /// Ends a read. After an error, the chunk stays on disk and is retried later. A damaged chunk
    /// is removed with all its descendants; none is visible in host memory.
    fn end_read(
        &mut self,
        id: ChunkId,
        frame: Frame,
        outcome: &Result<()>,
        num_refused: u64,
    ) -> bool {
        let num_bytes = frame.bytes().len() as u64;
        self.host.give_back(frame);
        self.stats.disk_read_errors += num_refused;
        self.stats.disk_read_busy_us += micros(self.now.saturating_sub(self.disk.reading_since));
        self.disk.reading_since = self.now;
        let is_damaged = outcome.as_ref().is_err_and(|error| error.kind() == ErrorKind::Corrupt);
        self.stats.disk_verify_failures += u64::from(is_damaged);
        if outcome.is_ok() {
            self.stats.disk_reads += 1;
            self.stats.disk_bytes_read += num_bytes;
        }
        if self.index[id].detached {
            self.drop_detached_fill(id);
        } else if outcome.is_ok() {
            self.fill(id);
        } else {
            if is_damaged {
                self.remove_tree(id);
            } else {
                let until = (self.now + AGAIN_AFTER).as_secs();
                self.index[id].unreadable_until_s = u32::try_from(until).unwrap_or(u32::MAX);
            }
            self.fail_host(id);
        }
        outcome.is_ok() || is_damaged
    }

    fn end_write(&mut self, id: ChunkId, frame: Frame, outcome: Written) -> Option<bool> {
        let num_bytes = frame.bytes().len() as u64;
        self.host.give_back(frame);
        if let Written::In(slot) = outcome {
            self.stats.disk_writes += 1;
            self.stats.disk_bytes_written += num_bytes;
            if self.index[id].detached {
                self.change_disk(id, DiskEvent::Leave(Removal::Dropped));
                self.disk.to_free.push(slot);
            } else {
                self.change_disk(id, DiskEvent::Written(slot));
                self.unblock_children(id);
            }
        } else {
            self.change_disk(id, DiskEvent::Leave(Removal::Dropped));
            self.drop_blocked(id);
        }
        self.unhold(id);
        match outcome {
            Written::In(_) => Some(true),
            Written::NoRoom => {
                self.stats.disk_dropped += 1;
                None
            }
            Written::NoQuota => {
                self.stats.disk_dropped += 1;
                self.stats.quota_dropped += 1;
                None
            }
            Written::Failed(slot) => {
                self.stats.disk_write_errors += 1;
                self.retry_free_later(slot);
                Some(false)
            }
        }
    }

    /// Ends a job that freed slots; retries those that could not be freed.
    fn end_free(&mut self, not_freed: Vec<SlotId>) -> bool {
        let is_well = not_freed.is_empty();
        self.disk.freeing -= 1;
        self.stats.disk_write_errors += u64::from(!is_well);
        self.retry_free_later(not_freed);
        is_well
    }

    /// Keeps slots that could not be freed for another attempt, because a restart would find their
    /// chunks.
    fn retry_free_later(&mut self, slots: impl IntoIterator<Item = SlotId>) {
        if self.disk.unfreed.is_empty() {
            self.disk.unfreed_until = self.now + AGAIN_AFTER;
        }
        self.disk.unfreed.extend(slots);
    }

    /// Ends a clear; it is retried if the disk is not empty.
    fn end_clear(&mut self, not_freed: Vec<SlotId>, is_cleared: bool) -> bool {
        self.retry_free_later(not_freed);
        self.disk.clearing = if is_cleared { Clearing::No } else { Clearing::Wanted };
        if !is_cleared {
            self.stats.disk_write_errors += 1;
            self.log(Event::problem("disk tier: could not be cleared; retrying, and until then a restart finds its chunks"));
        }
        is_cleared
    }
}
