//! Verifies every chunk in every namespace of a disk directory for `kvloft verify`, a few chunks at
//! a time.
//!
//! The verifier changes nothing, but locks the directory, because concurrent writes by an engine
//! would look like damage. Damaged superblocks, records and frames are reported as [`Damage`], not
//! as errors.

use std::path::Path;

use super::files::{self, SlotFiles};
use super::inspect::{list, lost_records, open_namespace};
use super::owner::DirLock;
use super::types::{Damage, SlotId};
use crate::io::part::{MAGIC, TRAILER_BYTES};
use crate::io::{Frame, FrameId, HostArena};
use crate::{Error, ErrorKind, Result};

/// Size of the pieces in which frames are read.
const PIECE_BYTES: u64 = 1024 * 1024;
/// Maximum number of damaged records listed individually for each size class of a namespace.
const MAX_BAD_RECORDS: u64 = 1000;

/// A verification in progress; see [`Verifier::step`].
#[derive(Debug)]
pub struct Verifier {
    /// The files of every size class in every namespace, each with its namespace's name.
    files: Vec<(String, SlotFiles)>,
    /// All chunks, each with an index into `files`.
    chunks: Vec<(usize, SlotId)>,
    num_checked: usize,
    /// Damage found when the directory was opened.
    early: Vec<Damage>,
    /// Read buffer, aligned for direct I/O.
    buffer: Frame,
    _lock: DirLock,
}

impl Verifier {
    /// Locks the directory and reads all records. Returns `Busy` if an engine is using `dir`,
    /// `InvalidConfig` if `dir` is not a disk directory, and `Io` if `dir` cannot be read.
    pub fn open(dir: &Path) -> Result<Self> {
        let found = list(dir)?;
        let lock = DirLock::acquire_existing(dir)?;
        let memory = HostArena::of_bytes(PIECE_BYTES)?;
        let mut frames = memory.frames(PIECE_BYTES, &PIECE_BYTES.into())?;
        let buffer = frames
            .lend(FrameId(0))
            .ok_or_else(|| Error::new(ErrorKind::Io, "cannot allocate a read buffer"))?;
        let (files, chunks, early) = (Vec::new(), Vec::new(), Vec::new());
        let mut verifier = Self { files, chunks, num_checked: 0, early, buffer, _lock: lock };
        for namespace in found {
            let opened = open_namespace(&namespace).map_or_else(|e| vec![Err(e)], |(_, all)| all);
            for files in opened {
                match files {
                    Ok(files) => verifier.add(namespace.name.clone(), files),
                    Err(damage) => verifier.early.push(damage),
                }
            }
        }
        Ok(verifier)
    }

    /// Returns the total number of chunks to check.
    pub fn num_chunks(&self) -> u64 {
        self.chunks.len() as u64
    }

    /// Returns the number of chunks checked so far.
    pub fn num_checked(&self) -> u64 {
        self.num_checked as u64
    }

    /// Checks up to `max_chunks` more chunks and returns the damage found. The first call also
    /// returns the damage that `open` found in superblocks and records.
    /// Call this method at least once, even if there are no chunks.
    pub fn step(&mut self, max_chunks: u64) -> Vec<Damage> {
        let mut damage = std::mem::take(&mut self.early);
        let max_chunks = usize::try_from(max_chunks).unwrap_or(usize::MAX);
        let buffer = self.buffer.bytes_mut();
        for &(at, slot) in self.chunks.iter().skip(self.num_checked).take(max_chunks) {
            let (name, files) = &self.files[at];
            damage.extend(check(name, files, slot, buffer));
            self.num_checked += 1;
        }
        damage
    }

    fn add(&mut self, name: String, files: SlotFiles) {
        let at = self.files.len();
        let mut num_bad = 0_u64;
        let walked = files.for_each_record(|slot, found| match found {
            Ok(_) => self.chunks.push((at, slot)),
            Err(problem) => {
                num_bad += 1;
                if num_bad <= MAX_BAD_RECORDS {
                    self.early.push(files.damage(&name, slot, problem));
                }
            }
        });
        let more = match num_bad.saturating_sub(MAX_BAD_RECORDS) {
            0 => None,
            1 => Some("1 more record is damaged or has no frame".to_owned()),
            rest => Some(format!("{rest} more records are damaged or have no frame")),
        };
        let problem = match walked {
            Ok((records, frames)) => lost_records(files.frame_bytes, records, frames),
            Err(e) => Some(format!("cannot read the index ({e})")),
        };
        self.early.extend(
            [more, problem].into_iter().flatten().map(|problem| Damage::new(&name, problem)),
        );
        self.files.push((name, files));
    }
}

fn check(name: &str, files: &SlotFiles, slot: SlotId, buffer: &mut [u8]) -> Option<Damage> {
    let record = files.read_record(slot);
    let key = record.as_ref().ok().map(|record| record.meta.key.to_string());
    let result = record.and_then(|record| {
        let end = files.check(slot, &record, buffer)?;
        Ok(names_another_key(end, &record.meta.key.0))
    });
    let problem = match result {
        Ok(true) => "its trailer and record have different keys".to_owned(),
        Ok(false) => return None,
        Err(e) if files::is_damage(&e) => e.to_string(),
        Err(e) => format!("unreadable ({e})"),
    };
    Some(Damage { key, ..files.damage(name, slot, problem) })
}

/// Returns true if the frame ends with the trailer of a different chunk. Returns false if the frame
/// has no trailer.
fn names_another_key(frame: &[u8], key: &[u8; 32]) -> bool {
    let trailer = &frame[frame.len().saturating_sub(TRAILER_BYTES)..];
    trailer.strip_prefix(&MAGIC).is_some_and(|rest| !rest.starts_with(key))
}
