//! Methods that let other tests inspect the index.

use super::{Entry, Index};
use crate::evict::ChunkId;

impl Index {
    /// Returns the roots of all mapped trees.
    pub(crate) fn roots(&self) -> impl Iterator<Item = ChunkId> {
        std::iter::successors(self.first_root, |&id| self[id].next_sibling)
    }

    /// Returns all entries, including detached entries.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (ChunkId, &Entry)> {
        (0..).map(ChunkId).zip(&self.entries).filter(|(_, entry)| entry.live)
    }
}

#[cfg(test)]
mod states;
