//! Turns the records of an index into a consistent set of entries.
//!
//! Each record is valid by itself. Together they must have one slot per chunk and every parent; the
//! order is parents before children, otherwise oldest first. It must not do I/O.

use std::collections::HashMap;

use super::types::{DiskEntry, SlotId};
use crate::ChunkKey;

/// Chunks that a recovery keeps, and slots that it drops.
#[derive(Debug, Default)]
pub(crate) struct Recovered {
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

/// The entries of an index, and the fate of each.
struct Places<'a> {
    found: &'a [DiskEntry],
    fates: Vec<Fate>,
    /// Positions by key. Keys are digests, but an index can be forged, so this is std's map, which
    /// hashes with a random seed.
    by_key: HashMap<&'a ChunkKey, usize>,
}

/// Orders and prunes the entries of an index: one per slot, in order of slots.
pub(crate) fn recover(found: &[DiskEntry]) -> Recovered {
    let mut order: Vec<usize> = (0..found.len()).collect();
    order.sort_by_key(|&at| found[at].sequence);
    let mut out = Recovered { entries: Vec::with_capacity(found.len()), ..Recovered::default() };
    let by_key = HashMap::with_capacity(found.len());
    let mut places = Places { found, fates: vec![Fate::Unknown; found.len()], by_key };
    for &at in &order {
        // In order of writing, so a newer copy of a chunk replaces the older one.
        if let Some(older) = places.by_key.insert(&found[at].meta.key, at) {
            places.fates[older] = Fate::Dropped;
            out.duplicates.push(found[older].slot);
        }
    }
    let mut path = Vec::new();
    let mut before = None;
    for &at in &order {
        let fate = places.climb(at, before, &mut path);
        before = Some(at);
        // From the highest unplaced ancestor down to the entry itself.
        for at in path.drain(..).rev() {
            places.fates[at] = fate;
            match fate {
                Fate::Kept => out.entries.push(found[at]),
                Fate::Unknown | Fate::Dropped => out.orphans.push(found[at].slot),
            }
        }
    }
    out
}

impl Places<'_> {
    /// Collects the entry and its ancestors without a fate, and returns their common fate.
    ///
    /// Depth decreases by one in each step, so a forged cycle of parents ends as well. `before` is
    /// a guess of the parent that saves most lookups, because chunks of a prefix are written one
    /// after the other.
    fn climb(&self, start: usize, before: Option<usize>, path: &mut Vec<usize>) -> Fate {
        let mut at = start;
        loop {
            if self.fates[at] != Fate::Unknown {
                return self.fates[at];
            }
            path.push(at);
            let entry = &self.found[at].meta;
            let Some(depth) = entry.depth.checked_sub(1) else { return Fate::Kept };
            let is_parent = |&at: &usize| {
                self.fates[at] == Fate::Kept && self.found[at].meta.key == entry.parent
            };
            match before.filter(is_parent).or_else(|| self.by_key.get(&entry.parent).copied()) {
                Some(parent) if self.found[parent].meta.depth == depth => at = parent,
                _ => return Fate::Dropped,
            }
        }
    }
}
