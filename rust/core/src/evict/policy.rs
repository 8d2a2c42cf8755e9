//! What every policy is told and asked. It must not know any of them.

use std::fmt;

use crate::key::ChunkKey;

/// A chunk as a policy knows it: small numbers, used again after `remove`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkId(pub u32);

/// Chunks of a tier whose coldest may be asked for by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupId(pub u32);

/// Why a chunk left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// It was the victim: worth remembering, should it come back.
    Evicted,
    /// It was forgotten for another reason; its content may be wrong.
    Dropped,
}

/// Chooses victims among the chunks of one tier.
///
/// The store **guarantees**: an id is `insert`ed once before anything else and `remove`d once; its
/// parent, if given, is present from its `insert` to its `remove`; `set_evictable` is only called
/// when the value changes (it starts false); a chunk with a present child is never evictable. Using
/// a chunk means using its whole prefix, but only the deepest is `touch`ed. `set_group` is called
/// right after `insert`, if at all.
///
/// A policy **must**: return from `victim` only ids that are evictable now, and some id whenever
/// there is one, and from `victim_of` the same of one group; leave the victim in place until
/// `remove`; take O(log n) time in every call, for the store's lock is held.
pub trait Policy: fmt::Debug + Send {
    /// `id` is in the tier from now on, behind `parent`.
    fn insert(&mut self, id: ChunkId, parent: Option<ChunkId>, key: &ChunkKey);
    /// The prefix that ends with `id` was used.
    fn touch(&mut self, id: ChunkId);
    /// `id` may be a victim from now on, or may not.
    fn set_evictable(&mut self, id: ChunkId, evictable: bool);
    /// `id` is in no other tier yet and should get there, or that is over.
    fn set_unwritten(&mut self, id: ChunkId, unwritten: bool);
    /// From now on unwritten chunks are victims only if there is no other, or are like others.
    fn spare_unwritten(&mut self, spare: bool);
    /// `id` is of that group until it is removed.
    fn set_group(&mut self, id: ChunkId, group: GroupId);
    /// What should go next; None if nothing may.
    fn victim(&mut self) -> Option<ChunkId>;
    /// Whether at least half of the `num_chunks` that end with `end` were used again, as far as
    /// that shows at once.
    fn goes_on(&self, end: ChunkId, num_chunks: u32) -> bool;
    /// `id` is as if it had been used again. When it was used last stays.
    fn mark_reused(&mut self, id: ChunkId);
    /// The same of what is in a group.
    fn victim_of(&mut self, group: GroupId) -> Option<ChunkId>;
    /// `id` left the tier.
    fn remove(&mut self, id: ChunkId, removal: Removal);
}
