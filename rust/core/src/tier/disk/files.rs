//! A size class's two files in a namespace: the index, which holds the records, and the frames
//! file.
//!
//! A write clears the record, writes the frame, then writes the record. A valid record therefore
//! always has a complete frame, no matter when the process dies (I3).

use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::namespaces::{frames_name, index_name};
use super::owner;
use super::record::{self, EMPTY, Parsed, PayloadHasher, RECORD_BYTES, Record, index_offset};
use super::types::{Damage, DiskMeta, SlotId};
use crate::ChunkKey;
use crate::io::direct::{OsFile, RawFile};
use crate::io::{MAX_FRAMES, SizeClass};

/// Opens the tier's files. Tests inject implementations that fail on demand.
pub trait OpenFiles: std::fmt::Debug + Send + Sync {
    /// Opens `path` for reading and writing, creating it if needed. `direct` requests `O_DIRECT` if
    /// the file system supports it.
    fn open(&self, path: &Path, direct: bool) -> io::Result<Box<dyn RawFile>>;
}

/// Opens each file as an [`OsFile`].
#[derive(Debug, Clone, Copy)]
pub struct OsFiles;

impl OpenFiles for OsFiles {
    fn open(&self, path: &Path, direct: bool) -> io::Result<Box<dyn RawFile>> {
        Ok(Box::new(OsFile::open(path, direct)?))
    }
}

/// Number of index records that are lost if one 4096-byte sector is unreadable.
const RECORDS_PER_PIECE: usize = 4096 / RECORD_BYTES;
/// If more pieces than this are unreadable, the whole disk has failed, not just a few sectors.
/// Opening then fails and is retried later, so that no chunk is lost.
const MAX_BAD_PIECES: usize = 8;
const DIFFERS: &str = "its checksum does not match";

/// Creates an error for stored bytes that differ from the bytes written. `how` is a clause that
/// states the evidence.
fn damage(how: &'static str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, how)
}

/// Returns true if the error proves that stored bytes are wrong. Returns false if a system call
/// failed.
pub(super) fn is_damage(error: &io::Error) -> bool {
    error.kind() == ErrorKind::InvalidData
}

/// Fills `into` with the bytes at `offset`. A file that is too short is treated as damaged.
pub(super) fn read_exact(file: &dyn RawFile, into: &mut [u8], offset: u64) -> io::Result<()> {
    file.read_exact_at(into, offset).map_err(|error| match error.kind() {
        ErrorKind::UnexpectedEof => damage("the file is too short"),
        _ => error,
    })
}

/// A size class's two open files.
#[derive(Debug)]
pub(super) struct SlotFiles {
    pub(super) frames: Box<dyn RawFile>,
    pub(super) index: Box<dyn RawFile>,
    pub(super) class: SizeClass,
    pub(super) frame_bytes: u64,
    pub(super) seed: u64,
}

impl SlotFiles {
    /// Opens both files in a namespace's directory.
    pub(super) fn open(
        dir: &Path,
        (class, frame_bytes): (SizeClass, u64),
        namespace: &[u8; 32],
        opener: &dyn OpenFiles,
    ) -> io::Result<Self> {
        let index = opener.open(&dir.join(index_name(frame_bytes)), false)?;
        let frames = opener.open(&dir.join(frames_name(frame_bytes)), true)?;
        let seed = record::record_seed(namespace, frame_bytes);
        Ok(Self { frames, index, class, frame_bytes, seed })
    }

    /// Opens both files of an existing namespace read-only. Returns None if the files have never
    /// held a chunk. The error describes the damage.
    pub(super) fn open_read(
        dir: &Path,
        (class, frame_bytes): (SizeClass, u64),
        namespace: &[u8; 32],
    ) -> Result<Option<Self>, String> {
        let (index_name, frames_name) = (index_name(frame_bytes), frames_name(frame_bytes));
        let seed = record::record_seed(namespace, frame_bytes);
        let open = |name: &str, direct| match OsFile::open_read(&dir.join(name), direct) {
            Ok(file) => Ok(Some(Box::new(file))),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) => Err(format!("cannot open {name} ({e})")),
        };
        let missing = |name: &str| Err(format!("{name} is missing: its chunks are lost"));
        match (open(&index_name, false)?, open(&frames_name, true)?) {
            (Some(index), Some(frames)) => {
                Ok(Some(Self { frames, index, class, frame_bytes, seed }))
            }
            (None, None) => Ok(None),
            // The index is created first, so a process killed before it creates the frames file
            // leaves only an empty index.
            (Some(index), None) if index.size().is_ok_and(|size| size == 0) => Ok(None),
            (Some(_), None) => missing(&frames_name),
            (None, Some(_)) => missing(&index_name),
        }
    }

    /// Returns true if a file is known to have been removed or moved out of `dir`.
    pub(super) fn are_removed_from(&self, dir: &Path) -> bool {
        let (index, frames) = (index_name(self.frame_bytes), frames_name(self.frame_bytes));
        [(&self.index, index), (&self.frames, frames)].into_iter().any(|(file, name)| {
            let is_gone = |dev| owner::is_missing(&dir.join(&name), dev);
            file.metadata().is_ok_and(|meta| meta.nlink() == 0 || is_gone(meta.dev()))
        })
    }

    pub(super) fn damage(
        &self,
        namespace: &str,
        slot: SlotId,
        problem: impl Into<String>,
    ) -> Damage {
        let (slot, frame_bytes) = (Some(slot.number()), Some(self.frame_bytes));
        Damage { slot, frame_bytes, ..Damage::new(namespace, problem) }
    }

    pub(super) fn is_direct(&self) -> bool {
        self.frames.is_direct()
    }

    /// Writes a chunk. Until `at_record` is called, the slot's record is either unchanged or empty.
    /// After that, the new record may be present.
    pub(super) fn write(
        &self,
        slot: SlotId,
        meta: &DiskMeta,
        frame: &[u8],
        sequence: u64,
        at_record: impl FnOnce(),
    ) -> io::Result<()> {
        self.clear_record(slot)?;
        self.frames.write_all_at(frame, self.frame_offset(slot.number()))?;
        let record = Record { meta: *meta, payload: record::payload_checksum(frame), sequence };
        at_record();
        self.index
            .write_all_at(&record.encode(slot.number(), self.seed), index_offset(slot.number()))
    }

    /// Reads `key`'s frame and verifies its record and checksum.
    pub(super) fn read(&self, slot: SlotId, key: &ChunkKey, into: &mut [u8]) -> io::Result<()> {
        let record = self.read_record(slot)?;
        if record.meta.key != *key {
            return Err(damage("its record belongs to a different chunk"));
        }
        read_exact(&*self.frames, into, self.frame_offset(slot.number()))?;
        if record::payload_checksum(into) == record.payload { Ok(()) } else { Err(damage(DIFFERS)) }
    }

    /// Reads the record of a slot that should hold a chunk.
    pub(super) fn read_record(&self, slot: SlotId) -> io::Result<Record> {
        let mut bytes = EMPTY;
        read_exact(&*self.index, &mut bytes, index_offset(slot.number()))?;
        match record::parse(&bytes, slot.number(), self.seed) {
            Parsed::Valid(found) => Ok(found),
            Parsed::Empty => Err(damage("its record is empty")),
            Parsed::Bad => Err(damage("its record is damaged")),
        }
    }

    /// Compares a frame's checksum with the checksum in its record. Reads one buffer at a time, so
    /// that a forged frame size cannot cause a large allocation. Returns the last bytes read: the
    /// end of the frame.
    pub(super) fn check<'b>(
        &self,
        slot: SlotId,
        record: &Record,
        buffer: &'b mut [u8],
    ) -> io::Result<&'b [u8]> {
        let mut checksum = PayloadHasher::default();
        let (mut done, mut piece) = (0, 0);
        while done < self.frame_bytes {
            piece =
                buffer.len().min(usize::try_from(self.frame_bytes - done).unwrap_or(usize::MAX));
            read_exact(
                &*self.frames,
                &mut buffer[..piece],
                self.frame_offset(slot.number()) + done,
            )?;
            checksum.write(&buffer[..piece]);
            done += piece as u64;
        }
        if checksum.finish_128() == record.payload {
            Ok(&buffer[..piece])
        } else {
            Err(damage(DIFFERS))
        }
    }

    pub(super) fn clear_record(&self, slot: SlotId) -> io::Result<()> {
        self.index.write_all_at(&EMPTY, index_offset(slot.number()))
    }

    pub(super) fn frame_offset(&self, slot: u32) -> u64 {
        u64::from(slot) * self.frame_bytes
    }

    /// Returns the number of complete records and the number of complete frames.
    pub(super) fn lens(&self) -> io::Result<(u32, u32)> {
        let whole =
            |len: u64, each: u64| u32::try_from((len / each).min(MAX_FRAMES)).unwrap_or(u32::MAX);
        // Measure the frames file first, because an engine that grows the files extends the index
        // first.
        let frames = whole(self.frames.size()?, self.frame_bytes);
        let records = whole(self.index.size()?, RECORD_BYTES as u64);
        Ok((records, frames))
    }

    /// Reads all records in order, a megabyte at a time. Passes each nonempty record, or a clause
    /// describing its defect, to `show`. Skips holes, so that a forged file length does not
    /// slow down the scan. Returns the same numbers as `lens`.
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
            let is_unreadable = self.read_records(bytes, first)?;
            for (number, chunk) in (first..).zip(bytes.as_chunks::<RECORD_BYTES>().0) {
                let slot = SlotId::new(self.class, number);
                if is_unreadable.get((number - first) as usize / RECORDS_PER_PIECE) == Some(&true) {
                    show(slot, Err("its record is unreadable"));
                    continue;
                }
                match record::parse(chunk, number, self.seed) {
                    Parsed::Empty => {}
                    Parsed::Valid(record) if number < frames => show(slot, Ok(record)),
                    Parsed::Valid(_) => show(slot, Err("the frames file is too short")),
                    Parsed::Bad => show(slot, Err("its record is damaged")),
                }
            }
            first = first.saturating_add(count);
        }
        Ok((records, frames))
    }

    /// Reads records, starting at slot `first`. If this fails, reads them in pieces and returns
    /// which pieces are unreadable, because one bad sector must not make all other chunks unusable.
    fn read_records(&self, bytes: &mut [u8], first: u32) -> io::Result<Vec<bool>> {
        const PIECE: usize = RECORDS_PER_PIECE * RECORD_BYTES;
        let offset = index_offset(first);
        let error = match read_exact(&*self.index, bytes, offset) {
            Ok(()) => return Ok(Vec::new()),
            Err(error) if is_damage(&error) => return Err(error),
            Err(error) => error,
        };
        let pieces = (offset..).step_by(PIECE).zip(bytes.chunks_mut(PIECE));
        let is_unreadable: Vec<_> =
            pieces.map(|(at, piece)| read_exact(&*self.index, piece, at).is_err()).collect();
        let num_bad = is_unreadable.iter().filter(|is_bad| **is_bad).count();
        if num_bad > MAX_BAD_PIECES { Err(error) } else { Ok(is_unreadable) }
    }

    /// Truncates or extends both files to exactly `slots` slots. The index is truncated first, so
    /// that every record has a frame.
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

    /// Extends both files from `from` to `to` slots. Returns true if the new blocks are allocated,
    /// and false if the new slots are holes because the file system cannot preallocate. On error,
    /// both files are truncated back to `from` slots.
    pub(super) fn grow(&self, from: u32, to: u32) -> io::Result<bool> {
        let result = extend(&*self.index, index_offset(from), index_offset(to)).and_then(|index| {
            let frames = extend(&*self.frames, self.frame_offset(from), self.frame_offset(to))?;
            Ok(index && frames)
        });
        if result.is_err() {
            // A failed allocation may have extended a file.
            let _ = self.set_slots(from);
        }
        result
    }

    /// Allocates blocks for punched slots. Returns false if the file system cannot preallocate.
    pub(super) fn refill(&self, slots: &Range<u32>) -> io::Result<bool> {
        extend(&*self.frames, self.frame_offset(slots.start), self.frame_offset(slots.end))
    }

    /// Frees the blocks of the given slots, whose records must be empty (I3).
    pub(super) fn punch(&self, slots: &Range<u32>) -> io::Result<()> {
        self.frames.punch(self.frame_offset(slots.start), self.frame_offset(slots.end))
    }
}

/// Allocates the blocks between `from` and `to` and extends the file if needed. If the file system
/// cannot preallocate, extends the file with a hole and returns false.
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
