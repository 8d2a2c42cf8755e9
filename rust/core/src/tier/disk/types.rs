//! The disk tier's values: settings, chunks, statistics and damage.
//!
//! Nothing here does I/O. Sizes are bytes, counts are slots or chunks as named.

use std::path::PathBuf;

use crate::ChunkKey;
use crate::io::{FrameId, FrameSizes, SizeClass};

/// Room for one frame in a class's file of frames, with its record in the class's index. Class and
/// number are packed as those of a [`FrameId`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub u32);

impl SlotId {
    /// Slot `number`, below [`crate::io::MAX_FRAMES`], of a size.
    pub fn new(class: SizeClass, number: u32) -> Self {
        Self(FrameId::new(class, number).0)
    }

    /// Its size class.
    pub fn class(self) -> SizeClass {
        FrameId(self.0).class()
    }

    /// Its number among the slots of its size.
    pub fn number(self) -> u32 {
        FrameId(self.0).number()
    }
}

/// Settings of a disk directory.
#[derive(Debug, Clone)]
pub struct DiskConfig {
    /// The directory (`disk_path`); created if it is missing. It has one owner at a time.
    pub dir: PathBuf,
    /// Maximum size of the whole directory on disk, over all namespaces (`disk_size`).
    pub cap_bytes: u64,
    /// Sizes of frames, by size class.
    pub frame_sizes: FrameSizes,
    /// The namespace whose chunks are served.
    pub namespace: [u8; 32],
    /// One line for `kvloft inspect`: the model and the shape of this namespace.
    pub description: String,
}

/// A chunk as it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskMeta {
    /// The chunk.
    pub key: ChunkKey,
    /// The chunk before it; the root if `depth` is 0.
    pub parent: ChunkKey,
    /// Chunks before it in its prefix: 0 is the first chunk.
    pub depth: u32,
    /// When it was saved, in seconds of Unix time.
    pub saved_s: u64,
}

/// A chunk found at opening.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskEntry {
    /// The slot of its frame.
    pub slot: SlotId,
    /// What it is.
    pub meta: DiskMeta,
    /// Order of writes, over restarts: a smaller number was written earlier.
    pub sequence: u64,
}

/// Gauges and counters since open.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// Slots in the files (free, reserved and used, of all sizes), except free ones whose blocks
    /// are punched.
    pub slots: u64,
    /// Slots that hold a chunk.
    pub slots_used: u64,
    /// Slots reserved and not yet written or freed.
    pub slots_reserved: u64,
    /// Accounted bytes of the whole directory, or of this namespace if several are open.
    pub bytes: u64,
    /// The cap on `bytes`.
    pub cap_bytes: u64,
    /// Whether frames bypass the page cache (`O_DIRECT`).
    pub direct: bool,
    /// Chunks found at open.
    pub recovered: u64,
    /// Records dropped at open: parent missing.
    pub dropped_orphans: u64,
    /// Records dropped at open: an older copy of the same chunk.
    pub dropped_duplicates: u64,
    /// Records dropped at open: not readable as a record of this namespace.
    pub dropped_records: u64,
    /// Chunks dropped at open because the cap became smaller.
    pub dropped_over_cap: u64,
    /// 1 if the namespace was recreated because its superblock was wrong, foreign or corrupt.
    pub fresh_starts: u64,
    /// Failures to grow or punch the files, and writes without space in the file system; reaching
    /// the limit does not count.
    pub grow_errors: u64,
}

/// One defect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// The namespace directory's name.
    pub namespace: String,
    /// The slot's number among those of its size, if the defect concerns a slot.
    pub slot: Option<u32>,
    /// Bytes of the slot's frame.
    pub frame_bytes: Option<u64>,
    /// The key in hex, if the record still has one.
    pub key: Option<String>,
    /// The damage, in a few words.
    pub problem: String,
    /// True if nothing is known to be damaged: another version created the namespace, so nothing
    /// was checked.
    pub is_other_format: bool,
}

impl Damage {
    pub(super) fn new(namespace: &str, problem: impl Into<String>) -> Self {
        Self {
            namespace: namespace.to_owned(),
            slot: None,
            frame_bytes: None,
            key: None,
            problem: problem.into(),
            is_other_format: false,
        }
    }
}
