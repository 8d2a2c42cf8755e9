//! Picks the chunk to evict when another chunk needs a disk slot. `threads` frees the slot without
//! holding the lock.

use crate::evict::{ChunkId, Removal};
use crate::index::{DiskEvent, DiskState, Entry};
use crate::io::SizeClass;
use crate::store::state::State;
use crate::tier::disk::SlotId;

/// What it takes for a chunk that is about to be written to fit its tenant's quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotFor {
    Fits,
    /// This chunk, which belongs to the same tenant, must be evicted first: the caller must free
    /// the slot, then call `end_disk_eviction`.
    After(ChunkId, SlotId),
    /// The chunk does not fit, and the tenant has nothing to evict.
    None,
}

impl State {
    /// Checks a tenant's disk usage, which already includes the given chunk, against the tenant's
    /// quota. If the tenant is over its quota, starts evicting another of the tenant's chunks.
    pub(crate) fn slot_for(&mut self, id: ChunkId) -> SlotFor {
        let Entry { tenant, disk_pages, .. } = self.index[id];
        let quota = self.tenants.ceiling(tenant).disk;
        if !self.tenants.limits.has_quotas || self.tenants.disk_pages(tenant) <= quota {
            return SlotFor::Fits;
        }
        if u64::from(disk_pages) > quota {
            return SlotFor::None; // evictions would not help
        }
        match self.disk_policy.victim_of(tenant).and_then(|victim| self.begin_evict(victim)) {
            Some((victim, slot)) => SlotFor::After(victim, slot),
            None => SlotFor::None,
        }
    }

    /// Starts evicting the next chunk. Returns the chunk and its slot, or None if all chunks are in
    /// use. Also returns None if `only` is given and the slot belongs to a different size class.
    pub(crate) fn begin_disk_eviction(
        &mut self,
        only: Option<SizeClass>,
    ) -> Option<(ChunkId, SlotId)> {
        let victim = self.disk_policy.victim()?;
        let class = self.index[victim].disk.slot()?.class();
        if only.is_some_and(|only| only != class) { None } else { self.begin_evict(victim) }
    }

    fn begin_evict(&mut self, victim: ChunkId) -> Option<(ChunkId, SlotId)> {
        debug_assert_eq!(
            self.index[victim].disk_evictable,
            Some(true),
            "a policy only returns evictable chunks"
        );
        let slot = self.index[victim].disk.slot()?;
        self.change_disk(victim, DiskEvent::Evict);
        Some((victim, slot))
    }

    /// Completes an eviction. An attached chunk stays stored if its slot could not be freed.
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

    /// Evicts a chunk whose tenant is over its quota. The chunk's slot is freed later.
    pub(crate) fn drop_for_quota(&mut self, id: ChunkId) {
        self.stats.disk_evictions += 1;
        self.stats.quota_disk_evictions += 1;
        self.leave_slot(id, Removal::Evicted);
        self.unblock_children(id);
        self.settle(id);
    }
}
