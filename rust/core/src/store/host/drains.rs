//! Slabs that are being emptied for other stores, and how far each one is. Data only; `slabs` empties them.

use rustc_hash::FxHashSet;

use crate::evict::ChunkId;
use crate::pool::SlabId;

/// Slabs that are emptied. They are looked at in rounds, of many calls where they are large: whatever has to stay is found once.
#[derive(Debug, Default)]
pub(crate) struct Drains {
    pub(crate) all: Vec<Drain>,
    /// Chunks that had to stay in this round, with something that hangs on them or by themselves.
    pub(crate) stuck: FxHashSet<(ChunkId, u32)>,
}

/// A slab that is emptied.
#[derive(Debug)]
pub(crate) struct Drain {
    pub(crate) slab: SlabId,
    /// Frames before it were looked at in this round.
    pub(crate) next: u32,
    /// A chunk of the slab, and the way down to what hangs on it.
    pub(crate) way: Vec<Step>,
    /// Nothing more can go in this round.
    pub(crate) is_done: bool,
}

/// A chunk, and the child that is looked at next.
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
