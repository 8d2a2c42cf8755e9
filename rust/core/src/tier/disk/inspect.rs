//! Reports the contents of a disk directory for `kvloft inspect`, without locking or changing it.
//!
//! The numbers may be slightly out of date while an engine is writing. Damage is reported in
//! `problem`.

use std::collections::BTreeSet;
use std::path::Path;
use std::{fs, io};

use super::files::SlotFiles;
use super::namespaces;
use super::record::Record;
use super::superblock::{Refusal, Superblock};
use super::types::{Damage, DiskMeta};
use crate::io::FrameSizes;
use crate::key::namespace_id;
use crate::{Error, Result};

/// Contents of a namespace directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NamespaceInfo {
    /// The directory's name: the namespace's first 16 hex digits.
    pub name: String,
    /// Description from the superblock. Empty if the superblock is unreadable.
    pub description: String,
    /// Frame size of each size class, in bytes. Empty if unknown.
    pub frame_sizes: Vec<u64>,
    /// Number of slots in the namespace's files, across all sizes.
    pub slots: u64,
    /// Number of slots with a readable record.
    pub chunks: u64,
    /// Size of the directory on disk, in bytes.
    pub bytes: u64,
    /// Unix time at which the oldest chunk was saved, in seconds.
    pub oldest_s: Option<u64>,
    /// Unix time at which the newest chunk was saved, in seconds.
    pub newest_s: Option<u64>,
    /// The first defect found in the namespace, if any.
    pub problem: Option<String>,
}

/// Returns all namespaces in `dir`, most recently used first. Returns `InvalidConfig` if `dir` is
/// not a disk directory, and `Io` if `dir` cannot be read.
pub fn inspect(dir: &Path) -> Result<Vec<NamespaceInfo>> {
    let mut infos: Vec<_> = list(dir)?.iter().map(inspect_one).collect();
    infos.reverse();
    Ok(infos)
}

/// Lists the namespaces in a user-supplied directory.
pub(super) fn list(dir: &Path) -> Result<Vec<namespaces::Found>> {
    let not_ours = |why: &str| {
        let message =
            format!("{} {why}: DIR must be an engine's or server's disk_path", dir.display());
        Error::invalid(message)
    };
    match fs::metadata(dir) {
        Ok(meta) if meta.is_dir() => {}
        Ok(_) => return Err(not_ours("is not a directory")),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(not_ours("does not exist")),
        Err(e) => return Err(not_ours(&format!("cannot be opened ({e})"))),
    }
    let found = namespaces::scan(dir, &BTreeSet::new())
        .map_err(|e| Error::io(format!("cannot list {}", dir.display()), e))?;
    if found.is_empty() && !dir.join(super::owner::FILE_NAME).exists() {
        return Err(not_ours("is not a kvloft disk directory"));
    }
    Ok(found)
}

/// Returns a namespace's superblock and, for each size class that has files, the opened files or a
/// description of their damage. If the superblock is unusable, returns only a description of the
/// problem.
pub(super) fn open_namespace(
    found: &namespaces::Found,
) -> Result<(Superblock, Vec<Result<SlotFiles, Damage>>), Damage> {
    let fail = |problem: String| Damage::new(&found.name, problem);
    let superblock = match Superblock::read(&found.path) {
        Ok(Some(Ok(superblock))) => superblock,
        Ok(Some(Err(why @ Refusal::OtherFormat(_)))) => {
            let problem = format!(
                "superblock.json is {why}: this version of kvloft clears the namespace when opening it"
            );
            return Err(Damage { is_other_format: true, ..fail(problem) });
        }
        Ok(Some(Err(why))) => return Err(fail(format!("superblock.json is {why}"))),
        Ok(None) => return Err(fail("superblock.json is missing".to_owned())),
        Err(e) => return Err(fail(format!("cannot read superblock.json ({e})"))),
    };
    let Some(namespace) = superblock.namespace().filter(|n| namespace_id(n) == found.name) else {
        return Err(fail("superblock.json belongs to a different namespace".to_owned()));
    };
    let sizes = FrameSizes::from(superblock.frame_sizes.clone());
    let open = |class| SlotFiles::open_read(&found.path, (class, sizes.bytes(class)), &namespace);
    let files = sizes.classes().filter_map(|class| open(class).map_err(fail).transpose());
    Ok((superblock, files.collect()))
}

/// Returns a clause describing the chunks lost because the index is shorter than the frames
/// file. The tier extends the index before the frames file, so every frame has a record. An
/// undamaged index is shorter only if the process was killed while it was shrinking the files to
/// drop these slots.
pub(super) fn lost_records(frame_bytes: u64, records: u32, frames: u32) -> Option<String> {
    let name = namespaces::index_name(frame_bytes);
    match records {
        _ if records >= frames => None,
        0 => Some(format!("{name} is empty, but there are {frames} frames: their chunks are lost")),
        _ => Some(format!(
            "{name} has records for {records} of {frames} frames: any chunks in the other frames are lost"
        )),
    }
}

fn inspect_one(found: &namespaces::Found) -> NamespaceInfo {
    let mut info =
        NamespaceInfo { name: found.name.clone(), bytes: found.bytes, ..NamespaceInfo::default() };
    match open_namespace(found) {
        Err(damage) => info.problem = Some(damage.problem),
        Ok((superblock, files)) => {
            info.description = superblock.description;
            info.frame_sizes = superblock.frame_sizes;
            for files in files {
                let problem = match files {
                    Ok(files) => count_records(&files, &mut info),
                    Err(damage) => Some(damage.problem),
                };
                info.problem = info.problem.or(problem);
            }
        }
    }
    info
}

/// Adds a size class's chunks to `info`. Returns a description of any defect in the class's files.
fn count_records(files: &SlotFiles, info: &mut NamespaceInfo) -> Option<String> {
    let mut bad = 0_u64;
    let walked = files.for_each_record(|_, found| match found {
        Ok(Record { meta: DiskMeta { saved_s, .. }, .. }) => {
            info.chunks += 1;
            info.oldest_s = Some(info.oldest_s.map_or(saved_s, |s| s.min(saved_s)));
            info.newest_s = Some(info.newest_s.map_or(saved_s, |s| s.max(saved_s)));
        }
        Err(_) => bad += 1,
    });
    match walked {
        Err(e) => Some(format!("cannot read the index ({e})")),
        Ok((records, frames)) => {
            info.slots += u64::from(records.min(frames));
            let damaged = match bad {
                0 => None,
                1 => Some("1 record is damaged or has no frame".to_owned()),
                _ => Some(format!("{bad} records are damaged or have no frame")),
            };
            damaged.or_else(|| lost_records(files.frame_bytes, records, frames))
        }
    }
}
