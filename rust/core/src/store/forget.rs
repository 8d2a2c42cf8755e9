//! Forgetting: at once for the caller, in slices for the books.
//!
//! A *doomed* chunk has no key any more; it and all below it are walked depth-first, children before parents as the policies
//! are promised, a slice a call. Until then a chunk below it still has its key: lookups and reservations look at the whole
//! way up while anything is doomed. A clear takes all keys away at once; the index remembers the trees that it left.

use super::books::{Attached, Clearing};
use super::state::{Doomed, State, Why};
use crate::evict::ChunkId;
use crate::key::ChunkKey;

/// Most keys that are remembered until it is known what the disk holds; beyond, it is not used.
const MAX_UNWELCOME: usize = 1 << 16;

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
}
