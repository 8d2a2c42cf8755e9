//! Tiers: where frames live. `host` is shared memory, `disk` is files; neither knows keys' meaning
//! or who should leave.

pub mod disk;
pub(crate) mod host;
pub mod remote;

use std::fmt;
use std::path::PathBuf;

use disk::{DiskMeta, DiskStats, SlotId};

use crate::Result;
use crate::io::SizeClass;
use crate::key::ChunkKey;

/// A tier that this process owns: slots of one frame each, with proof that what comes back is what
/// went in.
///
/// A slot's life: `reserve` -> `write` -> `free`. It is the caller's from `reserve` (or from the
/// entries that opening found) until `free` returns Ok. At most one call at a time may concern a
/// slot; that is the caller's pin. After `close` every call is `Closed`. [`disk::DiskTier`] is the
/// one on files.
pub trait LocalTier: fmt::Debug + Send + Sync {
    /// A free or newly grown slot for frames of `class`; None where there is no room, or none yet.
    /// Never touches a written slot.
    fn reserve(&self, class: SizeClass) -> Option<SlotId>;

    /// Bytes of a frame of `class`; 0 if there is no such class.
    fn frame_bytes(&self, class: SizeClass) -> u64;

    /// Writes a frame to a reserved slot. On Err nothing of it can be read, and the slot is still
    /// the caller's, who calls `free`, or `write` again.
    fn write(&self, slot: SlotId, meta: &DiskMeta, frame: &[u8]) -> Result<()>;

    /// Reads the frame of `key`. Errors: `Corrupt` where record or checksum prove damage, `Io`
    /// where the system refused, which says nothing about the chunk. On any error `into` holds
    /// rubbish.
    fn read(&self, slot: SlotId, key: &ChunkKey, into: &mut [u8]) -> Result<()>;

    /// Removes the chunk from the slot, also for the next open, and takes the slot back. On Err
    /// the chunk can still be read, and the slot is still the caller's.
    fn free(&self, slot: SlotId) -> Result<()>;

    /// Whether the tier's storage can be removed while the tier is open: `removed` is called now
    /// and then.
    fn is_removable(&self) -> bool;

    /// Returns the directory or file of the tier that was removed or moved while the tier was open.
    /// Does I/O. None also where the system cannot say.
    fn removed(&self) -> Option<PathBuf>;

    /// Gauges and counters. It never waits for I/O.
    fn stats(&self) -> DiskStats;

    /// Lines to log since the last call, oldest first: each once, and a limited number.
    fn take_events(&self) -> Vec<String>;

    /// Frees every written slot; reserved ones stay with their callers. On Err some are still
    /// there, and are still used.
    fn clear(&self) -> Result<()>;

    /// Closes the tier without waiting for I/O. The last call in progress releases the tier's
    /// resources.
    fn close(&self);
}
