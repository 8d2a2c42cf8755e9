//! Changes a chunk's disk state and updates everything derived from it. Does no I/O.
//!
//! The states are defined in `index/disk_state.rs`. Invariants that hold between calls:
//!
//! - If a chunk has a slot, its parent is stored: parents are written first and removed last.
//! - The policy holds every attached chunk with a slot. The policy may evict stored leaves that no
//!   running or queued read uses.

use crate::evict::{ChunkId, Removal};
use crate::index::{DiskEvent, DiskState, Entry};
use crate::io::FrameId;
use crate::store::disk::work::DiskOpening;
use crate::store::state::State;
use crate::tier::disk::SlotId;

/// Maximum number of writes to block or cancel per call. Blocking or canceling this many writes
/// takes about 0.1 ms.
pub(crate) const WRITE_SLICE: usize = 256;

impl State {
    /// Applies an event to a chunk. No other code changes `Entry::disk`. This method also:
    ///
    /// - updates the tenant's disk usage and the parent's child count,
    /// - adds the chunk to the disk policy when it gets a slot, and removes it when it loses its
    ///   slot,
    /// - updates the host policy when the chunk becomes unwritten or stops being unwritten,
    /// - updates the gauges and the change log,
    /// - updates which chunks the disk policy can evict, except after `Found`: chains are indexed
    ///   chunk by chunk, so every chunk would briefly be a leaf. The caller must call
    ///   [`State::sync_disk`] afterward.
    ///
    /// The caller updates the queues and frees a removed chunk's slot.
    pub(crate) fn change_disk(&mut self, id: ChunkId, event: DiskEvent) {
        let entry = &self.index[id];
        let (before, is_detached) = (entry.disk, entry.detached);
        let Some(after) = before.after(event) else {
            unreachable!("disk tier: {event:?} in state {before:?}")
        };
        if let DiskEvent::Leave(removal) = event {
            self.leave_disk_policy(id, removal);
        }
        self.index[id].disk = after;
        self.count_write(id, before, after);
        if before.takes_slot() != after.takes_slot() {
            self.count_slot(id, after.takes_slot());
        }
        let slot = before.slot().or(after.slot());
        let slot_bytes = slot.map_or(0, |slot| self.host.frame_bytes(slot.class()));
        let raw_bytes = slot.map_or(0, |slot| self.host.raw_frame_bytes(slot.class()));
        match (before.slot(), after.slot()) {
            (None, Some(_)) => {
                self.stats.disk_used += 1;
                self.stats.disk_used_bytes += slot_bytes;
                self.stats.disk_raw_bytes += raw_bytes;
                self.enter_disk_policy(id);
            }
            (Some(_), None) => {
                self.stats.disk_used -= 1;
                self.stats.disk_used_bytes -= slot_bytes;
                self.stats.disk_raw_bytes -= raw_bytes;
                self.disk.num_detached_slots -= u64::from(is_detached);
            }
            _ => {}
        }
        if before.is_stored() != after.is_stored() {
            if !is_detached {
                self.note_change(id);
            }
            if !matches!(event, DiskEvent::Found(_)) {
                self.sync_disk(id);
            }
        }
    }

    fn count_write(&mut self, id: ChunkId, before: DiskState, after: DiskState) {
        if before.is_unwritten() == after.is_unwritten() {
            return;
        }
        self.disk.num_unwritten += u64::from(after.is_unwritten());
        self.disk.num_unwritten -= u64::from(before.is_unwritten());
        if self.index[id].host_evictable.is_some() {
            self.host_policy.set_unwritten(id, after.is_unwritten());
        }
    }

    fn count_slot(&mut self, id: ChunkId, is_more: bool) {
        let Entry { tenant, parent, disk, host, disk_pages, .. } = self.index[id];
        let class = disk.slot().map(SlotId::class).or(host.frame().map(FrameId::class));
        let pages = if is_more { class.map_or(0, |class| self.host.pages(class)) } else { 0 };
        self.index[id].disk_pages = pages;
        self.tenants.count_disk(tenant, pages.max(disk_pages), is_more);
        if let Some(parent) = parent {
            let children = &mut self.index[parent].disk_children;
            *children = if is_more { *children + 1 } else { *children - 1 };
            self.sync_disk(parent);
        }
    }

    fn enter_disk_policy(&mut self, id: ChunkId) {
        let entry = &mut self.index[id];
        entry.disk_evictable = Some(false);
        self.disk_policy.insert(id, entry.parent, &entry.key);
        if entry.reused {
            self.disk_policy.mark_reused(id);
        }
        self.set_tenant_on_disk(id);
    }

    pub(crate) fn leave_disk_policy(&mut self, id: ChunkId, removal: Removal) {
        if self.index[id].disk_evictable.take().is_some() {
            self.disk_policy.remove(id, removal);
        }
    }

    /// Updates the disk policy if the chunk's evictability has changed.
    pub(crate) fn sync_disk(&mut self, id: ChunkId) {
        let entry = &mut self.index[id];
        let is_evictable = entry.is_disk_evictable();
        if entry.disk_evictable.is_some_and(|before| before != is_evictable) {
            entry.disk_evictable = Some(is_evictable);
            self.disk_policy.set_evictable(id, is_evictable);
        }
    }

    /// Removes a chunk from the disk. The chunk's slot is freed later.
    pub(crate) fn leave_slot(&mut self, id: ChunkId, removal: Removal) {
        let slot = self.index[id].disk.slot();
        self.change_disk(id, DiskEvent::Leave(removal));
        self.disk.to_free.extend(slot);
    }

    /// Removes a detached chunk from the disk, or leaves the removal to the job that is still using
    /// the chunk.
    pub(crate) fn leave_slot_if_unused(&mut self, id: ChunkId) {
        let entry = &self.index[id];
        if entry.disk.is_stored() && !entry.host.awaits_read() {
            self.leave_slot(id, Removal::Dropped);
        }
    }

    /// Queues a newly visible chunk to be written. Does nothing if there is no disk tier, or if the
    /// chunk is already on disk or on its way there.
    pub(crate) fn want_on_disk(&mut self, id: ChunkId) {
        if self.disk.opening != DiskOpening::NoTier && self.index[id].disk == DiskState::Absent {
            self.change_disk(id, DiskEvent::Want);
            self.disk.write_queue.push(
                &self.index,
                id,
                self.disk.num_unwritten,
                Entry::is_to_write,
            );
        }
    }

    /// Cancels a pending write. Returns false if the chunk was not waiting to be written.
    pub(crate) fn cancel_write(&mut self, id: ChunkId) -> bool {
        let is_waiting = self.index[id].disk.is_waiting();
        if is_waiting {
            self.change_disk(id, DiskEvent::Cancel);
            self.disk.blocked.remove(&id);
        }
        is_waiting
    }

    /// Takes the list of children waiting for a chunk to be written.
    fn take_blocked(&mut self, id: ChunkId) -> Vec<ChunkId> {
        let mut children = self.disk.blocked.remove(&id).unwrap_or_default();
        let index = &self.index;
        children
            .retain(|&child| index.is_child(child, id) && index[child].disk == DiskState::Blocked);
        children.sort_unstable();
        children.dedup(); // a child is listed twice if its write was canceled and then requeued
        children
    }

    /// Moves the children that a chunk's write was blocking to the front of the write queue.
    pub(crate) fn unblock_children(&mut self, id: ChunkId) {
        for child in self.take_blocked(id) {
            self.change_disk(child, DiskEvent::Unblock);
            self.disk.write_queue.push_first(&self.index, child);
        }
    }

    /// Cancels the writes of all descendants that were waiting for a failed write. If there are too
    /// many for one call, the disk threads cancel the remaining writes.
    pub(crate) fn drop_blocked(&mut self, id: ChunkId) {
        self.queue_blocked_children(id);
        self.drop_some_blocked();
    }

    /// Moves a chunk's blocked children to `to_drop`.
    fn queue_blocked_children(&mut self, id: ChunkId) {
        let children = self.take_blocked(id);
        let index = &self.index;
        self.disk.to_drop.extend(children.iter().map(|&child| (child, index[child].generation)));
    }

    /// Cancels a slice of the writes in `to_drop`. Returns true if any writes remain.
    pub(crate) fn drop_some_blocked(&mut self) -> bool {
        for _ in 0..WRITE_SLICE {
            let Some((id, generation)) = self.disk.to_drop.pop() else { break };
            if self.index.is_same(id, generation) && self.index[id].disk == DiskState::Blocked {
                self.queue_blocked_children(id);
                self.cancel_write(id);
                self.stats.disk_dropped += 1;
            }
        }
        !self.disk.to_drop.is_empty()
    }
}
