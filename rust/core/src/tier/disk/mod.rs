//! The disk tier: equal frames in one file, a 128-byte record per frame in another, one owner per directory.
//!
//! It keeps bytes under slots and proves them on the way back; it must not know which chunk deserves to stay
//! (that is `evict`), who waits for a read (`store`), nor what is inside a frame.

mod types;

pub use types::{DiskConfig, DiskEntry, DiskMeta, DiskStats, SlotId};

use crate::{ChunkKey, Error, ErrorKind, Result};

/// An open disk directory of one namespace. All methods take `&self` and may be called from any thread.
///
/// A slot's life: `reserve` -> `write` (visible from then on, also to the next open) -> `free`. A slot belongs to the
/// caller from `reserve` until it calls `free`, **also when `write` fails**: the caller frees it then, and the tier decides
/// whether it may be used again. Nobody may read, write and free one slot at the same time; that is the caller's pin.
#[derive(Debug)]
pub struct DiskTier {
    config: DiskConfig,
}

impl DiskTier {
    /// Opens (or makes) the directory and finds the chunks of this namespace: parents before children, oldest first.
    ///
    /// Chunks whose parent is missing (and is not a root: `depth` > 0) are dropped, as are unreadable records; a namespace with a wrong superblock is
    /// started afresh. Errors: `Busy` where another owner lives, `InvalidConfig` where `disk_path` or `disk_size`
    /// cannot work, `Io`.
    pub fn open(config: DiskConfig) -> Result<(Self, Vec<DiskEntry>)> {
        Ok((Self { config }, Vec::new()))
    }

    /// A place for one frame, or None where the cap (or the file system) has no room: evict and `free` first.
    ///
    /// May grow the files and delete another namespace, so it belongs on a disk thread, not in a step.
    pub fn reserve(&self) -> Option<SlotId> {
        None
    }

    /// Writes a frame of `frame_bytes` to a reserved slot; once it returns Ok the chunk survives the process.
    ///
    /// Frames aligned to 4096 in memory are written without a copy. Errors: `Io`, `Closed`.
    pub fn write(&self, slot: SlotId, meta: &DiskMeta, frame: &[u8]) -> Result<()> {
        let _ = (slot, meta, frame);
        Err(Error::new(ErrorKind::Io, format!("no disk tier at {} yet", self.config.dir.display())))
    }

    /// Reads the frame of `key` from `slot` into `into` (`frame_bytes` long) and proves record and bytes.
    ///
    /// On any error `into` holds rubbish. Errors: `Corrupt` (not that key's bytes), `Io`, `Closed`.
    pub fn read(&self, slot: SlotId, key: &ChunkKey, into: &mut [u8]) -> Result<()> {
        let _ = (slot, key, into);
        Err(Error::new(ErrorKind::Corrupt, "no disk tier yet"))
    }

    /// Forgets what is in the slot (also after a restart) and takes it back. The caller must not use it any more.
    pub fn free(&self, slot: SlotId) {
        let _ = slot;
    }

    /// Gauges and counters.
    pub fn stats(&self) -> DiskStats {
        DiskStats::default()
    }

    /// Forgets every written slot and takes those back; reserved slots stay with their callers.
    ///
    /// No write may be under way that the caller would free afterwards.
    pub fn clear(&self) {}

    /// Waits for reads and writes under way and gives the directory up; from then on everything is `Closed`. Dropping does the same.
    pub fn close(&self) {}
}
