//! Picks the next job for a disk thread and applies its result. Runs under the lock and does no
//! I/O.
//!
//! Reads and writes share disk time fairly (see `time_shares`). Slots are freed before chunks are
//! written, and chunks are written oldest first. No slot is freed while a chunk is being written,
//! because the slot may hold that chunk's parent. A hung write does not prevent slots from being
//! freed: if the chunk being written loses its parent, the next recovery removes the chunk.

use std::time::Duration;

use crate::evict::{ChunkId, Removal};
use crate::index::{DiskEvent, DiskState, Entry, HostEvent, HostState};
use crate::io::Frame;
use crate::key::ChunkKey;
use crate::store::disk::breaker::IoOutcome;
use crate::store::disk::time_shares::Direction;
use crate::store::disk::transitions::WRITE_SLICE;
use crate::store::disk::work::{Clearing, DiskOpening, JobInFlight};
use crate::store::state::State;
use crate::store::tenants::quota::FrameSource;
use crate::tier::disk::{DiskMeta, SlotId};
use crate::tier::host::FrameRequest;
use crate::units::micros;
use crate::{ErrorKind, Event, Result};

/// Maximum number of slots that one job frees. This number is small so that threads remain
/// available for reads.
const FREE_BATCH: usize = 32;
/// Delay before retrying a failed read or free.
const AGAIN_AFTER: Duration = Duration::from_secs(60);
/// Delay before the next write while another thread is still creating slots.
const DEFER_FOR: Duration = Duration::from_millis(100);

/// An I/O job, which owns its frame until the job completes.
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
    Free {
        slots: Vec<SlotId>,
        /// True if these slots could not be freed or cleared in an earlier attempt.
        is_retry: bool,
    },
    /// Clears the tier and frees these slots, which were still waiting to be freed.
    Clear(Vec<SlotId>),
}

#[derive(Debug)]
pub(crate) enum JobResult {
    /// A completed read. `num_errors` is the number of failed attempts, excluding corruption.
    Read {
        id: ChunkId,
        frame: Frame,
        outcome: Result<()>,
        num_errors: u64,
    },
    Write {
        id: ChunkId,
        frame: Frame,
        outcome: Written,
    },
    /// A completed free job, with the slots that could not be freed.
    Free {
        not_freed: Vec<SlotId>,
        is_retry: bool,
    },
    /// A completed clear job, with the slots that could not be freed and a flag that is true if the
    /// tier was cleared.
    Clear(Vec<SlotId>, bool),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Written {
    /// The chunk was written to this slot.
    In(SlotId),
    /// No slot is available: no chunk can be evicted, or the file system is full.
    NoRoom,
    /// Another thread is still creating slots.
    NotYet,
    /// The chunk's tenant is at its quota and has nothing to evict.
    NoQuota,
    /// The write failed. The slot, if given, could not be freed either and may still hold the
    /// chunk's record.
    Failed(Option<SlotId>),
}

impl State {
    /// Returns the next job that can run now, along with its ticket. The caller must pass the
    /// result to `end_job`.
    pub(crate) fn next_job(&mut self) -> Option<(u64, Job)> {
        let now = self.now;
        if self.disk.opening != DiskOpening::Open || self.disk.stopping {
            return None;
        }
        let (direction, job) = match self.disk.clearing {
            Clearing::No => self.next_of_both()?,
            // Chunks that are being removed must release their slots first.
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
        self.disk.begin(ticket, direction, matches!(job, Job::Write { .. }), now);
        Some((ticket, job))
    }

    /// Returns a job in the direction whose turn it is, or, failing that, a job in the other
    /// direction.
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

    /// Applies a job's result and reports the outcome to the breaker.
    pub(crate) fn end_job(&mut self, ticket: u64, result: JobResult) {
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
        let outcome = match result {
            JobResult::Read { id, frame, outcome, num_errors } => {
                self.stats.disk_read_us += micros;
                self.end_read(id, frame, &outcome, num_errors)
            }
            JobResult::Write { id, frame, outcome } => {
                self.stats.disk_write_us += micros;
                self.end_write(id, frame, outcome)
            }
            JobResult::Free { not_freed, is_retry } => self.end_free(not_freed, is_retry),
            JobResult::Clear(not_freed, is_cleared) => self.end_clear(not_freed, is_cleared),
        };
        if hangs && outcome != IoOutcome::Failed {
            return self.end_hang(ticket);
        }
        let breaker = self.disk.breaker(direction);
        let before = breaker.is_open();
        breaker.end(ticket, outcome, now);
        let after = breaker.is_open();
        if before != after {
            let what = if direction == Direction::Read { "reads" } else { "writes" };
            if after {
                self.log(Event::problem(format!(
                    "disk tier: {what} are failing; pausing {what} and retrying in the background"
                )));
            } else {
                self.log(Event::recovery(format!("disk tier: {what} are working again")));
            }
        }
    }

    pub(crate) fn end_hang(&mut self, ticket: u64) {
        self.disk.read_breaker.end(ticket, IoOutcome::Succeeded, self.now);
        self.disk.write_breaker.end(ticket, IoOutcome::Succeeded, self.now);
        if !self.disk.hangs() {
            self.log(Event::recovery("disk tier: responding again"));
        }
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
                    self.take_frame_under(entry.parent, source, FrameRequest::for_read(class))
            {
                self.change_host(id, HostEvent::Read(place));
                let frame = self.host.lend(place).expect("a free frame is not lent (I4)");
                return Some(Job::Read { id, slot, key: entry.key, frame });
            }
            // The chunk cannot be read, so leases waiting for it are cut off just before it.
            self.stats.quota_dropped += u64::from(has_parent && source != FrameSource::Any);
            self.fail_host(id);
        }
        None
    }

    fn next_free(&mut self) -> Option<Job> {
        let work = &mut self.disk;
        if !work.must_free(self.now)
            || work.in_flight.iter().any(|job| job.writes_chunk && !job.hangs)
        {
            return None;
        }
        let is_retry = work.to_free.is_empty();
        let from = if is_retry {
            work.unfreed_until = self.now + AGAIN_AFTER; // until then, chunks can be written
            &mut work.unfreed
        } else {
            &mut work.to_free
        };
        let slots = from.split_off(from.len().saturating_sub(FREE_BATCH));
        work.freeing += 1;
        Some(Job::Free { slots, is_retry })
    }

    fn next_write(&mut self) -> Option<Job> {
        let is_deferred = self.now < self.disk.writes_deferred_until;
        if is_deferred || self.disk.must_free(self.now) || !self.disk.found.is_empty() {
            return None;
        }
        for _ in 0..WRITE_SLICE {
            let id = self.disk.write_queue.pop(&self.index, Entry::is_to_write)?;
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
        self.disk.is_search_cut_short = true;
        None
    }

    /// Returns true if a queued chunk's parent is on disk. Otherwise, blocks the chunk until the
    /// parent is written.
    fn parent_is_on_disk(&mut self, id: ChunkId) -> bool {
        let Some(parent) = self.index[id].parent else { return true };
        if self.index[parent].disk.is_stored() {
            return true;
        }
        self.change_disk(id, DiskEvent::Block);
        self.disk.blocked.entry(parent).or_default().push(id);
        if self.index[parent].disk == DiskState::Absent {
            // The parent left the disk or could not be written, but its child keeps it in host
            // memory.
            self.change_disk(parent, DiskEvent::Want);
            self.disk.write_queue.push_first(&self.index, parent);
        }
        false
    }

    /// Completes a read. After an I/O error, the chunk stays on disk for a later retry. A damaged
    /// chunk is removed along with its descendants, which are not visible in host memory.
    fn end_read(
        &mut self,
        id: ChunkId,
        frame: Frame,
        outcome: &Result<()>,
        num_errors: u64,
    ) -> IoOutcome {
        let num_bytes = frame.bytes().len() as u64;
        self.host.return_frame(frame);
        self.stats.disk_read_errors += num_errors;
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
        IoOutcome::of(outcome.is_ok() || is_damaged)
    }

    fn end_write(&mut self, id: ChunkId, frame: Frame, outcome: Written) -> IoOutcome {
        let num_bytes = frame.bytes().len() as u64;
        self.host.return_frame(frame);
        if let Written::In(slot) = outcome {
            self.disk.writes_deferred_until = Duration::ZERO;
            self.stats.disk_writes += 1;
            self.stats.disk_bytes_written += num_bytes;
            if self.index[id].detached {
                self.change_disk(id, DiskEvent::Leave(Removal::Dropped));
                self.disk.to_free.push(slot);
            } else {
                self.change_disk(id, DiskEvent::Written(slot));
                self.unblock_children(id);
            }
        } else if outcome == Written::NotYet && !self.index[id].detached {
            self.change_disk(id, DiskEvent::Defer);
            self.disk.write_queue.push_first(&self.index, id);
            self.disk.writes_deferred_until = self.now + DEFER_FOR;
        } else {
            self.change_disk(id, DiskEvent::Leave(Removal::Dropped));
            self.drop_blocked(id);
        }
        self.unhold(id);
        match outcome {
            Written::In(_) => IoOutcome::Succeeded,
            Written::NotYet => IoOutcome::Neutral,
            Written::NoRoom => {
                self.stats.disk_dropped += 1;
                IoOutcome::Neutral
            }
            Written::NoQuota => {
                self.stats.disk_dropped += 1;
                self.stats.quota_dropped += 1;
                IoOutcome::Neutral
            }
            Written::Failed(slot) => {
                self.stats.disk_write_errors += 1;
                self.retry_free_later(slot.into_iter().collect());
                IoOutcome::Failed
            }
        }
    }

    fn end_free(&mut self, not_freed: Vec<SlotId>, is_retry: bool) -> IoOutcome {
        let all_freed = not_freed.is_empty();
        self.disk.freeing -= 1;
        self.stats.disk_write_errors += u64::from(!all_freed);
        if !is_retry {
            self.retry_free_later(not_freed);
        } else if all_freed {
            self.disk.unfreed_until = self.now;
        } else {
            self.disk.unfreed.splice(0..0, not_freed); // retry these slots last
            return IoOutcome::Neutral; // a few bad sectors must not stop all writes
        }
        IoOutcome::of(all_freed)
    }

    /// Schedules another attempt to free slots. If the store restarted before that attempt, the
    /// chunks in these slots would be found again.
    fn retry_free_later(&mut self, slots: Vec<SlotId>) {
        let work = &mut self.disk;
        if work.unfreed.is_empty() {
            work.unfreed_until = self.now + AGAIN_AFTER;
        }
        work.unfreed_may_be_removed |= !slots.is_empty();
        work.unfreed.extend(slots);
    }

    fn end_clear(&mut self, not_freed: Vec<SlotId>, is_cleared: bool) -> IoOutcome {
        let all_freed = is_cleared && not_freed.is_empty();
        self.retry_free_later(not_freed);
        self.disk.clearing = if is_cleared { Clearing::No } else { Clearing::Wanted };
        if !all_freed {
            self.stats.disk_write_errors += 1;
            self.log(Event::problem(
                "disk tier: some chunks could not be cleared; retrying in the background (a restart \
                 before the retry succeeds would bring them back)",
            ));
        }
        IoOutcome::of(all_freed)
    }
}
