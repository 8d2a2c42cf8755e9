//! The disk tier: equal frames in one file, a 128-byte record per frame in another, one owner per directory.
//!
//! It keeps bytes under slots and proves them on the way back; it must not know which chunk deserves to stay
//! (that is `evict`), who waits for a read (`store`), nor what is inside a frame. It never calls fsync: after a power
//! loss the checksums turn what did not reach the device into counted misses.

mod budget;
mod counters;
mod errors;
mod files;
mod growth;
mod inspect;
mod lock;
mod namespaces;
mod open;
mod record;
mod recover;
mod slots;
mod superblock;
mod types;
mod verify;

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

pub use inspect::{NamespaceInfo, inspect};
pub use types::{DiskConfig, DiskEntry, DiskMeta, DiskStats, SlotId};
pub use verify::{Damage, Verifier};

use crate::{ChunkKey, Error, ErrorKind, Result};
use counters::Counters;
use files::{OpenFile, OsFiles, ReadFailure, SlotFiles};
use growth::Growth;
use lock::DirLock;
use slots::{Release, Slots};

/// An open disk directory of one namespace. All methods take `&self` and may be called from any thread.
///
/// A slot's life: `reserve` -> `write` (visible from then on, also to the next open) -> `free`. A slot belongs to the
/// caller from `reserve` (or from `open`'s entries) until it calls `free`, **also when `write` fails**: the caller frees it
/// then, and the tier decides whether it may be used again. Nobody may read, write and free one slot at the same time;
/// that is the caller's pin.
#[derive(Debug)]
pub struct DiskTier {
    namespace_dir: PathBuf,
    frame_bytes: u64,
    files: SlotFiles,
    /// Readers are operations under way, the writer is `close` or `clear`; true once closed. Taken before the others.
    closed: RwLock<bool>,
    /// Taken before `slots`.
    growth: Mutex<Growth>,
    slots: Mutex<Slots>,
    next_sequence: AtomicU64,
    counters: Counters,
    /// Last, so that the directory is given up after all else is dropped.
    lock: DirLock,
}

impl DiskTier {
    /// Opens (or makes) the directory and finds the chunks of this namespace: parents before children, oldest first.
    ///
    /// Chunks whose parent is missing (and is not a root: `depth` > 0) are dropped, as are unreadable records; a
    /// namespace with a wrong superblock is started afresh. Errors: `Busy` where another owner lives, `InvalidConfig`
    /// where `disk_path` or `disk_size` cannot work, `Io`.
    #[expect(clippy::needless_pass_by_value, reason = "the settings are the tier's from here on")]
    pub fn open(config: DiskConfig) -> Result<(Self, Vec<DiskEntry>)> {
        Self::open_with(&config, &OsFiles)
    }

    fn open_with(config: &DiskConfig, opener: &dyn OpenFile) -> Result<(Self, Vec<DiskEntry>)> {
        let found = open::open(config, opener)?;
        let next = found.entries.iter().map(|e| e.sequence).max().map_or(0, |last| last.saturating_add(1));
        let growth = Growth {
            dir: config.dir.clone(),
            own_name: namespaces::dir_name(&config.namespace),
            cap_bytes: config.cap_bytes,
            frame_bytes: config.frame_bytes,
            foreign_bytes: found.foreign_bytes,
            is_full: false,
            asks_to_skip: 0,
        };
        let tier = Self {
            namespace_dir: found.namespace_dir,
            frame_bytes: config.frame_bytes,
            files: found.files,
            closed: RwLock::new(false),
            growth: Mutex::new(growth),
            slots: Mutex::new(found.slots),
            next_sequence: AtomicU64::new(next),
            counters: Counters::new(found.stats),
            lock: found.lock,
        };
        Ok((tier, found.entries))
    }

    /// A place for one frame, or None where the cap (or the file system) has no room: evict and `free` first.
    ///
    /// May grow the files and delete another namespace, so it belongs on a disk thread, not in a step.
    pub fn reserve(&self) -> Option<SlotId> {
        let _open = self.enter().ok()?;
        if let Some(slot) = self.slots().take() {
            return Some(slot);
        }
        let mut growth = self.growth();
        let have = {
            // Another thread may have grown the files, or freed a slot, while this one waited.
            let mut slots = self.slots();
            if let Some(slot) = slots.take() {
                return Some(slot);
            }
            slots.len()
        };
        let len = growth.grow(have, &self.files, &self.counters);
        let mut slots = self.slots();
        slots.grow(len);
        slots.take()
    }

    /// Writes a frame of `frame_bytes` to a reserved slot; once it returns Ok the chunk survives the process.
    ///
    /// Frames aligned to 4096 in memory are written without a copy. Errors: `Io`, `Closed`; `InvalidConfig` where the
    /// frame's size is not `frame_bytes`.
    pub fn write(&self, slot: SlotId, meta: &DiskMeta, frame: &[u8]) -> Result<()> {
        let _open = self.enter()?;
        self.check_size(frame.len())?;
        if !self.slots().may_write(slot) {
            return Err(
                Error::new(ErrorKind::Io, "a disk slot was written that was not reserved").with_context("slot", slot.0)
            );
        }
        let sequence = self.next_sequence.fetch_add(1, Ordering::Relaxed);
        match self.files.write(slot, meta, frame, sequence) {
            Ok(()) => {
                self.slots().written(slot);
                self.counters.writes.add(1);
                self.counters.write_bytes.add(self.frame_bytes);
                Ok(())
            }
            Err(error) => {
                self.slots().failed(slot, !errors::is_full(&error));
                self.counters.write_errors.add(1);
                Err(self.io_error("write", slot, error))
            }
        }
    }

    /// Reads the frame of `key` from `slot` into `into` (`frame_bytes` long) and proves record and bytes.
    ///
    /// On any error `into` holds rubbish. Errors: `Corrupt` (not that key's bytes), `Io`, `Closed`; `InvalidConfig`
    /// where the size of `into` is not `frame_bytes`.
    pub fn read(&self, slot: SlotId, key: &ChunkKey, into: &mut [u8]) -> Result<()> {
        let _open = self.enter()?;
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

    /// Forgets what is in the slot (also after a restart) and takes it back. The caller must not use it any more.
    pub fn free(&self, slot: SlotId) {
        let Ok(_open) = self.enter() else { return };
        let cleared = match self.slots().before_release(slot) {
            Release::Nothing => return,
            Release::Clean => true,
            Release::Clear => self.files.clear_record(slot).is_ok(),
        };
        if !cleared {
            self.counters.write_errors.add(1);
        }
        self.slots().released(slot, cleared);
    }

    /// Gauges and counters.
    pub fn stats(&self) -> DiskStats {
        let (bytes, cap_bytes) = {
            let growth = self.growth();
            (growth.bytes(self.slots().len()), growth.cap_bytes)
        };
        let slots = self.slots();
        DiskStats {
            slots: u64::from(slots.len()),
            slots_used: slots.used(),
            slots_reserved: slots.reserved(),
            slots_retired: slots.retired(),
            bytes,
            cap_bytes,
            direct: self.files.is_direct(),
            ..self.counters.snapshot()
        }
    }

    /// Forgets every written slot and takes those back; reserved slots stay with their callers.
    ///
    /// Waits for reads and writes under way. A caller whose write ended before this must not `free` its slot after it.
    pub fn clear(&self) {
        let closed = self.block();
        if *closed {
            return;
        }
        let used = self.slots().all_used();
        for slot in used {
            let cleared = self.files.clear_record(slot).is_ok();
            if !cleared {
                self.counters.write_errors.add(1);
            }
            self.slots().released(slot, cleared);
        }
    }

    /// Waits for reads and writes under way and gives the directory up; from then on everything is `Closed`. Dropping
    /// does the same.
    pub fn close(&self) {
        let mut closed = self.block();
        if !*closed {
            *closed = true;
            // Only the order in which namespaces are deleted depends on it.
            let _ = open::touch(&self.namespace_dir);
            self.lock.release();
        }
    }

    /// Keeps `close` away while the guard lives.
    fn enter(&self) -> Result<RwLockReadGuard<'_, bool>> {
        let closed = self.closed.read().unwrap_or_else(PoisonError::into_inner);
        if *closed { Err(Error::new(ErrorKind::Closed, "the disk tier was closed")) } else { Ok(closed) }
    }

    fn block(&self) -> RwLockWriteGuard<'_, bool> {
        self.closed.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn growth(&self) -> MutexGuard<'_, Growth> {
        self.growth.lock().unwrap_or_else(PoisonError::into_inner)
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

impl Drop for DiskTier {
    fn drop(&mut self) {
        self.close();
    }
}
