//! Eviction policies: which chunk to evict when a tier is full.
//!
//! The store decides *which chunks can be evicted* (leaves that are not pinned, written or read),
//! and the policy *chooses one of them*. No policy can therefore evict a parent before its
//! children. Policies see numbers and keys only: no frames, no clock, no randomness. The same calls
//! return the same victims.

mod adaptive;
mod ghosts;
mod groups;
#[cfg(test)]
mod tests;

use std::fmt;

pub use adaptive::{Adaptive, Eviction};

use crate::key::ChunkKey;

/// The number of a chunk. Numbers are small and are reused after `remove`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkId(pub u32);

/// Chunks of a tier that have their own victim (`victim_of`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupId(pub u32);

/// Why a chunk was removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// Evicted; the policy can remember the chunk.
    Evicted,
    /// Removed for another reason; its content may be wrong.
    Dropped,
}

/// Chooses victims among the chunks of one tier.
///
/// The store **guarantees**: an id is `insert`ed once before any other call and `remove`d once; its
/// parent, if given, is present from its `insert` to its `remove`; `set_evictable` is only called
/// when the value changes (it starts false); a chunk with a present child is never evictable. A use
/// of a chunk is a use of its whole prefix, but only the deepest chunk is `touch`ed. `set_group`,
/// if called, directly follows `insert`.
///
/// A policy **must**: return from `victim` an evictable id whenever there is one, and from
/// `victim_of` an evictable id of the group; keep the victim until `remove`; take O(log n) time in
/// every call, because the store's lock is held.
pub trait Policy: fmt::Debug + Send {
    /// Adds `id` to the tier, with `parent` before it in the prefix.
    fn insert(&mut self, id: ChunkId, parent: Option<ChunkId>, key: &ChunkKey);
    /// The prefix that ends with `id` was used.
    fn touch(&mut self, id: ChunkId);
    /// Sets whether `id` may be a victim.
    fn set_evictable(&mut self, id: ChunkId, evictable: bool);
    /// Sets whether `id` still waits to be written to another tier.
    fn set_unwritten(&mut self, id: ChunkId, unwritten: bool);
    /// If `spare`, unwritten chunks are victims only if there are no others.
    fn spare_unwritten(&mut self, spare: bool);
    /// Puts `id` into a group until it is removed.
    fn set_group(&mut self, id: ChunkId, group: GroupId);
    /// The next chunk to evict; None if no chunk is evictable.
    fn victim(&mut self) -> Option<ChunkId>;
    /// Returns whether at least half of the `num_chunks` that end with `end` were reused, as far as
    /// a bounded number of steps shows.
    fn is_mostly_reused(&self, end: ChunkId, num_chunks: u32) -> bool;
    /// Marks `id` as reused without changing its last use.
    fn mark_reused(&mut self, id: ChunkId);
    /// The next chunk of the group to evict.
    fn victim_of(&mut self, group: GroupId) -> Option<ChunkId>;
    /// Removes `id` from the tier.
    fn remove(&mut self, id: ChunkId, removal: Removal);
}
