//! Key -> id without pauses: open addressing with room for twice as many entries, in which a removal leaves nothing behind.
//!
//! The standard map marks what was removed and cleans all of it up now and then, or grows: tens of milliseconds under the
//! store's lock for a million chunks. Here an entry takes 8 bytes and keys stay where the caller has them.

use crate::evict::ChunkId;
use crate::key::ChunkKey;

/// Part of the key, and the id plus one: 0 is a free slot. A tuple, so that `vec!` asks for zeroed memory.
type Slot = (u32, u32);

#[derive(Debug, Default)]
pub(super) struct Table {
    /// A power of two, at least twice `len`.
    slots: Vec<Slot>,
    len: usize,
}

/// Of all bytes: keys are digests, but those that somebody wrote into a file of records may begin alike.
fn hash(key: &ChunkKey) -> u32 {
    let (words, _) = key.0.as_chunks::<8>();
    let mixed = words.iter().fold(0, |hash: u64, word| {
        (hash.rotate_left(29) ^ u64::from_le_bytes(*word)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    });
    u32::try_from(mixed >> 32).expect("32 bits are left")
}

impl Table {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn clear(&mut self) {
        self.slots.fill((0, 0));
        self.len = 0;
    }

    /// Room for `num` entries in all.
    pub(super) fn reserve(&mut self, num: usize) {
        if 2 * num > self.slots.len() {
            let before = std::mem::replace(&mut self.slots, vec![(0, 0); (2 * num).next_power_of_two()]);
            for slot in before.into_iter().filter(|slot| slot.1 != 0) {
                let at = self.find(slot.0, |_| false).1;
                self.slots[at] = slot;
            }
        }
    }

    fn mask(&self) -> usize {
        self.slots.len() - 1
    }

    /// The id with this hash that `is_it`, and where it is, or the free slot where it would be.
    fn find(&self, hash: u32, is_it: impl Fn(ChunkId) -> bool) -> (Option<ChunkId>, usize) {
        let mut at = hash as usize & self.mask();
        loop {
            match self.slots[at] {
                (_, 0) => return (None, at),
                (other, id) if other == hash && is_it(ChunkId(id - 1)) => return (Some(ChunkId(id - 1)), at),
                _ => at = (at + 1) & self.mask(),
            }
        }
    }

    pub(super) fn get(&self, key: &ChunkKey, is_it: impl Fn(ChunkId) -> bool) -> Option<ChunkId> {
        if self.len == 0 { None } else { self.find(hash(key), is_it).0 }
    }

    /// Adds an id whose key is not there.
    pub(super) fn insert(&mut self, key: &ChunkKey, id: ChunkId) {
        self.len += 1;
        self.reserve(self.len);
        let hash = hash(key);
        let at = self.find(hash, |_| false).1;
        self.slots[at] = (hash, id.0 + 1);
    }

    /// Takes an id out, if it is there, and moves those up that would not be found behind the gap.
    pub(super) fn remove(&mut self, key: &ChunkKey, id: ChunkId) {
        if self.get(key, |other| other == id).is_none() {
            return;
        }
        self.len -= 1;
        let mut gap = self.find(hash(key), |other| other == id).1;
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

#[cfg(test)]
mod tests;
