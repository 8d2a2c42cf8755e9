//! Fault injection: wraps the operating system's files and injects scripted or seeded random
//! faults.
//!
//! In tests, `FaultFiles` is the file layer of the real disk tier (`DiskTier::open_with_files`), so
//! every layer sees a failing disk as an engine would. `FaultFiles` knows nothing about slots or
//! records.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use kvloft_core::io::direct::{OsFile, RawFile};
use kvloft_core::tier::disk::OpenFiles;

pub use rule::{CHANGES, Call, EIO, ENOSPC, EOPNOTSUPP, EROFS, Fault, Rule};

mod rule;

thread_local! {
    static FAULTS_HERE: Cell<u64> = const { Cell::new(0) };
}

/// Returns the number of calls on this thread that were hit by a fault.
pub fn faults_here() -> u64 {
    FAULTS_HERE.get()
}

#[derive(Debug, Default)]
struct Script {
    rules: Vec<Rule>,
    random: u64,
    crashed: bool,
    hung: u32,
    /// Incremented by each `release`, which ends all calls that are hanging at the time.
    releases: u64,
    calls: BTreeMap<Call, u64>,
    faults: BTreeMap<&'static str, u64>,
    watched: Option<PathBuf>,
}

#[derive(Debug, Default)]
struct Shared {
    script: Mutex<Script>,
    released: Condvar,
    most_bytes: AtomicU64,
    most_blocks: AtomicU64,
}

/// Operating system files with scripted faults. Clones share the same state.
#[derive(Debug, Clone, Default)]
pub struct FaultFiles(Arc<Shared>);

impl FaultFiles {
    /// Creates a file layer with no faults. `seed` is used for rules with a probability.
    pub fn new(seed: u64) -> Self {
        let files = Self::default();
        files.script().random = seed;
        files
    }

    /// Adds a rule. If several rules match a call, the first rule applies.
    pub fn inject(&self, rule: Rule) {
        self.script().rules.push(rule);
    }

    /// Removes all rules and ends all hanging calls.
    pub fn heal(&self) {
        self.script().rules.clear();
        self.release();
    }

    /// Ends all calls that are currently hanging.
    pub fn release(&self) {
        self.script().releases += 1;
        self.0.released.notify_all();
    }

    /// Returns the number of calls that are currently hanging.
    pub fn num_hung(&self) -> u32 {
        self.script().hung
    }

    /// Returns the number of calls of one kind, including failed calls.
    pub fn num_calls(&self, call: Call) -> u64 {
        self.script().calls.get(&call).copied().unwrap_or(0)
    }

    /// Returns the number of calls hit by a fault.
    pub fn num_faults(&self) -> u64 {
        self.script().faults.values().sum()
    }

    /// Returns the number of calls hit by each kind of fault.
    pub fn faults_by_kind(&self) -> BTreeMap<&'static str, u64> {
        self.script().faults.clone()
    }

    /// Returns true after a `Crash` fault.
    pub fn has_crashed(&self) -> bool {
        self.script().crashed
    }

    /// Starts measuring the size of `dir` after each change.
    pub fn watch(&self, dir: &Path) {
        self.script().watched = Some(dir.to_owned());
    }

    /// Returns the largest size measured for the watched directory.
    pub fn most_bytes(&self) -> u64 {
        self.0.most_bytes.load(Ordering::SeqCst)
    }

    /// Like `most_bytes`, but counts allocated blocks, so holes are excluded.
    pub fn most_blocks(&self) -> u64 {
        self.0.most_blocks.load(Ordering::SeqCst)
    }

    fn script(&self) -> MutexGuard<'_, Script> {
        self.0.script.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a call and returns its fault, if any. If the fault is a hang, returns only once the
    /// hang ends.
    fn meet(&self, call: Call, file: &str) -> io::Result<Option<Fault>> {
        self.meet_at(call, (file, 0))
    }

    fn meet_at(&self, call: Call, place: (&str, u64)) -> io::Result<Option<Fault>> {
        let mut guard = self.script();
        let script = &mut *guard;
        if script.crashed {
            return Err(dead());
        }
        *script.calls.entry(call).or_default() += 1;
        // With multiplication alone, a seed of 0 would always yield 0.
        script.random =
            script.random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        let random = script.random >> 40;
        let Some(rule) = script
            .rules
            .iter_mut()
            .find_map(|rule| rule.hits(call, place, random).then_some(*rule))
        else {
            return Ok(None);
        };
        *script.faults.entry(rule.fault.name()).or_default() += 1;
        FAULTS_HERE.set(FAULTS_HERE.get() + 1);
        match rule.fault {
            Fault::Refuse(number) => Err(io::Error::from_raw_os_error(number)),
            Fault::Crash(_) => {
                script.crashed = true;
                Ok(Some(rule.fault))
            }
            Fault::Hang => {
                script.hung += 1;
                let since = script.releases;
                let hung = self.0.released.wait_while(guard, |script| script.releases == since);
                hung.unwrap_or_else(PoisonError::into_inner).hung -= 1;
                Ok(None)
            }
            fault => Ok(Some(fault)),
        }
    }

    /// Applies an atomic change.
    fn change(
        &self,
        call: Call,
        file: &str,
        work: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let result = match self.meet(call, file)? {
            Some(Fault::Lost) => Ok(()),
            // The next process may or may not see the change.
            Some(Fault::Crash(part)) => if part >= 128 { work() } else { Ok(()) }.and(Err(dead())),
            _ => work(),
        };
        self.measure();
        result
    }

    fn measure(&self) {
        let watched = self.script().watched.clone();
        if let Some(dir) = watched {
            self.0.most_bytes.fetch_max(du(&dir), Ordering::SeqCst);
            self.0.most_blocks.fetch_max(blocks(&dir), Ordering::SeqCst);
        }
    }
}

fn dead() -> io::Error {
    io::Error::other("the process crashed")
}

/// Returns a directory's size in bytes. Each file counts as its length or its allocated size,
/// whichever is larger.
pub fn du(dir: &Path) -> u64 {
    measure(dir, &|meta| (meta.blocks() * 512).max(meta.len()))
}

/// Returns the size of a directory's allocated blocks, in bytes.
pub fn blocks(dir: &Path) -> u64 {
    measure(dir, &|meta| meta.blocks() * 512)
}

fn measure(path: &Path, size: &dyn Fn(&Metadata) -> u64) -> u64 {
    let Ok(meta) = std::fs::symlink_metadata(path) else { return 0 };
    let inside = std::fs::read_dir(path).into_iter().flatten().flatten();
    size(&meta) + inside.map(|entry| measure(&entry.path(), size)).sum::<u64>()
}

impl OpenFiles for FaultFiles {
    fn open(&self, path: &Path, direct: bool) -> io::Result<Box<dyn RawFile>> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if let Some(Fault::Crash(_)) = self.meet(Call::Open, &name)? {
            return Err(dead());
        }
        Ok(Box::new(FaultFile { file: OsFile::open(path, direct)?, name, files: self.clone() }))
    }
}

#[derive(Debug)]
struct FaultFile {
    file: OsFile,
    name: String,
    files: FaultFiles,
}

fn flip(bytes: &mut [u8], bit: usize) {
    if !bytes.is_empty() {
        let bit = bit % (bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

impl FaultFile {
    fn write_all(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        self.file.write_all_at(bytes, offset).map(|()| bytes.len())
    }
}

impl FileExt for FaultFile {
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        match self.files.meet_at(Call::Read, (&self.name, offset))? {
            Some(Fault::Short(most)) => {
                let most = most.min(into.len());
                self.file.read_at(&mut into[..most], offset)
            }
            Some(Fault::Flip(bit)) => {
                let done = self.file.read_at(into, offset)?;
                flip(&mut into[..done], bit);
                Ok(done)
            }
            Some(Fault::Crash(_)) => Err(dead()),
            _ => self.file.read_at(into, offset),
        }
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        match self.files.meet_at(Call::Write, (&self.name, offset))? {
            Some(Fault::Short(most)) => self.file.write_at(&bytes[..most.min(bytes.len())], offset),
            Some(Fault::Torn(most, then)) => {
                self.write_all(&bytes[..most.min(bytes.len())], offset)?;
                then.map_or(Ok(bytes.len()), |number| Err(io::Error::from_raw_os_error(number)))
            }
            Some(Fault::Lost) => Ok(bytes.len()),
            Some(Fault::Flip(bit)) => {
                let mut bytes = bytes.to_vec();
                flip(&mut bytes, bit);
                self.write_all(&bytes, offset)
            }
            Some(Fault::Crash(part)) => {
                self.write_all(&bytes[..bytes.len() * usize::from(part) / 255], offset)?;
                Err(dead())
            }
            _ => self.file.write_at(bytes, offset),
        }
    }
}

impl RawFile for FaultFile {
    fn metadata(&self) -> io::Result<Metadata> {
        self.file.metadata()
    }

    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<u64>> {
        self.file.next_data(offset)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        if len <= self.size()? && !self.files.has_crashed() {
            // Space can be freed even on a full disk.
            return self.file.set_len(len);
        }
        self.files.change(Call::SetLen, &self.name, || self.file.set_len(len))
    }

    fn allocate(&self, from: u64, to: u64) -> io::Result<()> {
        let result = self.files.change(Call::Allocate, &self.name, || self.file.allocate(from, to));
        let has_part = !self.files.has_crashed() && !result.as_ref().is_err_and(is_unsupported);
        if result.is_err() && has_part {
            // After a failed call, a real file can keep part of the allocation.
            self.file.allocate(from, from.midpoint(to))?;
        }
        result
    }

    fn punch(&self, from: u64, to: u64) -> io::Result<()> {
        self.files.change(Call::Punch, &self.name, || self.file.punch(from, to))
    }

    fn is_direct(&self) -> bool {
        self.file.is_direct()
    }
}

fn is_unsupported(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Unsupported
}
