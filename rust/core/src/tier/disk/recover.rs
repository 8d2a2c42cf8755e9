//! From records to entries: what of an index may be believed together.
//!
//! Each record has proved itself; here they are made consistent: one slot per chunk, every parent present, parents before
//! children, otherwise oldest first. It must not do I/O.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::types::{DiskEntry, SlotId};
use crate::ChunkKey;

/// What a recovery keeps and what it gives up.
#[derive(Debug, Default)]
pub(super) struct Recovered {
    /// Parents before children, otherwise in order of writing.
    pub entries: Vec<DiskEntry>,
    /// Slots of older copies of a chunk.
    pub duplicates: Vec<SlotId>,
    /// Slots of chunks without their parent.
    pub orphans: Vec<SlotId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Unknown,
    Kept,
    Dropped,
}

/// Keys are digests already: their first 8 bytes are as good a hash as any.
#[derive(Debug, Default)]
struct DigestHasher(u64);

impl Hasher for DigestHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        if let Some(first) = bytes.first_chunk::<8>() {
            self.0 = u64::from_le_bytes(*first);
        }
    }
    fn write_usize(&mut self, _len_prefix: usize) {}
}

type ByKey = HashMap<ChunkKey, usize, BuildHasherDefault<DigestHasher>>;

/// Orders and prunes the entries of an index (one per slot, in any order).
pub(super) fn recover(mut found: Vec<DiskEntry>) -> Recovered {
    found.sort_unstable_by_key(|e| (e.sequence, e.slot));
    let mut out = Recovered { entries: Vec::with_capacity(found.len()), ..Recovered::default() };
    let mut fates = vec![Fate::Unknown; found.len()];
    let mut by_key = ByKey::with_capacity_and_hasher(found.len(), BuildHasherDefault::default());
    for (i, entry) in found.iter().enumerate() {
        // In order of writing, so the newer copy of a chunk takes the older one's place.
        if let Some(older) = by_key.insert(entry.key, i) {
            fates[older] = Fate::Dropped;
            out.duplicates.push(found[older].slot);
        }
    }
    let mut path = Vec::new();
    for i in 0..found.len() {
        let fate = climb(&found, &by_key, &fates, i, &mut path);
        // From the highest unplaced ancestor down to the entry itself.
        for at in path.drain(..).rev() {
            fates[at] = fate;
            match fate {
                Fate::Kept => out.entries.push(found[at]),
                Fate::Unknown | Fate::Dropped => out.orphans.push(found[at].slot),
            }
        }
    }
    out
}

/// Collects the entry and its ancestors that have no fate yet, and says which fate they share.
///
/// Depth falls by one each step, so a forged cycle of parents ends too.
fn climb(found: &[DiskEntry], by_key: &ByKey, fates: &[Fate], start: usize, path: &mut Vec<usize>) -> Fate {
    let mut at = start;
    loop {
        if fates[at] != Fate::Unknown {
            return fates[at];
        }
        path.push(at);
        let entry = &found[at];
        let Some(depth) = entry.depth.checked_sub(1) else { return Fate::Kept };
        match by_key.get(&entry.parent) {
            Some(&parent) if found[parent].depth == depth => at = parent,
            _ => return Fate::Dropped,
        }
    }
}
