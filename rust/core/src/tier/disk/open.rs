//! Opening a disk directory: owner, superblock, cap, recovery; in that order.
//!
//! Whatever is wrong with what a namespace's files hold costs chunks and a count, never the open;
//! what is wrong with the directory itself, or is not a file where one must be, is the setting's
//! fault and says so.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, utimensat};

use super::books::{Books, Growth};
use super::files::{OpenFiles, OsFiles, SlotFiles};
use super::record::{Record, record_seed};
use super::recover::{self, Recovered};
use super::root::{DiskRoot, Owner, Room};
use super::slots::Slots;
use super::superblock::{self, Superblock};
use super::tier::DiskTier;
use super::types::{DiskConfig, DiskEntry, DiskStats, SlotId};
use super::{budget, namespaces, paths};
use crate::sync::{Condvar, Mutex};
use crate::units::size_text;
use crate::{Error, ErrorKind, Result};

impl DiskTier {
    /// Opens (or makes) the directory and finds the chunks of this namespace: parents before
    /// children, oldest first.
    ///
    /// Chunks whose parent is missing (and is not a root: `depth` > 0) are dropped, as are
    /// unreadable records; a namespace with a wrong superblock is started afresh. Errors:
    /// `InvalidConfig` where these settings can never work; `Busy` where another owner lives, and
    /// `Io` where the system refused or somebody else may write here: both may pass, so the same
    /// settings are worth another try later. A failed open leaves nothing that hinders the next.
    #[expect(clippy::needless_pass_by_value, reason = "the settings are the tier's from here on")]
    pub fn open(config: DiskConfig) -> Result<(Self, Vec<DiskEntry>)> {
        Self::open_with_files(&config, &OsFiles)
    }

    /// As [`Self::open`], beside other namespaces of the directory that this process has open.
    pub fn open_beside(
        config: &DiskConfig,
        root: &Arc<DiskRoot>,
    ) -> Result<(Self, Vec<DiskEntry>)> {
        Self::open_at(config, root, &OsFiles)
    }

    /// As [`Self::open`], with another source of files: tests have one that fails on purpose.
    #[doc(hidden)]
    pub fn open_with_files(
        config: &DiskConfig,
        opener: &dyn OpenFiles,
    ) -> Result<(Self, Vec<DiskEntry>)> {
        Self::open_at(config, &Arc::default(), opener)
    }

    pub(super) fn open_at(
        config: &DiskConfig,
        root: &Arc<DiskRoot>,
        opener: &dyn OpenFiles,
    ) -> Result<(Self, Vec<DiskEntry>)> {
        validate(config)?;
        let owner = root.enter(config)?;
        let dir = namespaces::dir_of(config);
        let failed = |e| Error::io(format!("cannot open the namespace {}", dir.display()), e);
        let mut books = Books::default();
        make_namespace(&dir, &mut books).map_err(failed)?;
        paths::check_owner_at(&config.dir, &dir)?;
        for name in namespaces::FILE_NAMES {
            paths::check_owner_at(&config.dir, &dir.join(name))?;
        }
        claim_namespace(config, &dir, &mut books).map_err(failed)?;
        let seed = record_seed(&config.namespace);
        let files =
            SlotFiles::open(&dir, config.frame_sizes.largest(), seed, opener).map_err(failed)?;
        let keep = fit_cap(config, &owner, &files, &mut books).map_err(failed)?;
        let (found, unsound) = collect(&files, keep, &mut books.stats).map_err(failed)?;
        files.set_slots(keep).map_err(failed)?;
        owner.settle(config, keep);
        let entries = settle(&files, keep, &found, unsound, &mut books);
        let tier = Self {
            config: config.clone(),
            files,
            books: Mutex::new(books),
            growth: Mutex::new(Growth::default()),
            grown: Condvar::new(),
            owner: Mutex::new(Some(owner)),
        };
        Ok((tier, entries))
    }
}

fn validate(config: &DiskConfig) -> Result<()> {
    let frame_bytes = config.frame_sizes.largest();
    let fail = |message: String| Err(Error::new(ErrorKind::InvalidConfig, message));
    if !superblock::is_frame_size(frame_bytes) {
        return fail(format!(
            "a frame of {frame_bytes} bytes cannot go to disk: it must be a multiple of 4096, at most 16 GiB"
        ));
    }
    let least = budget::dir_bytes(1, frame_bytes, 0);
    if config.cap_bytes < least {
        return fail(format!(
            "disk_size = {} does not hold one chunk of {frame_bytes} bytes: set disk_size to at least {least} bytes, or leave \
             disk_path out for no disk",
            size_text(config.cap_bytes)
        ));
    }
    Ok(())
}

/// Makes the namespace's directory; what has its name and is none, or is a link to one, goes.
fn make_namespace(dir: &Path, books: &mut Books) -> io::Result<()> {
    if fs::symlink_metadata(dir).is_ok_and(|meta| !meta.is_dir()) {
        fs::remove_file(dir)?;
        start_afresh(dir, "it was not a directory", books);
    }
    namespaces::make_dir(dir)
}

/// Makes the namespace ours: its superblock is this namespace's, and files under any other are
/// gone.
fn claim_namespace(config: &DiskConfig, dir: &Path, books: &mut Books) -> io::Result<()> {
    let ours =
        Superblock::new(&config.namespace, config.frame_sizes.largest(), &config.description);
    let why = match Superblock::read(dir)? {
        Some(Ok(_)) if namespaces::has_strange_files(dir) => {
            "one of its files is not a regular file".to_owned()
        }
        Some(Ok(found)) if found == ours => return touch(dir),
        Some(Ok(found)) if found.namespace() != ours.namespace() => {
            if found.namespace().is_some_and(|other| {
                namespaces::dir_name(&other) == namespaces::dir_name(&config.namespace)
            }) {
                let message = "another namespace, whose name begins with the same 16 digits, has this directory: set another disk_path";
                return Err(io::Error::other(message));
            }
            "its superblock.json is another namespace's".to_owned()
        }
        Some(Ok(found)) if found.frame_bytes != ours.frame_bytes => {
            format!("its frames have {} bytes", found.frame_bytes)
        }
        Some(Ok(_)) => {
            // Only the line for people changed; a full disk may keep the old one.
            let _ = ours.write(dir);
            return Ok(());
        }
        Some(Err(why)) => format!("its superblock.json is {why}"),
        None if namespaces::remove_files(dir)? => "it had no superblock.json".to_owned(),
        None => return ours.write(dir),
    };
    start_afresh(dir, &why, books);
    namespaces::remove_files(dir)?;
    ours.write(dir)
}

fn start_afresh(dir: &Path, why: &str, books: &mut Books) {
    books.stats.fresh_starts += 1;
    books.event(format!("{} starts afresh: {why}", dir.display()));
}

/// Marks the namespace as used now, for the choice of which goes first.
fn touch(dir: &Path) -> io::Result<()> {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    let times = Timestamps { last_access: now, last_modification: now };
    Ok(utimensat(CWD, dir.join(superblock::FILE_NAME), &times, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// Makes room where the directory is above its cap; returns how many slots may stay.
fn fit_cap(
    config: &DiskConfig,
    owner: &Owner,
    files: &SlotFiles,
    books: &mut Books,
) -> io::Result<u32> {
    let (records, frames) = files.lens()?;
    let have = records.min(frames);
    let Room { slots, foreign_bytes } = owner.claim(config, [have; 3], |line| books.event(line))?;
    books.foreign_bytes = foreign_bytes;
    Ok(slots)
}

/// Reads the index: what the first `keep` slots hold, those of them whose record must go, and
/// counts of what is given up.
fn collect(
    files: &SlotFiles,
    keep: u32,
    stats: &mut DiskStats,
) -> io::Result<(Vec<DiskEntry>, Vec<SlotId>)> {
    let mut entries = Vec::new();
    let mut unsound = Vec::new();
    files.for_each_record(|slot, found| match found {
        Ok(Record { meta, sequence, .. }) if slot.0 < keep => {
            entries.push(DiskEntry { slot, meta, sequence });
        }
        Ok(_) => stats.dropped_over_cap += 1,
        Err(_) => {
            stats.dropped_records += 1;
            unsound.extend((slot.0 < keep).then_some(slot));
        }
    })?;
    Ok((entries, unsound))
}

/// Orders the entries, empties the records of the others, and makes the slots' states.
///
/// What is given up but cannot be emptied would be found again by a later open, when it may have
/// been forgotten: it comes behind the entries, for the caller to free.
fn settle(
    files: &SlotFiles,
    keep: u32,
    found: &[DiskEntry],
    mut unsound: Vec<SlotId>,
    books: &mut Books,
) -> Vec<DiskEntry> {
    let Recovered { mut entries, duplicates, orphans } = recover::recover(found);
    books.stats.recovered = entries.len() as u64;
    books.stats.dropped_duplicates = duplicates.len() as u64;
    books.stats.dropped_orphans = orphans.len() as u64;
    books.next_sequence =
        entries.iter().map(|e| e.sequence).max().map_or(0, |last| last.saturating_add(1));
    let is_kept = |slot: &SlotId| files.clear_record(*slot).is_err();
    unsound.retain(is_kept);
    let given_up: HashSet<_> = duplicates.into_iter().chain(orphans).filter(is_kept).collect();
    entries.extend(found.iter().filter(|entry| given_up.contains(&entry.slot)));
    books.slots = Slots::found(keep, &entries, &unsound);
    if let Some(line) = losses(&books.stats) {
        books.event(line);
    }
    entries
}

/// What opening gave up, for people.
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
            "{recovered} chunks recovered; dropped: {dropped_records} damaged, {dropped_orphans} without parent, \
             {dropped_duplicates} superseded, {dropped_over_cap} above disk_size"
        )
    })
}
