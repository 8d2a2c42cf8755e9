//! How far the files may grow now, and what has to go for it.
//!
//! The one place that compares the cap with what is on disk; it holds for every instant because the files only grow
//! here, to a size that was added up first, while the directory has one owner.

use std::path::PathBuf;

use super::budget;
use super::counters::Counters;
use super::files::SlotFiles;
use super::namespaces;

/// The files grow by about this much at a time: few allocations, and no more taken than soon used.
const EXTENT_BYTES: u64 = 64 * 1024 * 1024;
/// After the file system had no room, so many asks are turned away before it is tried again.
const ASKS_BEFORE_RETRY: u32 = 256;

/// The state of growing; its mutex makes growing one thread's business at a time.
#[derive(Debug)]
pub(super) struct Growth {
    pub(super) dir: PathBuf,
    pub(super) own_name: String,
    pub(super) cap_bytes: u64,
    pub(super) frame_bytes: u64,
    /// Bytes of other namespaces when last looked.
    pub(super) foreign_bytes: u64,
    /// Nothing more can ever fit: the cap is ours alone and full.
    pub(super) is_full: bool,
    pub(super) asks_to_skip: u32,
}

impl Growth {
    /// Grows the files beyond `have` slots; returns how many there are now.
    pub(super) fn grow(&mut self, have: u32, files: &SlotFiles, counters: &Counters) -> u32 {
        if self.is_full {
            return have;
        }
        if self.asks_to_skip > 0 {
            self.asks_to_skip -= 1;
            return have;
        }
        let room = self.make_room(have, counters);
        let extent = u32::try_from(EXTENT_BYTES / self.frame_bytes).unwrap_or(u32::MAX).max(1);
        let mut to = have.saturating_add(extent).min(room);
        while to > have {
            let Err(error) = files.grow(have, to) else { return to };
            counters.grow_errors.add(1);
            counters.event(format!("{} cannot grow by {} chunks: {error}", self.dir.display(), to - have));
            to = have + (to - have) / 2;
        }
        if room > have {
            self.asks_to_skip = ASKS_BEFORE_RETRY;
        }
        have
    }

    /// Bytes that the whole directory is accounted at with so many slots of ours.
    pub(super) fn bytes(&self, slots: u32) -> u64 {
        budget::FIXED_BYTES + self.foreign_bytes + budget::slots_bytes(slots, self.frame_bytes)
    }

    /// Slots that fit the cap; other namespaces go, least recently used first, only if else not one more fits.
    fn make_room(&mut self, have: u32, counters: &Counters) -> u32 {
        let Ok(foreign) = namespaces::scan(&self.dir, Some(&self.own_name)) else { return have };
        self.foreign_bytes = foreign.iter().map(|f| f.bytes).fold(0, u64::saturating_add);
        for oldest in &foreign {
            if self.slots_that_fit() > have {
                break;
            }
            match namespaces::remove(&oldest.path) {
                Ok(()) => {
                    self.foreign_bytes = self.foreign_bytes.saturating_sub(oldest.bytes);
                    counters.namespaces_removed.add(1);
                    counters.event(format!("{} was deleted to make room", oldest.path.display()));
                }
                Err(error) => counters.event(format!("{} cannot be deleted: {error}", oldest.path.display())),
            }
        }
        let room = self.slots_that_fit();
        self.is_full = room <= have && self.foreign_bytes == 0;
        if room <= have && !self.is_full {
            // Something that is not ours to delete takes the room; it may go one day.
            self.asks_to_skip = ASKS_BEFORE_RETRY;
        }
        room
    }

    fn slots_that_fit(&self) -> u32 {
        let room = self.cap_bytes - budget::FIXED_BYTES;
        budget::max_slots(room.saturating_sub(self.foreign_bytes), self.frame_bytes)
    }
}
