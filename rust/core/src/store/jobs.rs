//! What disk threads should do next, and what comes of it. Under the lock, without I/O.
//!
//! Loads wait for reads, so reads go first; then slots are given back, then frames are written, oldest first. A slot is given
//! back only while nothing is written: a chunk under way to disk may hang on the one that was there (it was forgotten since).

use super::disk::Clearing;
use super::state::State;
use crate::evict::{ChunkId, Removal};
use crate::index::{Dirty, DiskState, HostState};
use crate::io::Frame;
use crate::key::ChunkKey;
use crate::tier::disk::{DiskMeta, SlotId};
use crate::{Error, ErrorKind};

/// Slots given back by one job: few enough that a read need not wait long for a thread.
const FREE_BATCH: usize = 32;

/// What came of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Written {
    /// It is there.
    In(SlotId),
    /// No slot could be had: all are in use by chunks that may not go now.
    NoRoom,
    /// The system refused.
    Failed,
}

/// One piece of I/O. Frames are lent to it.
#[derive(Debug)]
pub(super) enum Job {
    Read { id: ChunkId, slot: SlotId, key: ChunkKey, frame: Frame },
    Write { id: ChunkId, meta: DiskMeta, frame: Frame },
    Free(Vec<SlotId>),
    Clear,
}

impl State {
    /// The next job, if there is one that may run now. `end_job` must follow.
    pub(super) fn next_job(&mut self) -> Option<Job> {
        let books = self.disk.as_mut()?;
        let job = match books.clearing {
            Clearing::Running => return None,
            Clearing::Wanted if books.in_flight > 0 => return None,
            Clearing::Wanted => {
                books.clearing = Clearing::Running;
                books.trash.clear();
                Job::Clear
            }
            Clearing::No => {
                let next = self.next_read();
                next.or_else(|| if self.disk_books().trash.is_empty() { self.next_write() } else { self.next_free() })?
            }
        };
        self.disk_books().in_flight += 1;
        Some(job)
    }

    /// A job is done and its outcome entered.
    pub(super) fn end_job(&mut self) {
        self.disk_books().in_flight -= 1;
    }

    fn next_read(&mut self) -> Option<Job> {
        while let Some(id) = self.disk_books().reads.pop_front() {
            let entry = &self.index[id];
            let (host, disk, key) = (entry.host, entry.disk, entry.key);
            if let (HostState::Loading(frame), DiskState::Present(slot), false) = (host, disk, entry.detached)
                && let Some(frame) = self.host.lend(frame)
            {
                return Some(Job::Read { id, slot, key, frame });
            }
            self.fail_read(id);
        }
        None
    }

    fn next_free(&mut self) -> Option<Job> {
        let books = self.disk_books();
        if books.writing > 0 {
            return None;
        }
        let trash = &mut books.trash;
        let rest = trash.len().saturating_sub(FREE_BATCH);
        let slots = trash.split_off(rest);
        if slots.is_empty() {
            return None;
        }
        books.freeing += 1;
        Some(Job::Free(slots))
    }

    fn next_write(&mut self) -> Option<Job> {
        while let Some((id, generation)) = self.disk_books().queue.pop_front() {
            if !self.index.is_same(id, generation)
                || self.index[id].dirty != Dirty::Queued
                || !self.parent_is_on_disk(id)
            {
                continue;
            }
            let entry = &self.index[id];
            let meta =
                DiskMeta { key: entry.key, parent: entry.parent_key, num_blocks: entry.num_blocks, depth: entry.depth };
            if let HostState::Visible(frame) = entry.host
                && let Some(frame) = self.host.lend(frame)
            {
                self.index[id].dirty = Dirty::Writing;
                self.hold(id);
                self.begin_disk(id);
                self.disk_books().writing += 1;
                return Some(Job::Write { id, meta, frame });
            }
            self.unwant(id);
        }
        None
    }

    /// Whether a queued chunk may be written now. If not, it stands behind its parent, which is in the queue then.
    fn parent_is_on_disk(&mut self, id: ChunkId) -> bool {
        let Some(parent) = self.index[id].parent else { return true };
        if self.index[parent].is_on_disk() {
            return true;
        }
        self.index[id].dirty = Dirty::Behind;
        if self.index[parent].dirty == Dirty::Clean {
            // It left the disk, or could not be written when it was new; it is in host, for its child is.
            self.index[parent].dirty = Dirty::Queued;
            let generation = self.index[parent].generation();
            let books = self.disk_books();
            books.num_dirty += 1;
            books.queue.push_front((parent, generation));
        }
        false
    }

    /// A read ended.
    pub(super) fn end_read(&mut self, id: ChunkId, frame: Frame, outcome: Result<(), Error>, micros: u64) {
        let num_bytes = frame.bytes().len() as u64;
        self.host.give_back(frame);
        let HostState::Loading(frame) = self.index[id].host else { return };
        self.counters.disk_read_us += micros;
        let failures = match outcome {
            Ok(()) => None,
            Err(error) if error.kind() == ErrorKind::Corrupt => Some(&mut self.counters.disk_verify_failures),
            Err(_) => Some(&mut self.counters.disk_read_errors),
        };
        if let Some(failures) = failures {
            *failures += 1;
            return self.fail_read(id);
        }
        self.counters.disk_reads += 1;
        self.counters.disk_bytes_read += num_bytes;
        if self.index[id].detached {
            return self.fail_read(id);
        }
        self.index[id].reading = false;
        self.sync_disk(id);
        self.change_host(id, HostState::Waiting(frame));
        self.rise(id);
    }

    /// A write ended: in a slot, or not at all.
    pub(super) fn end_write(&mut self, id: ChunkId, frame: Frame, outcome: Written, micros: u64) {
        let num_bytes = frame.bytes().len() as u64;
        self.host.give_back(frame);
        self.counters.disk_write_us += micros;
        self.index[id].dirty = Dirty::Clean;
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
            Written::NoRoom | Written::Failed => {
                let failed = outcome == Written::Failed;
                *(if failed { &mut self.counters.disk_write_errors } else { &mut self.counters.disk_dropped }) += 1;
                self.leave_disk(id, Removal::Dropped);
                self.drop_behind(id);
            }
        }
        self.unhold(id);
    }

    /// Slots were given back.
    pub(super) fn end_free(&mut self) {
        self.disk_books().freeing -= 1;
    }

    /// The disk is empty.
    pub(super) fn end_clear(&mut self) {
        self.disk_books().clearing = Clearing::No;
    }

    /// Queues the children that stood behind a chunk that is on disk now.
    fn wake_behind(&mut self, id: ChunkId) {
        let behind: Vec<_> =
            self.index.children(id).filter(|&child| self.index[child].dirty == Dirty::Behind).collect();
        for child in behind {
            self.index[child].dirty = Dirty::Queued;
            let generation = self.index[child].generation();
            self.disk_books().queue.push_front((child, generation));
        }
    }

    /// Gives up on all that stood behind a chunk that will not get to disk.
    fn drop_behind(&mut self, id: ChunkId) {
        let mut ids = vec![id];
        while let Some(id) = ids.pop() {
            let behind: Vec<_> =
                self.index.children(id).filter(|&child| self.index[child].dirty == Dirty::Behind).collect();
            for child in behind {
                self.unwant(child);
                self.counters.disk_dropped += 1;
                ids.push(child);
            }
        }
    }
}
