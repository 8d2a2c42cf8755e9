//! Maps keys to entries. An entry holds a chunk's state in each tier and links to its parent and
//! children.
//!
//! Entries live in one vector and are linked into trees. A *detached* entry is no longer in the map
//! or in its parent's child list, but keeps its parent link until its last user finishes. The index
//! maintains only the map and the links. The store maintains an entry's counts and decides when to
//! free it.

mod disk_state;
mod entry;
mod host_state;
mod table;
#[cfg(any(test, feature = "testing"))]
mod tests;

use std::ops;

pub(crate) use disk_state::{DiskEvent, DiskState};
pub(crate) use entry::{Entry, NEVER};
pub(crate) use host_state::{HostEvent, HostState};
use table::Table;

use crate::evict::ChunkId;
use crate::key::ChunkKey;

#[derive(Debug, Default)]
pub(crate) struct Index {
    map: Table,
    entries: Vec<Entry>,
    vacant: Vec<u32>,
    /// The newest chunk that has no parent. All other chunks with no parent are its siblings.
    first_root: Option<ChunkId>,
    /// The value of `first_root` before each call to [`Index::unmap_all`].
    old_roots: Vec<ChunkId>,
}

impl ops::Index<ChunkId> for Index {
    type Output = Entry;
    fn index(&self, id: ChunkId) -> &Entry {
        &self.entries[id.0 as usize]
    }
}

impl ops::IndexMut<ChunkId> for Index {
    fn index_mut(&mut self, id: ChunkId) -> &mut Entry {
        &mut self.entries[id.0 as usize]
    }
}

impl Index {
    pub(crate) fn get(&self, key: &ChunkKey) -> Option<ChunkId> {
        self.map.get(key, |id| self[id].key == *key)
    }

    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    /// Reserves memory for `num` more entries, so that the vector is not reallocated under the
    /// lock. The kernel allocates pages only on first use.
    pub(crate) fn reserve(&mut self, num: usize) {
        self.entries.reserve(num);
    }

    /// Adds an entry under its parent. The key must not be in the map.
    pub(crate) fn insert(&mut self, new: Entry) -> ChunkId {
        debug_assert!(self.get(&new.key).is_none(), "a key must map to one entry");
        debug_assert!(
            new.parent.is_none_or(|parent| !self[parent].detached),
            "the parent of a new entry must not be detached"
        );
        let id = self.vacant.pop().map(ChunkId).unwrap_or_else(|| {
            self.entries.push(Entry::default());
            ChunkId(
                u32::try_from(self.entries.len() - 1).expect("frames and slots are counted in u32"),
            )
        });
        let head = new.parent.map_or(&mut self.first_root, |parent| {
            &mut self.entries[parent.0 as usize].first_child
        });
        let next_sibling = head.replace(id);
        if let Some(next) = next_sibling {
            self[next].prev_sibling = Some(id);
        }
        let generation = self[id].generation + 1;
        self[id] = Entry { next_sibling, generation, live: true, ..new };
        self.map.insert(&new.key, id);
        id
    }

    /// Removes the entry's key from the map unless the key maps to a newer entry.
    pub(crate) fn unmap(&mut self, id: ChunkId) {
        let key = self[id].key;
        self.map.remove(&key, id);
    }

    /// Removes all keys in one step. The entries remain in their trees, whose roots `old_root`
    /// returns one by one.
    pub(crate) fn unmap_all(&mut self) {
        self.map.clear();
        self.old_roots.extend(self.first_root.take());
    }

    /// Returns the root of a tree unmapped by [`Self::unmap_all`].
    pub(crate) fn old_root(&self) -> Option<ChunkId> {
        self.old_roots.last().copied()
    }

    /// Detaches an entry that has no attached children, so that a new entry can use its key. The
    /// parent still counts the entry but no longer lists it.
    pub(crate) fn detach(&mut self, id: ChunkId) {
        self.unmap(id);
        let Entry { parent, first_child, prev_sibling, next_sibling, .. } = self[id];
        debug_assert!(first_child.is_none(), "children must be detached before their parents");
        if let Some(next) = next_sibling {
            self[next].prev_sibling = prev_sibling;
        }
        match (prev_sibling, parent) {
            (Some(prev), _) => self[prev].next_sibling = next_sibling,
            (None, Some(parent)) => self[parent].first_child = next_sibling,
            (None, None) if self.first_root == Some(id) => self.first_root = next_sibling,
            (None, None) => {
                self.old_roots.retain(|root| *root != id);
                self.old_roots.extend(next_sibling);
            }
        }
        if let Some(parent) = parent {
            self[parent].num_detached += 1;
        }
        let entry = &mut self[id];
        (entry.detached, entry.prev_sibling, entry.next_sibling) = (true, None, None);
    }

    /// Frees a detached entry that has no children.
    pub(crate) fn remove(&mut self, id: ChunkId) {
        debug_assert!(
            self[id].detached && !self[id].has_children(),
            "parents must outlive their children"
        );
        if let Some(parent) = self[id].parent {
            self[parent].num_detached -= 1;
        }
        self[id].live = false;
        self.vacant.push(id.0);
    }

    /// Returns true if `id` is a child of `parent` and is not detached.
    pub(crate) fn is_child(&self, id: ChunkId, parent: ChunkId) -> bool {
        let entry = &self[id];
        entry.live && !entry.detached && entry.parent == Some(parent)
    }

    /// Returns true if `id` is live and still has this `generation`.
    pub(crate) fn is_same(&self, id: ChunkId, generation: u32) -> bool {
        self.entries
            .get(id.0 as usize)
            .is_some_and(|entry| entry.live && entry.generation == generation)
    }

    /// Iterates over `id` and all its ancestors, children before parents.
    pub(crate) fn ancestry(&self, id: ChunkId) -> impl Iterator<Item = ChunkId> {
        std::iter::successors(Some(id), |&id| self[id].parent)
    }

    /// Returns the number of positions in the vector, including vacant positions. Entries never
    /// move, so a walk over all positions visits every entry.
    pub(crate) fn num_places(&self) -> u32 {
        u32::try_from(self.entries.len()).unwrap_or(u32::MAX)
    }

    pub(crate) fn at(&self, place: u32) -> Option<(ChunkId, &Entry)> {
        self.entries
            .get(place as usize)
            .filter(|entry| entry.live)
            .map(|entry| (ChunkId(place), entry))
    }
}
