//! Slabs that are being emptied for other stores, and the progress of each. Data only; `emptying`
//! empties them.

use rustc_hash::FxHashSet;

use crate::evict::ChunkId;
use crate::pool::SlabId;

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
