//! A first-in, first-out queue of chunks that wait for a disk job.

use std::collections::VecDeque;

use crate::evict::ChunkId;
use crate::index::{Entry, Index};

/// Chunks with their generations. Chunks that are no longer wanted are skipped when popped.
#[derive(Debug, Default)]
pub(crate) struct Queue(VecDeque<(ChunkId, u32)>);

impl Queue {
    /// Appends a chunk. Drops chunks that are no longer wanted once the queue is far longer than
    /// `num_wanted`.
    pub(crate) fn push(
        &mut self,
        index: &Index,
        id: ChunkId,
        num_wanted: u64,
        is_wanted: fn(&Entry) -> bool,
    ) {
        self.0.push_back((id, index[id].generation));
        if self.0.len() as u64 > 2 * num_wanted + 64 {
            self.0
                .retain(|&(id, generation)| index.is_same(id, generation) && is_wanted(&index[id]));
        }
    }

    pub(crate) fn push_first(&mut self, index: &Index, id: ChunkId) {
        self.0.push_front((id, index[id].generation));
    }

    /// Removes and returns the first chunk that is still wanted.
    pub(crate) fn pop(&mut self, index: &Index, is_wanted: fn(&Entry) -> bool) -> Option<ChunkId> {
        let mut wanted = std::iter::from_fn(|| self.0.pop_front());
        wanted
            .find(|&(id, generation)| index.is_same(id, generation) && is_wanted(&index[id]))
            .map(|(id, _)| id)
    }

    /// Returns true if there is nothing in the queue, wanted or not.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
