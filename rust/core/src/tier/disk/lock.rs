//! One owner per disk directory, over all its namespaces.
//!
//! An exclusive `flock`, which the kernel drops when the owner dies, however it dies: on the directory itself, for a file in
//! it may be deleted under its owner, and on `DIR/lock`, for file systems that cannot lock directories. The file's text (the
//! owner's pid) is only for the other's error message. It must not know what the directory holds.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

use super::{errors, owner};
use crate::{Error, ErrorKind, Result};

/// The file's name in the directory.
pub(super) const FILE_NAME: &str = "lock";

/// Who wants the directory, for the advice in the error.
#[derive(Debug, Clone, Copy)]
enum Asker {
    Engine,
    Reader,
}

/// The directory is ours until this is released or dropped.
#[derive(Debug)]
pub(super) struct DirLock {
    files: Vec<File>,
    /// A forked child has the same open files; its drop must not unlock the parent's directory.
    owner_pid: u32,
}

impl DirLock {
    /// Takes the directory for writing; makes the lock file where missing. `Busy` where another owner lives, `Io` where
    /// another user may write.
    pub(super) fn acquire(dir: &Path) -> Result<Self> {
        let failed = |e| errors::at_path("open the lock file of", dir, e);
        let mut lock = Self::lock_dir(dir, Asker::Engine)?;
        owner::check(dir, dir, &lock.files[0].metadata().map_err(failed)?)?;
        let path = dir.join(FILE_NAME);
        owner::check_at(dir, &path)?;
        let mut options = open_options(OFlags::NOFOLLOW);
        let file = options.write(true).create(true).truncate(false).mode(0o600).open(&path).map_err(failed)?;
        lock.add(file, dir, Asker::Engine)?;
        // The text is a courtesy: a full disk must not keep a good cache from opening.
        let text = format!("{}\n", lock.owner_pid);
        let _ = lock.files[1].set_len(0);
        let _ = lock.files[1].write_all_at(text.as_bytes(), 0);
        Ok(lock)
    }

    /// Takes the directory for reading only, without making or changing anything.
    pub(super) fn acquire_existing(dir: &Path) -> Result<Self> {
        let mut lock = Self::lock_dir(dir, Asker::Reader)?;
        match open_options(OFlags::NOFOLLOW).open(dir.join(FILE_NAME)) {
            Ok(file) => lock.add(file, dir, Asker::Reader)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(errors::at_path("open the lock file of", dir, e)),
        }
        Ok(lock)
    }

    fn lock_dir(dir: &Path, asker: Asker) -> Result<Self> {
        let file = open_options(OFlags::DIRECTORY).open(dir).map_err(|e| errors::at_path("open", dir, e))?;
        let result = flock(&file, FlockOperation::NonBlockingLockExclusive);
        // Some network file systems lock only what is open for writing; there the lock file has to do.
        if result == Err(Errno::WOULDBLOCK) { Err(busy(dir, asker)) } else { Ok(Self::of(file)) }
    }

    fn of(file: File) -> Self {
        Self { files: vec![file], owner_pid: std::process::id() }
    }

    fn add(&mut self, file: File, dir: &Path, asker: Asker) -> Result<()> {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                self.files.push(file);
                Ok(())
            }
            Err(Errno::WOULDBLOCK) => Err(busy(dir, asker)),
            Err(e) => Err(errors::at_path("lock", dir, e.into())),
        }
    }

    /// Gives the directory up now, even if a forked child still has the files open.
    pub(super) fn release(&self) {
        if self.owner_pid == std::process::id() {
            for file in &self.files {
                let _ = flock(file, FlockOperation::Unlock);
            }
        }
    }
}

impl Drop for DirLock {
    fn drop(&mut self) {
        self.release();
    }
}

/// For reading; without `O_NONBLOCK`, opening a FIFO waits for its other end.
fn open_options(flags: OFlags) -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags((OFlags::NONBLOCK | flags).bits().cast_signed());
    options
}

fn busy(dir: &Path, asker: Asker) -> Error {
    let mut text = String::new();
    if let Ok(file) = open_options(OFlags::NOFOLLOW).open(dir.join(FILE_NAME)) {
        let _ = file.take(32).read_to_string(&mut text);
    }
    let owner = match text.trim().parse::<u32>() {
        Ok(pid) if Path::new("/proc").join(pid.to_string()).exists() => format!("process {pid}"),
        Ok(pid) => format!("a process that was started by process {pid}, which is gone"),
        Err(_) => "another process".to_owned(),
    };
    let dir = dir.display();
    let message = match asker {
        Asker::Engine => {
            format!("disk_path {dir} is in use by {owner}: stop it, or give this engine another disk_path")
        }
        Asker::Reader => format!(
            "{dir} is in use by {owner}: stop that process and verify again, or use `kvloft inspect`, which needs no stop"
        ),
    };
    Error::new(ErrorKind::Busy, message)
}

#[cfg(test)]
mod tests;
