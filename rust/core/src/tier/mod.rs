//! Tiers store frames: `host` in shared memory, `disk` in files, and `remote` on another machine,
//! which is only an interface so far. Tiers treat keys as opaque, and the store chooses the chunks
//! to evict.

pub mod disk;
pub(crate) mod host;
pub mod remote;

use std::fmt;
use std::path::PathBuf;

use disk::{DiskMeta, DiskStats, SlotId};

use crate::Result;
use crate::io::SizeClass;
use crate::key::ChunkKey;

/// A tier that this process owns. It has slots for one frame each, and verifies frames with
/// checksums.
///
/// Life of a slot: `reserve` -> `write` -> `free`. The caller owns a slot from `reserve` (or from
/// opening, which returns stored chunks) until `free` returns Ok, and must not use it in two calls
/// concurrently. After `close`, `write`, `read`, `free` and `clear` return `Closed`, and `reserve`
/// returns None. [`disk::DiskTier`] implements this trait with files.
pub trait LocalTier: fmt::Debug + Send + Sync {
    /// Reserves a free or new slot for frames of `class`. Returns None if no slot is available, or
    /// not yet. Never modifies a written slot.
    fn reserve(&self, class: SizeClass) -> Option<SlotId>;

    /// Returns the size of a frame of `class`, in bytes; 0 if there is no such class.
    fn frame_bytes(&self, class: SizeClass) -> u64;

    /// Writes a frame to a reserved slot. After an error, `read` fails, and the caller still owns
    /// the slot and must call `free`, or `write` again.
    fn write(&self, slot: SlotId, meta: &DiskMeta, frame: &[u8]) -> Result<()>;

    /// Reads the frame of `key`. Returns `Corrupt` if the record or the checksum proves damage, and
    /// `Io` if a system call failed, which proves nothing about the chunk. After an error, the
    /// content of `into` is undefined.
    fn read(&self, slot: SlotId, key: &ChunkKey, into: &mut [u8]) -> Result<()>;

    /// Permanently removes the chunk from the slot and takes the slot back. After an error, the
    /// chunk can still be read, and the caller still owns the slot.
    fn free(&self, slot: SlotId) -> Result<()>;

    /// Returns true if the tier's storage can be removed while the tier is open, so that the caller
    /// must call `removed` regularly.
    fn is_removable(&self) -> bool;

    /// Returns the directory or file of the tier that was removed or moved while the tier was open.
    /// Returns None if nothing was removed, or if that is unknown. Does I/O.
    fn removed(&self) -> Option<PathBuf>;

    /// Returns gauges and counters. Never waits for I/O.
    fn stats(&self) -> DiskStats;

    /// Returns the log lines since the last call, oldest first. Lines beyond a limit are dropped.
    fn take_events(&self) -> Vec<String>;

    /// Frees every written slot. Callers keep reserved slots. After an error, some chunks remain,
    /// and their slots are still used.
    fn clear(&self) -> Result<()>;

    /// Closes the tier without waiting for I/O. The last call in progress releases the tier's
    /// resources.
    fn close(&self);
}
