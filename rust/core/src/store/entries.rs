//! How entries come and go: a chunk that is in no tier any more is forgotten, and a forgotten one is freed with its last user.

use super::state::State;
use crate::evict::{ChunkId, Removal};
use crate::index::{Entry, Filler, Presence};
use crate::key::SaltTag;

impl State {
    /// Enters a chunk that is in no tier yet; `saved_s` is the caller's.
    pub(super) fn add(&mut self, new: Entry) -> ChunkId {
        let owner = match new.parent {
            Some(parent) => self.index[parent].owner,
            None => self.owners.find_or_add(SaltTag::of_root(&new.parent_key)),
        };
        self.owners.count_entry(owner, true);
        let expires_s = self.expiry(self.owners.ceiling(owner).ttl_s, new.parent, new.saved_s);
        let id = self.index.insert(Entry { owner, expires_s, ..new });
        self.note_age(id);
        id
    }

    /// Forgets a chunk without children that can be found.
    pub(super) fn detach(&mut self, id: ChunkId) {
        let parent = self.index[id].parent;
        self.forget_host(id, Removal::Dropped);
        self.unwant(id);
        self.index.detach(id);
        self.note_change(id);
        let entry = &self.index[id];
        if matches!(entry.host, Presence::Coming(_)) && !entry.is_filling() {
            self.leave_host(id, Removal::Dropped);
        }
        if self.index[id].disk.place().is_some() {
            self.disk.num_lingering += 1;
            self.drop_from_disk(id);
        }
        self.reap(id);
        self.end_failed(parent);
    }

    /// What was filled for a forgotten chunk is of no use: its frame is free.
    pub(super) fn abandon(&mut self, id: ChunkId) {
        let parent = self.index[id].parent;
        self.leave_host(id, Removal::Dropped);
        self.drop_from_disk(id);
        self.reap(id);
        self.end_failed(parent);
    }

    /// Forgets a chunk that is in no tier any more.
    pub(super) fn settle(&mut self, id: ChunkId) {
        let entry = &self.index[id];
        if entry.host.is_absent() && entry.disk.is_absent() && !entry.detached {
            self.detach(id);
        } else {
            self.reap(id);
        }
    }

    /// Frees a detached entry that has no user any more, and those above it that only waited for it.
    pub(super) fn reap(&mut self, id: ChunkId) {
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
            self.forget_age(id);
            self.owners.count_entry(self.index[id].owner, false);
            self.index.remove(id);
        }
        self.end_failed(next);
    }

    /// Takes a failed chunk out of host, once nothing hangs on it there; then those above it.
    pub(super) fn end_failed(&mut self, mut next: Option<ChunkId>) {
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
