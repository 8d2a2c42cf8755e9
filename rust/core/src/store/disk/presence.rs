//! The small moves that keep the books right on disk. Without I/O: `threads` does what `jobs` hands out.
//!
//! A chunk is written only behind a parent that is on disk, and leaves only before it: presence is monotone, as in host.

use crate::evict::{ChunkId, Removal};
use crate::index::{Entry, Presence, Wish};
use crate::store::disk::work::Attached;
use crate::store::state::State;
use crate::tier::disk::SlotId;

impl State {
    /// Begins to write a chunk that is nowhere on disk, or to enter one that was found there.
    pub(crate) fn begin_disk(&mut self, id: ChunkId) {
        debug_assert!(self.index[id].disk.is_absent());
        self.index[id].disk = Presence::Coming(None);
        self.tenants.count_slot(self.index[id].tenant, true);
        if let Some(parent) = self.index[id].parent {
            self.index[parent].disk_children += 1;
            self.sync_disk(parent);
        }
    }

    /// The chunk is in `slot` from now on. `sync_disk` is the caller's.
    pub(crate) fn arrive_on_disk(&mut self, id: ChunkId, slot: SlotId) {
        let entry = &mut self.index[id];
        entry.disk = Presence::Here(slot);
        entry.disk_evictable = Some(false);
        self.stats.disk_used += 1;
        self.disk_policy.insert(id, entry.parent, &entry.key);
        if entry.reused {
            self.disk_policy.mark_reused(id);
        }
        self.group_on_disk(id);
        self.note_change(id);
    }

    /// The chunk is nowhere on disk any more; returns the slot it had.
    pub(crate) fn leave_disk(&mut self, id: ChunkId, removal: Removal) -> Option<SlotId> {
        self.leave_disk_policy(id, removal);
        let before = std::mem::take(&mut self.index[id].disk);
        if !before.is_absent() {
            self.tenants.count_slot(self.index[id].tenant, false);
        }
        if let Some(parent) = self.index[id].parent {
            self.index[parent].disk_children -= 1;
            self.sync_disk(parent);
        }
        let slot = before.place()?;
        self.stats.disk_used -= 1;
        self.disk.num_detached_slots -= u64::from(self.index[id].detached);
        Some(slot)
    }

    /// Takes the chunk from the disk policy, if it is there.
    fn leave_disk_policy(&mut self, id: ChunkId, removal: Removal) {
        if self.index[id].disk_evictable.take().is_some() {
            self.disk_policy.remove(id, removal);
        }
    }

    /// Takes a detached chunk off the disk, if it is there and no job is with it; the slot is freed in time.
    pub(crate) fn drop_from_disk(&mut self, id: ChunkId) {
        if self.index[id].disk.is_here() && !self.index[id].is_read() {
            let slot = self.leave_disk(id, Removal::Dropped);
            self.disk.to_free.extend(slot);
        } else {
            self.leave_disk_policy(id, Removal::Dropped);
        }
    }

    /// Tells the disk policy whether the chunk may go now, if that changed.
    pub(crate) fn sync_disk(&mut self, id: ChunkId) {
        let entry = &mut self.index[id];
        let evictable = entry.disk.is_here() && entry.disk_children == 0 && !entry.is_read();
        if entry.disk_evictable.is_some_and(|before| before != evictable) {
            entry.disk_evictable = Some(evictable);
            self.disk_policy.set_evictable(id, evictable);
        }
    }

    /// A chunk became visible in host: it should be on disk too.
    pub(crate) fn want_on_disk(&mut self, id: ChunkId) {
        let entry = &mut self.index[id];
        if self.disk.attached != Attached::Never && entry.disk.is_absent() && entry.wish == Wish::None {
            entry.wish = Wish::Queued;
            self.disk.num_unwritten += 1;
            self.sync_unwritten(id);
            self.disk.write_queue.push(&self.index, id, self.disk.num_unwritten, Entry::is_to_write);
        }
    }

    /// The chunk need not get to disk any more; returns whether it should have. Not for chunks being written.
    pub(crate) fn unwant(&mut self, id: ChunkId) -> bool {
        let wanted = matches!(self.index[id].wish, Wish::Queued | Wish::Behind);
        if wanted {
            self.index[id].wish = Wish::None;
            self.disk.num_unwritten -= 1;
            self.sync_unwritten(id);
            self.disk.blocked.remove(&id);
        }
        wanted
    }

    /// Children that stood behind a chunk, and still do.
    fn take_blocked(&mut self, id: ChunkId) -> Vec<ChunkId> {
        let mut children = self.disk.blocked.remove(&id).unwrap_or_default();
        let index = &self.index;
        children.retain(|&child| index.is_child(child, id) && index[child].wish == Wish::Behind);
        children
    }

    /// Queues the children that stood behind a chunk.
    pub(crate) fn unblock_children(&mut self, id: ChunkId) {
        for child in self.take_blocked(id) {
            self.index[child].wish = Wish::Queued;
            self.disk.write_queue.push_first(&self.index, child);
        }
    }

    /// Gives up on all that stood behind a chunk that will not get to disk.
    pub(crate) fn drop_blocked(&mut self, id: ChunkId) {
        let mut behind = self.take_blocked(id);
        while let Some(child) = behind.pop() {
            behind.extend(self.take_blocked(child));
            self.unwant(child);
            self.stats.disk_dropped += 1;
        }
    }
}
