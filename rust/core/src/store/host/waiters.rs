//! Children that were filled before their parent was visible.
//!
//! A prompt is saved chunk by chunk, so nearly every parent has one waiting child: the first child
//! of a parent costs no allocation. Data only; `fill` decides which children still wait.

use rustc_hash::FxHashMap;

use crate::evict::ChunkId;

#[derive(Debug, Default)]
pub(crate) struct Waiters {
    /// By parent.
    first: FxHashMap<ChunkId, ChunkId>,
    /// Children after the first, in order.
    others: FxHashMap<ChunkId, Vec<ChunkId>>,
}

impl Waiters {
    /// Adds `child` to those that wait for `parent`. It may be listed twice.
    pub(crate) fn push(&mut self, parent: ChunkId, child: ChunkId) {
        if *self.first.entry(parent).or_insert(child) != child {
            self.others.entry(parent).or_default().push(child);
        }
    }

    /// Removes and returns the children that wait for `parent`.
    pub(crate) fn take(&mut self, parent: ChunkId) -> impl Iterator<Item = ChunkId> + use<> {
        let first = self.first.remove(&parent);
        let others = if self.others.is_empty() { None } else { self.others.remove(&parent) };
        first.into_iter().chain(others.into_iter().flatten())
    }
}
