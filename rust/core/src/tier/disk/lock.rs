//! `DIR/lock`: one owner per disk directory, over all its namespaces.
//!
//! An exclusive `flock`, which the kernel drops when the owner dies, however it dies; the file's text (the owner's pid) is
//! only for the other's error message. It must not know what the directory holds.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

use super::errors;
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
    file: File,
    /// A forked child has the same open file; its drop must not unlock the parent's directory.
    owner_pid: u32,
}

impl DirLock {
    /// Takes the directory for writing; makes the lock file where missing. `Busy` where another owner lives.
    pub(super) fn acquire(dir: &Path) -> Result<Self> {
        let path = dir.join(FILE_NAME);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
            .open(&path)
            .map_err(|e| errors::at_path("open the lock file of", dir, e))?;
        let lock = Self::lock(file, dir, Asker::Engine)?;
        // The text is a courtesy: a full disk must not keep a good cache from opening.
        let text = format!("{}\n", lock.owner_pid);
        let _ = lock.file.set_len(0);
        let _ = lock.file.write_all_at(text.as_bytes(), 0);
        Ok(lock)
    }

    /// Takes the directory for reading only, without making or changing anything; None where there is no lock file.
    pub(super) fn acquire_existing(dir: &Path) -> Result<Option<Self>> {
        let options = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed()).to_owned();
        match options.open(dir.join(FILE_NAME)) {
            Ok(file) => Self::lock(file, dir, Asker::Reader).map(Some),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(errors::at_path("open the lock file of", dir, e)),
        }
    }

    fn lock(file: File, dir: &Path, asker: Asker) -> Result<Self> {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self { file, owner_pid: std::process::id() }),
            Err(Errno::WOULDBLOCK) => Err(busy(&file, dir, asker)),
            Err(e) => Err(errors::at_path("lock", dir, e.into())),
        }
    }

    /// Gives the directory up now, even if a forked child still has the file open.
    pub(super) fn release(&self) {
        if self.owner_pid == std::process::id() {
            let _ = flock(&self.file, FlockOperation::Unlock);
        }
    }
}

impl Drop for DirLock {
    fn drop(&mut self) {
        self.release();
    }
}

fn busy(file: &File, dir: &Path, asker: Asker) -> Error {
    let mut text = String::new();
    let _ = file.take(32).read_to_string(&mut text);
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
mod tests {
    use super::*;

    /// A forked child has the same open file, as the clone here, and drops what it got of its parent's memory.
    #[test]
    fn a_forked_child_leaves_the_directory_locked() {
        let dir = tempfile::tempdir().unwrap();
        let mut lock = DirLock::acquire(dir.path()).unwrap();
        let parents = lock.file.try_clone().unwrap();
        lock.owner_pid += 1;
        drop(lock);
        assert_eq!(DirLock::acquire(dir.path()).unwrap_err().kind(), ErrorKind::Busy);
        drop(parents);
        assert!(DirLock::acquire(dir.path()).is_ok());
    }
}
