//! Least recently used, over prefixes.
//!
//! Using a chunk uses its ancestors too, yet only the deepest is stamped: an ancestor cannot be a victim before its
//! descendants are gone, and a leaving chunk hands its stamp up if it is the younger one. So a chunk that becomes a leaf
//! has the stamp that stamping whole prefixes would have given it, and a touch costs the same for any depth.

use std::collections::BTreeSet;

use super::{ChunkId, Policy, Removal};
use crate::key::ChunkKey;

const NO_PARENT: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Node {
    stamp: u64,
    parent: u32,
    evictable: bool,
}

/// Evictable chunks in order of last use.
#[derive(Debug, Default)]
pub struct Lru {
    nodes: Vec<Node>,
    queue: BTreeSet<(u64, u32)>,
    now: u64,
}

impl Policy for Lru {
    fn insert(&mut self, id: ChunkId, parent: Option<ChunkId>, _key: &ChunkKey) {
        self.now += 1;
        let at = id.0 as usize;
        if at >= self.nodes.len() {
            self.nodes.resize(at + 1, Node { stamp: 0, parent: NO_PARENT, evictable: false });
        }
        let parent = parent.map_or(NO_PARENT, |parent| parent.0);
        self.nodes[at] = Node { stamp: self.now, parent, evictable: false };
    }

    fn touch(&mut self, id: ChunkId) {
        self.now += 1;
        let node = &mut self.nodes[id.0 as usize];
        if node.evictable {
            self.queue.remove(&(node.stamp, id.0));
            self.queue.insert((self.now, id.0));
        }
        node.stamp = self.now;
    }

    fn set_evictable(&mut self, id: ChunkId, evictable: bool) {
        let node = &mut self.nodes[id.0 as usize];
        node.evictable = evictable;
        if evictable {
            self.queue.insert((node.stamp, id.0));
        } else {
            self.queue.remove(&(node.stamp, id.0));
        }
    }

    fn victim(&mut self) -> Option<ChunkId> {
        self.queue.first().map(|&(_, id)| ChunkId(id))
    }

    fn remove(&mut self, id: ChunkId, _removal: Removal) {
        let node = self.nodes[id.0 as usize];
        if node.evictable {
            self.queue.remove(&(node.stamp, id.0));
        }
        if node.parent != NO_PARENT {
            // A parent with a child present is not evictable, so it has no place in the queue that would have to move.
            let parent = &mut self.nodes[node.parent as usize];
            debug_assert!(!parent.evictable, "a parent is never evictable before its children left");
            parent.stamp = parent.stamp.max(node.stamp);
        }
    }
}
