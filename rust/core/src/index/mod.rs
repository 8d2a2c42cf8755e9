//! Key -> entry: where each chunk is, who its parent is, who hangs on it.
//!
//! Entries live in a slab and are linked into one tree per root; a *detached* entry is forgotten (no key leads to it, and its
//! parent does not list it) but stays, with its link upwards, until its last user ends. The index keeps links and the map
//! right and nothing else: what the counts in an entry mean, and when one may go, is the store's business.

mod entry;
mod presence;

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};
use std::ops;

pub(crate) use entry::{Entry, Filler, NewEntry, Wish};
pub(crate) use presence::Presence;

use crate::evict::ChunkId;
use crate::key::ChunkKey;

/// A map and a slab with links between parents and children.
#[derive(Debug, Default)]
pub(crate) struct Index {
    map: HashMap<ChunkKey, ChunkId, KeyBytes>,
    entries: Vec<Entry>,
    vacant: Vec<u32>,
    epoch: u32,
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
    /// The entry that `key` leads to.
    pub(crate) fn get(&self, key: &ChunkKey) -> Option<ChunkId> {
        self.map.get(key).copied()
    }

    /// Entries that a key leads to.
    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    /// Makes room for `num` more without growing piecemeal.
    pub(crate) fn reserve(&mut self, num: usize) {
        self.map.reserve(num);
        self.entries.reserve(num);
    }

    /// A new entry without any presence, linked behind its parent. The key must be free.
    pub(crate) fn insert(&mut self, new: NewEntry) -> ChunkId {
        debug_assert!(new.parent.is_none_or(|parent| !self[parent].detached), "children hang on what can be found");
        let next = new.parent.and_then(|parent| self[parent].first_child);
        let generation = self.vacant.last().map_or(0, |&at| self.entries[at as usize].generation + 1);
        let entry = Entry::new(new, next, generation, self.epoch);
        let id = if let Some(at) = self.vacant.pop() {
            self.entries[at as usize] = entry;
            ChunkId(at)
        } else {
            self.entries.push(entry);
            ChunkId(u32::try_from(self.entries.len() - 1).expect("frames and slots are counted in u32"))
        };
        if let Some(parent) = new.parent {
            self[parent].first_child = Some(id);
        }
        if let Some(next) = next {
            self[next].prev_sibling = Some(id);
        }
        let before = self.map.insert(new.key, id);
        debug_assert!(before.is_none(), "a key leads to one entry");
        id
    }

    /// Forgets the entry's key; an entry that came later may have it.
    pub(crate) fn unmap(&mut self, id: ChunkId) {
        let key = self[id].key;
        if self.get(&key) == Some(id) {
            self.map.remove(&key);
        }
    }

    /// Forgets every key at once. The entries stay, of an older epoch.
    pub(crate) fn unmap_all(&mut self) {
        self.map.clear();
        self.epoch += 1;
    }

    /// Forgets an entry without attached children: its key is free, and its parent counts it but does not list it.
    pub(crate) fn detach(&mut self, id: ChunkId) {
        self.unmap(id);
        let Entry { parent, first_child, prev_sibling, next_sibling, .. } = self[id];
        debug_assert!(first_child.is_none(), "children are forgotten before their parents");
        if let Some(prev) = prev_sibling {
            self[prev].next_sibling = next_sibling;
        } else if let Some(parent) = parent {
            self[parent].first_child = next_sibling;
        }
        if let Some(next) = next_sibling {
            self[next].prev_sibling = prev_sibling;
        }
        if let Some(parent) = parent {
            self[parent].num_detached += 1;
        }
        let entry = &mut self[id];
        (entry.detached, entry.prev_sibling, entry.next_sibling) = (true, None, None);
    }

    /// Frees a detached entry that has no children.
    pub(crate) fn remove(&mut self, id: ChunkId) {
        debug_assert!(self[id].detached && !self[id].has_children(), "parents outlive their children");
        if let Some(parent) = self[id].parent {
            self[parent].num_detached -= 1;
        }
        self[id].live = false;
        self.vacant.push(id.0);
    }

    /// The last child that was added and is not detached.
    pub(crate) fn first_child(&self, id: ChunkId) -> Option<ChunkId> {
        self[id].first_child
    }

    /// Whether `id` can be found and hangs on `parent`.
    pub(crate) fn is_child(&self, id: ChunkId, parent: ChunkId) -> bool {
        let entry = &self[id];
        entry.live && !entry.detached && entry.parent == Some(parent)
    }

    /// Slots of the slab, live or not: ids are below.
    pub(crate) fn num_ids(&self) -> u32 {
        u32::try_from(self.entries.len()).unwrap_or(u32::MAX)
    }

    /// Whether the entry is a root of an older epoch that still has to be forgotten.
    pub(crate) fn is_old_root(&self, id: ChunkId) -> bool {
        let entry = &self[id];
        entry.live && !entry.detached && entry.parent.is_none() && self.is_old(id)
    }

    /// Whether everything was forgotten since the entry came.
    pub(crate) fn is_old(&self, id: ChunkId) -> bool {
        self[id].epoch != self.epoch
    }

    /// Whether `id` is still the entry that had `generation`.
    pub(crate) fn is_same(&self, id: ChunkId, generation: u32) -> bool {
        self.entries.get(id.0 as usize).is_some_and(|entry| entry.live && entry.generation == generation)
    }

    /// `id` and all above it, children before parents.
    pub(crate) fn ancestry(&self, id: ChunkId) -> impl Iterator<Item = ChunkId> {
        std::iter::successors(Some(id), |&id| self[id].parent)
    }

    /// All entries, detached ones too, in no order; for checks.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (ChunkId, &Entry)> {
        (0..).map(ChunkId).zip(&self.entries).filter(|(_, entry)| entry.live)
    }
}

/// Keys are digests: eight of their bytes are as good a hash as any.
#[derive(Debug, Clone, Copy, Default)]
struct KeyBytes;

#[derive(Debug, Default)]
struct FirstBytes(u64);

impl BuildHasher for KeyBytes {
    type Hasher = FirstBytes;
    fn build_hasher(&self) -> FirstBytes {
        FirstBytes(0)
    }
}

impl Hasher for FirstBytes {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        if let Some(first) = bytes.first_chunk() {
            self.0 = u64::from_le_bytes(*first);
        }
    }
    fn write_usize(&mut self, _length: usize) {}
}
