//! One namespace's two files, as slots: records in `index.dat`, frames in `frames.dat`.
//!
//! The order of a write is here and nowhere else: clear the record, write the frame, write the record. So whenever the
//! process dies, a record that reads valid has its whole frame behind it (I3). It must not know which slot is whose.

use std::io::{self, ErrorKind};
use std::path::Path;

use super::namespaces::{FRAMES_NAME, INDEX_NAME};
use super::record::{self, EMPTY, Parsed, PayloadHasher, RECORD_BYTES, Record, RecordBytes};
use super::types::{DiskMeta, SlotId};
use crate::ChunkKey;
use crate::io::direct::{OsFile, RawFile, read_exact_at, write_all_at};

/// Where the tier's files come from; a test's own may fail on purpose.
pub trait OpenFiles: std::fmt::Debug + Send + Sync {
    /// Opens `path` for reading and writing, made where missing; `direct` asks for `O_DIRECT` where it works.
    fn open(&self, path: &Path, direct: bool) -> io::Result<Box<dyn RawFile>>;
}

/// The operating system's files.
#[derive(Debug, Clone, Copy)]
pub struct OsFiles;

impl OpenFiles for OsFiles {
    fn open(&self, path: &Path, direct: bool) -> io::Result<Box<dyn RawFile>> {
        Ok(Box::new(OsFile::open(path, direct)?))
    }
}

/// Why a frame did not come back.
#[derive(Debug)]
pub(super) enum ReadFailure {
    /// What is there is not that key's bytes; the clause says how it shows.
    Corrupt(&'static str),
    /// The operating system refused.
    Io(io::Error),
}

impl From<io::Error> for ReadFailure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::UnexpectedEof => Self::Corrupt("the file ends before it"),
            _ => Self::Io(error),
        }
    }
}

const DIFFERS: ReadFailure = ReadFailure::Corrupt("its checksum differs");

/// The two open files of a namespace.
#[derive(Debug)]
pub(super) struct SlotFiles {
    frames: Box<dyn RawFile>,
    index: Box<dyn RawFile>,
    frame_bytes: u64,
    seed: u64,
}

impl SlotFiles {
    /// Opens both files in a namespace's directory.
    pub(super) fn open(dir: &Path, frame_bytes: u64, seed: u64, opener: &dyn OpenFiles) -> io::Result<Self> {
        let index = opener.open(&dir.join(INDEX_NAME), false)?;
        let frames = opener.open(&dir.join(FRAMES_NAME), true)?;
        Ok(Self { frames, index, frame_bytes, seed })
    }

    /// Opens both files of an existing namespace for reading only; None where it was made and never held a chunk. The error is
    /// one clause.
    pub(super) fn open_read(dir: &Path, frame_bytes: u64, seed: u64) -> Result<Option<Self>, String> {
        let open = |name: &str, direct| match OsFile::open_read(&dir.join(name), direct) {
            Ok(file) => Ok(Some(Box::new(file))),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) => Err(format!("{name} cannot be opened ({e})")),
        };
        let missing = |name: &str| Err(format!("{name} is missing: the chunks of this namespace are lost"));
        match (open(INDEX_NAME, false)?, open(FRAMES_NAME, true)?) {
            (Some(index), Some(frames)) => Ok(Some(Self { frames, index, frame_bytes, seed })),
            (None, None) => Ok(None),
            // The index is made first; a kill may come before the frames.
            (Some(index), None) if index.size().is_ok_and(|size| size == 0) => Ok(None),
            (Some(_), None) => missing(FRAMES_NAME),
            (None, Some(_)) => missing(INDEX_NAME),
        }
    }

    /// Slots that each file has whole: (records, frames).
    pub(super) fn lens(&self) -> io::Result<(u32, u32)> {
        let whole = |len: u64, each: u64| u32::try_from(len / each).unwrap_or(u32::MAX);
        // Frames first: an engine that grows its files meanwhile extends the index before them.
        let frames = whole(self.frames.size()?, self.frame_bytes);
        let records = whole(self.index.size()?, RECORD_BYTES as u64);
        Ok((records, frames))
    }

    /// Whether frames bypass the page cache.
    pub(super) fn is_direct(&self) -> bool {
        self.frames.is_direct()
    }

    /// Cuts or extends both files to exactly `slots`; records go first, so that none is ever without its frame.
    pub(super) fn set_slots(&self, slots: u32) -> io::Result<()> {
        for (file, len) in [(&self.index, index_offset(slots)), (&self.frames, self.frame_offset(slots))] {
            if file.size()? != len {
                file.set_len(len)?;
            }
        }
        Ok(())
    }

    /// Extends both files from `from` to `to` slots with their blocks allocated; on an error they are `from` long again.
    pub(super) fn grow(&self, from: u32, to: u32) -> io::Result<()> {
        let result = extend(&*self.index, index_offset(from), index_offset(to))
            .and_then(|()| extend(&*self.frames, self.frame_offset(from), self.frame_offset(to)));
        if result.is_err() {
            // A failed allocation may have kept a part.
            let _ = self.set_slots(from);
        }
        result
    }

    /// The first half of writing a chunk: record cleared, then frame. Where it fails, a record that was empty still is.
    pub(super) fn write_frame(&self, slot: SlotId, meta: &DiskMeta, frame: &[u8], sequence: u64) -> io::Result<Record> {
        self.clear_record(slot)?;
        // The clear has just set this time, so it is the file system's "now".
        let written_s = self.index.modified_s()?;
        write_all_at(&*self.frames, frame, self.frame_offset(slot.0))?;
        Ok(Record { meta: *meta, payload: record::payload_checksum(frame), sequence, written_s })
    }

    /// The second half: the record, which makes the chunk visible.
    pub(super) fn write_record(&self, slot: SlotId, record: &Record) -> io::Result<()> {
        write_all_at(&*self.index, &record.encode(slot, self.seed), index_offset(slot.0))
    }

    /// Reads the frame of `key` and proves it, record first.
    pub(super) fn read(&self, slot: SlotId, key: &ChunkKey, into: &mut [u8]) -> Result<(), ReadFailure> {
        let found = self.read_record(slot)?;
        if found.meta.key != *key {
            return Err(ReadFailure::Corrupt("its record names another chunk"));
        }
        read_exact_at(&*self.frames, into, self.frame_offset(slot.0))?;
        if record::payload_checksum(into) == found.payload { Ok(()) } else { Err(DIFFERS) }
    }

    /// Reads the record of a slot that should have one.
    pub(super) fn read_record(&self, slot: SlotId) -> Result<Record, ReadFailure> {
        let mut bytes = EMPTY;
        read_exact_at(&*self.index, &mut bytes, index_offset(slot.0))?;
        match record::parse(&bytes, slot, self.seed) {
            Parsed::Valid(found) => Ok(found),
            Parsed::Empty => Err(ReadFailure::Corrupt("its record is empty")),
            Parsed::Bad => Err(ReadFailure::Corrupt("its record is damaged")),
        }
    }

    /// Compares a frame's checksum with its record's, a buffer at a time: no frame size that a file names makes anyone
    /// allocate it. Returns the last piece.
    pub(super) fn check<'b>(
        &self,
        slot: SlotId,
        record: &Record,
        buffer: &'b mut [u8],
    ) -> Result<&'b [u8], ReadFailure> {
        let mut checksum = PayloadHasher::default();
        let (mut done, mut piece) = (0, 0);
        while done < self.frame_bytes {
            piece = buffer.len().min(usize::try_from(self.frame_bytes - done).unwrap_or(usize::MAX));
            read_exact_at(&*self.frames, &mut buffer[..piece], self.frame_offset(slot.0) + done)?;
            checksum.write(&buffer[..piece]);
            done += piece as u64;
        }
        if checksum.finish_128() == record.payload { Ok(&buffer[..piece]) } else { Err(DIFFERS) }
    }

    /// Makes the slot empty.
    pub(super) fn clear_record(&self, slot: SlotId) -> io::Result<()> {
        write_all_at(&*self.index, &EMPTY, index_offset(slot.0))
    }

    /// Reads the first `slots` records in order, a megabyte at a time, and shows each that is not empty. Holes are not read: a
    /// forged length costs nothing.
    pub(super) fn for_each_record(&self, slots: u32, mut show: impl FnMut(SlotId, Parsed)) -> io::Result<()> {
        const BATCH: u32 = 8192;
        let mut buffer = vec![0; RECORD_BYTES * usize::try_from(BATCH.min(slots)).unwrap_or(0)];
        let mut first = 0;
        while first < slots {
            let Some(at) = self.index.next_data(index_offset(first))? else { return Ok(()) };
            first = first.max(u32::try_from(at / RECORD_BYTES as u64).unwrap_or(u32::MAX));
            let count = BATCH.min(slots.saturating_sub(first));
            let bytes = &mut buffer[..RECORD_BYTES * usize::try_from(count).unwrap_or(0)];
            read_exact_at(&*self.index, bytes, index_offset(first))?;
            for (slot, chunk) in (first..).zip(bytes.as_chunks::<RECORD_BYTES>().0) {
                self.show_record(SlotId(slot), chunk, &mut show);
            }
            first = first.saturating_add(count);
        }
        Ok(())
    }

    fn show_record(&self, slot: SlotId, bytes: &RecordBytes, show: &mut impl FnMut(SlotId, Parsed)) {
        match record::parse(bytes, slot, self.seed) {
            Parsed::Empty => {}
            parsed => show(slot, parsed),
        }
    }

    fn frame_offset(&self, slot: u32) -> u64 {
        u64::from(slot) * self.frame_bytes
    }
}

fn index_offset(slot: u32) -> u64 {
    u64::from(slot) * RECORD_BYTES as u64
}

/// Extends a file with allocated blocks, or with a hole where the file system cannot allocate ahead.
fn extend(file: &dyn RawFile, from: u64, to: u64) -> io::Result<()> {
    match file.allocate(from, to) {
        Err(e) if e.kind() == ErrorKind::Unsupported => file.set_len(to),
        other => other,
    }
}
