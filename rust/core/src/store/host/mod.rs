//! The host side of the store: which chunks have a frame, and which of them a load may use. This
//! file has the data of `fill` and `emptying`.
//!
//! | file | contents |
//! |---|---|
//! | `transitions` | changes a chunk's state, with everything that follows from it |
//! | `fill` | a filled chunk becomes visible, or fails with the chunks that wait for it |
//! | `frames` | find or free a frame for a chunk |
//! | `emptying` | empty slabs for other stores of the same pool, and for other size classes |

pub(crate) mod emptying;
pub(crate) mod fill;
pub(crate) mod frames;
pub(crate) mod transitions;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::evict::ChunkId;
use crate::pool::SlabId;

/// Children that were filled before their parent was visible.
///
/// A prompt is saved chunk by chunk, so nearly every parent has one waiting child: the first child
/// of a parent costs no allocation.
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

/// Slabs that are being emptied, in rounds of many calls. A chunk that must stay is visited once
/// per round.
#[derive(Debug, Default)]
pub(crate) struct Drains {
    pub(crate) all: Vec<Drain>,
    /// Chunks that had to stay in this round because they, or chunks below them, are in use.
    pub(crate) stuck: FxHashSet<(ChunkId, u32)>,
}

/// One slab that is being emptied.
#[derive(Debug)]
pub(crate) struct Drain {
    pub(crate) slab: SlabId,
    /// The next frame to visit in this round.
    pub(crate) next: u32,
    /// The path from a chunk of the slab down to the chunk to evict next.
    pub(crate) path: Vec<Step>,
    /// True if no further chunk can be evicted in this round.
    pub(crate) is_done: bool,
}

/// A chunk on the path, and its child to visit next.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) id: ChunkId,
    pub(crate) generation: u32,
    pub(crate) next: Next,
}

/// The child to visit next.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Next {
    First,
    Child(ChunkId, u32),
    None,
}
