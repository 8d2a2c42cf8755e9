//! Shrinks a namespace's files to the size limit when the namespace is opened.
//!
//! With a single size class, the highest slots are freed. With several size classes, the disk space
//! of free slots is released first. Each class then frees its highest slots in proportion to its
//! size.

use std::collections::BTreeSet;
use std::io;

use super::budget::{self, SlotCount};
use super::files::SlotFiles;
use super::punch::runs;
use super::record::Record;
use super::root::{Claim, OpenNamespace};
use super::tier::TierState;
use super::types::{DiskConfig, DiskEntry, SlotId};

/// The contents of a size class's files.
#[derive(Debug, Default)]
pub(super) struct ClassIndex {
    /// Number of slots that both files cover.
    len: u32,
    /// Valid records, in slot order.
    pub(super) entries: Vec<DiskEntry>,
    /// Slots whose records are neither valid nor empty.
    pub(super) unsound: Vec<SlotId>,
    /// Slots with nonempty records, in ascending order.
    recorded: Vec<u32>,
    /// True if all slots without records are holes.
    is_punched: bool,
}

impl ClassIndex {
    pub(super) fn read(files: &SlotFiles) -> io::Result<Self> {
        let mut found = Self::default();
        let (records, frames) = files.for_each_record(|slot, record| {
            found.recorded.push(slot.number());
            match record {
                Ok(Record { meta, sequence, .. }) => {
                    found.entries.push(DiskEntry { slot, meta, sequence });
                }
                Err(_) => found.unsound.push(slot),
            }
        })?;
        found.len = records.min(frames);
        Ok(found)
    }

    pub(super) fn count(&self, frame_bytes: u64) -> SlotCount {
        self.count_below(self.len, frame_bytes)
    }

    fn count_below(&self, slots: u32, frame_bytes: u64) -> SlotCount {
        let recorded = self.recorded.partition_point(|slot| *slot < slots);
        let recorded = u32::try_from(recorded).unwrap_or(u32::MAX);
        SlotCount { frame_bytes, slots, filled: if self.is_punched { recorded } else { slots } }
    }

    pub(super) fn punched(&self) -> BTreeSet<u32> {
        let mut recorded = self.recorded.iter().peekable();
        let is_free = |slot: &u32| recorded.next_if_eq(&slot).is_none();
        (0..if self.is_punched { self.len } else { 0 }).filter(is_free).collect()
    }

    /// Truncates the files after the last record and, if the file system supports it, punches holes
    /// in place of the remaining free slots.
    fn release_free(&mut self, files: &SlotFiles) -> io::Result<()> {
        let end = self.recorded.iter().rev().find(|slot| **slot < self.len);
        self.cut(end.map_or(0, |last| last + 1), files)?;
        self.is_punched = true;
        let free: Vec<_> = self.punched().into_iter().collect();
        self.is_punched = runs(&free).try_for_each(|run| files.punch(&run)).is_ok();
        Ok(())
    }

    /// Truncates the files to `slots` slots. Returns the number of chunks lost.
    fn cut(&mut self, slots: u32, files: &SlotFiles) -> io::Result<u64> {
        files.set_slots(slots)?;
        self.len = slots;
        let num_entries = self.entries.len();
        self.entries.retain(|entry| entry.slot.number() < slots);
        self.unsound.retain(|slot| slot.number() < slots);
        self.recorded.retain(|slot| *slot < slots);
        Ok((num_entries - self.entries.len()) as u64)
    }
}

/// Claims space for the namespace and shrinks its files to fit the claimed space.
pub(super) fn fit_cap(
    config: &DiskConfig,
    owner: &OpenNamespace,
    files: &[SlotFiles],
    found: &mut [ClassIndex],
    state: &mut TierState,
) -> io::Result<()> {
    let counts = |found: &[ClassIndex]| -> Vec<SlotCount> {
        files.iter().zip(found).map(|(files, index)| index.count(files.frame_bytes)).collect()
    };
    let recorded = |count: &SlotCount, index: &ClassIndex| {
        let filled = u32::try_from(index.recorded.len()).unwrap_or(u32::MAX);
        SlotCount { filled: filled.min(count.filled), ..*count }
    };
    state.stats.dropped_records = found.iter().map(|index| index.unsound.len() as u64).sum();
    let all = counts(found);
    let want = budget::namespace_bytes(&all);
    let least: Vec<_> = all.iter().zip(&*found).map(|(all, index)| recorded(all, index)).collect();
    let have_several = files.len() > 1;
    let enough = if have_several { budget::namespace_bytes(&least) } else { want };
    let Claim { bytes: room, foreign_bytes } =
        owner.claim(config, [enough, want], |line| state.event(line))?;
    state.foreign_bytes = foreign_bytes;
    if want > room && have_several {
        for (files, index) in files.iter().zip(&mut *found) {
            index.release_free(files)?;
        }
    }
    let counts = counts(found);
    let taken = budget::namespace_bytes(&counts);
    let maps = budget::map_bytes(files.len());
    for ((files, index), count) in files.iter().zip(found).zip(counts) {
        let part = u128::from(room.saturating_sub(maps)) * u128::from(count.bytes());
        let part = part / u128::from((taken - maps).max(1));
        let fits = |slots| {
            let bytes = index.count_below(slots, count.frame_bytes).bytes();
            taken <= room || u128::from(bytes) <= part
        };
        let keep = budget::largest_fit(count.slots, fits);
        state.stats.dropped_over_cap += index.cut(keep, files)?;
    }
    Ok(())
}
