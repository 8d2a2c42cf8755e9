//! Computes, before anything is written, how much disk space a directory will take, so that the
//! size limit is never exceeded.
//!
//! File data is counted in whole pages. Slot sizes include the file system's extent
//! metadata, because `du` counts it.

pub(crate) const PAGE_BYTES: u64 = 4096;
/// Size of `lock`, `superblock.json`, its temporary file, and the directories themselves.
pub(crate) const FIXED_BYTES: u64 = 64 * 1024;
/// Size of one record plus two 12-byte extents, rounded up. A frame written between unwritten
/// frames splits their extent into three.
const SLOT_OVERHEAD_BYTES: u64 = super::record::RECORD_BYTES as u64 + 32;

/// The slots of one size class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlotCount {
    /// Frame size, in bytes.
    pub(crate) frame_bytes: u64,
    /// Number of slots that the files are long enough to hold.
    pub(crate) slots: u32,
    /// Number of slots that have blocks or will get them when written. All other slots are punched.
    pub(crate) filled: u32,
}

impl SlotCount {
    pub(crate) fn bytes(self) -> u64 {
        let overhead = u64::from(self.slots) * SLOT_OVERHEAD_BYTES;
        u64::from(self.filled)
            .saturating_mul(self.frame_bytes)
            .saturating_add(overhead.next_multiple_of(PAGE_BYTES))
    }

    /// Returns the count after filling `more` additional slots: punched slots first, then new
    /// slots.
    pub(crate) fn with(self, more: u32) -> Self {
        let refilled = more.min(self.slots - self.filled);
        let slots = self.slots.saturating_add(more - refilled);
        Self { slots, filled: self.filled.saturating_add(more), ..self }
    }
}

pub(crate) fn namespace_bytes(classes: &[SlotCount]) -> u64 {
    let maps = map_bytes(classes.len());
    classes.iter().map(|class| class.bytes()).fold(maps, u64::saturating_add)
}

/// Returns the size of the files' block maps: one page for each class after the first.
pub(crate) fn map_bytes(num_classes: usize) -> u64 {
    num_classes.saturating_sub(1) as u64 * PAGE_BYTES
}

/// Returns the directory size in bytes for `slots` slots of one class and `foreign_bytes` of other
/// data.
pub(crate) fn dir_bytes(slots: u32, frame_bytes: u64, foreign_bytes: u64) -> u64 {
    let class = SlotCount { frame_bytes, slots, filled: slots };
    class.bytes().saturating_add(FIXED_BYTES).saturating_add(foreign_bytes)
}

/// Returns the largest number up to `most` that fits, or 0 if no number fits. `fits` must be
/// monotone.
pub(crate) fn largest_fit(most: u32, fits: impl Fn(u32) -> bool) -> u32 {
    let (mut low, mut high) = (0, most);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low
}
