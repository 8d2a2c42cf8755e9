//! Eviction policies choose which chunk to evict when a tier is full.
//!
//! The store decides *which chunks can be evicted* (leaves that are not pinned, being written or
//! being read), and the policy *chooses among them*. No policy can therefore evict a parent before
//! its children. Policies are deterministic: they receive ids and keys, and use neither a clock nor
//! randomness.

mod adaptive;
mod ghosts;
mod tenants;
#[cfg(test)]
mod tests;

use std::fmt;

pub use adaptive::{Adaptive, Eviction};

use crate::key::ChunkKey;

/// A chunk's id. Ids are small integers and are reused after `remove`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkId(pub u32);

/// A chunk's tenant (see `store/tenants/table.rs`). The default is the tenant for requests with no
/// salt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct TenantId(pub u32);

/// Why a chunk was removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// The chunk was evicted, and the policy may remember it.
    Evicted,
    /// The chunk was removed for another reason, and its content may be wrong.
    Dropped,
}

/// Chooses the next chunk to evict among the chunks of one tier.
///
/// The store **guarantees** the following. Each id is `insert`ed once before any other call that
/// names it, and `remove`d once. The parent of an id, if any, is present from the id's `insert` to
/// its `remove`. `set_evictable` is called only when the value changes, and the initial value is
/// false. A chunk with a present child is never evictable. Each use of a chunk also counts as a use
/// of its prefix, but only the deepest chunk is `touch`ed. If `set_tenant` is called, it directly
/// follows `insert`.
///
/// If any id is evictable, `victim` **must** return an evictable id. If any of a tenant's ids is
/// evictable, `victim_of` **must** return one of them. Choosing a victim must not remove the victim, because the store calls
/// `remove`. Every call must take O(log n) time, because it runs under the store's lock.
pub trait Policy: fmt::Debug + Send {
    /// Adds `id` to the tier. `parent` is the chunk before it in the prefix.
    fn insert(&mut self, id: ChunkId, parent: Option<ChunkId>, key: &ChunkKey);
    /// Records a use of the prefix that ends with `id`.
    fn touch(&mut self, id: ChunkId);
    /// Sets whether `id` can be a victim.
    fn set_evictable(&mut self, id: ChunkId, evictable: bool);
    /// Sets whether `id` has yet to be written to another tier.
    fn set_unwritten(&mut self, id: ChunkId, unwritten: bool);
    /// If `spare` is true, `victim` chooses unwritten chunks only as a last resort.
    fn spare_unwritten(&mut self, spare: bool);
    /// Assigns `id` to `tenant` until `id` is removed, so that `victim_of(tenant)` can choose it.
    fn set_tenant(&mut self, id: ChunkId, tenant: TenantId);
    /// Returns the next chunk to evict, or None if no chunk is evictable.
    fn victim(&mut self) -> Option<ChunkId>;
    /// Estimates whether at least half of the `num_chunks` chunks in the prefix that ends with
    /// `end` were reused. Takes a bounded number of steps.
    fn is_mostly_reused(&self, end: ChunkId, num_chunks: u32) -> bool;
    /// Marks `id` as reused without changing its last use.
    fn mark_reused(&mut self, id: ChunkId);
    /// Returns the tenant's next chunk to evict, or None if the tenant has no evictable chunk.
    fn victim_of(&mut self, tenant: TenantId) -> Option<ChunkId>;
    /// Removes `id` from the tier.
    fn remove(&mut self, id: ChunkId, removal: Removal);
}
