//! Ensures that a disk directory and all its namespaces are owned by a single process, checks that
//! other users cannot write to them, and builds the errors for unusable directories.
//!
//! The owner holds an exclusive `flock`, which the kernel releases when the owner dies. Both the
//! directory and `DIR/lock` are locked, because `DIR/lock` could be deleted and because some file
//! systems cannot lock directories. `DIR/lock` also holds the owner's pid for error messages in
//! other processes.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind as Io, Read};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

use crate::{Error, ErrorKind, Result};

/// Name of the lock file in the directory.
pub(super) const FILE_NAME: &str = "lock";

/// The action to pass to [`dir_error`] when creating the directory.
pub(super) const MAKE: &str = "create";

/// The kind of caller: the setting to name in errors, and the advice to give if another process is
/// using the directory.
type Asker = [&'static str; 2];
const OWNER: Asker = ["disk_path ", "stop it or set a different disk_path"];
const READER: Asker =
    ["", "stop it and verify again, or use `kvloft inspect`, which works while it runs"];

/// A lock on a disk directory. Dropping it unlocks the directory.
#[derive(Debug)]
pub(super) struct DirLock {
    files: Vec<File>,
    /// Pid of the process that took the lock. A forked child shares the open files, and dropping
    /// the child's copy must not unlock the directory for the parent.
    owner_pid: u32,
}

impl DirLock {
    /// Locks the directory for writing and creates the lock file if needed. Returns `Busy` if
    /// another owner is alive, and `Io` if another user can write to the directory.
    pub(super) fn acquire(dir: &Path) -> Result<Self> {
        let failed = |e| failed("open the lock file in", dir, OWNER, e);
        let mut lock = Self::lock_dir(dir, OWNER)?;
        check_owner(dir, dir, &lock.files[0].metadata().map_err(failed)?)?;
        let path = dir.join(FILE_NAME);
        check_owner_at(dir, &path)?;
        let mut options = open_options(OFlags::NOFOLLOW);
        let file = options
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(failed)?;
        lock.add(file, dir, OWNER)?;
        // Writing the pid is best-effort: a full disk must not prevent an intact cache from
        // opening.
        let text = format!("{}\n", lock.owner_pid);
        let _ = lock.files[1].set_len(0);
        let _ = lock.files[1].write_all_at(text.as_bytes(), 0);
        Ok(lock)
    }

    /// Locks the directory for a reader. Does not create or change any file.
    pub(super) fn acquire_existing(dir: &Path) -> Result<Self> {
        let mut lock = Self::lock_dir(dir, READER)?;
        match open_options(OFlags::NOFOLLOW).open(dir.join(FILE_NAME)) {
            Ok(file) => lock.add(file, dir, READER)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(failed("open the lock file in", dir, READER, e)),
        }
        Ok(lock)
    }

    /// Returns true if `dir` is still the locked directory, not a new directory at the same path.
    pub(super) fn is_of(&self, dir: &Path) -> bool {
        let (own, there) = (self.files[0].metadata(), dir.metadata());
        own.is_ok_and(|own| {
            there.is_ok_and(|there| (own.dev(), own.ino()) == (there.dev(), there.ino()))
        })
    }

    fn lock_dir(dir: &Path, asker: Asker) -> Result<Self> {
        let file =
            open_options(OFlags::DIRECTORY).open(dir).map_err(|e| failed("open", dir, asker, e))?;
        let result = flock(&file, FlockOperation::NonBlockingLockExclusive);
        // Some network file systems can lock only files that are open for writing. On these file
        // systems, the lock file protects the directory.
        if result == Err(Errno::WOULDBLOCK) {
            return Err(busy(dir, asker));
        }
        Ok(Self { files: vec![file], owner_pid: std::process::id() })
    }

    fn add(&mut self, file: File, dir: &Path, asker: Asker) -> Result<()> {
        flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|e| match e {
            Errno::WOULDBLOCK => busy(dir, asker),
            e => failed("lock", dir, asker, e.into()),
        })?;
        self.files.push(file);
        Ok(())
    }
}

impl Drop for DirLock {
    /// Unlocks the directory immediately, even if a forked child still has the files open.
    fn drop(&mut self) {
        if self.owner_pid == std::process::id() {
            for file in &self.files {
                let _ = flock(file, FlockOperation::Unlock);
            }
        }
    }
}

/// Returns options for reading. Without `O_NONBLOCK`, opening a FIFO would block until a process
/// opens the other end.
fn open_options(flags: OFlags) -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags((OFlags::NONBLOCK | flags).bits().cast_signed());
    options
}

/// Errors for readers do not mention `disk_path`, because the directory was passed as an argument.
fn failed(action: &str, dir: &Path, asker: Asker, error: io::Error) -> Error {
    if asker == READER {
        return Error::io(format!("cannot {action} {}", dir.display()), error);
    }
    dir_error(action, dir, error)
}

fn busy(dir: &Path, [name, advice]: Asker) -> Error {
    let mut text = String::new();
    if let Ok(file) = open_options(OFlags::NOFOLLOW).open(dir.join(FILE_NAME)) {
        let _ = file.take(32).read_to_string(&mut text);
    }
    let owner = match text.trim().parse::<u32>() {
        Ok(pid) if Path::new("/proc").join(pid.to_string()).exists() => format!("process {pid}"),
        Ok(pid) => format!("a child of the exited process {pid}"),
        Err(_) => "another process".to_owned(),
    };
    Error::new(ErrorKind::Busy, format!("{name}{} is in use by {owner}: {advice}", dir.display()))
}

/// Checks that only this user and root can write to the file with metadata `meta`. Files that
/// another user can change are not trusted, because a forged index could map a key to the wrong
/// chunk. The error is `Io`, because the operator can fix the problem while the engine is running.
pub(super) fn check_owner(disk_path: &Path, path: &Path, meta: &Metadata) -> Result<()> {
    let me = rustix::process::geteuid().as_raw();
    let (is_ours, mode) = (meta.uid() == me, meta.mode() & 0o7777);
    let (is_shared, is_public) = (mode & 0o022 != 0, mode & 0o002 != 0);
    let shown = path.display();
    let problem = if path == disk_path && is_shared && (is_ours || is_public) {
        // The message does not suggest chmod, because that would break other programs in a shared
        // directory such as /tmp.
        format!(
            "{shown} is writable by other users (mode {mode:o}); set disk_path = {}, which kvloft creates for this user only",
            path.join("kvloft").display()
        )
    } else if !is_ours {
        format!(
            "{shown} belongs to user {}, but this process runs as user {me}; run `chown -R {me} \
             {shown}`, or set disk_path to a directory owned by this user",
            meta.uid()
        )
    } else if is_shared {
        format!(
            "{shown} is writable by other users (mode {mode:o}); run `chmod go-w {shown}`, or set disk_path to a \
             directory owned by this user"
        )
    } else {
        return Ok(());
    };
    let message = format!("disk_path {} is not used: {problem}", disk_path.display());
    Err(Error::new(ErrorKind::Io, message))
}

/// Returns the error for a directory whose parent or link target is missing. The error is `Io`,
/// because a file system may be mounted there later. The parent is not created, because the chunks
/// could then fill the wrong file system.
pub(super) fn missing_place(path: &Path, error: &io::Error) -> Option<Error> {
    let parent = path.parent()?;
    let place = match error.kind() {
        Io::NotFound => parent.to_owned(),
        Io::AlreadyExists => parent.join(fs::read_link(path).ok()?),
        _ => return None,
    };
    if place.exists() {
        return None;
    }
    let message = format!(
        "disk_path {} is not used: {} does not exist; mount its file system, or run `mkdir -p {}`",
        path.display(),
        place.display(),
        place.display()
    );
    Some(Error::new(ErrorKind::Io, message))
}

/// Like `check_owner`, but for the file at `path`. Accepts a missing file. Also accepts a symbolic
/// link, because links are never followed.
pub(super) fn check_owner_at(disk_path: &Path, path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_symlink() => Ok(()),
        Ok(meta) => check_owner(disk_path, path, &meta),
        Err(e) if e.kind() == Io::NotFound => Ok(()),
        Err(e) => Err(Error::io(format!("cannot inspect {}", path.display()), e)),
    }
}

/// Returns true if `path` does not exist and its nearest existing ancestor is on the device `dev`.
/// If the ancestor is on a different device, the file system was unmounted and nothing was removed.
pub(super) fn is_missing(path: &Path, dev: u64) -> bool {
    let is_absent = |error: &io::Error| matches!(error.kind(), Io::NotFound | Io::NotADirectory);
    if !fs::symlink_metadata(path).is_err_and(|error| is_absent(&error)) {
        return false;
    }
    let there = path.ancestors().skip(1).find_map(|above| fs::metadata(above).ok());
    there.is_some_and(|meta| meta.dev() == dev)
}

/// Returns the disk directory if it is missing, or else the namespace's directory.
pub(super) fn first_missing<'a>(disk_path: &'a Path, namespace: &'a Path) -> &'a Path {
    if disk_path.exists() { namespace } else { disk_path }
}

/// Converts an I/O error from an operation on the directory itself. The result is `InvalidConfig`
/// if this `disk_path` can never work. Otherwise, the result is `Io`, because permissions, mounts
/// and free space can change while an engine is running.
pub(super) fn dir_error(action: &str, path: &Path, error: io::Error) -> Error {
    let advice = |problem: &str| {
        format!(
            "disk_path {} {problem}: set disk_path to a writable local directory",
            path.display()
        )
    };
    let never = match error.kind() {
        Io::NotADirectory | Io::AlreadyExists => "(or one of its parents) is not a directory",
        Io::NotFound => "cannot be created, because its file system does not allow new directories",
        Io::InvalidFilename => "is not a valid path",
        Io::Unsupported => "is on a file system without flock support",
        Io::PermissionDenied if action == MAKE => {
            let parent = path.parent().unwrap_or(path).display();
            let (shown, me) = (path.display(), rustix::process::geteuid().as_raw());
            let message = format!(
                "disk_path {shown} cannot be created, because {parent} is not writable by this user: run \
                 `mkdir {shown} && chown {me} {shown}` as root, or set disk_path to a writable local directory"
            );
            return Error::new(ErrorKind::Io, message);
        }
        Io::PermissionDenied => {
            return Error::new(ErrorKind::Io, advice("is not writable by this user"));
        }
        Io::ReadOnlyFilesystem => {
            return Error::new(ErrorKind::Io, advice("is on a read-only file system"));
        }
        _ => return Error::io(format!("cannot {action} disk_path {}", path.display()), error),
    };
    Error::invalid(advice(&format!("{never} ({error})")))
}

#[cfg(test)]
mod tests;
