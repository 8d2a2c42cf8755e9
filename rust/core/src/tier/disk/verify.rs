//! Proving every chunk of a disk directory, for `kvloft verify`: all namespaces, a few chunks at a time.
//!
//! It owns the directory meanwhile (an engine's writes would look like damage) and changes nothing. Damaged superblocks,
//! records and frames are findings, never errors.

use std::path::Path;

use super::files::{self, SlotFiles};
use super::inspect::{Unreadable, list, lost_records, open_namespace};
use super::lock::DirLock;
use super::types::SlotId;
use crate::Result;
use crate::io::direct::PageBuffer;
use crate::io::part::{MAGIC, TRAILER_BYTES};

/// Frames are read in pieces of this size.
const PIECE_BYTES: usize = 1024 * 1024;
/// Damaged records of one namespace that are told one by one.
const MAX_BAD_RECORDS: u64 = 1000;

/// One thing that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// The namespace directory's name.
    pub namespace: String,
    /// The slot, where it concerns one.
    pub slot: Option<u32>,
    /// The key in hex, where the record still names one.
    pub key: Option<String>,
    /// What is wrong, in a few words.
    pub problem: String,
    /// True where nothing is known to be damaged: another version made the namespace, so nothing of it was checked.
    pub is_other_format: bool,
}

#[derive(Debug)]
struct Namespace {
    name: String,
    files: SlotFiles,
    todo: Vec<SlotId>,
}

/// A walk over every chunk; see `step`.
#[derive(Debug)]
pub struct Verifier {
    namespaces: Vec<Namespace>,
    buffer: PageBuffer,
    /// Found before the first chunk was read.
    early: Vec<Damage>,
    num_chunks: u64,
    num_checked: u64,
    _lock: DirLock,
}

impl Verifier {
    /// Takes the directory and reads its records. Errors: `Busy` while an engine owns it, `InvalidConfig` where `dir`
    /// is no disk directory, `Io`.
    pub fn open(dir: &Path) -> Result<Self> {
        let found = list(dir)?;
        let mut verifier = Self {
            namespaces: Vec::new(),
            buffer: PageBuffer::new(PIECE_BYTES),
            early: Vec::new(),
            num_chunks: 0,
            num_checked: 0,
            _lock: DirLock::acquire_existing(dir)?,
        };
        for namespace in &found {
            match open_namespace(namespace) {
                Ok((_, Some(files))) => verifier.add(&namespace.name, files),
                Ok((_, None)) => {}
                Err(Unreadable { problem, is_other_format }) => {
                    let name = namespace.name.clone();
                    verifier.early.push(Damage { namespace: name, slot: None, key: None, problem, is_other_format });
                }
            }
        }
        Ok(verifier)
    }

    /// Chunks to check in all.
    pub fn num_chunks(&self) -> u64 {
        self.num_chunks
    }

    /// Chunks checked so far.
    pub fn num_checked(&self) -> u64 {
        self.num_checked
    }

    /// Checks up to `max_chunks` more chunks and returns the damage found. The first call also returns what opening
    /// found (superblocks, records), so call it at least once.
    pub fn step(&mut self, max_chunks: u64) -> Vec<Damage> {
        let mut damage = std::mem::take(&mut self.early);
        let end = self.num_checked.saturating_add(max_chunks);
        while self.num_checked < end {
            let Some(namespace) = self.namespaces.last_mut() else { break };
            let Some(slot) = namespace.todo.pop() else {
                self.namespaces.pop();
                continue;
            };
            self.num_checked += 1;
            damage.extend(namespace.check(slot, &mut self.buffer));
        }
        damage
    }

    fn add(&mut self, name: &str, files: SlotFiles) {
        let mut todo = Vec::new();
        let mut num_bad = 0_u64;
        let walked = files.for_each_record(|slot, found| match found {
            Ok(_) => todo.push(slot),
            Err(problem) => {
                num_bad += 1;
                if num_bad <= MAX_BAD_RECORDS {
                    self.note(name, Some(slot.0), problem.to_owned());
                }
            }
        });
        if num_bad > MAX_BAD_RECORDS {
            self.note(name, None, format!("{} more records damaged or without their frame", num_bad - MAX_BAD_RECORDS));
        }
        let problem = match walked {
            Ok((records, frames)) => lost_records(records, frames),
            Err(e) => Some(format!("index unreadable ({e})")),
        };
        problem.into_iter().for_each(|problem| self.note(name, None, problem));
        self.num_chunks += todo.len() as u64;
        todo.reverse();
        self.namespaces.push(Namespace { name: name.to_owned(), files, todo });
    }

    fn note(&mut self, name: &str, slot: Option<u32>, problem: String) {
        self.early.push(Damage { namespace: name.to_owned(), slot, key: None, problem, is_other_format: false });
    }
}

impl Namespace {
    fn check(&self, slot: SlotId, buffer: &mut [u8]) -> Option<Damage> {
        let record = self.files.read_record(slot);
        let key = record.as_ref().ok().map(|record| record.meta.key.to_string());
        let result = record.and_then(|record| {
            let end = self.files.check(slot, &record, buffer)?;
            Ok(names_another_key(end, &record.meta.key.0))
        });
        let problem = match result {
            Ok(true) => "its trailer names another key".to_owned(),
            Ok(false) => return None,
            Err(e) if files::is_damage(&e) => e.to_string(),
            Err(e) => format!("unreadable ({e})"),
        };
        Some(Damage { namespace: self.name.clone(), slot: Some(slot.0), key, problem, is_other_format: false })
    }
}

/// Whether the frame ends in a trailer of another chunk; a frame without a trailer says nothing.
fn names_another_key(frame: &[u8], key: &[u8; 32]) -> bool {
    let trailer = &frame[frame.len().saturating_sub(TRAILER_BYTES)..];
    trailer.strip_prefix(&MAGIC).is_some_and(|rest| !rest.starts_with(key))
}
