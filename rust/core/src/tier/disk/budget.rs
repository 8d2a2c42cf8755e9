//! What a directory costs on disk, so that its cap can be kept before a byte is written.
//!
//! Pure arithmetic: bytes of so many slots, and slots that fit so many bytes. File data is counted
//! in whole pages; each slot also pays for the file system's own map of where its pieces are, which
//! `du` counts too.

use super::types::DiskConfig;

pub(crate) const PAGE_BYTES: u64 = 4096;
/// `lock`, `superblock.json` with its successor, and the directories themselves.
pub(crate) const FIXED_BYTES: u64 = 64 * 1024;
/// One record, plus two extents of 12 bytes (a frame written amid unwritten ones splits its
/// extent), rounded up.
const SLOT_OVERHEAD_BYTES: u64 = super::record::RECORD_BYTES as u64 + 32;

/// Bytes of a directory with so many slots of this namespace and `foreign_bytes` of others.
pub(crate) fn dir_bytes(slots: u32, frame_bytes: u64, foreign_bytes: u64) -> u64 {
    let slots = u64::from(slots);
    let overhead = (slots * SLOT_OVERHEAD_BYTES).next_multiple_of(PAGE_BYTES);
    slots
        .saturating_mul(frame_bytes)
        .saturating_add(overhead + FIXED_BYTES)
        .saturating_add(foreign_bytes)
}

/// Most slots that fit the cap beside so much of other namespaces.
pub(crate) fn max_slots(config: &DiskConfig, foreign_bytes: u64) -> u32 {
    let (cap_bytes, frame_bytes) = (config.cap_bytes, config.frame_sizes.largest());
    // Pages of overhead are rounded up once, so the quotient may be one page too generous: step
    // back then.
    let bytes = cap_bytes.saturating_sub(FIXED_BYTES).saturating_sub(foreign_bytes);
    let mut slots = u32::try_from(bytes / (frame_bytes + SLOT_OVERHEAD_BYTES)).unwrap_or(u32::MAX);
    while slots > 0 && dir_bytes(slots, frame_bytes, foreign_bytes) > cap_bytes {
        slots -= 1;
    }
    slots
}
