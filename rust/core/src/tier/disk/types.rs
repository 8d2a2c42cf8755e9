//! Data types of the disk tier: settings, chunks, statistics and damage.

use std::path::PathBuf;

use crate::ChunkKey;
use crate::io::{FrameId, FrameSizes, SizeClass};

/// Identifies a slot: space for one frame in a class's frames file, and a record in the class's
/// index. The class and number are packed as in a [`FrameId`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub u32);

impl SlotId {
    /// Creates the id of slot `number` in a size class. `number` must be less than
    /// [`crate::io::MAX_FRAMES`].
    pub fn new(class: SizeClass, number: u32) -> Self {
        Self(FrameId::new(class, number).0)
    }

    /// Returns the size class.
    pub fn class(self) -> SizeClass {
        FrameId(self.0).class()
    }

    /// Returns the slot's number among all slots of its size.
    pub fn number(self) -> u32 {
        FrameId(self.0).number()
    }
}

/// Settings of a disk directory.
#[derive(Debug, Clone)]
pub struct DiskConfig {
    /// The directory (`disk_path`), which is created if it is missing. A directory has one owner at
    /// a time.
    pub dir: PathBuf,
    /// Maximum size of the directory on disk across all namespaces, in bytes (`disk_size`).
    pub cap_bytes: u64,
    /// Frame size of each size class, in bytes.
    pub frame_sizes: FrameSizes,
    /// The namespace whose chunks are served.
    pub namespace: [u8; 32],
    /// One-line description of this namespace's model and shape for `kvloft inspect`.
    pub description: String,
}

/// A chunk's metadata, which is stored in the chunk's record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskMeta {
    /// The chunk's key.
    pub key: ChunkKey,
    /// The previous chunk's key, or the root key if `depth` is 0.
    pub parent: ChunkKey,
    /// Number of chunks before this chunk in its prefix.
    pub depth: u32,
    /// Unix time at which the chunk was saved, in seconds.
    pub saved_s: u64,
}

/// A chunk found when the directory was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskEntry {
    /// The chunk's slot.
    pub slot: SlotId,
    /// The chunk's metadata.
    pub meta: DiskMeta,
    /// Position in the write order across restarts. Chunks with smaller numbers were written
    /// earlier.
    pub sequence: u64,
}

/// Gauges, and counters that start at 0 when the directory is opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// Number of slots in the files across all sizes, excluding holes.
    pub slots: u64,
    /// Number of slots that hold a chunk.
    pub slots_used: u64,
    /// Number of reserved slots that have not been written or freed yet.
    pub slots_reserved: u64,
    /// Directory size as computed by the tier, in bytes. The size covers only this namespace if
    /// multiple namespaces may be open.
    pub bytes: u64,
    /// Maximum value of `bytes`.
    pub cap_bytes: u64,
    /// True if frames bypass the page cache (`O_DIRECT`).
    pub direct: bool,
    /// Number of chunks found when the directory was opened.
    pub recovered: u64,
    /// Number of records dropped on open because their parent was missing.
    pub dropped_orphans: u64,
    /// Number of records dropped on open because the chunk had a newer copy.
    pub dropped_duplicates: u64,
    /// Number of records dropped on open because they were invalid or had no frame.
    pub dropped_records: u64,
    /// Number of chunks dropped on open because they exceeded the size limit.
    pub dropped_over_cap: u64,
    /// 1 if the namespace was recreated because its directory or superblock was unusable.
    pub fresh_starts: u64,
    /// Number of failures to grow the files or punch holes, plus the number of writes that failed
    /// because the file system was full. Reaching the size limit is not a failure.
    pub grow_errors: u64,
}

/// A defect in a disk directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// Name of the namespace directory.
    pub namespace: String,
    /// The slot's number among the slots of its size, if the defect affects a slot.
    pub slot: Option<u32>,
    /// The slot's frame size, in bytes.
    pub frame_bytes: Option<u64>,
    /// The chunk's key in hex, if the record is readable.
    pub key: Option<String>,
    /// A short description of the damage.
    pub problem: String,
    /// True if the superblock's format differs from this kvloft version's format. Such a namespace
    /// is not checked for damage.
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
