//! Eviction policies: which chunk to evict when a tier is full.
//!
//! The store decides *which chunks can be evicted* (leaves that are not pinned, being written or
//! being read), and the policy *chooses among them*. No policy can therefore evict a parent before
//! its children. Policies are deterministic: they receive ids and keys, and use no clock and no
//! randomness.

mod adaptive;
mod ghosts;
mod groups;
#[cfg(test)]
mod tests;

use std::fmt;

pub use adaptive::{Adaptive, Eviction};

use crate::key::ChunkKey;

/// The id of a chunk. Ids are small numbers and are reused after `remove`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkId(pub u32);

/// A group of chunks in a tier, from which `victim_of` chooses a victim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupId(pub u32);

/// Why a chunk was removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// The chunk was evicted; the policy may remember it.
    Evicted,
    /// The chunk was removed for a different reason, so its content may be wrong.
    Dropped,
}

/// Chooses victims among the chunks of one tier.
///
/// The store **guarantees** the following. An id is `insert`ed once before any other call, and
/// `remove`d once. Its parent, if any, is present from its `insert` to its `remove`.
/// `set_evictable` is only called when the value changes (it starts as false). A chunk with a
/// present child is never evictable. Using a chunk uses its whole prefix, but only the deepest
/// chunk is `touch`ed. `set_group`, if called, directly follows `insert`.
///
/// A policy **must** return an evictable id from `victim` whenever there is one, and an evictable
/// id of the group from `victim_of`. Choosing a victim must not remove it; the store calls `remove`
/// for that. Every call must take O(log n) time, because the store's lock is held.
pub trait Policy: fmt::Debug + Send {
    /// Adds `id` to the tier, with `parent` before it in the prefix.
    fn insert(&mut self, id: ChunkId, parent: Option<ChunkId>, key: &ChunkKey);
    /// Records a use of the prefix that ends with `id`.
    fn touch(&mut self, id: ChunkId);
    /// Sets whether `id` may be a victim.
    fn set_evictable(&mut self, id: ChunkId, evictable: bool);
    /// Sets whether `id` has yet to be written to another tier.
    fn set_unwritten(&mut self, id: ChunkId, unwritten: bool);
    /// If `spare` is true, an unwritten chunk is only a victim if there are no other victims.
    fn spare_unwritten(&mut self, spare: bool);
    /// Puts `id` into a group until it is removed.
    fn set_group(&mut self, id: ChunkId, group: GroupId);
    /// Returns the next chunk to evict; None if no chunk is evictable.
    fn victim(&mut self) -> Option<ChunkId>;
    /// Estimates, in a bounded number of steps, whether at least half of the `num_chunks` chunks of
    /// the prefix that ends with `end` were reused.
    fn is_mostly_reused(&self, end: ChunkId, num_chunks: u32) -> bool;
    /// Marks `id` as reused without changing its last use.
    fn mark_reused(&mut self, id: ChunkId);
    /// Returns the next chunk of the group to evict; None if no chunk of the group is evictable.
    fn victim_of(&mut self, group: GroupId) -> Option<ChunkId>;
    /// Removes `id` from the tier.
    fn remove(&mut self, id: ChunkId, removal: Removal);
}
