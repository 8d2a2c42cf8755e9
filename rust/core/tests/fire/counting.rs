//! Wraps the real disk tier and counts chunk reads and writes, without changing its behavior.

use kvloft_core::io::SizeClass;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvloft_core::tier::disk::{DiskMeta, DiskStats, DiskTier, SlotId};
use kvloft_core::tier::{LocalTier, NoSlot};
use kvloft_core::{ChunkKey, ErrorKind, Result};
use kvloft_testing::faults::faults_here;

/// Numbers of chunk reads and writes, summed over all stores.
#[derive(Debug, Default)]
pub(crate) struct Reads {
    /// All reads, with or without faults.
    pub(crate) all: AtomicU64,
    /// Reads with at least one failed call.
    pub(crate) faulted: AtomicU64,
    /// Reads that returned the chunk despite a failed call.
    pub(crate) faulted_good: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) corrupt: AtomicU64,
    pub(crate) writes: AtomicU64,
}

#[derive(Debug)]
pub(crate) struct Counting {
    pub(crate) tier: DiskTier,
    pub(crate) reads: Arc<Reads>,
}

fn count(counter: &AtomicU64, hit: bool) {
    counter.fetch_add(u64::from(hit), Ordering::Relaxed);
}

impl LocalTier for Counting {
    fn reserve(&self, class: SizeClass) -> Result<SlotId, NoSlot> {
        self.tier.reserve(class)
    }

    fn frame_bytes(&self, class: SizeClass) -> u64 {
        self.tier.frame_bytes(class)
    }

    fn write(&self, slot: SlotId, meta: &DiskMeta, frame: &[u8]) -> Result<()> {
        count(&self.reads.writes, true);
        self.tier.write(slot, meta, frame)
    }

    fn read(&self, slot: SlotId, key: &ChunkKey, into: &mut [u8]) -> Result<()> {
        let before = faults_here();
        let result = self.tier.read(slot, key, into);
        let (reads, is_faulted) = (&self.reads, faults_here() > before);
        let failed_as = |kind| result.as_ref().is_err_and(|error| error.kind() == kind);
        count(&reads.all, true);
        count(&reads.faulted, is_faulted);
        count(&reads.faulted_good, is_faulted && result.is_ok());
        count(&reads.refused, failed_as(ErrorKind::Io));
        count(&reads.corrupt, failed_as(ErrorKind::Corrupt));
        result
    }

    fn free(&self, slot: SlotId) -> Result<()> {
        self.tier.free(slot)
    }

    fn uncleared(&self) -> Vec<SlotId> {
        self.tier.uncleared()
    }

    fn is_removable(&self) -> bool {
        self.tier.is_removable()
    }

    fn removed(&self) -> Option<PathBuf> {
        self.tier.removed()
    }

    fn stats(&self) -> DiskStats {
        self.tier.stats()
    }

    fn take_events(&self) -> Vec<String> {
        self.tier.take_events()
    }

    fn clear(&self) -> Result<Vec<SlotId>> {
        self.tier.clear()
    }

    fn close(&self) {
        self.tier.close();
    }
}
