//! The 128-byte record of a slot in its class's index: identifies the chunk in the slot's frame and
//! verifies itself.
//!
//! Layout, little endian: magic `KVLREC01` (8), key (32), parent (32), payload checksum (u128),
//! sequence (u64), time of the save (u64, Unix seconds; the time of the write in early versions),
//! number of units (u32, 1), depth (u32), number of the slot (u32), zeros (4), checksum of these
//! 120 bytes (u64). An empty slot is all zeros. Both checksums are XXH3. The seed of the record's
//! is the first 8 bytes of the namespace (u64) XOR the frame size, so that a record of another
//! namespace, size or slot is invalid. Must not do I/O or panic on any bytes.

use twox_hash::XxHash3_64;
/// The checksum of a frame that is read in pieces.
pub(crate) use twox_hash::XxHash3_128 as PayloadHasher;

use super::types::DiskMeta;
use crate::ChunkKey;

/// Size of a record.
pub(crate) const RECORD_BYTES: usize = 128;
/// A record's bytes.
pub(crate) type RecordBytes = [u8; RECORD_BYTES];
/// The record of an empty slot.
pub(crate) const EMPTY: RecordBytes = [0; RECORD_BYTES];

const MAGIC: [u8; 8] = *b"KVLREC01";
const CHECKED_BYTES: usize = 120;
/// Units of a chunk. Earlier versions had chunks of several blocks; their records with other
/// numbers are not valid.
const NUM_UNITS: u32 = 1;

/// A slot's chunk and the checksum of its frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Record {
    /// The chunk.
    pub(crate) meta: DiskMeta,
    /// XXH3-128 of the whole frame.
    pub(crate) payload: u128,
    /// Order of writing.
    pub(crate) sequence: u64,
}

/// Result of parsing a slot's 128 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Parsed {
    /// All zeros: an empty slot.
    Empty,
    /// A valid record of this namespace and slot.
    Valid(Record),
    /// Anything else: torn, flipped, foreign or misplaced.
    Bad,
}

/// Offset of a slot's record in the index.
pub(crate) fn index_offset(slot: u32) -> u64 {
    u64::from(slot) * RECORD_BYTES as u64
}

pub(crate) fn payload_checksum(frame: &[u8]) -> u128 {
    PayloadHasher::oneshot(frame)
}

/// The seed of the record checksums of a namespace's frames of one size.
pub(crate) fn record_seed(namespace: &[u8; 32], frame_bytes: u64) -> u64 {
    u64::from_le_bytes(take(&mut namespace.as_slice())) ^ frame_bytes
}

impl Record {
    /// The record's bytes at slot number `slot` of its class.
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

/// Reads the record at slot number `slot` of its class.
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
    // Magic, slot, zeros and checksum are right if writing the parsed record gives the same bytes.
    if record.encode(slot, seed) == *bytes { Parsed::Valid(record) } else { Parsed::Bad }
}

/// The next N bytes; the callers' sizes add up to a record, which the round-trip tests prove.
fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let (head, tail) = rest.split_first_chunk::<N>().unwrap_or((&[0; N], &[]));
    *rest = tail;
    *head
}
