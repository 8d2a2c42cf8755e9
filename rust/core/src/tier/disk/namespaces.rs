//! Finds, measures and deletes namespace directories in a disk directory.
//!
//! Deletes only files that this tier creates, and only in directories with namespace names. Never
//! reads file contents.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::budget::PAGE_BYTES;
use super::superblock;
use super::types::DiskConfig;
use crate::key::namespace_id;

/// Name prefixes of the slot files, in deletion order. An interrupted deletion never leaves a
/// record without its frame.
const SLOT_FILES: [&str; 2] = ["index", "frames"];

pub(crate) fn index_name(frame_bytes: u64) -> String {
    format!("{}-{frame_bytes}.dat", SLOT_FILES[0])
}

pub(crate) fn frames_name(frame_bytes: u64) -> String {
    format!("{}-{frame_bytes}.dat", SLOT_FILES[1])
}

/// Returns true if `name` is the name of an index or frames file. In earlier versions, file names
/// did not include the frame size.
fn is_slot_file(name: &str) -> bool {
    SLOT_FILES.iter().any(|kind| {
        let rest = name.strip_prefix(kind).and_then(|rest| rest.strip_suffix(".dat"));
        let size = rest.map(|rest| rest.strip_prefix('-').unwrap_or(rest));
        size.is_some_and(|size| size.bytes().all(|digit| digit.is_ascii_digit()))
    })
}

/// Returns the names of kvloft's files in a namespace directory, in deletion order.
pub(crate) fn file_names(path: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(path)? {
        let Ok(name) = entry?.file_name().into_string() else { continue };
        if is_slot_file(&name) || [superblock::FILE_NAME, superblock::TEMP_NAME].contains(&&*name) {
            names.push(name);
        }
    }
    let place = |name: &str| SLOT_FILES.iter().position(|kind| name.starts_with(kind));
    names.sort_by_key(|name| place(name).unwrap_or(SLOT_FILES.len()));
    Ok(names)
}

/// A namespace directory.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    /// Name of the directory: 16 hex digits.
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    /// Size on disk, in bytes.
    pub(crate) bytes: u64,
    /// Unix time at which the namespace was last opened or written to, as (seconds, nanoseconds).
    pub(crate) last_used: (i64, i64),
}

/// Returns the configured namespace's directory.
pub(crate) fn dir_of(config: &DiskConfig) -> PathBuf {
    config.dir.join(namespace_id(&config.namespace))
}

/// Creates a directory that only this user can access. First checks whether the directory exists,
/// because `mkdir` hangs on a frozen file system. Creates a missing parent only for a
/// data-parallel engine's directory.
pub(crate) fn make_dir(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let create = |path: &Path| match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        done => done,
    };
    match (create(path), path.parent()) {
        (Err(error), Some(disk_path))
            if error.kind() == ErrorKind::NotFound && is_of_data_parallel_engine(path) =>
        {
            create(disk_path)?;
            create(path)
        }
        (done, _) => done,
    }
}

/// Returns true if the directory is named `dpN`.
fn is_of_data_parallel_engine(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    let number = name.and_then(|name| name.strip_prefix("dp"));
    number.is_some_and(|number| {
        !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit())
    })
}

/// Returns the namespace directories in `dir` that are not in `open`, least recently used first.
pub(crate) fn scan(dir: &Path, open: &BTreeSet<String>) -> io::Result<Vec<Found>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        if is_namespace_name(&name) && !open.contains(&name) && entry.file_type()?.is_dir() {
            found.push(measure(name, entry.path()));
        }
    }
    found.sort_by(|a, b| (a.last_used, &a.name).cmp(&(b.last_used, &b.name)));
    Ok(found)
}

/// Deletes closed namespaces, least recently used first, until `is_enough` returns true for the
/// size of the remaining closed namespaces. Returns that size. Calls `note` with a log line for
/// each deletion or failure.
pub(crate) fn make_room(
    config: &DiskConfig,
    open: &BTreeSet<String>,
    is_enough: impl Fn(u64) -> bool,
    remove: impl Fn(&Found) -> io::Result<()>,
    mut note: impl FnMut(String),
) -> io::Result<u64> {
    let closed = scan(&config.dir, open)?;
    let mut bytes = closed.iter().map(|f| f.bytes).fold(0, u64::saturating_add);
    for found in &closed {
        if is_enough(bytes) {
            break;
        }
        match remove(found) {
            Ok(()) => {
                bytes = bytes.saturating_sub(found.bytes);
                note(format!("disk tier: deleted {} to make room", found.path.display()));
            }
            Err(error) => {
                note(format!("disk tier: cannot delete {}: {error}", found.path.display()));
            }
        }
    }
    Ok(bytes)
}

/// Deletes kvloft's files in a namespace directory, and the directory itself if it is then empty.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    remove_files(path, |_| true)?;
    match fs::remove_dir(path) {
        Err(e) if !matches!(e.kind(), ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty) => Err(e),
        _ => Ok(()),
    }
}

/// Returns true if any directory entry has a slot file's name but is not a regular file.
pub(crate) fn has_strange_files(path: &Path) -> bool {
    file_names(path).unwrap_or_default().iter().any(|name| {
        let meta = fs::symlink_metadata(path.join(name));
        is_slot_file(name) && meta.is_ok_and(|meta| !meta.is_file())
    })
}

/// Deletes slot files whose frame size is not in `sizes`.
pub(crate) fn remove_other_sizes(path: &Path, sizes: &[u64]) -> io::Result<()> {
    let kept: Vec<_> =
        sizes.iter().flat_map(|size| [index_name(*size), frames_name(*size)]).collect();
    remove_files(path, |name| is_slot_file(name) && !kept.iter().any(|kept| kept == name)).map(drop)
}

/// Deletes the kvloft files whose names `is_meant` accepts. Returns true if any file was deleted.
pub(crate) fn remove_files(path: &Path, is_meant: impl Fn(&str) -> bool) -> io::Result<bool> {
    let mut any = false;
    for name in file_names(path)?.iter().filter(|name| is_meant(name)) {
        match fs::remove_file(path.join(name)) {
            Ok(()) => any = true,
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
    }
    Ok(any)
}

fn is_namespace_name(name: &str) -> bool {
    name.len() == 16 && name.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// Measures a namespace directory. Ignores entries that vanish or are unreadable.
///
/// The holes in a sparse file can still fill up, so files are measured by their length. With
/// multiple frame sizes, holes may be punched in the frames files to make room, so these files are
/// measured by their allocated blocks.
pub(crate) fn measure(name: String, path: PathBuf) -> Found {
    let mut found = Found { name, bytes: 0, path, last_used: (0, 0) };
    found.bytes = fs::symlink_metadata(&found.path).map_or(0, |meta| disk_bytes(&meta));
    let files: Vec<_> = fs::read_dir(&found.path)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.metadata().ok()?)))
        .collect();
    let is_frames = |name: &str| is_slot_file(name) && name.starts_with(SLOT_FILES[1]);
    let have_several_sizes = files.iter().filter(|(name, _)| is_frames(name)).count() > 1;
    for (name, meta) in &files {
        let may_be_punched = have_several_sizes && is_frames(name);
        let bytes = if may_be_punched { meta.blocks() * 512 } else { disk_bytes(meta) };
        found.bytes = found.bytes.saturating_add(bytes);
        found.last_used = found.last_used.max((meta.mtime(), meta.mtime_nsec()));
    }
    found
}

/// Returns the file's length, rounded up to whole pages, or the size of its allocated blocks,
/// whichever is larger.
fn disk_bytes(meta: &Metadata) -> u64 {
    meta.len().next_multiple_of(PAGE_BYTES).max(meta.blocks() * 512)
}
