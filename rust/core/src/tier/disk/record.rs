//! A slot's 128-byte record in its size class's index. A record identifies the chunk in the slot's
//! frame and holds checksums of the frame and of the record itself. `recover` turns a namespace's
//! records into a consistent set of entries.
//!
//! Layout, little endian: magic `KVLREC01` (8), key (32), parent (32), payload checksum (u128),
//! sequence (u64), save time (u64, Unix seconds; the write time in early versions), number of units
//! (u32, always 1), depth (u32), slot number (u32), zeros (4), checksum of the preceding 120 bytes
//! (u64). The record of an empty slot is all zeros. Both checksums are XXH3. The record checksum is
//! seeded with the first 8 bytes of the namespace (u64) XOR the frame size, so that records of any
//! other namespace or frame size are invalid. Parsing never panics.

use std::collections::HashMap;

use twox_hash::XxHash3_64;
/// Computes the checksum of a frame piece by piece.
pub(crate) use twox_hash::XxHash3_128 as PayloadHasher;

use super::types::{DiskEntry, DiskMeta, SlotId};
use crate::ChunkKey;

pub(crate) const RECORD_BYTES: usize = 128;
pub(crate) type RecordBytes = [u8; RECORD_BYTES];
/// The record of an empty slot.
pub(crate) const EMPTY: RecordBytes = [0; RECORD_BYTES];

const MAGIC: [u8; 8] = *b"KVLREC01";
const CHECKED_BYTES: usize = 120;
/// Number of units per chunk. Earlier versions supported more units per chunk. Records with more
/// units are invalid.
const NUM_UNITS: u32 = 1;

/// The chunk in a slot and the checksum of its frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) meta: DiskMeta,
    /// XXH3-128 of the whole frame.
    pub(crate) payload: u128,
    /// The record's position in the write order.
    pub(crate) sequence: u64,
}

/// The result of parsing a slot's 128-byte record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Parsed {
    /// The slot is empty: its record is all zeros.
    Empty,
    /// The record is valid for this namespace and slot.
    Valid(Record),
    /// The record is torn, corrupt, foreign or misplaced.
    Bad,
}

/// Returns the offset of a slot's record in the index.
pub(crate) fn index_offset(slot: u32) -> u64 {
    u64::from(slot) * RECORD_BYTES as u64
}

pub(crate) fn payload_checksum(frame: &[u8]) -> u128 {
    PayloadHasher::oneshot(frame)
}

/// Returns the checksum seed for a namespace's records of one frame size.
pub(crate) fn record_seed(namespace: &[u8; 32], frame_bytes: u64) -> u64 {
    u64::from_le_bytes(take(&mut namespace.as_slice())) ^ frame_bytes
}

impl Record {
    /// Encodes the record for slot number `slot` in its size class.
    pub(crate) fn encode(&self, slot: u32, seed: u64) -> RecordBytes {
        let mut out = EMPTY;
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            out[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(&MAGIC);
        put(&self.meta.key.0);
        put(&self.meta.parent.0);
        put(&self.payload.to_le_bytes());
        put(&self.sequence.to_le_bytes());
        put(&self.meta.saved_s.to_le_bytes());
        put(&NUM_UNITS.to_le_bytes());
        put(&self.meta.depth.to_le_bytes());
        put(&slot.to_le_bytes());
        let checksum = XxHash3_64::oneshot_with_seed(seed, &out[..CHECKED_BYTES]);
        out[CHECKED_BYTES..].copy_from_slice(&checksum.to_le_bytes());
        out
    }
}

/// Parses the record of slot number `slot` in its size class.
pub(crate) fn parse(bytes: &RecordBytes, slot: u32, seed: u64) -> Parsed {
    if *bytes == EMPTY {
        return Parsed::Empty;
    }
    let mut rest = &bytes[MAGIC.len()..];
    let (key, parent) = (ChunkKey(take(&mut rest)), ChunkKey(take(&mut rest)));
    let payload = u128::from_le_bytes(take(&mut rest));
    let sequence = u64::from_le_bytes(take(&mut rest));
    let saved_s = u64::from_le_bytes(take(&mut rest));
    let _num_units: [u8; 4] = take(&mut rest);
    let depth = u32::from_le_bytes(take(&mut rest));
    let record = Record { meta: DiskMeta { key, parent, depth, saved_s }, payload, sequence };
    // If re-encoding gives the same bytes, the magic, slot number, zero bytes and checksum are
    // valid.
    if record.encode(slot, seed) == *bytes { Parsed::Valid(record) } else { Parsed::Bad }
}

/// Removes and returns the next N bytes, or zeros if fewer bytes remain. Callers never read past
/// the end.
fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let (head, tail) = rest.split_first_chunk::<N>().unwrap_or((&[0; N], &[]));
    *rest = tail;
    *head
}

/// The chunks that a recovery keeps, and the slots that it drops.
#[derive(Debug, Default)]
pub(crate) struct Recovered {
    /// Kept chunks: parents before children, and otherwise in write order.
    pub entries: Vec<DiskEntry>,
    /// Slots of older copies of a chunk.
    pub duplicates: Vec<SlotId>,
    /// Slots of chunks whose parent is missing.
    pub orphans: Vec<SlotId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Unknown,
    Kept,
    Dropped,
}

/// The entries of a namespace, and whether each entry is kept or dropped.
struct Places<'a> {
    found: &'a [DiskEntry],
    fates: Vec<Fate>,
    /// Maps keys to positions. Keys are digests, but an index can be forged, so the map is a
    /// standard `HashMap` with a random seed.
    by_key: HashMap<&'a ChunkKey, usize>,
}

/// Sorts a namespace's entries and drops duplicates and orphans. `found` must not contain more
/// than one entry per slot.
pub(crate) fn recover(found: &[DiskEntry]) -> Recovered {
    let mut order: Vec<usize> = (0..found.len()).collect();
    order.sort_by_key(|&at| found[at].sequence);
    let mut out = Recovered { entries: Vec::with_capacity(found.len()), ..Recovered::default() };
    let by_key = HashMap::with_capacity(found.len());
    let mut places = Places { found, fates: vec![Fate::Unknown; found.len()], by_key };
    for &at in &order {
        // Visit entries in write order, so that a newer copy of a chunk replaces an older copy.
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
        // Visit the path from the topmost undecided ancestor down to the entry itself.
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
    /// Adds the entry and its undecided ancestors to `path`. Returns their common fate.
    ///
    /// The depth decreases with each step, so the walk terminates even if a forged index contains a
    /// cycle of parents. `before` is a guess at the parent. This guess avoids most lookups, because
    /// a prefix's chunks are usually written in sequence.
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
