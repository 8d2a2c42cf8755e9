//! The policy that never lets anything go: what does not fit is dropped. For tests and as the smallest example.

use super::{ChunkId, Policy, Removal};
use crate::key::ChunkKey;

/// Never has a victim.
#[derive(Debug, Default)]
pub struct Noop;

impl Policy for Noop {
    fn insert(&mut self, _id: ChunkId, _parent: Option<ChunkId>, _key: &ChunkKey) {}
    fn touch(&mut self, _id: ChunkId) {}
    fn set_evictable(&mut self, _id: ChunkId, _evictable: bool) {}
    fn victim(&mut self) -> Option<ChunkId> {
        None
    }
    fn remove(&mut self, _id: ChunkId, _removal: Removal) {}
}
