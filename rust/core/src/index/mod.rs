//! Key -> entry: where each chunk is, who its parent is, who hangs on it.
//!
//! Entries live in a slab and are linked into one tree per root; a *detached* entry is forgotten (no key leads to it) but stays
//! until its last user ends. The index keeps links and the map right and nothing else: what the counts in an entry
//! mean, and when one may go, is the store's business.

mod entry;

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};
use std::ops;

pub(crate) use entry::{Dirty, DiskState, Entry, HostState, NewEntry};

use crate::evict::ChunkId;
use crate::key::ChunkKey;

/// A map and a slab with links between parents and children.
#[derive(Debug, Default)]
pub(crate) struct Index {
    map: HashMap<ChunkKey, ChunkId, KeyBytes>,
    entries: Vec<Entry>,
    vacant: Vec<u32>,
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
        let next = match new.parent {
            Some(parent) => self[parent].first_child,
            None => None,
        };
        let generation = self.vacant.last().map_or(0, |&at| self.entries[at as usize].generation + 1);
        let entry = Entry::new(new, next, generation);
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

    /// Forgets the entry's key. Its links stay.
    pub(crate) fn detach(&mut self, id: ChunkId) {
        let entry = &mut self[id];
        entry.detached = true;
        let key = entry.key;
        let before = self.map.remove(&key);
        debug_assert_eq!(before, Some(id), "attached entries are in the map");
    }

    /// Unlinks and frees an entry that has no children. It is detached first where it is not.
    pub(crate) fn remove(&mut self, id: ChunkId) {
        if !self[id].detached {
            self.detach(id);
        }
        let Entry { parent, first_child, prev_sibling, next_sibling, .. } = self[id];
        debug_assert!(first_child.is_none(), "parents outlive their children");
        if let Some(prev) = prev_sibling {
            self[prev].next_sibling = next_sibling;
        } else if let Some(parent) = parent {
            self[parent].first_child = next_sibling;
        }
        if let Some(next) = next_sibling {
            self[next].prev_sibling = prev_sibling;
        }
        self[id].live = false;
        self.vacant.push(id.0);
    }

    /// Whether `id` is still the entry that had `generation`.
    pub(crate) fn is_same(&self, id: ChunkId, generation: u32) -> bool {
        self.entries.get(id.0 as usize).is_some_and(|entry| entry.live && entry.generation == generation)
    }

    /// Children of `id`, newest first.
    pub(crate) fn children(&self, id: ChunkId) -> impl Iterator<Item = ChunkId> {
        std::iter::successors(self[id].first_child, |&child| self[child].next_sibling)
    }

    /// `id` and all below it, parents before children.
    pub(crate) fn subtree(&self, id: ChunkId) -> Vec<ChunkId> {
        let mut all = vec![id];
        let mut at = 0;
        while let Some(&id) = all.get(at) {
            all.extend(self.children(id));
            at += 1;
        }
        all
    }

    /// `id` and all above it, children before parents.
    pub(crate) fn ancestry(&self, id: ChunkId) -> impl Iterator<Item = ChunkId> {
        std::iter::successors(Some(id), |&id| self[id].parent)
    }

    /// All entries, detached ones too, in no order.
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
