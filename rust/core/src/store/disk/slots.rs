//! Room on disk for a chunk that is about to be written: whose slot is freed for it. `threads` frees it, without the lock.

use crate::evict::{ChunkId, Removal};
use crate::index::{DiskEvent, DiskState};
use crate::store::state::State;
use crate::store::tenants::quota::group;
use crate::tier::disk::SlotId;

/// Room on disk for a chunk that is about to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotFor {
    /// It is within its tenant's quota.
    Fits,
    /// This one of its tenant's has to leave first; `end_disk_eviction` must follow.
    After(ChunkId, SlotId),
    /// Nothing of its tenant's may go.
    None,
}

impl State {
    /// Whether the chunk, which is counted already, may be written to disk; what has to leave for it begins to.
    pub(crate) fn slot_for(&mut self, id: ChunkId) -> SlotFor {
        let tenant = self.index[id].tenant;
        if !self.tenants.limits.has_quotas || self.tenants.num_slots(tenant) <= self.tenants.ceiling(tenant).disk {
            return SlotFor::Fits;
        }
        match self.disk_policy.victim_of(group(tenant)).and_then(|victim| self.begin_evict(victim)) {
            Some((victim, slot)) => SlotFor::After(victim, slot),
            None => SlotFor::None,
        }
    }

    /// Begins to make room on disk: the chunk that should leave, and the slot to free; None if every one is in use.
    pub(crate) fn begin_disk_eviction(&mut self) -> Option<(ChunkId, SlotId)> {
        let victim = self.disk_policy.victim()?;
        self.begin_evict(victim)
    }

    /// A chunk that may go begins to leave the disk.
    fn begin_evict(&mut self, victim: ChunkId) -> Option<(ChunkId, SlotId)> {
        debug_assert_eq!(self.index[victim].disk_evictable, Some(true), "a policy returns evictable chunks only");
        let slot = self.index[victim].disk.slot()?;
        self.change_disk(victim, DiskEvent::Evict);
        Some((victim, slot))
    }

    /// The slot was freed, or the chunk is there as before.
    pub(crate) fn end_disk_eviction(&mut self, id: ChunkId, freed: bool) {
        if !matches!(self.index[id].disk, DiskState::Evicting(_)) {
            return;
        }
        if freed {
            self.stats.disk_evictions += 1;
            self.change_disk(id, DiskEvent::Leave(Removal::Evicted));
        } else if self.index[id].detached {
            self.leave_slot(id, Removal::Dropped);
        } else {
            self.change_disk(id, DiskEvent::Keep);
            self.disk_policy.touch(id); // the next eviction tries another chunk first
        }
        self.unblock_children(id);
        self.settle(id);
    }

    /// The same of a chunk that leaves for its tenant's quota.
    pub(crate) fn end_quota_eviction(&mut self, id: ChunkId, freed: bool) {
        self.stats.quota_disk_evictions += u64::from(freed);
        self.end_disk_eviction(id, freed);
    }

    /// Takes a chunk off the disk; its slot is freed in time.
    pub(crate) fn drop_for_quota(&mut self, id: ChunkId) {
        self.stats.disk_evictions += 1;
        self.stats.quota_disk_evictions += 1;
        self.leave_slot(id, Removal::Evicted);
        self.unblock_children(id);
        self.settle(id);
    }
}
