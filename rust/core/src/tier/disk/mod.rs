//! The disk tier: equal frames in one file, a 128-byte record per frame in another, one owner per directory.
//!
//! It keeps bytes under slots and proves them on the way back; it must not know which chunk deserves to stay
//! (that is `evict`), who waits for a read (`store`), nor what is inside a frame. It never calls fsync: after a power
//! loss the checksums turn what did not reach the device into counted misses.

mod books;
mod budget;
mod erase;
#[cfg(any(test, feature = "faults"))]
#[doc(hidden)]
pub mod faults;
mod files;
#[cfg(any(test, feature = "faults"))]
#[doc(hidden)]
pub mod fuzzing;
mod growth;
mod inspect;
mod lock;
mod namespaces;
mod open;
mod paths;
mod record;
mod recover;
mod root;
mod slots;
mod superblock;
mod types;
mod verify;

#[cfg(test)]
mod tests;

use std::io;
use std::sync::{Arc, PoisonError};

pub use erase::Erased;
pub(crate) use erase::erase;
pub use inspect::{NamespaceInfo, inspect};
pub use root::DiskRoot;
pub use types::{DiskConfig, DiskEntry, DiskMeta, DiskStats, SlotId};
pub use verify::{Damage, Verifier};

use super::LocalTier;
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::{ChunkKey, Error, ErrorKind, Result};
use books::Books;
use files::SlotFiles;
#[doc(hidden)]
pub use files::{OpenFiles, OsFiles};
use growth::Growth;
use root::Owner;

/// An open disk directory of one namespace. All methods take `&self` and may be called from any thread.
///
/// No lock is held while the system works, so one slow or hung call delays no other.
#[derive(Debug)]
pub struct DiskTier {
    config: DiskConfig,
    files: SlotFiles,
    books: Mutex<Books>,
    growth: Mutex<Growth>,
    grown: Condvar,
    /// None once closed. Each call that is inside has a part of it, and the last to leave gives the directory up: so a call
    /// that hangs keeps the directory, and there are never two owners. Last, so that it is dropped after all else.
    owner: Mutex<Option<Arc<Owner>>>,
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

    /// As [`Self::open`], beside other namespaces of the directory that this process has open.
    pub fn open_beside(config: &DiskConfig, root: &Arc<DiskRoot>) -> Result<(Self, Vec<DiskEntry>)> {
        Self::open_at(config, root, &OsFiles)
    }

    fn enter(&self) -> Result<Arc<Owner>> {
        let owner = self.owner.lock().unwrap_or_else(PoisonError::into_inner).clone();
        owner.ok_or_else(|| Error::new(ErrorKind::Closed, "the disk tier was closed"))
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees a slot; nothing where no caller has it.
    fn leave(&self, slot: SlotId) -> Result<()> {
        let leaving = self.books().slots.leaving(slot);
        let Some(before) = leaving else { return Ok(()) };
        let cleared = if before.may_have_record() { self.files.clear_record(slot) } else { Ok(()) };
        let slots = &mut self.books().slots;
        match cleared {
            Ok(()) => slots.left(slot),
            Err(_) => slots.stays(slot, before),
        }
        cleared.map_err(|error| self.io_error("free", slot, error))
    }

    /// The sequence of a write that may begin.
    fn begin_write(&self, slot: SlotId) -> Result<u64> {
        let mut books = self.books();
        if !books.slots.may_write(slot) {
            let message = "a disk slot was written that was not reserved";
            return Err(Error::new(ErrorKind::Io, message).with_context("slot", slot.0));
        }
        books.next_sequence = books.next_sequence.saturating_add(1);
        Ok(books.next_sequence - 1)
    }

    fn check_size(&self, len: usize) -> Result<()> {
        let expected = self.config.frame_bytes;
        if len as u64 == expected {
            return Ok(());
        }
        let message = format!("a frame of {len} bytes was given to a disk tier with frames of {expected}");
        Err(Error::new(ErrorKind::InvalidConfig, message))
    }

    fn io_error(&self, verb: &str, slot: SlotId, error: io::Error) -> Error {
        let message = format!("cannot {verb} a chunk in {}", self.config.namespace_dir().display());
        Error::io(message, error).with_context("slot", slot.0)
    }
}

impl LocalTier for DiskTier {
    /// May grow the files and delete other namespaces, so it belongs on a disk thread, not in a step. Where another thread does
    /// that and takes long, this one does not wait and gets None.
    fn reserve(&self) -> Option<SlotId> {
        let _inside = self.enter().ok()?;
        let slot = self.books().slots.take();
        slot.or_else(|| self.reserve_more())
    }

    /// Once it returns Ok the chunk survives the process. Frames aligned to 4096 in memory are written without a copy.
    fn write(&self, slot: SlotId, meta: &DiskMeta, frame: &[u8]) -> Result<()> {
        let _inside = self.enter()?;
        self.check_size(frame.len())?;
        let sequence = self.begin_write(slot)?;
        let written = self.files.write(slot, meta, frame, sequence, || self.books().slots.unsure(slot));
        written.map_err(|error| self.io_error("write", slot, error))?;
        self.books().slots.written(slot);
        Ok(())
    }

    fn read(&self, slot: SlotId, key: &ChunkKey, into: &mut [u8]) -> Result<()> {
        let _inside = self.enter()?;
        self.check_size(into.len())?;
        self.files.read(slot, key, into).map_err(|error| {
            if !files::is_damage(&error) {
                return self.io_error("read", slot, error);
            }
            let dir = self.config.namespace_dir();
            let message = format!("the chunk in {} is not the one asked for: {error}", dir.display());
            Error::new(ErrorKind::Corrupt, message).with_context("slot", slot.0)
        })
    }

    fn free(&self, slot: SlotId) -> Result<()> {
        let _inside = self.enter()?;
        self.leave(slot)
    }

    fn stats(&self) -> DiskStats {
        let books = self.books();
        let slots = books.slots.len();
        DiskStats {
            slots: u64::from(slots),
            slots_used: books.slots.used(),
            slots_reserved: books.slots.reserved(),
            bytes: budget::dir_bytes(slots, self.config.frame_bytes, books.foreign_bytes),
            cap_bytes: self.config.cap_bytes,
            direct: self.files.is_direct(),
            ..books.stats
        }
    }

    fn take_events(&self) -> Vec<String> {
        self.books().take_events()
    }

    fn clear(&self) -> Result<()> {
        let _inside = self.enter()?;
        let used = self.books().slots.all_used();
        used.into_iter().map(|slot| self.leave(slot)).fold(Ok(()), Result::and)
    }

    fn close(&self) {
        let owner = self.owner.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(owner);
    }
}
