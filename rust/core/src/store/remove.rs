//! Forgetting: at once for the caller, in slices for the books.
//!
//! A *doomed* chunk has no key any more; it and all below it are walked depth-first, children before parents as the policies
//! are promised, a slice a call. Until then a chunk below it still has its key: lookups and reservations look at the whole
//! way up while anything is doomed. A clear takes all keys away at once; the index remembers the trees that it left.

use crate::evict::ChunkId;
use crate::key::ChunkKey;
use crate::store::disk::work::{Attached, Clearing};
use crate::store::state::{Cause, State, Subtree};

/// Most keys that are remembered until it is known what the disk holds; beyond, it is not used.
const MAX_REJECTED: usize = 1 << 16;

impl State {
    /// Forgets chunks and all that hangs on them; returns how many are gone already.
    pub(crate) fn discard(&mut self, keys: &[ChunkKey]) -> u64 {
        if self.disk.is_recovering() {
            self.reject(keys);
        }
        for key in keys {
            if let Some(id) = self.index.get(key) {
                self.remove_tree(id);
            }
        }
        self.remove_slice()
    }

    /// Chunks that must not come back with what the disk turns out to hold.
    fn reject(&mut self, keys: &[ChunkKey]) {
        let books = &mut self.disk;
        if books.clearing == Clearing::No {
            books.rejected.extend(keys);
        }
        if books.rejected.len() > MAX_REJECTED {
            books.rejected.clear();
            books.to_free.extend(books.found.drain(..).map(|entry| entry.slot));
            if books.attached != Attached::Yes {
                books.clearing = Clearing::Wanted;
            }
        }
    }

    /// Forgets everything: nothing is found from now on.
    pub(crate) fn clear(&mut self) {
        self.index.unmap_all();
        self.note_all();
        self.removals.clear();
        self.disk.found.clear();
        self.disk.rejected.clear();
        if self.disk.attached != Attached::Never {
            self.disk.clearing = Clearing::Wanted;
        }
        self.remove_slice();
    }

    /// Whether chunks are still to be forgotten.
    pub(crate) fn is_removing(&self) -> bool {
        !self.removals.is_empty() || self.index.old_root().is_some()
    }

    /// No key leads to the chunk from now on; it and all below it are forgotten in slices.
    pub(crate) fn remove_tree(&mut self, id: ChunkId) {
        self.remove_tree_for(id, Cause::Discard);
    }

    pub(crate) fn remove_tree_for(&mut self, id: ChunkId, why: Cause) {
        if !self.index[id].removing && !self.index[id].detached {
            self.index.unmap(id);
            self.index[id].removing = true;
            self.note_change(id);
            self.push_subtree(id, why);
        }
    }

    fn push_subtree(&mut self, id: ChunkId, why: Cause) {
        self.removals.push(Subtree { id, generation: self.index[id].generation, why });
    }

    /// Forgets as much as one call may take time for; returns how many chunks.
    pub(crate) fn remove_slice(&mut self) -> u64 {
        self.remove_some(self.slice)
    }

    /// Forgets about `budget` chunks of those that are doomed; returns how many.
    pub(crate) fn remove_some(&mut self, budget: usize) -> u64 {
        let mut forgotten = 0;
        for _ in 0..budget {
            let Some(&Subtree { id, generation, why }) = self.removals.last() else {
                let Some(root) = self.index.old_root() else { break };
                self.push_subtree(root, Cause::Clear);
                continue;
            };
            if !self.index.is_same(id, generation) || self.index[id].detached {
                self.removals.pop();
            } else if let Some(child) = self.index[id].first_child {
                self.push_subtree(child, why);
            } else {
                self.removals.pop();
                match why {
                    Cause::Discard => self.stats.discards += 1,
                    Cause::Clear => self.stats.cleared += 1,
                    Cause::Evict => self.evicted.count(&self.index[id]),
                    Cause::Age => self.stats.expired += 1,
                }
                self.detach(id);
                self.evicted.num_in_use += u64::from(why == Cause::Evict && self.index.is_same(id, generation));
                forgotten += 1;
            }
        }
        forgotten
    }
}
