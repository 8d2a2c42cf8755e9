//! How entries come and go: a chunk that is in no tier any more is forgotten, and a forgotten one is freed with its last user.

use crate::evict::{ChunkId, Removal};
use crate::index::{Entry, Filler, Presence};
use crate::key::SaltTag;
use crate::store::state::State;

impl State {
    /// Enters a chunk that is in no tier yet; `saved_s` is the caller's.
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

    /// Forgets a chunk without children that can be found.
    pub(crate) fn detach(&mut self, id: ChunkId) {
        let parent = self.index[id].parent;
        self.leave_host_policy(id, Removal::Dropped);
        self.unwant(id);
        self.index.detach(id);
        self.note_change(id);
        let entry = &self.index[id];
        if matches!(entry.host, Presence::Coming(_)) && !entry.is_filling() {
            self.leave_host(id, Removal::Dropped);
        }
        if self.index[id].disk.place().is_some() {
            self.disk.num_detached_slots += 1;
            self.drop_from_disk(id);
        }
        self.reap(id);
        self.end_failed(parent);
    }

    /// What was filled for a forgotten chunk is of no use: its frame is free.
    pub(crate) fn drop_detached_fill(&mut self, id: ChunkId) {
        let parent = self.index[id].parent;
        self.leave_host(id, Removal::Dropped);
        self.drop_from_disk(id);
        self.reap(id);
        self.end_failed(parent);
    }

    /// Forgets a chunk that is in no tier any more.
    pub(crate) fn settle(&mut self, id: ChunkId) {
        let entry = &self.index[id];
        if entry.host.is_absent() && entry.disk.is_absent() && !entry.detached {
            self.detach(id);
        } else {
            self.reap(id);
        }
    }

    /// Frees a detached entry that has no user any more, and those above it that only waited for it.
    pub(crate) fn reap(&mut self, id: ChunkId) {
        let mut next = Some(id);
        while let Some(id) = next {
            let entry = &self.index[id];
            let is_used = entry.holds > 0 || entry.has_children() || entry.is_filling() || !entry.disk.is_absent();
            if !entry.detached || is_used {
                break;
            }
            next = entry.parent;
            if !entry.host.is_absent() {
                self.leave_host(id, Removal::Dropped);
            }
            self.untrack_expiry(id);
            self.tenants.count_entry(self.index[id].tenant, false);
            self.index.remove(id);
        }
        self.end_failed(next);
    }

    /// Takes a failed chunk out of host, once nothing hangs on it there; then those above it.
    pub(crate) fn end_failed(&mut self, mut next: Option<ChunkId>) {
        while let Some(id) = next {
            let entry = &self.index[id];
            if entry.filler != Filler::Failed || entry.host_children > 0 || entry.detached {
                break;
            }
            next = entry.parent;
            self.leave_host(id, Removal::Dropped);
            self.sync_disk(id);
            self.settle(id);
        }
    }
}
