//! Room on disk for a chunk that is about to be written: whose slot is freed for it. `threads` frees it, without the lock.

use super::quota::group;
use super::state::State;
use crate::evict::{ChunkId, Removal};
use crate::index::Presence;
use crate::tier::disk::SlotId;

/// Room on disk for a chunk that is about to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// It is within its owner's quota.
    Fits,
    /// This one of its owner's has to leave first; `end_eviction` must follow.
    After(ChunkId, SlotId),
    /// Nothing of its owner's may go.
    None,
}

impl State {
    /// Whether the chunk, which is counted already, may be written to disk; what has to leave for it begins to.
    pub(super) fn place_on_disk(&mut self, id: ChunkId) -> Place {
        let owner = self.index[id].owner;
        if !self.owners.limits.has_quotas || self.owners.num_slots(owner) <= self.owners.ceiling(owner).disk {
            return Place::Fits;
        }
        match self.disk_policy.victim_of(group(owner)).and_then(|victim| self.leave_slot(victim)) {
            Some((victim, slot)) => Place::After(victim, slot),
            None => Place::None,
        }
    }

    /// Begins to make room on disk: the chunk that should leave, and the slot to free; None if every one is in use.
    pub(super) fn begin_eviction(&mut self) -> Option<(ChunkId, SlotId)> {
        let victim = self.disk_policy.victim()?;
        self.leave_slot(victim)
    }

    /// A chunk that may go begins to leave the disk.
    fn leave_slot(&mut self, victim: ChunkId) -> Option<(ChunkId, SlotId)> {
        debug_assert_eq!(self.index[victim].disk_evictable, Some(true), "a policy returns evictable chunks only");
        let slot = self.index[victim].disk.place()?;
        self.index[victim].disk = Presence::Leaving(slot);
        self.note_change(victim);
        self.sync_disk(victim);
        Some((victim, slot))
    }

    /// The slot was freed, or the chunk is there as before.
    pub(super) fn end_eviction(&mut self, id: ChunkId, freed: bool) {
        let Presence::Leaving(slot) = self.index[id].disk else { return };
        if freed {
            self.stats.disk_evictions += 1;
            self.leave_disk(id, Removal::Evicted);
        } else if self.index[id].detached {
            self.leave_disk(id, Removal::Dropped);
            self.disk.trash.push(slot);
        } else {
            self.index[id].disk = Presence::Here(slot);
            self.note_change(id);
            self.sync_disk(id);
            // Another one is tried first next time.
            self.disk_policy.touch(id);
        }
        self.wake_behind(id);
        self.settle(id);
    }

    /// The same of a chunk that leaves for its owner's quota.
    pub(super) fn end_own_eviction(&mut self, id: ChunkId, freed: bool) {
        self.stats.quota_disk_evictions += u64::from(freed);
        self.end_eviction(id, freed);
    }

    /// Takes a chunk off the disk; its slot is freed in time.
    pub(super) fn drop_for_quota(&mut self, id: ChunkId) {
        self.stats.disk_evictions += 1;
        self.stats.quota_disk_evictions += 1;
        let slot = self.leave_disk(id, Removal::Evicted);
        self.disk.trash.extend(slot);
        self.note_change(id);
        self.wake_behind(id);
        self.settle(id);
    }
}
