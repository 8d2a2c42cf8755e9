//! How an error of opening the directory becomes the core's: which of them only another setting can fix.

use std::io::{self, ErrorKind as Io};
use std::path::Path;

use crate::{Error, ErrorKind};

/// An error of an operation on the directory itself: `InvalidConfig` where this `disk_path` can never work; else `Io`, for
/// permissions are given, file systems mounted and disks emptied while an engine runs.
pub(super) fn at_path(action: &str, path: &Path, error: io::Error) -> Error {
    let never = match error.kind() {
        Io::NotADirectory | Io::AlreadyExists => "is, or leads through, something that is not a directory",
        Io::NotFound => "cannot be created there, for its file system takes no new directory",
        Io::InvalidFilename => "is not a possible file name",
        Io::Unsupported => "is on a file system without what a disk tier needs (flock)",
        Io::PermissionDenied => return Error::io(advice(path, "may not be written by this user"), error),
        Io::ReadOnlyFilesystem => return Error::io(advice(path, "is on a read-only file system"), error),
        _ => return Error::io(format!("cannot {action} disk_path {}", path.display()), error),
    };
    Error::new(ErrorKind::InvalidConfig, advice(path, never)).with_context("cause", error)
}

fn advice(path: &Path, problem: &str) -> String {
    format!("disk_path {} {problem}: set disk_path to a writable local directory", path.display())
}
