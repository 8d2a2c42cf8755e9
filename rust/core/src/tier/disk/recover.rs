//! From records to entries: what of an index may be believed together.
//!
//! Each record has proved itself; here they are made consistent: one slot per chunk, every parent present, parents before
//! children, otherwise oldest first. It must not do I/O.

use std::hash::{BuildHasher, RandomState};

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

/// Key -> position in the found entries: open addressing over 4-byte cells, so that a million keys stay in a cache.
///
/// Keys are digests, but whoever writes an index chooses them; so their cells depend on a number that nobody knows. It
/// decides how long this takes and nothing else.
struct Table<'a> {
    found: &'a [DiskEntry],
    hasher: RandomState,
    /// Position + 1; 0 is an empty cell. At most half are taken.
    cells: Vec<u32>,
}

impl<'a> Table<'a> {
    fn new(found: &'a [DiskEntry]) -> Self {
        Self { found, hasher: RandomState::new(), cells: vec![0; (found.len() * 2).next_power_of_two()] }
    }

    /// The cell of `key`, taken or where it would go.
    fn cell(&self, key: &ChunkKey) -> usize {
        let mask = self.cells.len() - 1;
        let [a, b, c, d, ..] = self.hasher.hash_one(key.0).to_le_bytes();
        let mut at = u32::from_le_bytes([a, b, c, d]) as usize & mask;
        while let Some(position) = self.position(at)
            && self.found[position].key != *key
        {
            at = (at + 1) & mask;
        }
        at
    }

    fn position(&self, cell: usize) -> Option<usize> {
        self.cells[cell].checked_sub(1).map(|position| position as usize)
    }

    fn get(&self, key: &ChunkKey) -> Option<usize> {
        self.position(self.cell(key))
    }

    /// Puts an entry under its key; returns the one that was there.
    fn insert(&mut self, position: u32) -> Option<usize> {
        let cell = self.cell(&self.found[position as usize].key);
        let before = self.position(cell);
        self.cells[cell] = position + 1;
        before
    }
}

/// Orders and prunes the entries of an index: one per slot, in order of slots.
pub(super) fn recover(found: &[DiskEntry]) -> Recovered {
    let mut order: Vec<(u64, u32)> = found.iter().map(|e| e.sequence).zip(0..).collect();
    order.sort_unstable();
    let mut out = Recovered { entries: Vec::with_capacity(found.len()), ..Recovered::default() };
    let mut fates = vec![Fate::Unknown; found.len()];
    let mut table = Table::new(found);
    for &(_, at) in &order {
        // In order of writing, so the newer copy of a chunk takes the older one's place.
        if let Some(older) = table.insert(at) {
            fates[older] = Fate::Dropped;
            out.duplicates.push(found[older].slot);
        }
    }
    let mut path = Vec::new();
    let mut before = None;
    for &(_, at) in &order {
        let at = at as usize;
        let fate = climb(&table, &fates, at, before, &mut path);
        before = Some(at);
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
/// Depth falls by one each step, so a forged cycle of parents ends too. `before` is a guess at the parent that spares most
/// lookups: chunks of a prefix are written one behind the other.
fn climb(table: &Table, fates: &[Fate], start: usize, before: Option<usize>, path: &mut Vec<usize>) -> Fate {
    let mut at = start;
    loop {
        if fates[at] != Fate::Unknown {
            return fates[at];
        }
        path.push(at);
        let entry = &table.found[at];
        let Some(depth) = entry.depth.checked_sub(1) else { return Fate::Kept };
        let is_parent = |&at: &usize| fates[at] == Fate::Kept && table.found[at].key == entry.parent;
        match before.filter(is_parent).or_else(|| table.get(&entry.parent)) {
            Some(parent) if table.found[parent].depth == depth => at = parent,
            _ => return Fate::Dropped,
        }
    }
}
