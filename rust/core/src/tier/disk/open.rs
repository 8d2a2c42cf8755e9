//! Opens a disk directory: claims it, checks the superblock, applies the size limit and recovers
//! the stored chunks.
//!
//! Chunks with damaged records are dropped and counted. Damage never prevents a directory from
//! being opened.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, utimensat};

use super::files::{OpenFiles, OsFiles, SlotFiles};
use super::fit::{ClassIndex, fit_cap};
use super::record::{self, Recovered};
use super::root::{DiskRoot, OpenNamespace};
use super::slots::Slots;
use super::superblock::{self, Superblock};
use super::tier::DiskTier;
use super::tier::{Growth, TierState};
use super::types::{DiskConfig, DiskEntry, DiskStats, SlotId};
use super::{budget, namespaces, owner};
use crate::key::namespace_id;
use crate::sync::{Condvar, Mutex};
use crate::units::size_text;
use crate::{Error, Result};

impl DiskTier {
    /// Opens or creates a namespace in the directory. Returns the namespace's chunks: parents
    /// before children, and otherwise oldest first.
    ///
    /// Drops unreadable records, and chunks whose `depth` is above 0 but whose parent is missing.
    /// Recreates a namespace whose superblock does not match. Returns `InvalidConfig` if the
    /// settings can never work, `Busy` if another owner is alive, and `Io` if a system call fails
    /// or another user can write to the directory. `Busy` and `Io` can be temporary, so the caller
    /// should retry. A failed attempt does not prevent later attempts.
    pub fn open_in(config: &DiskConfig, root: &Arc<DiskRoot>) -> Result<(Self, Vec<DiskEntry>)> {
        Self::open_with_files(config, root, &OsFiles)
    }

    /// Like [`Self::open_in`], but opens files with `opener`, for example to inject faults.
    #[doc(hidden)]
    pub fn open_with_files(
        config: &DiskConfig,
        root: &Arc<DiskRoot>,
        opener: &dyn OpenFiles,
    ) -> Result<(Self, Vec<DiskEntry>)> {
        validate(config)?;
        let owner = root.enter(config)?;
        let mut parts = Self::open_owned(config, &owner, opener);
        let mut deleted = Vec::new();
        if parts.as_ref().is_err_and(Error::is_no_space)
            && owner.delete_closed(config, |line| deleted.push(line))
        {
            parts = Self::open_owned(config, &owner, opener);
        }
        let (files, mut state, entries) = parts?;
        for line in deleted {
            state.event(line);
        }
        owner.settle(state.num_bytes());
        let tier = Self {
            config: config.clone(),
            files,
            state: Mutex::new(state),
            growth: Mutex::new(Growth::default()),
            grown: Condvar::new(),
            owner: Mutex::new(Some(owner)),
        };
        Ok((tier, entries))
    }

    fn open_owned(
        config: &DiskConfig,
        owner: &OpenNamespace,
        opener: &dyn OpenFiles,
    ) -> Result<(Vec<SlotFiles>, TierState, Vec<DiskEntry>)> {
        let dir = namespaces::dir_of(config);
        let failed = |e| Error::io(format!("cannot open the namespace {}", dir.display()), e);
        let mut state = TierState::default();
        make_namespace(&dir, &mut state).map_err(failed)?;
        owner::check_owner_at(&config.dir, &dir)?;
        for name in namespaces::file_names(&dir).map_err(failed)? {
            owner::check_owner_at(&config.dir, &dir.join(name))?;
        }
        claim_namespace(config, &dir, &mut state).map_err(failed)?;
        let files = open_files(config, &dir, opener).map_err(failed)?;
        let mut found =
            files.iter().map(ClassIndex::read).collect::<io::Result<Vec<_>>>().map_err(failed)?;
        fit_cap(config, owner, &files, &mut found, &mut state).map_err(failed)?;
        let entries = settle(&files, found, &mut state);
        Ok((files, state, entries))
    }
}

fn validate(config: &DiskConfig) -> Result<()> {
    let fail = |message: String| Err(Error::invalid(message));
    let sizes = config.frame_sizes.all();
    if let Some(frame_bytes) = sizes.iter().find(|size| !superblock::is_frame_size(**size)) {
        return fail(format!(
            "cannot store {frame_bytes}-byte frames on disk: the frame size must be a multiple of \
             4096 bytes and at most 16 GiB"
        ));
    }
    config.frame_sizes.check()?;
    let frame_bytes = config.frame_sizes.largest();
    let least = budget::dir_bytes(1, frame_bytes, budget::map_bytes(sizes.len()));
    if config.cap_bytes < least {
        return fail(format!(
            "disk_size = {} is too small for a single {frame_bytes}-byte chunk; set disk_size to \
             at least {least} bytes, or omit disk_path to run without a disk tier",
            size_text(config.cap_bytes)
        ));
    }
    Ok(())
}

fn open_files(
    config: &DiskConfig,
    dir: &Path,
    opener: &dyn OpenFiles,
) -> io::Result<Vec<SlotFiles>> {
    let sizes = &config.frame_sizes;
    let open = |class| SlotFiles::open(dir, (class, sizes.bytes(class)), &config.namespace, opener);
    sizes.classes().map(open).collect()
}

/// Creates the namespace's directory. Replaces any file or link of the same name.
fn make_namespace(dir: &Path, state: &mut TierState) -> io::Result<()> {
    if fs::symlink_metadata(dir).is_ok_and(|meta| !meta.is_dir()) {
        fs::remove_file(dir)?;
        start_afresh(dir, "it was not a directory", state);
    }
    namespaces::make_dir(dir)
}

/// Ensures that the directory holds this namespace's superblock. Deletes files that belong to a
/// different superblock.
fn claim_namespace(config: &DiskConfig, dir: &Path, state: &mut TierState) -> io::Result<()> {
    let ours = Superblock::new(&config.namespace, config.frame_sizes.all(), &config.description);
    let why = match Superblock::read(dir)? {
        Some(Ok(_)) if namespaces::has_strange_files(dir) => {
            "one of its files is not a regular file".to_owned()
        }
        Some(Ok(found)) if found == ours => return touch(dir),
        Some(Ok(found)) if found.namespace() != ours.namespace() => {
            if found
                .namespace()
                .is_some_and(|other| namespace_id(&other) == namespace_id(&config.namespace))
            {
                let message = "the directory belongs to another namespace with the same 16-digit \
                    prefix; set a different disk_path";
                return Err(io::Error::other(message));
            }
            "its superblock.json belongs to a different namespace".to_owned()
        }
        Some(Ok(found)) if !found.has_sizes_of(&ours) => {
            format!("none of its frame sizes match ({:?} bytes)", found.frame_sizes)
        }
        Some(Ok(found)) if found.frame_sizes != ours.frame_sizes => {
            state.event(format!(
                "disk tier: {}: frame sizes changed from {:?} to {:?} bytes; \
                 keeping chunks whose size is unchanged",
                dir.display(),
                found.frame_sizes,
                ours.frame_sizes
            ));
            namespaces::remove_other_sizes(dir, &ours.frame_sizes)?;
            return ours.write(dir);
        }
        Some(Ok(_)) => {
            // Only the description has changed, so a failed write is not an error.
            let _ = ours.write(dir);
            return Ok(());
        }
        Some(Err(why)) => format!("its superblock.json is {why}"),
        None if namespaces::remove_files(dir, |_| true)? => "it had no superblock.json".to_owned(),
        None => return ours.write(dir),
    };
    start_afresh(dir, &why, state);
    namespaces::remove_files(dir, |_| true)?;
    ours.write(dir)
}

fn start_afresh(dir: &Path, why: &str, state: &mut TierState) {
    state.stats.fresh_starts += 1;
    state.event(format!("disk tier: recreating {}: {why}", dir.display()));
}

/// Marks the namespace as recently used. The least recently used namespace is deleted first.
fn touch(dir: &Path) -> io::Result<()> {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    let times = Timestamps { last_access: now, last_modification: now };
    Ok(utimensat(CWD, dir.join(superblock::FILE_NAME), &times, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// Sorts the entries, clears all other records, and initializes the slot states.
///
/// A dropped chunk whose record cannot be cleared would be found again the next time the namespace
/// is opened. Such chunks are appended to the entries for the caller to free.
fn settle(files: &[SlotFiles], found: Vec<ClassIndex>, state: &mut TierState) -> Vec<DiskEntry> {
    let all: Vec<_> = found.iter().flat_map(|index| &index.entries).copied().collect();
    let Recovered { mut entries, duplicates, orphans } = record::recover(&all);
    state.stats.recovered = entries.len() as u64;
    state.stats.dropped_duplicates = duplicates.len() as u64;
    state.stats.dropped_orphans = orphans.len() as u64;
    state.next_sequence =
        entries.iter().map(|e| e.sequence).max().map_or(0, |last| last.saturating_add(1));
    let is_kept = |slot: &SlotId| files[slot.class().index()].clear_record(*slot).is_err();
    let given_up: HashSet<_> = duplicates.into_iter().chain(orphans).filter(is_kept).collect();
    entries.extend(all.iter().filter(|entry| given_up.contains(&entry.slot)));
    for (files, mut index) in files.iter().zip(found) {
        index.unsound.retain(is_kept);
        let used = entries.iter().map(|entry| entry.slot);
        let used = used.filter(|slot| slot.class() == files.class);
        let count = index.count(files.frame_bytes);
        let punched = index.punched();
        state.slots.push(Slots::found(files.class, count, used, &index.unsound, punched));
    }
    if let Some(line) = losses(&state.stats) {
        state.event(line);
    }
    entries
}

fn losses(stats: &DiskStats) -> Option<String> {
    let DiskStats {
        recovered,
        dropped_over_cap,
        dropped_records,
        dropped_duplicates,
        dropped_orphans,
        ..
    } = stats;
    let any = dropped_over_cap + dropped_records + dropped_duplicates + dropped_orphans > 0;
    any.then(|| {
        format!(
            "disk tier: recovered {recovered} chunks; dropped {dropped_records} damaged, \
             {dropped_orphans} orphaned, {dropped_duplicates} superseded and \
             {dropped_over_cap} beyond disk_size"
        )
    })
}
