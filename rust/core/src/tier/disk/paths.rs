//! Checks of paths: their owners, and the meaning of errors.

use std::fs::{self, Metadata};
use std::io::{self, ErrorKind as Io};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::{Error, ErrorKind, Result};

/// The action of [`dir_error`] that creates the directory.
pub(super) const MAKE: &str = "make";

/// Checks that only this user and root can write the file of `meta`. A file that another user can
/// change is not trusted: the writer of an index chooses which chunk is served under which key.
/// `Io`, because the operator can fix it while the engine runs.
pub(super) fn check_owner(disk_path: &Path, path: &Path, meta: &Metadata) -> Result<()> {
    let me = rustix::process::geteuid().as_raw();
    let (is_ours, mode) = (meta.uid() == me, meta.mode() & 0o7777);
    let (is_shared, is_public) = (mode & 0o022 != 0, mode & 0o002 != 0);
    let shown = path.display();
    let problem = if path == disk_path && is_shared && (is_ours || is_public) {
        // Another permission of a directory such as /tmp would break other programs.
        format!(
            "{shown} is writable by other users (mode {mode:o}): set disk_path = {}, which kvloft creates for this user only",
            path.join("kvloft").display()
        )
    } else if !is_ours {
        format!(
            "{shown} belongs to user {}, and this process is user {me}: run `chown -R {me} {shown}`, or set disk_path to \
             a directory of this user",
            meta.uid()
        )
    } else if is_shared {
        format!(
            "{shown} is writable by other users (mode {mode:o}): run `chmod go-w {shown}`, or set disk_path to a \
             directory of this user"
        )
    } else {
        return Ok(());
    };
    let message = format!("disk_path {} is not used: {problem}", disk_path.display());
    Err(Error::new(ErrorKind::Io, message))
}

/// Returns the error of creating a directory whose parent is missing: `Io`, because a file system
/// may be mounted later. On the file system below it, the files would fill the wrong disk.
pub(super) fn missing_parent(path: &Path, error: &io::Error) -> Option<Error> {
    let parent = path.parent().filter(|parent| error.kind() == Io::NotFound && !parent.exists())?;
    let parent = parent.display();
    let message = format!(
        "disk_path {} is not used: {parent} does not exist: mount its file system, or run `mkdir -p {parent}`",
        path.display()
    );
    Some(Error::new(ErrorKind::Io, message))
}

/// As `check_owner`, for the file at `path`. A missing file passes, and so does a link, which is
/// never followed.
pub(super) fn check_owner_at(disk_path: &Path, path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_symlink() => Ok(()),
        Ok(meta) => check_owner(disk_path, path, &meta),
        Err(e) if e.kind() == Io::NotFound => Ok(()),
        Err(e) => Err(Error::io(format!("cannot look at {}", path.display()), e)),
    }
}

/// Returns whether nothing is at `path` and its nearest existing ancestor is on the device `dev`.
/// An ancestor on another device means that the file system was unmounted: nothing was removed.
pub(super) fn is_missing(path: &Path, dev: u64) -> bool {
    let is_absent = |error: &io::Error| matches!(error.kind(), Io::NotFound | Io::NotADirectory);
    if !fs::symlink_metadata(path).is_err_and(|error| is_absent(&error)) {
        return false;
    }
    let there = path.ancestors().skip(1).find_map(|above| fs::metadata(above).ok());
    there.is_some_and(|meta| meta.dev() == dev)
}

/// Returns the disk directory if it is missing, else the namespace's directory in it.
pub(super) fn first_missing<'a>(disk_path: &'a Path, namespace: &'a Path) -> &'a Path {
    if disk_path.exists() { namespace } else { disk_path }
}

/// Returns the error of an operation on the directory itself: `InvalidConfig` if this `disk_path`
/// can never work; else `Io`, because permissions, mounts and free space can change while an engine
/// runs.
pub(super) fn dir_error(action: &str, path: &Path, error: io::Error) -> Error {
    let advice = |problem| {
        format!(
            "disk_path {} {problem}: set disk_path to a writable local directory",
            path.display()
        )
    };
    let never = match error.kind() {
        Io::NotADirectory | Io::AlreadyExists => {
            "is, or leads through, something that is not a directory"
        }
        Io::NotFound => "cannot be created there, because its file system accepts no new directory",
        Io::InvalidFilename => "is not a possible file name",
        Io::Unsupported => "is on a file system without flock, which the disk tier needs",
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
    Error::invalid(format!("{} ({error})", advice(never)))
}
