//! Slot operations on an open directory: reserve, write, read and free.
//!
//! No lock is held during system calls. Callers must follow the `LocalTier` contract. The only
//! violation that is detected is a write to an unreserved slot.

use std::path::PathBuf;

use super::files::SlotFiles;
use super::slots::{SlotState, Slots};
use super::tier::DiskTier;
use super::types::{DiskMeta, DiskStats, SlotId};
use super::{budget, files, namespaces, owner};
use crate::error::is_no_space;
use crate::io::SizeClass;
use crate::sync::locked;
use crate::tier::{LocalTier, NoSlot};
use crate::{ChunkKey, Error, ErrorKind, Result};

impl DiskTier {
    /// Frees a slot. Does nothing if no caller owns the slot.
    fn leave(&self, slot: SlotId) -> Result<()> {
        let class = slot.class();
        let leaving = self.state().of(class).and_then(|slots| slots.leaving(slot));
        let Some(before) = leaving else { return Ok(()) };
        let files = self.files_of(class)?;
        let cleared = if before.may_have_record() { files.clear_record(slot) } else { Ok(()) };
        self.state().with(class, |slots| match cleared {
            Ok(()) => slots.left(slot),
            Err(_) => slots.stays(slot, before),
        });
        cleared.map_err(|error| self.io_error("free", slot, error))
    }

    /// Checks that the slot is reserved. Returns the write's sequence number.
    fn begin_write(&self, slot: SlotId) -> Result<u64> {
        let mut state = self.state();
        if !state.of(slot.class()).is_some_and(|slots| slots.may_write(slot)) {
            let message = "rejected a write to an unreserved disk slot";
            return Err(Error::new(ErrorKind::Io, message).with_context("slot", slot.number()));
        }
        state.next_sequence = state.next_sequence.saturating_add(1);
        Ok(state.next_sequence - 1)
    }

    /// Returns a slot's files, or `InvalidConfig` if the slot's frame size is not `len`.
    fn files_for(&self, slot: SlotId, len: usize) -> Result<&SlotFiles> {
        let files = self.files_of(slot.class())?;
        let expected = files.frame_bytes;
        if len as u64 == expected {
            return Ok(files);
        }
        let message = format!("the frame has {len} bytes, but the disk slot holds {expected}");
        Err(Error::invalid(message))
    }
}

impl LocalTier for DiskTier {
    /// May grow the files and delete closed namespaces, so it must be called on a disk thread,
    /// never in a scheduler step.
    fn reserve(&self, class: SizeClass) -> Result<SlotId, NoSlot> {
        let _inside = self.enter().map_err(|_| NoSlot::Full)?;
        let slot = self.state().take(class);
        slot.map_or_else(|| self.reserve_more(class), Ok)
    }

    fn frame_bytes(&self, class: SizeClass) -> u64 {
        self.config.frame_sizes.bytes(class)
    }

    /// Once this method succeeds, the chunk survives a process crash. Frames aligned to 4096 bytes
    /// in memory are written without being copied.
    fn write(&self, slot: SlotId, meta: &DiskMeta, frame: &[u8]) -> Result<()> {
        let _inside = self.enter()?;
        let (class, files) = (slot.class(), self.files_for(slot, frame.len())?);
        let sequence = self.begin_write(slot)?;
        let at_record = || self.state().with(class, |slots| slots.unsure(slot));
        let written = files.write(slot, meta, frame, sequence, at_record);
        if let Err(error) = written {
            if is_no_space(&error) {
                self.hold_growth();
            } else {
                self.state().with(class, |slots| slots.write_failed(slot));
            }
            return Err(self.io_error("write", slot, error));
        }
        self.state().with(class, |slots| slots.written(slot));
        Ok(())
    }

    fn read(&self, slot: SlotId, key: &ChunkKey, into: &mut [u8]) -> Result<()> {
        let _inside = self.enter()?;
        let files = self.files_for(slot, into.len())?;
        files.read(slot, key, into).map_err(|error| {
            if !files::is_damage(&error) {
                return self.io_error("read", slot, error);
            }
            let dir = namespaces::dir_of(&self.config);
            let message = format!("damaged chunk in {}: {error}", dir.display());
            Error::new(ErrorKind::Corrupt, message).with_context("slot", slot.number())
        })
    }

    fn free(&self, slot: SlotId) -> Result<()> {
        let _inside = self.enter()?;
        self.leave(slot)
    }

    fn uncleared(&self) -> Vec<SlotId> {
        self.state().slots_in(SlotState::Reserved(true))
    }

    fn is_removable(&self) -> bool {
        true
    }

    fn removed(&self) -> Option<PathBuf> {
        let dir = namespaces::dir_of(&self.config);
        self.files
            .iter()
            .any(|files| files.are_removed_from(&dir))
            .then(|| owner::first_missing(&self.config.dir, &dir).to_owned())
    }

    fn stats(&self) -> DiskStats {
        let state = self.state();
        let bytes = state.num_bytes().saturating_add(budget::FIXED_BYTES);
        DiskStats {
            slots: state.counts().iter().map(|count| u64::from(count.filled)).sum(),
            slots_used: state.slots.iter().map(|slots| slots.used).sum(),
            slots_reserved: state.slots.iter().map(Slots::reserved).sum(),
            bytes: bytes.saturating_add(state.foreign_bytes),
            cap_bytes: self.config.cap_bytes,
            direct: self.files.iter().all(SlotFiles::is_direct),
            ..state.stats
        }
    }

    fn take_events(&self) -> Vec<String> {
        self.state().take_events()
    }

    fn clear(&self) -> Result<Vec<SlotId>> {
        let _inside = self.enter()?;
        let mut used = self.state().slots_in(SlotState::Used);
        used.retain(|&slot| self.leave(slot).is_err());
        Ok(used)
    }

    fn close(&self) {
        let owner = locked(&self.owner).take();
        drop(owner);
    }
}
