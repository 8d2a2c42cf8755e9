//! Data types of the disk tier: settings, chunks, statistics and damage.

use std::path::PathBuf;

use crate::ChunkKey;
use crate::io::{FrameId, FrameSizes, SizeClass};

/// Space for one frame in a class's file of frames, with a record in the class's index. Class and
/// number are packed as in a [`FrameId`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub u32);

impl SlotId {
    /// Creates the id of slot `number` of a size class. `number` must be below
    /// [`crate::io::MAX_FRAMES`].
    pub fn new(class: SizeClass, number: u32) -> Self {
        Self(FrameId::new(class, number).0)
    }

    /// Returns the size class.
    pub fn class(self) -> SizeClass {
        FrameId(self.0).class()
    }

    /// Returns the slot's number among the slots of its size.
    pub fn number(self) -> u32 {
        FrameId(self.0).number()
    }
}

/// Settings of a disk directory.
#[derive(Debug, Clone)]
pub struct DiskConfig {
    /// The directory (`disk_path`); created if it is missing. It has one owner at a time.
    pub dir: PathBuf,
    /// Maximum size of the whole directory on disk, across all namespaces, in bytes (`disk_size`).
    pub cap_bytes: u64,
    /// Frame sizes, indexed by size class.
    pub frame_sizes: FrameSizes,
    /// The namespace whose chunks are served.
    pub namespace: [u8; 32],
    /// One line for `kvloft inspect` that describes the model and the shape of this namespace.
    pub description: String,
}

/// Metadata of a chunk, which is written to its record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskMeta {
    /// Key of the chunk.
    pub key: ChunkKey,
    /// Key of the previous chunk; the root key if `depth` is 0.
    pub parent: ChunkKey,
    /// Number of chunks before it in its prefix.
    pub depth: u32,
    /// Unix time at which it was saved, in seconds.
    pub saved_s: u64,
}

/// A chunk found when the directory was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskEntry {
    /// The slot of the chunk.
    pub slot: SlotId,
    /// Metadata of the chunk.
    pub meta: DiskMeta,
    /// Position in the order of writes, across restarts: a chunk with a smaller number was written
    /// earlier.
    pub sequence: u64,
}

/// Gauges, and counters since the directory was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// Number of slots of all sizes in the files, except punched slots.
    pub slots: u64,
    /// Number of slots that contain a chunk.
    pub slots_used: u64,
    /// Number of slots that are reserved but not yet written or freed.
    pub slots_reserved: u64,
    /// Accounted size of the whole directory, in bytes; of this namespace, if more than one
    /// namespace is open.
    pub bytes: u64,
    /// Maximum value of `bytes`.
    pub cap_bytes: u64,
    /// True if frames bypass the page cache (`O_DIRECT`).
    pub direct: bool,
    /// Number of chunks found when the directory was opened.
    pub recovered: u64,
    /// Number of records dropped at opening because their parent was missing.
    pub dropped_orphans: u64,
    /// Number of records dropped at opening because a newer copy of the chunk exists.
    pub dropped_duplicates: u64,
    /// Number of records dropped at opening because they are not valid in this namespace.
    pub dropped_records: u64,
    /// Number of chunks dropped at opening because the size limit was lowered.
    pub dropped_over_cap: u64,
    /// 1 if the namespace was recreated because its superblock was invalid.
    pub fresh_starts: u64,
    /// Number of failures to grow or punch the files, and of writes without space in the file
    /// system. Reaching the size limit is not included.
    pub grow_errors: u64,
}

/// A defect in a disk directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// Name of the namespace directory.
    pub namespace: String,
    /// Number of the slot among the slots of its size, if the defect concerns a slot.
    pub slot: Option<u32>,
    /// Size of the slot's frame, in bytes.
    pub frame_bytes: Option<u64>,
    /// The key in hex, if the record is readable.
    pub key: Option<String>,
    /// A short description of the damage.
    pub problem: String,
    /// True if a different version created the namespace, so that nothing was checked and no damage
    /// is known.
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
