//! The two files of a size class: lengths, blocks and all records.

use std::io::{self, ErrorKind};
use std::ops::Range;

use super::files::{SlotFiles, read_exact};
use super::record::{self, Parsed, RECORD_BYTES, Record, index_offset};
use super::types::SlotId;
use crate::io::MAX_FRAMES;
use crate::io::direct::RawFile;

impl SlotFiles {
    /// Number of complete slots in each file: (records, frames).
    pub(super) fn lens(&self) -> io::Result<(u32, u32)> {
        let whole =
            |len: u64, each: u64| u32::try_from((len / each).min(MAX_FRAMES)).unwrap_or(u32::MAX);
        // Frames first: an engine that grows its files meanwhile extends the index first.
        let frames = whole(self.frames.size()?, self.frame_bytes);
        let records = whole(self.index.size()?, RECORD_BYTES as u64);
        Ok((records, frames))
    }

    /// Reads all records in order, a megabyte at a time, and passes each nonempty record, or its
    /// defect as a clause, to `show`. Holes are skipped, so a forged length costs no time. Returns
    /// the slots of each file, as `lens`.
    pub(super) fn for_each_record(
        &self,
        mut show: impl FnMut(SlotId, Result<Record, &'static str>),
    ) -> io::Result<(u32, u32)> {
        const BATCH: u32 = 8192;
        let (records, frames) = self.lens()?;
        let mut buffer = vec![0; RECORD_BYTES * BATCH.min(records) as usize];
        let mut first = 0;
        while first < records {
            let Some(at) = self.index.next_data(index_offset(first))? else { break };
            first = first.max(u32::try_from(at / RECORD_BYTES as u64).unwrap_or(u32::MAX));
            let count = BATCH.min(records.saturating_sub(first));
            let bytes = &mut buffer[..RECORD_BYTES * count as usize];
            read_exact(&*self.index, bytes, index_offset(first))?;
            for (number, chunk) in (first..).zip(bytes.as_chunks::<RECORD_BYTES>().0) {
                let slot = SlotId::new(self.class, number);
                match record::parse(chunk, number, self.seed) {
                    Parsed::Empty => {}
                    Parsed::Valid(record) if number < frames => show(slot, Ok(record)),
                    Parsed::Valid(_) => show(slot, Err("the file of frames ends before it")),
                    Parsed::Bad => show(slot, Err("record damaged")),
                }
            }
            first = first.saturating_add(count);
        }
        Ok((records, frames))
    }

    /// Cuts or extends both files to exactly `slots`; records are cut first, so that no record is
    /// without a frame.
    pub(super) fn set_slots(&self, slots: u32) -> io::Result<()> {
        for (file, len) in
            [(&self.index, index_offset(slots)), (&self.frames, self.frame_offset(slots))]
        {
            if file.size()? != len {
                file.set_len(len)?;
            }
        }
        Ok(())
    }

    /// Extends both files from `from` to `to` slots; returns whether their blocks are allocated, or
    /// the slots are holes because the file system cannot allocate ahead. On an error the files are
    /// `from` long again.
    pub(super) fn grow(&self, from: u32, to: u32) -> io::Result<bool> {
        let result = extend(&*self.index, index_offset(from), index_offset(to)).and_then(|index| {
            let frames = extend(&*self.frames, self.frame_offset(from), self.frame_offset(to))?;
            Ok(index && frames)
        });
        if result.is_err() {
            // A failed allocation may have allocated a part.
            let _ = self.set_slots(from);
        }
        result
    }

    /// Allocates the blocks of punched slots; returns true if they are allocated, false if the file
    /// system cannot allocate ahead.
    pub(super) fn refill(&self, slots: &Range<u32>) -> io::Result<bool> {
        extend(&*self.frames, self.frame_offset(slots.start), self.frame_offset(slots.end))
    }

    /// Frees the blocks of slots; the file keeps its length. Their records must be empty (I3).
    pub(super) fn punch(&self, slots: &Range<u32>) -> io::Result<()> {
        self.frames.punch(self.frame_offset(slots.start), self.frame_offset(slots.end))
    }
}

/// Extends a file with allocated blocks, or with a hole if the file system cannot preallocate;
/// returns whether blocks were allocated. Fills holes if the file is longer.
fn extend(file: &dyn RawFile, from: u64, to: u64) -> io::Result<bool> {
    match file.allocate(from, to) {
        Err(e) if e.kind() == ErrorKind::Unsupported => {
            if file.size()? < to {
                file.set_len(to)?;
            }
            Ok(false)
        }
        other => other.map(|()| true),
    }
}
