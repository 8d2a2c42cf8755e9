//! Adds chunks to the index, detaches them once no tier has them, and frees them once no user has
//! them.

use crate::evict::{ChunkId, Removal};
use crate::index::{Entry, HostEvent, HostState};
use crate::key::SaltTag;
use crate::store::state::State;

impl State {
    /// Adds a chunk that no tier has yet. The caller sets `saved_s`.
    pub(crate) fn add(&mut self, new: Entry) -> ChunkId {
        let tenant = match new.parent {
            Some(parent) => self.index[parent].tenant,
            None => self.tenants.find_or_add(SaltTag::of_root(&new.parent_key)),
        };
        self.tenants.count_entry(tenant, true);
        let expires_s = self.expiry(self.tenants.ceiling(tenant).ttl_s, new.parent, new.saved_s);
        let id = self.index.insert(Entry { tenant, expires_s, ..new });
        self.track_expiry(id);
        id
    }

    /// Detaches a chunk without attached children. It stays until its last user ends.
    pub(crate) fn detach(&mut self, id: ChunkId) {
        let parent = self.index[id].parent;
        self.leave_host_policy(id, Removal::Dropped);
        self.leave_disk_policy(id, Removal::Dropped);
        self.cancel_write(id);
        self.index.detach(id);
        self.note_change(id);
        let host = self.index[id].host;
        if host.is_pending() && !host.is_filling() {
            self.change_host(id, HostEvent::Leave(Removal::Dropped));
        }
        if self.index[id].disk.slot().is_some() {
            self.disk.num_detached_slots += 1;
            self.leave_slot_if_unused(id);
        }
        self.reap(id);
        self.leave_failed(parent);
    }

    /// Frees the frame that was filled for a detached chunk.
    pub(crate) fn drop_detached_fill(&mut self, id: ChunkId) {
        let parent = self.index[id].parent;
        self.change_host(id, HostEvent::Leave(Removal::Dropped));
        self.leave_slot_if_unused(id);
        self.reap(id);
        self.leave_failed(parent);
    }

    pub(crate) fn settle(&mut self, id: ChunkId) {
        let entry = &self.index[id];
        if entry.host.is_absent() && !entry.disk.takes_slot() && !entry.detached {
            self.detach(id);
        } else {
            self.reap(id);
        }
    }

    /// Frees a detached entry without users, and the detached entries above it that only waited for
    /// it.
    pub(crate) fn reap(&mut self, id: ChunkId) {
        let mut next = Some(id);
        while let Some(id) = next {
            let entry = &self.index[id];
            let is_used = entry.holds > 0
                || entry.has_children()
                || entry.host.is_filling()
                || entry.disk.takes_slot();
            if !entry.detached || is_used {
                break;
            }
            next = entry.parent;
            if !entry.host.is_absent() {
                self.change_host(id, HostEvent::Leave(Removal::Dropped));
            }
            self.untrack_expiry(id);
            self.tenants.count_entry(self.index[id].tenant, false);
            self.index.remove(id);
        }
        self.leave_failed(next);
    }

    /// Removes a failed chunk without children from host memory, and then its failed ancestors.
    pub(crate) fn leave_failed(&mut self, mut next: Option<ChunkId>) {
        while let Some(id) = next {
            let entry = &self.index[id];
            if !matches!(entry.host, HostState::Failed(_))
                || entry.host_children > 0
                || entry.detached
            {
                break;
            }
            next = entry.parent;
            self.change_host(id, HostEvent::Leave(Removal::Dropped));
            self.settle(id);
        }
    }
}
