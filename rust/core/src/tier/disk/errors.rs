//! How this tier's I/O errors become the core's: which of them a setting can fix.

use std::io::{self, ErrorKind as Io};
use std::path::Path;

use crate::{Error, ErrorKind};

/// An error of an operation on the directory itself: `InvalidConfig` where another `disk_path` is the fix, else `Io`.
pub(super) fn at_path(action: &str, path: &Path, error: io::Error) -> Error {
    let problem = match error.kind() {
        Io::NotADirectory | Io::AlreadyExists => "is, or leads through, something that is not a directory",
        Io::NotFound => "cannot be created there, for its file system takes no new directory",
        Io::PermissionDenied => "may not be written by this user",
        Io::ReadOnlyFilesystem => "is on a read-only file system",
        Io::InvalidFilename => "is not a possible file name",
        Io::Unsupported => "is on a file system without what a disk tier needs (flock)",
        _ => return Error::io(format!("cannot {action} disk_path {}", path.display()), error),
    };
    let message = format!("disk_path {} {problem}: set disk_path to a writable local directory", path.display());
    Error::new(ErrorKind::InvalidConfig, message).with_context("cause", error)
}
