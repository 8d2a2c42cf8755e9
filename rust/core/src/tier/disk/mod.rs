//! The disk tier: equal frames in one file, a 128-byte record per frame in another, one owner per directory.
//!
//! It keeps bytes under slots and proves them on the way back; it must not know which chunk deserves to stay
//! (that is `evict`), who waits for a read (`store`), nor what is inside a frame. It never calls fsync: after a power
//! loss the checksums turn what did not reach the device into counted misses.

mod budget;
mod counters;
mod errors;
#[cfg(any(test, feature = "faults"))]
#[doc(hidden)]
pub mod faults;
mod files;
#[cfg(any(test, feature = "faults"))]
#[doc(hidden)]
pub mod fuzzing;
mod gate;
mod growth;
mod inspect;
mod lock;
mod namespaces;
mod open;
mod owner;
mod record;
mod recover;
mod slots;
mod superblock;
mod types;
mod verify;

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::PoisonError;

pub use inspect::{NamespaceInfo, inspect};
pub use types::{DiskConfig, DiskEntry, DiskMeta, DiskStats, SlotId};
pub use verify::{Damage, Verifier};

use super::LocalTier;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard};
use crate::{ChunkKey, Error, ErrorKind, Result};
use counters::Counters;
#[doc(hidden)]
pub use files::{OpenFiles, OsFiles};
use files::{ReadFailure, SlotFiles};
use gate::{Gate, Inside};
use growth::Growth;
use slots::{Before, Slots};

/// An open disk directory of one namespace. All methods take `&self` and may be called from any thread.
///
/// No lock is held while the system works, so one slow or hung call delays nobody else.
#[derive(Debug)]
pub struct DiskTier {
    namespace_dir: PathBuf,
    frame_bytes: u64,
    files: SlotFiles,
    growth: Growth,
    slots: Mutex<Slots>,
    next_sequence: AtomicU64,
    counters: Counters,
    /// Last, so that the directory is given up after all else is dropped.
    gate: Gate,
}

impl DiskTier {
    /// Opens (or makes) the directory and finds the chunks of this namespace: parents before children, oldest first.
    ///
    /// Chunks whose parent is missing (and is not a root: `depth` > 0) are dropped, as are unreadable records; a
    /// namespace with a wrong superblock is started afresh. Errors: `InvalidConfig` where these settings can never work;
    /// `Busy` where another owner lives, and `Io` where the system refused or somebody else may write here: both may pass,
    /// so the same settings are worth another try later. A failed open leaves nothing that hinders the next.
    #[expect(clippy::needless_pass_by_value, reason = "the settings are the tier's from here on")]
    pub fn open(config: DiskConfig) -> Result<(Self, Vec<DiskEntry>)> {
        Self::open_with_files(&config, &OsFiles)
    }

    /// As [`Self::open`], with another source of files: tests have one that fails on purpose.
    #[doc(hidden)]
    pub fn open_with_files(config: &DiskConfig, files: &dyn OpenFiles) -> Result<(Self, Vec<DiskEntry>)> {
        let found = open::open(config, files)?;
        let next = found.entries.iter().map(|e| e.sequence).max().map_or(0, |last| last.saturating_add(1));
        let tier = Self {
            namespace_dir: found.namespace_dir,
            frame_bytes: config.frame_bytes,
            files: found.files,
            growth: Growth::new(config, found.foreign_bytes),
            slots: Mutex::new(found.slots),
            next_sequence: AtomicU64::new(next),
            counters: Counters::new(found.stats, found.events),
            gate: Gate::new(found.lock),
        };
        Ok((tier, found.entries))
    }

    fn enter(&self) -> Result<Inside<'_>> {
        self.gate.enter().ok_or_else(|| Error::new(ErrorKind::Closed, "the disk tier was closed"))
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends what `Slots::leaving` began.
    fn leave(&self, slot: SlotId, before: Before) -> Result<()> {
        if before.may_have_record()
            && let Err(error) = self.files.clear_record(slot)
        {
            self.slots().stays(slot, before);
            self.counters.write_errors.add(1);
            return Err(self.io_error("free", slot, error));
        }
        self.slots().left(slot);
        Ok(())
    }

    /// Frame first, then record; from the record on the slot is not known to be empty.
    fn write_both(&self, slot: SlotId, meta: &DiskMeta, frame: &[u8]) -> std::io::Result<()> {
        let sequence = self.next_sequence.fetch_add(1, Ordering::Relaxed);
        let record = self.files.write_frame(slot, meta, frame, sequence)?;
        self.slots().unsure(slot);
        self.files.write_record(slot, &record)
    }

    fn check_size(&self, len: usize) -> Result<()> {
        if len as u64 == self.frame_bytes {
            return Ok(());
        }
        let message = format!("a frame of {len} bytes was given to a disk tier with frames of {}", self.frame_bytes);
        Err(Error::new(ErrorKind::InvalidConfig, message))
    }

    fn io_error(&self, verb: &str, slot: SlotId, error: std::io::Error) -> Error {
        Error::io(format!("cannot {verb} a chunk in {}", self.namespace_dir.display()), error)
            .with_context("slot", slot.0)
    }
}

impl LocalTier for DiskTier {
    /// May grow the files and delete other namespaces, so it belongs on a disk thread, not in a step. Where another thread does
    /// that and takes long, this one does not wait and gets None.
    fn reserve(&self) -> Option<SlotId> {
        let _inside = self.enter().ok()?;
        let slot = self.slots().take();
        slot.or_else(|| self.growth.reserve(&self.slots, &self.files, &self.counters))
    }

    /// Once it returns Ok the chunk survives the process. Frames aligned to 4096 in memory are written without a copy.
    fn write(&self, slot: SlotId, meta: &DiskMeta, frame: &[u8]) -> Result<()> {
        let _inside = self.enter()?;
        self.check_size(frame.len())?;
        if !self.slots().may_write(slot) {
            let message = "a disk slot was written that was not reserved";
            return Err(Error::new(ErrorKind::Io, message).with_context("slot", slot.0));
        }
        if let Err(error) = self.write_both(slot, meta, frame) {
            self.counters.write_errors.add(1);
            return Err(self.io_error("write", slot, error));
        }
        self.slots().written(slot);
        self.counters.writes.add(1);
        self.counters.write_bytes.add(self.frame_bytes);
        Ok(())
    }

    fn read(&self, slot: SlotId, key: &ChunkKey, into: &mut [u8]) -> Result<()> {
        let _inside = self.enter()?;
        self.check_size(into.len())?;
        match self.files.read(slot, key, into) {
            Ok(()) => {
                self.counters.reads.add(1);
                self.counters.read_bytes.add(self.frame_bytes);
                Ok(())
            }
            Err(ReadFailure::Corrupt(how)) => {
                self.counters.corrupt_reads.add(1);
                let message = format!("the chunk in {} is not the one asked for: {how}", self.namespace_dir.display());
                Err(Error::new(ErrorKind::Corrupt, message).with_context("slot", slot.0))
            }
            Err(ReadFailure::Io(error)) => {
                self.counters.read_errors.add(1);
                Err(self.io_error("read", slot, error))
            }
        }
    }

    fn free(&self, slot: SlotId) -> Result<()> {
        let _inside = self.enter()?;
        let leaving = self.slots().leaving(slot);
        leaving.map_or(Ok(()), |before| self.leave(slot, before))
    }

    fn stats(&self) -> DiskStats {
        let slots = self.slots();
        DiskStats {
            slots: u64::from(slots.len()),
            slots_used: slots.used(),
            slots_reserved: slots.reserved(),
            bytes: self.growth.bytes(slots.len()),
            cap_bytes: self.growth.cap_bytes(),
            direct: self.files.is_direct(),
            ..self.counters.snapshot()
        }
    }

    fn take_events(&self) -> Vec<String> {
        self.counters.take_events()
    }

    fn clear(&self) -> Result<()> {
        let _inside = self.enter()?;
        let used = self.slots().all_used();
        let mut result = Ok(());
        for slot in used {
            let leaving = self.slots().leaving(slot);
            if let Some(before) = leaving {
                result = result.and(self.leave(slot, before));
            }
        }
        result
    }

    fn close(&self) {
        self.gate.close();
    }
}
