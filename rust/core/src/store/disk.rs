//! The disk tier's books: which chunks are on disk, which should get there, which are being read.
//!
//! Everything here happens under the store's lock and without I/O; `threads` does the I/O that `jobs` hands out. A chunk is
//! written only behind a parent that is on disk, and leaves only before it: presence is monotone, as in host.

use std::collections::VecDeque;

use super::state::State;
use crate::evict::{ChunkId, Policy, Removal};
use crate::index::{Dirty, DiskState, HostState, NewEntry};
use crate::tier::disk::{DiskEntry, SlotId};

/// Where a wish to forget everything stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Clearing {
    No,
    /// As soon as no other job is under way.
    Wanted,
    Running,
}

/// What the lock guards of the disk tier.
#[derive(Debug)]
pub(crate) struct DiskBooks {
    pub(super) policy: Box<dyn Policy>,
    /// Chunks to write, with their generation; those that are not `Queued` any more are skipped.
    pub(super) queue: VecDeque<(ChunkId, u32)>,
    /// Chunks that are not `Clean`.
    pub(super) num_dirty: u64,
    /// Chunks to read: all `Loading`.
    pub(super) reads: VecDeque<ChunkId>,
    /// Slots to give back.
    pub(super) trash: Vec<SlotId>,
    pub(super) clearing: Clearing,
    /// Jobs under way.
    pub(super) in_flight: u32,
    /// Of those, writes.
    pub(super) writing: u32,
    /// Of those, jobs that give slots back.
    pub(super) freeing: u32,
    /// Forgotten chunks that are on disk until a read of them ends.
    pub(super) num_doomed: u64,
    pub(super) stopping: bool,
    /// Chunks on disk.
    pub(super) used: u64,
    /// Slots of the files and their bytes, as a disk thread last saw them.
    pub(super) slots: u64,
    pub(super) bytes: u64,
}

impl DiskBooks {
    pub(super) fn new(policy: Box<dyn Policy>) -> Self {
        Self {
            policy,
            queue: VecDeque::new(),
            num_dirty: 0,
            reads: VecDeque::new(),
            trash: Vec::new(),
            clearing: Clearing::No,
            in_flight: 0,
            writing: 0,
            freeing: 0,
            num_doomed: 0,
            stopping: false,
            used: 0,
            slots: 0,
            bytes: 0,
        }
    }

    /// Whether all that should be on disk is there, and nothing that should not.
    pub(super) fn is_settled(&self) -> bool {
        let nothing_to_free = self.num_doomed == 0 && self.trash.is_empty() && self.freeing == 0;
        self.num_dirty == 0 && nothing_to_free && self.clearing == Clearing::No
    }

    pub(super) fn is_clearing(&self) -> bool {
        self.clearing != Clearing::No
    }

    pub(super) fn has_jobs(&self) -> bool {
        !self.queue.is_empty()
            || !self.reads.is_empty()
            || !self.trash.is_empty()
            || self.clearing == Clearing::Wanted
            || self.stopping
    }
}

impl State {
    /// The disk's books, where there is a disk; callers are past that question.
    pub(super) fn disk_books(&mut self) -> &mut DiskBooks {
        self.disk.as_mut().expect("only stores with a disk have chunks, jobs or wishes for it")
    }

    /// Enters what was found on disk; parents come before children. What does not fit together is given back.
    pub(super) fn recover(&mut self, found: &[DiskEntry], blocks_per_chunk: u32) {
        self.index.reserve(found.len());
        let mut ids: Vec<ChunkId> = Vec::with_capacity(found.len());
        for entry in found {
            // Chunks of a prefix come one behind the other, which spares most lookups.
            let before = ids.last().copied().filter(|&id| self.index[id].key == entry.parent);
            let parent = before.or_else(|| self.index.get(&entry.parent));
            let fits = match (entry.depth, parent) {
                (0, _) => true,
                (depth, Some(parent)) => {
                    let parent = &self.index[parent];
                    parent.depth.checked_add(1) == Some(depth) && parent.num_blocks == blocks_per_chunk
                }
                (_, None) => false,
            };
            let first_block = entry.depth.checked_mul(blocks_per_chunk);
            let fits =
                fits && (1..=blocks_per_chunk).contains(&entry.num_blocks) && self.index.get(&entry.key).is_none();
            let Some(first_block) = first_block.filter(|_| fits) else {
                self.disk_books().trash.push(entry.slot);
                continue;
            };
            let parent = parent.filter(|_| entry.depth > 0);
            let DiskEntry { key, parent: parent_key, depth, num_blocks, slot, .. } = *entry;
            let id = self.index.insert(NewEntry { key, parent_key, parent, depth, first_block, num_blocks });
            if let Some(parent) = parent {
                self.index[parent].disk_children += 1;
            }
            self.arrive_on_disk(id, slot);
            ids.push(id);
        }
        self.counters.disk_recovered = ids.len() as u64;
        // Only now, so that chains do not become and cease to be leaves link by link.
        for id in ids {
            self.sync_disk(id);
        }
    }

    /// The chunk is in `slot` from now on. Its parent's count and `sync_disk` are the caller's.
    pub(super) fn arrive_on_disk(&mut self, id: ChunkId, slot: SlotId) {
        let entry = &mut self.index[id];
        entry.disk = DiskState::Present(slot);
        entry.disk_evictable = Some(false);
        let (parent, key) = (entry.parent, entry.key);
        let books = self.disk_books();
        books.used += 1;
        books.policy.insert(id, parent, &key);
    }

    /// Begins to write a chunk that is nowhere on disk.
    pub(super) fn begin_disk(&mut self, id: ChunkId) {
        debug_assert_eq!(self.index[id].disk, DiskState::Absent);
        self.index[id].disk = DiskState::Writing;
        if let Some(parent) = self.index[id].parent {
            self.index[parent].disk_children += 1;
            self.sync_disk(parent);
        }
    }

    /// The chunk is nowhere on disk any more; returns the slot it had.
    pub(super) fn leave_disk(&mut self, id: ChunkId, removal: Removal) -> Option<SlotId> {
        self.forget_disk(id, removal);
        let before = std::mem::replace(&mut self.index[id].disk, DiskState::Absent);
        debug_assert_ne!(before, DiskState::Absent);
        if let Some(parent) = self.index[id].parent {
            self.index[parent].disk_children -= 1;
            self.sync_disk(parent);
        }
        let DiskState::Present(slot) = before else { return None };
        let detached = self.index[id].detached;
        let books = self.disk_books();
        books.used -= 1;
        books.num_doomed -= u64::from(detached);
        Some(slot)
    }

    /// Takes the chunk from the disk policy, if it is there.
    pub(super) fn forget_disk(&mut self, id: ChunkId, removal: Removal) {
        if self.index[id].disk_evictable.take().is_some() {
            self.disk_books().policy.remove(id, removal);
        }
    }

    /// A chunk that is on disk was forgotten: it leaves with `drop_from_disk`, at once or when its read ends.
    pub(super) fn doom(&mut self, id: ChunkId) {
        if self.index[id].is_on_disk() {
            self.disk_books().num_doomed += 1;
        }
    }

    /// Leaves the disk, if it is there and nobody reads it; the slot goes back in time.
    pub(super) fn drop_from_disk(&mut self, id: ChunkId) {
        let entry = &self.index[id];
        if entry.is_on_disk() && !entry.reading {
            let slot = self.leave_disk(id, Removal::Dropped);
            self.disk_books().trash.extend(slot);
        } else {
            self.forget_disk(id, Removal::Dropped);
        }
    }

    /// Tells the disk policy whether the chunk may go now, if that changed.
    pub(super) fn sync_disk(&mut self, id: ChunkId) {
        let entry = &mut self.index[id];
        let evictable = entry.is_on_disk() && entry.disk_children == 0 && !entry.reading && !entry.detached;
        if entry.disk_evictable.is_some_and(|before| before != evictable) {
            entry.disk_evictable = Some(evictable);
            self.disk_books().policy.set_evictable(id, evictable);
        }
    }

    /// Makes room on disk: the slot of a chunk that is on disk no more; None if every one is in use.
    pub(super) fn evict_from_disk(&mut self) -> Option<SlotId> {
        let victim = self.disk.as_mut()?.policy.victim()?;
        debug_assert_eq!(self.index[victim].disk_evictable, Some(true), "a policy returns evictable chunks only");
        self.counters.disk_evictions += 1;
        let slot = self.leave_disk(victim, Removal::Evicted);
        self.settle(victim);
        slot
    }

    /// A chunk became visible in host: it should be on disk too.
    pub(super) fn want_on_disk(&mut self, id: ChunkId) {
        let entry = &mut self.index[id];
        if let Some(books) = &mut self.disk
            && entry.disk == DiskState::Absent
            && entry.dirty == Dirty::Clean
        {
            entry.dirty = Dirty::Queued;
            books.num_dirty += 1;
            books.queue.push_back((id, entry.generation()));
            self.trim_queue();
        }
    }

    /// Keeps the queue from growing with chunks that left host before a slow disk got to them.
    fn trim_queue(&mut self) {
        let most = 2 * self.host.arena().num_frames() as usize + 64;
        if let Some(books) = self.disk.as_mut().filter(|books| books.queue.len() > most) {
            let index = &self.index;
            books.queue.retain(|&(id, generation)| index.is_same(id, generation) && index[id].dirty == Dirty::Queued);
        }
    }

    /// The chunk need not get to disk any more; returns whether it should have. Not for chunks being written.
    pub(super) fn unwant(&mut self, id: ChunkId) -> bool {
        let wanted = matches!(self.index[id].dirty, Dirty::Queued | Dirty::Behind);
        if wanted {
            self.index[id].dirty = Dirty::Clean;
            self.disk_books().num_dirty -= 1;
        }
        wanted
    }

    /// Starts to read a chunk from disk into a host frame; true if it will come, by this or an earlier read.
    pub(super) fn start_read(&mut self, id: ChunkId) -> bool {
        match self.index[id].host {
            HostState::Absent => {}
            HostState::Loading(_) | HostState::Waiting(_) | HostState::Visible(_) => return true,
            HostState::Reserved(_) | HostState::Failed => return false,
        }
        let Some(frame) = self.take_frame_under(self.index[id].parent) else { return false };
        self.enter_host(id, HostState::Loading(frame));
        self.index[id].reading = true;
        self.sync_disk(id);
        self.disk_books().reads.push_back(id);
        true
    }

    /// A chunk could not be read: its frame is free at once, and it and all below it are forgotten.
    pub(super) fn fail_read(&mut self, id: ChunkId) {
        self.index[id].reading = false;
        self.fail_host(id);
        if self.index[id].detached {
            self.drop_from_disk(id);
            self.reap(id);
        } else {
            self.counters.discards += self.detach_tree(id);
        }
    }

    /// Nothing more will be read or written but the jobs at hand.
    pub(super) fn stop(&mut self) {
        self.closed = true;
        self.fail_queued_reads();
        if let Some(books) = &mut self.disk {
            books.stopping = true;
        }
    }

    /// Fails every read that has not begun: their chunks were forgotten, or the store closes.
    pub(super) fn fail_queued_reads(&mut self) {
        let Some(books) = &mut self.disk else { return };
        for id in std::mem::take(&mut books.reads) {
            if self.index[id].detached {
                self.fail_read(id);
            } else {
                // On disk it is as good as before; only the leases of this closing store end short.
                self.index[id].reading = false;
                self.fail_host(id);
                self.sync_disk(id);
            }
        }
    }
}
