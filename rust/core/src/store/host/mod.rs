//! The store's host side: decides which chunks have a frame and which can be loaded. This file
//! defines the data structures for `fill` and `emptying`.
//!
//! | file | contents |
//! |---|---|
//! | `transitions` | change a chunk's state and everything that depends on it |
//! | `fill` | make filled chunks visible; fail chunks that cannot be filled |
//! | `frames` | find a frame for a chunk, or free one |
//! | `emptying` | empty slabs for other stores in the pool and for other size classes |

pub(crate) mod emptying;
pub(crate) mod fill;
pub(crate) mod frames;
pub(crate) mod transitions;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::evict::ChunkId;
use crate::pool::SlabId;

/// Children waiting for their parent to become visible.
///
/// A prompt is saved chunk by chunk, so nearly every parent has exactly one waiting child. Storing
/// the first child inline thus avoids nearly all allocations.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    /// The first waiting child, keyed by parent.
    first: FxHashMap<ChunkId, ChunkId>,
    /// Further waiting children, keyed by parent, in insertion order.
    others: FxHashMap<ChunkId, Vec<ChunkId>>,
}

impl Waiters {
    /// Records that `child` is waiting for `parent`. The same child may be recorded more than once.
    pub(crate) fn push(&mut self, parent: ChunkId, child: ChunkId) {
        if *self.first.entry(parent).or_insert(child) != child {
            self.others.entry(parent).or_default().push(child);
        }
    }

    pub(crate) fn take(&mut self, parent: ChunkId) -> impl Iterator<Item = ChunkId> + use<> {
        let first = self.first.remove(&parent);
        let others = if self.others.is_empty() { None } else { self.others.remove(&parent) };
        first.into_iter().chain(others.into_iter().flatten())
    }
}

/// The slabs being emptied, visited in rounds that span many calls. In each round, a chunk that
/// cannot be evicted is visited only once.
#[derive(Debug, Default)]
pub(crate) struct Drains {
    pub(crate) all: Vec<Drain>,
    /// Chunks that could not be evicted in this round because they or their descendants were in
    /// use.
    pub(crate) stuck: FxHashSet<(ChunkId, u32)>,
}

#[derive(Debug)]
pub(crate) struct Drain {
    pub(crate) slab: SlabId,
    /// Index of the next frame to visit in this round.
    pub(crate) next: u32,
    /// Path from a chunk in the slab down to the next chunk to evict.
    pub(crate) path: Vec<Step>,
    /// True if no further chunks can be evicted in this round.
    pub(crate) is_done: bool,
}

/// A chunk on the path, along with the child to visit next.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) id: ChunkId,
    pub(crate) generation: u32,
    pub(crate) next: Next,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Next {
    First,
    Child(ChunkId, u32),
    None,
}
