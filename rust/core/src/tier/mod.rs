//! Tiers: where frames live. `host` is shared memory, `disk` is files; neither knows keys' meaning or who should leave.

pub mod disk;
pub(crate) mod host;

use std::fmt;

use disk::{DiskMeta, DiskStats, DiskTier, SlotId};

use crate::Result;
use crate::key::ChunkKey;

/// What the store needs of a disk: slots of one frame each, with proof that what comes back is what went in.
///
/// [`DiskTier`] is the real one and its documentation the contract; tests have one in memory that fails on demand.
pub trait FrameDisk: fmt::Debug + Send + Sync {
    /// See [`DiskTier::reserve`].
    fn reserve(&self) -> Option<SlotId>;
    /// See [`DiskTier::write`].
    fn write(&self, slot: SlotId, meta: &DiskMeta, frame: &[u8]) -> Result<()>;
    /// See [`DiskTier::read`].
    fn read(&self, slot: SlotId, key: &ChunkKey, into: &mut [u8]) -> Result<()>;
    /// See [`DiskTier::free`].
    fn free(&self, slot: SlotId);
    /// See [`DiskTier::stats`].
    fn stats(&self) -> DiskStats;
    /// See [`DiskTier::clear`].
    fn clear(&self);
    /// See [`DiskTier::close`].
    fn close(&self);
}

impl FrameDisk for DiskTier {
    fn reserve(&self) -> Option<SlotId> {
        self.reserve()
    }
    fn write(&self, slot: SlotId, meta: &DiskMeta, frame: &[u8]) -> Result<()> {
        self.write(slot, meta, frame)
    }
    fn read(&self, slot: SlotId, key: &ChunkKey, into: &mut [u8]) -> Result<()> {
        self.read(slot, key, into)
    }
    fn free(&self, slot: SlotId) {
        self.free(slot);
    }
    fn stats(&self) -> DiskStats {
        self.stats()
    }
    fn clear(&self) {
        self.clear();
    }
    fn close(&self) {
        self.close();
    }
}
