//! Tiers store frames: `host` in shared memory, `disk` in files, and `remote` on another machine
//! (so far only an interface). Tiers treat keys as opaque. The store decides which chunks to evict.

pub mod disk;
pub(crate) mod host;
pub mod remote;

use std::fmt;
use std::path::PathBuf;

use disk::{DiskMeta, DiskStats, SlotId};

use crate::Result;
use crate::io::SizeClass;
use crate::key::ChunkKey;

/// The reason why a tier has no free slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoSlot {
    /// A slot must be freed first.
    Full,
    /// A slot of the same size must be freed first. Space from slots of other sizes cannot be
    /// reused at the moment.
    FullExceptSameSize,
    /// Another thread is still creating slots, so a later call may succeed.
    Growing,
}

/// A tier owned by this process. Each slot holds one frame, protected by a checksum.
///
/// Slot life cycle: `reserve` -> `write` -> `free`. A caller owns a slot from `reserve` until
/// `free` returns Ok, and must not use it in two concurrent calls. The caller also owns the slots
/// of chunks found when the tier opens, and the `uncleared` slots. After `close`, `write`, `read`,
/// `free` and `clear` return `Closed`, and `reserve` returns `Full`.
pub trait LocalTier: fmt::Debug + Send + Sync {
    /// Reserves a free or new slot for a frame of `class`. Never modifies a slot that holds a
    /// chunk.
    fn reserve(&self, class: SizeClass) -> Result<SlotId, NoSlot>;

    /// Returns the frame size of `class` in bytes, or 0 if there is no such class.
    fn frame_bytes(&self, class: SizeClass) -> u64;

    /// Writes a frame to a reserved slot. After an error, `read` fails, and the caller still owns
    /// the slot and must `free` it or retry `write`.
    fn write(&self, slot: SlotId, meta: &DiskMeta, frame: &[u8]) -> Result<()>;

    /// Reads `key`'s frame. Returns `Corrupt` if the record or checksum proves damage, or `Io` if
    /// a system call failed and the chunk may be intact. After an error, the contents of `into`
    /// are undefined.
    fn read(&self, slot: SlotId, key: &ChunkKey, into: &mut [u8]) -> Result<()>;

    /// Permanently removes the chunk from the slot and returns the slot to the tier. After an
    /// error, the chunk is still readable and the caller still owns the slot.
    fn free(&self, slot: SlotId) -> Result<()>;

    /// Returns the slots that hold no readable chunk but may have a record. When the tier opens,
    /// these are the slots whose records could be neither read nor cleared. The caller must `free`
    /// them. Otherwise, a later opening could find chunks that have been removed since.
    fn uncleared(&self) -> Vec<SlotId> {
        Vec::new()
    }

    /// Returns true if the tier's storage can be removed while the tier is open. The caller must
    /// then poll `removed`.
    fn is_removable(&self) -> bool;

    /// Returns the directory or file that was removed or moved out from under the open tier.
    /// Returns None if nothing was removed or the check is inconclusive. Does I/O.
    fn removed(&self) -> Option<PathBuf>;

    /// Returns gauges and counters. Never blocks on I/O.
    fn stats(&self) -> DiskStats;

    /// Returns the log lines added since the last call, oldest first. Lines beyond a limit are
    /// dropped.
    fn take_events(&self) -> Vec<String>;

    /// Frees all written slots, but not reserved slots. Returns the slots that could not be freed.
    fn clear(&self) -> Result<Vec<SlotId>>;

    /// Closes the tier without blocking on I/O. Resources are released when the last
    /// in-flight call returns.
    fn close(&self);
}
