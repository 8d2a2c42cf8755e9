//! Forgetting: at once for whoever asks, in slices for the books.
//!
//! A *doomed* chunk has no key any more; it and all below it are walked depth-first, children before parents as the policies
//! are promised, a slice a call. Until then a chunk below it still has its key: lookups and reservations look at the whole
//! way up while anything is doomed. A clear takes all keys away at once and finds the trees it left by walking the slab.

use super::books::{Attached, Clearing};
use super::state::State;
use crate::evict::{ChunkId, Removal};
use crate::index::Presence;
use crate::key::ChunkKey;

/// Slots of the slab looked at for the price of one entry.
const SWEEP: u32 = 32;

impl State {
    /// Forgets chunks and all that hangs on them; returns how many are gone already.
    pub(crate) fn discard(&mut self, keys: &[ChunkKey]) -> u64 {
        for key in keys {
            if let Some(books) =
                self.disk.as_mut().filter(|books| books.attached != Attached::Yes || !books.found.is_empty())
            {
                books.unwelcome.insert(*key);
            }
            if let Some(id) = self.index.get(key) {
                self.doom(id);
            }
        }
        self.forget_slice()
    }

    /// Forgets everything: nothing is found from now on.
    pub(crate) fn clear(&mut self) {
        self.index.unmap_all();
        self.sweep = self.index.num_ids();
        if let Some(books) = &mut self.disk {
            books.found.clear();
            books.unwelcome.clear();
            books.clearing = Clearing::Wanted;
        }
        self.forget_slice();
    }

    /// Whether chunks are still to be forgotten.
    pub(crate) fn is_forgetting(&self) -> bool {
        self.sweep > 0 || !self.doomed.is_empty()
    }

    /// No key leads to the chunk from now on; it and all below it are forgotten in slices.
    pub(super) fn doom(&mut self, id: ChunkId) {
        if !self.index[id].doomed && !self.index[id].detached {
            self.index.unmap(id);
            self.index[id].doomed = true;
            self.push_doomed(id);
        }
    }

    fn push_doomed(&mut self, id: ChunkId) {
        self.doomed.push((id, self.index[id].generation()));
    }

    /// Forgets as much as one call may take time for; returns how many chunks.
    pub(crate) fn forget_slice(&mut self) -> u64 {
        self.forget_some(self.slice)
    }

    /// Forgets about `budget` chunks of those that are doomed; returns how many.
    pub(crate) fn forget_some(&mut self, budget: usize) -> u64 {
        let mut forgotten = 0;
        for _ in 0..budget {
            let Some(&(id, generation)) = self.doomed.last() else {
                if !self.sweep_some() {
                    break;
                }
                continue;
            };
            if !self.index.is_same(id, generation) || self.index[id].detached {
                self.doomed.pop();
            } else if let Some(child) = self.index.first_child(id) {
                self.push_doomed(child);
            } else {
                self.doomed.pop();
                self.forget_one(id);
                forgotten += 1;
            }
        }
        forgotten
    }

    /// Looks for trees from before a clear; false if there is none left.
    fn sweep_some(&mut self) -> bool {
        let until = self.sweep.saturating_sub(SWEEP);
        while self.sweep > until {
            self.sweep -= 1;
            if self.index.is_old_root(ChunkId(self.sweep)) {
                self.push_doomed(ChunkId(self.sweep));
                break;
            }
        }
        self.is_forgetting()
    }

    /// Forgets a chunk without children that can be found.
    pub(super) fn forget_one(&mut self, id: ChunkId) {
        if self.index[id].detached {
            return;
        }
        let count = if self.index.is_old(id) { &mut self.counters.cleared } else { &mut self.counters.discards };
        *count += 1;
        self.detach(id);
    }

    /// As `forget_one`, not counted.
    pub(super) fn detach(&mut self, id: ChunkId) {
        let parent = self.index[id].parent;
        self.forget_host(id, Removal::Dropped);
        self.unwant(id);
        self.index.detach(id);
        let entry = &self.index[id];
        if matches!(entry.host, Presence::Coming(_)) && !entry.is_filling() {
            self.leave_host(id, Removal::Dropped);
        }
        if self.index[id].disk.place().is_some() {
            self.disk_books().num_lingering += 1;
            self.drop_from_disk(id);
        }
        self.reap(id);
        if let Some(parent) = parent {
            self.end_failed(parent);
        }
    }

    /// What was filled for a forgotten chunk is of no use: its frame is free.
    pub(super) fn abandon(&mut self, id: ChunkId) {
        let parent = self.index[id].parent;
        self.leave_host(id, Removal::Dropped);
        self.drop_from_disk(id);
        self.reap(id);
        if let Some(parent) = parent {
            self.end_failed(parent);
        }
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
            self.index.remove(id);
        }
        if let Some(parent) = next {
            self.end_failed(parent);
        }
    }
}
