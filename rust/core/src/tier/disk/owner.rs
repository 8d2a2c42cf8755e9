//! Whose a directory or file is. What another user may change is not believed: whoever writes an index chooses which chunk
//! is served under which key.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::{Error, ErrorKind, Result};

/// Whether only this user (and root) may write what `meta` is of. `Io`, for a person can mend it while the engine runs.
pub(super) fn check(disk_path: &Path, path: &Path, meta: &Metadata) -> Result<()> {
    let (dir, path, me) = (disk_path.display(), path.display(), rustix::process::geteuid().as_raw());
    let problem = if meta.uid() != me {
        format!("{path} belongs to user {}, and this process is user {me}: run `chown -R {me} {path}`", meta.uid())
    } else if meta.mode() & 0o022 != 0 {
        format!("{path} may be written by other users (mode {:o}): run `chmod go-w {path}`", meta.mode() & 0o7777)
    } else {
        return Ok(());
    };
    let message = format!("disk_path {dir} is not used: {problem}, or set disk_path to a directory of this user's own");
    Err(Error::new(ErrorKind::Io, message))
}

/// As `check`, for what is at `path` itself; what is missing, or a link (which is never followed), passes.
pub(super) fn check_at(disk_path: &Path, path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_symlink() => Ok(()),
        Ok(meta) => check(disk_path, path, &meta),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(Error::io(format!("cannot look at {}", path.display()), e)),
    }
}
