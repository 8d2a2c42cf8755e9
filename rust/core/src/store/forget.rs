//! Forgetting: at once for the caller, in slices for the books.
//!
//! A *doomed* chunk has no key any more; it and all below it are walked depth-first, children before parents as the policies
//! are promised, a slice a call. Until then a chunk below it still has its key: lookups and reservations look at the whole
//! way up while anything is doomed. A clear takes all keys away at once; the index remembers the trees that it left.

use super::books::{Attached, Clearing};
use super::state::State;
use crate::evict::{ChunkId, Removal};
use crate::index::Presence;
use crate::key::ChunkKey;

/// Most keys that are remembered until it is known what the disk holds; beyond, it is not used.
const MAX_UNWELCOME: usize = 1 << 16;

/// The top of a tree that is walked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Doomed {
    id: ChunkId,
    generation: u32,
    why: Why,
}

/// Who asked for it, for the counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    Discard,
    Clear,
    Evict,
    Age,
}

impl State {
    /// Forgets chunks and all that hangs on them; returns how many are gone already.
    pub(crate) fn discard(&mut self, keys: &[ChunkKey]) -> u64 {
        if self.disk.is_recovering() {
            self.refuse(keys);
        }
        for key in keys {
            if let Some(id) = self.index.get(key) {
                self.doom(id);
            }
        }
        self.forget_slice()
    }

    /// Chunks that must not come back with what the disk turns out to hold.
    fn refuse(&mut self, keys: &[ChunkKey]) {
        let books = &mut self.disk;
        if books.clearing == Clearing::No {
            books.unwelcome.extend(keys);
        }
        if books.unwelcome.len() > MAX_UNWELCOME {
            books.unwelcome.clear();
            books.trash.extend(books.found.drain(..).map(|entry| entry.slot));
            if books.attached != Attached::Yes {
                books.clearing = Clearing::Wanted;
            }
        }
    }

    /// Forgets everything: nothing is found from now on.
    pub(crate) fn clear(&mut self) {
        self.index.unmap_all();
        self.note_all();
        self.doomed.clear();
        self.disk.found.clear();
        self.disk.unwelcome.clear();
        if self.disk.attached != Attached::Never {
            self.disk.clearing = Clearing::Wanted;
        }
        self.forget_slice();
    }

    /// Whether chunks are still to be forgotten.
    pub(crate) fn is_forgetting(&self) -> bool {
        !self.doomed.is_empty() || self.index.old_root().is_some()
    }

    /// No key leads to the chunk from now on; it and all below it are forgotten in slices.
    pub(super) fn doom(&mut self, id: ChunkId) {
        self.doom_for(id, Why::Discard);
    }

    pub(super) fn doom_for(&mut self, id: ChunkId, why: Why) {
        if !self.index[id].doomed && !self.index[id].detached {
            self.index.unmap(id);
            self.index[id].doomed = true;
            self.note_change(id);
            self.push_doomed(id, why);
        }
    }

    fn push_doomed(&mut self, id: ChunkId, why: Why) {
        self.doomed.push(Doomed { id, generation: self.index[id].generation, why });
    }

    /// Forgets as much as one call may take time for; returns how many chunks.
    pub(crate) fn forget_slice(&mut self) -> u64 {
        self.forget_some(self.slice)
    }

    /// Forgets about `budget` chunks of those that are doomed; returns how many.
    pub(crate) fn forget_some(&mut self, budget: usize) -> u64 {
        let mut forgotten = 0;
        for _ in 0..budget {
            let Some(&Doomed { id, generation, why }) = self.doomed.last() else {
                let Some(root) = self.index.old_root() else { break };
                self.push_doomed(root, Why::Clear);
                continue;
            };
            if !self.index.is_same(id, generation) || self.index[id].detached {
                self.doomed.pop();
            } else if let Some(child) = self.index[id].first_child {
                self.push_doomed(child, why);
            } else {
                self.doomed.pop();
                match why {
                    Why::Discard => self.stats.discards += 1,
                    Why::Clear => self.stats.cleared += 1,
                    Why::Evict => self.evicted.count(&self.index[id]),
                    Why::Age => self.stats.expired += 1,
                }
                self.detach(id);
                self.evicted.num_in_use += u64::from(why == Why::Evict && self.index.is_same(id, generation));
                forgotten += 1;
            }
        }
        forgotten
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
}
