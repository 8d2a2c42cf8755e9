//! Children that came to host memory before their parent was visible. A prompt is saved chunk by chunk, so nearly every parent has
//! one that waits for it: the first costs no memory of its own. Data only; `fill` says who still waits.

use rustc_hash::FxHashMap;

use crate::evict::ChunkId;

#[derive(Debug, Default)]
pub(crate) struct Waiters {
    /// By parent.
    first: FxHashMap<ChunkId, ChunkId>,
    /// Those behind the first, in order.
    others: FxHashMap<ChunkId, Vec<ChunkId>>,
}

impl Waiters {
    /// `child` waits for `parent`, behind those that do already. It may do so twice.
    pub(crate) fn push(&mut self, parent: ChunkId, child: ChunkId) {
        if *self.first.entry(parent).or_insert(child) != child {
            self.others.entry(parent).or_default().push(child);
        }
    }

    /// Nothing waits for `parent` any more; returns what did.
    pub(crate) fn take(&mut self, parent: ChunkId) -> impl Iterator<Item = ChunkId> + use<> {
        let first = self.first.remove(&parent);
        let others = if self.others.is_empty() { None } else { self.others.remove(&parent) };
        first.into_iter().chain(others.into_iter().flatten())
    }
}
