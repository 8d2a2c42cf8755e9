//! Tiers store frames: `host` in shared memory, `disk` in files, and `remote` on another host, which
//! is only an interface so far. No tier knows the meaning of keys or chooses chunks to evict.

pub mod disk;
pub(crate) mod host;
pub mod remote;

use std::fmt;
use std::path::PathBuf;

use disk::{DiskMeta, DiskStats, SlotId};

use crate::Result;
use crate::io::SizeClass;
use crate::key::ChunkKey;

/// A tier that this process owns: slots of one frame each, with checksums.
///
/// A slot's life: `reserve` -> `write` -> `free`. The caller owns it from `reserve` (or from
/// opening, which returns stored chunks) until `free` returns Ok, and must not use it in two calls
/// at once. After `close` every call is `Closed`. [`disk::DiskTier`] implements it with files.
pub trait LocalTier: fmt::Debug + Send + Sync {
    /// Returns a free or new slot for frames of `class`; None if there is no room, or none yet.
    /// Never touches a written slot.
    fn reserve(&self, class: SizeClass) -> Option<SlotId>;

    /// Bytes of a frame of `class`; 0 if there is no such class.
    fn frame_bytes(&self, class: SizeClass) -> u64;

    /// Writes a frame to a reserved slot. On Err nothing of it can be read, and the caller still
    /// owns the slot and calls `free`, or `write` again.
    fn write(&self, slot: SlotId, meta: &DiskMeta, frame: &[u8]) -> Result<()>;

    /// Reads the frame of `key`. Errors: `Corrupt` if record or checksum prove damage; `Io` if the
    /// system refused, which proves nothing about the chunk. After an error, the content of `into`
    /// is undefined.
    fn read(&self, slot: SlotId, key: &ChunkKey, into: &mut [u8]) -> Result<()>;

    /// Removes the chunk from the slot, permanently, and takes the slot back. On Err the chunk can
    /// still be read, and the caller still owns the slot.
    fn free(&self, slot: SlotId) -> Result<()>;

    /// Returns whether the tier's storage can be removed while the tier is open, so that `removed`
    /// must be called regularly.
    fn is_removable(&self) -> bool;

    /// Returns the directory or file of the tier that was removed or moved while the tier was open.
    /// Does I/O. Also None if the system cannot report it.
    fn removed(&self) -> Option<PathBuf>;

    /// Gauges and counters. It never waits for I/O.
    fn stats(&self) -> DiskStats;

    /// Returns the log lines since the last call, oldest first, up to a limit.
    fn take_events(&self) -> Vec<String>;

    /// Frees every written slot; callers keep reserved ones. On Err some chunks remain, in slots
    /// that are still used.
    fn clear(&self) -> Result<()>;

    /// Closes the tier without waiting for I/O. The last call in progress releases the tier's
    /// resources.
    fn close(&self);
}
