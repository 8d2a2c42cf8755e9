//! A hash table that maps keys to ids and never rehashes all entries in one step: a directory of
//! small open-addressing tables without tombstones.
//!
//! The standard `HashMap` rehashes all entries when it grows or fills up with tombstones. With a
//! million chunks, a rehash takes tens of milliseconds under the store's lock. This table instead
//! splits one 64 KiB segment at a time (extendible hashing). Memory use and the cost of `clear`
//! scale with the number of keys, not the capacity. Each slot takes 8 bytes, and the caller stores
//! the keys.

use crate::evict::ChunkId;
use crate::key::ChunkKey;

/// A key's hash, and its id plus one (0 if the slot is free). This is a tuple so that `vec!`
/// requests zeroed memory.
type Slot = (u32, u32);

/// Number of slots in a new segment. Must be a power of two.
const SEGMENT_SLOTS: usize = 1 << 13;
/// The directory has at most `2^MAX_DEPTH` positions. Beyond that, segments grow. The directory and
/// a segment of `SEGMENT_SLOTS` slots together use no more than the 32 bits of a hash.
const MAX_DEPTH: u32 = 18;

/// Entries whose hashes share the first `depth` bits.
#[derive(Debug)]
struct Segment {
    slots: Vec<Slot>,
    len: usize,
    depth: u32,
}

#[derive(Debug, Default)]
pub(super) struct Table {
    segments: Vec<Segment>,
    /// The segment for each value of the first `depth` bits of a hash. Empty until the first
    /// insertion.
    directory: Vec<u32>,
    depth: u32,
    len: usize,
}

/// Hashes every byte of a key. Keys are digests, but forged keys in a record file can share a
/// prefix.
fn hash(key: &ChunkKey) -> u32 {
    let (words, _) = key.0.as_chunks::<8>();
    let mixed = words.iter().fold(0, |hash: u64, word| {
        (hash.rotate_left(29) ^ u64::from_le_bytes(*word)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    });
    u32::try_from(mixed >> 32).expect("32 bits are left")
}

/// Returns the first `depth` bits of a hash.
fn prefix(hash: u32, depth: u32) -> usize {
    usize::try_from((u64::from(hash) << depth) >> 32).expect("at most 32 bits")
}

impl Segment {
    fn new(num_slots: usize, depth: u32) -> Self {
        Self { slots: vec![(0, 0); num_slots], len: 0, depth }
    }

    fn is_full(&self) -> bool {
        self.len >= self.slots.len() / 8 * 5
    }

    fn mask(&self) -> usize {
        self.slots.len() - 1
    }

    /// Returns the id with this hash that `is_it` accepts, and its slot. If there is no such id,
    /// returns None and the free slot where the id belongs.
    fn find(&self, hash: u32, is_it: impl Fn(ChunkId) -> bool) -> (Option<ChunkId>, usize) {
        let mut at = hash as usize & self.mask();
        loop {
            match self.slots[at] {
                (_, 0) => return (None, at),
                (other, id) if other == hash && is_it(ChunkId(id - 1)) => {
                    return (Some(ChunkId(id - 1)), at);
                }
                _ => at = (at + 1) & self.mask(),
            }
        }
    }

    /// Inserts an entry. The segment must have a free slot.
    fn add(&mut self, slot: Slot) {
        let at = self.find(slot.0, |_| false).1;
        self.slots[at] = slot;
        self.len += 1;
    }

    /// Empties a slot and moves later entries that probing could otherwise no longer reach.
    fn remove(&mut self, mut gap: usize) {
        self.len -= 1;
        let mut at = gap;
        loop {
            at = (at + 1) & self.mask();
            let (other, id) = self.slots[at];
            if id == 0 {
                break;
            }
            let distance = |from: usize| at.wrapping_sub(from) & self.mask();
            if distance(other as usize & self.mask()) >= distance(gap) {
                self.slots[gap] = (other, id);
                gap = at;
            }
        }
        self.slots[gap] = (0, 0);
    }
}

impl Table {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    fn segment(&self, hash: u32) -> Option<usize> {
        self.directory.get(prefix(hash, self.depth)).map(|segment| *segment as usize)
    }

    pub(super) fn get(&self, key: &ChunkKey, is_it: impl Fn(ChunkId) -> bool) -> Option<ChunkId> {
        let hash = hash(key);
        self.segments[self.segment(hash)?].find(hash, is_it).0
    }

    pub(super) fn insert(&mut self, key: &ChunkKey, id: ChunkId) {
        let hash = hash(key);
        let segment = self.segment_with_room(hash);
        self.segments[segment].add((hash, id.0 + 1));
        self.len += 1;
    }

    fn segment_with_room(&mut self, hash: u32) -> usize {
        if self.directory.is_empty() {
            self.segments.push(Segment::new(SEGMENT_SLOTS, 0));
            self.directory.push(0);
        }
        loop {
            let segment = self.segment(hash).expect("the directory covers every hash");
            if !self.segments[segment].is_full() {
                return segment;
            }
            if self.segments[segment].depth < MAX_DEPTH {
                self.split(segment, hash);
            } else {
                self.enlarge(segment);
            }
        }
    }

    /// Splits a segment: entries whose next hash bit is 1 move to a new segment. `hash` is any hash
    /// in the segment.
    fn split(&mut self, segment: usize, hash: u32) {
        let depth = self.segments[segment].depth + 1;
        if depth > self.depth {
            self.directory = self.directory.iter().flat_map(|segment| [*segment; 2]).collect();
            self.depth = depth;
        }
        let new = u32::try_from(self.segments.len()).expect("the directory is bounded");
        let mut halves = [Segment::new(SEGMENT_SLOTS, depth), Segment::new(SEGMENT_SLOTS, depth)];
        for slot in self.segments[segment].slots.iter().filter(|slot| slot.1 != 0) {
            halves[prefix(slot.0, depth) & 1].add(*slot);
        }
        let [clear, set] = halves;
        self.segments[segment] = clear;
        self.segments.push(set);
        let num_places = 1 << (self.depth - depth);
        let first = (prefix(hash, depth) | 1) << (self.depth - depth);
        self.directory[first..first + num_places].fill(new);
    }

    /// Doubles the size of a segment that cannot be split because the directory is at its maximum
    /// size.
    fn enlarge(&mut self, segment: usize) {
        let old = &self.segments[segment];
        let mut new = Segment::new(2 * old.slots.len(), old.depth);
        old.slots.iter().filter(|slot| slot.1 != 0).for_each(|slot| new.add(*slot));
        self.segments[segment] = new;
    }

    /// Removes the key if it maps to `id`.
    pub(super) fn remove(&mut self, key: &ChunkKey, id: ChunkId) {
        let hash = hash(key);
        let Some(segment) = self.segment(hash) else { return };
        let segment = &mut self.segments[segment];
        if let (Some(_), at) = segment.find(hash, |other| other == id) {
            segment.remove(at);
            self.len -= 1;
        }
    }
}

#[cfg(test)]
mod tests;
