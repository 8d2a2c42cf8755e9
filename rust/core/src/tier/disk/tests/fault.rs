//! Files that fail on purpose, at one chosen system call, and what the tier does then.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::super::files::OpenFiles;
use super::super::{Error, ErrorKind};
use super::*;
use crate::io::direct::{OsFile, RawFile};

pub(super) const ENOSPC: i32 = 28;
pub(super) const EIO: i32 = 5;

/// What happens at the chosen call.
#[derive(Debug, Clone, Copy)]
pub(super) enum Fault {
    /// The process dies: of a write, this part of 256 is done; nothing after it happens.
    Crash(u8),
    /// The operating system refuses, this many calls in a row.
    Refuse(i32, u64),
    /// Writes and reads are short, from then on: at most this many bytes.
    Short(usize),
}

/// Which calls fail. Counts the calls that change a file, and reads where asked.
#[derive(Debug, Default)]
pub(super) struct Script {
    plan: Mutex<Option<(u64, Fault)>>,
    calls: AtomicU64,
    crashed: AtomicBool,
    /// `allocate` is not to be had on this file system.
    pub(super) no_allocate: AtomicBool,
    /// Reads fail too (they count as calls then).
    pub(super) with_reads: AtomicBool,
    /// A directory to measure after every call that changes a file, and the most it ever was.
    pub(super) watched: Mutex<Option<PathBuf>>,
    pub(super) most_bytes: AtomicU64,
}

enum Verdict {
    Proceed,
    Part(usize),
    Fail(io::Error),
    Die(u8),
}

impl Script {
    /// Fails at the `n`th call from now.
    pub(super) fn at(&self, n: u64, fault: Fault) {
        *self.plan.lock().unwrap() = Some((self.calls.load(Ordering::SeqCst) + n, fault));
    }

    pub(super) fn has_crashed(&self) -> bool {
        self.crashed.load(Ordering::SeqCst)
    }

    fn call(&self) -> Verdict {
        if self.has_crashed() {
            return Verdict::Fail(dead());
        }
        let now = self.calls.fetch_add(1, Ordering::SeqCst);
        let Some((at, fault)) = *self.plan.lock().unwrap() else { return Verdict::Proceed };
        match fault {
            Fault::Crash(part) if now == at => {
                self.crashed.store(true, Ordering::SeqCst);
                Verdict::Die(part)
            }
            Fault::Refuse(errno, times) if (at..at + times).contains(&now) => {
                Verdict::Fail(io::Error::from_raw_os_error(errno))
            }
            Fault::Short(most) if now >= at => Verdict::Part(most),
            _ => Verdict::Proceed,
        }
    }

    fn observe(&self) {
        if let Some(dir) = &*self.watched.lock().unwrap() {
            self.most_bytes.fetch_max(du(dir), Ordering::SeqCst);
        }
    }

    fn whole_call(&self, call: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        match self.call() {
            Verdict::Proceed | Verdict::Part(_) => call(),
            Verdict::Fail(e) => Err(e),
            Verdict::Die(part) => {
                // One call cannot be half seen by the next process, but it may or may not have happened.
                if part >= 128 {
                    call()?;
                }
                Err(dead())
            }
        }
    }
}

fn dead() -> io::Error {
    io::Error::other("this process is dead")
}

/// What `du` says of the directory, by length or by blocks, whichever is more.
pub(super) fn du(dir: &Path) -> u64 {
    let Ok(meta) = fs::symlink_metadata(dir) else { return 0 };
    let own = (meta.blocks() * 512).max(meta.len());
    let inside = fs::read_dir(dir).into_iter().flatten().flatten().map(|e| du(&e.path())).sum::<u64>();
    own + inside
}

/// Opens the operating system's files behind a script.
#[derive(Debug, Clone, Default)]
pub(super) struct FaultyFiles(pub(super) Arc<Script>);

impl OpenFiles for FaultyFiles {
    fn open(&self, path: &Path, direct: bool) -> io::Result<Box<dyn RawFile>> {
        Ok(Box::new(FaultyFile { file: OsFile::open(path, direct)?, script: self.0.clone() }))
    }
}

#[derive(Debug)]
struct FaultyFile {
    file: OsFile,
    script: Arc<Script>,
}

impl RawFile for FaultyFile {
    fn pread(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        if !self.script.with_reads.load(Ordering::SeqCst) {
            return self.file.pread(into, offset);
        }
        match self.script.call() {
            Verdict::Proceed => self.file.pread(into, offset),
            Verdict::Part(most) => {
                let most = most.min(into.len());
                self.file.pread(&mut into[..most], offset)
            }
            Verdict::Fail(e) => Err(e),
            Verdict::Die(_) => Err(dead()),
        }
    }

    fn pwrite(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        match self.script.call() {
            Verdict::Proceed => self.file.pwrite(bytes, offset),
            Verdict::Part(most) => self.file.pwrite(&bytes[..most.min(bytes.len())], offset),
            Verdict::Fail(e) => Err(e),
            Verdict::Die(part) => {
                let done = bytes.len() * usize::from(part) / 255;
                self.file.pwrite(&bytes[..done], offset)?;
                Err(dead())
            }
        }
    }

    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        if len <= self.size()? && !self.script.has_crashed() {
            // Giving space back is not what a full disk refuses.
            return self.file.set_len(len);
        }
        let result = self.script.whole_call(|| self.file.set_len(len));
        self.script.observe();
        result
    }

    fn allocate(&self, from: u64, to: u64) -> io::Result<()> {
        if self.script.no_allocate.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let result = self.script.whole_call(|| self.file.allocate(from, to));
        if result.is_err() && !self.script.has_crashed() {
            // A real one may have kept a part of it.
            self.file.allocate(from, from.midpoint(to))?;
        }
        self.script.observe();
        result
    }

    fn modified_s(&self) -> io::Result<u64> {
        self.file.modified_s()
    }

    fn is_direct(&self) -> bool {
        self.file.is_direct()
    }
}

fn faulty(config: &DiskConfig) -> (DiskTier, FaultyFiles) {
    let files = FaultyFiles::default();
    let (tier, _) = DiskTier::open_with_files(config, &files).unwrap();
    (tier, files)
}

fn try_put(tier: &DiskTier, i: u32) -> Result<SlotId, Error> {
    let slot = tier.reserve().expect("a slot");
    tier.write(slot, &meta_of(i), &frame_of(i, 0)).map(|()| slot).inspect_err(|_| tier.free(slot).unwrap())
}

#[test]
fn test_a_write_without_room_is_an_io_error_and_the_slot_is_used_again() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 3);
    let (tier, files) = faulty(&config);
    let kept = put(&tier, 0);
    for call in 0..3 {
        files.0.at(call, Fault::Refuse(ENOSPC, 1));
        let error = try_put(&tier, 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
        assert_eq!(error.io_source().and_then(io::Error::raw_os_error), Some(ENOSPC));
    }
    let stats = tier.stats();
    assert_eq!((stats.slots_used, stats.slots_reserved, stats.write_errors), (1, 0, 3));
    assert_eq!(get(&tier, kept, 0).unwrap(), frame_of(0, 0).to_vec());
    let again = try_put(&tier, 1).unwrap();
    assert_eq!(get(&tier, again, 1).unwrap(), frame_of(1, 0).to_vec());
}

#[test]
fn test_a_slot_that_refused_a_write_is_tried_last() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 3);
    for call in 0..3 {
        let (tier, files) = faulty(&config);
        tier.free(tier.reserve().expect("the files have grown")).unwrap();
        let slot = tier.reserve().unwrap();
        files.0.at(call, Fault::Refuse(EIO, 1));
        assert_eq!(tier.write(slot, &meta_of(1), &frame_of(1, 0)).unwrap_err().kind(), ErrorKind::Io);
        tier.free(slot).unwrap();
        assert_eq!((tier.stats().slots_used, tier.stats().slots_reserved), (0, 0));
        let order: Vec<_> = (0..3).map(|_| tier.reserve().unwrap()).collect();
        assert_eq!(order[2], slot, "what failed is handed out last, but it is handed out");
    }
}

#[test]
fn test_a_write_that_never_reached_its_record_gives_its_slot_back_without_io() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, files) = faulty(&config(dir.path(), 1));
    for call in 0..2 {
        let slot = tier.reserve().expect("the slot came back");
        files.0.at(call, Fault::Refuse(EIO, u64::MAX / 2));
        assert!(tier.write(slot, &meta_of(0), &frame_of(0, 0)).is_err());
        tier.free(slot).expect("its record is empty");
        files.0.at(0, Fault::Short(usize::MAX));
    }
}

#[test]
fn test_a_chunk_that_cannot_be_forgotten_stays_with_its_caller_and_can_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 2);
    let (tier, files) = faulty(&config);
    let slot = put(&tier, 0);
    for clear in [false, true] {
        files.0.at(0, Fault::Refuse(EIO, 1));
        let error = if clear { tier.clear() } else { tier.free(slot) }.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
        assert_eq!(get(&tier, slot, 0).unwrap(), frame_of(0, 0).to_vec());
    }
    assert_eq!((tier.stats().slots_used, tier.stats().write_errors), (1, 2));
    assert_ne!(tier.reserve(), Some(slot));
    assert_eq!(tier.reserve(), None);
    drop(tier);
    let (tier, found) = open(&config);
    assert_eq!(numbers(&found), [0]);
    tier.free(found[0].slot).unwrap();
    drop(tier);
    assert!(open(&config).1.is_empty());
}

#[test]
fn test_short_transfers_are_finished() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 2);
    let (tier, files) = faulty(&config);
    files.0.with_reads.store(true, Ordering::SeqCst);
    for most in [1, 77, 4096, 5000] {
        files.0.at(0, Fault::Short(most));
        let slot = put(&tier, most.try_into().unwrap());
        assert_eq!(get(&tier, slot, most.try_into().unwrap()).unwrap(), frame_of(most.try_into().unwrap(), 0).to_vec());
        tier.free(slot).unwrap();
    }
}

#[test]
fn test_a_failing_read_is_an_io_error_and_harms_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, files) = faulty(&config(dir.path(), 2));
    let slot = put(&tier, 0);
    files.0.with_reads.store(true, Ordering::SeqCst);
    for call in 0..2 {
        files.0.at(call, Fault::Refuse(EIO, 1));
        assert_eq!(get(&tier, slot, 0).unwrap_err().kind(), ErrorKind::Io);
    }
    assert_eq!((tier.stats().read_errors, tier.stats().corrupt_reads), (2, 0));
    assert_eq!(get(&tier, slot, 0).unwrap(), frame_of(0, 0).to_vec());
}

#[test]
fn test_files_that_cannot_grow_stop_growing_and_keep_what_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path(), 64);
    let first = {
        config.cap_bytes = budget::FIXED_BYTES + budget::slots_bytes(2, FRAME);
        let (tier, _) = open(&config);
        [put(&tier, 0), put(&tier, 1)]
    };
    config.cap_bytes = budget::FIXED_BYTES + budget::slots_bytes(64, FRAME);
    let (tier, files) = faulty(&config);
    files.0.at(0, Fault::Refuse(ENOSPC, u64::MAX / 2));
    assert_eq!(tier.reserve(), None);
    assert_eq!(tier.stats().slots, 2);
    let size = |name: &str| {
        let namespace = dir.path().join(super::super::namespaces::dir_name(&NAMESPACE));
        std::fs::metadata(namespace.join(name)).unwrap().len()
    };
    assert_eq!([size("frames.dat"), size("index.dat")], [2 * FRAME, 256], "what a failed growth took is given back");
    assert!(tier.stats().grow_errors >= 6, "it tried smaller steps, down to one slot");
    files.0.at(0, Fault::Short(usize::MAX));
    for (i, slot) in (0..).zip(first) {
        assert_eq!(get(&tier, slot, i).unwrap(), frame_of(i, 0).to_vec());
    }
    // Room may come back: it is tried again after a while, not at every ask.
    let asks = (1..1000).find(|_| tier.reserve().is_some()).expect("it grows again");
    assert!(asks > 100, "{asks}");
}

#[test]
fn test_part_of_an_extension_is_taken_where_all_of_it_does_not_fit() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, files) = faulty(&config(dir.path(), 64));
    files.0.at(1, Fault::Refuse(ENOSPC, 1));
    assert!(tier.reserve().is_some());
    let stats = tier.stats();
    assert_eq!((stats.slots, stats.grow_errors), (32, 1));
}

#[test]
fn test_a_file_system_without_allocation_still_works() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, files) = faulty(&config(dir.path(), 4));
    files.0.no_allocate.store(true, Ordering::SeqCst);
    for i in 0..4 {
        let slot = put(&tier, i);
        assert_eq!(get(&tier, slot, i).unwrap(), frame_of(i, 0).to_vec());
    }
    assert_eq!(tier.reserve(), None);
}
