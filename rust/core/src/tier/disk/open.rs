//! Opening a disk directory: owner, superblock, cap, recovery; in that order.
//!
//! Whatever is wrong with what a namespace's files hold costs chunks and a count, never the open; what is wrong with the directory
//! itself, or is no file where one must be, is the setting's fault and says so.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, utimensat};

use super::files::{OpenFiles, SlotFiles};
use super::lock::DirLock;
use super::record::{Parsed, record_seed};
use super::recover::{self, Recovered};
use super::slots::Slots;
use super::superblock::{self, Superblock};
use super::types::{DiskConfig, DiskEntry, DiskStats, SlotId};
use super::{budget, errors, namespaces, owner};
use crate::units::size_text;
use crate::{Error, ErrorKind, Result};

/// An opened directory, before it becomes a tier.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) lock: DirLock,
    pub(super) namespace_dir: PathBuf,
    pub(super) files: SlotFiles,
    pub(super) slots: Slots,
    pub(super) entries: Vec<DiskEntry>,
    /// The counters that opening moved.
    pub(super) stats: DiskStats,
    /// What a person should see of it.
    pub(super) events: Vec<String>,
    /// Bytes that other namespaces take.
    pub(super) foreign_bytes: u64,
}

/// Opens the directory; see `DiskTier::open`.
pub(super) fn open(config: &DiskConfig, opener: &dyn OpenFiles) -> Result<Opened> {
    validate(config)?;
    namespaces::make_dir(&config.dir).map_err(|e| errors::at_path("make", &config.dir, e))?;
    let lock = DirLock::acquire(&config.dir)?;
    let namespace_dir = config.dir.join(namespaces::dir_name(&config.namespace));
    let mut stats = DiskStats::default();
    let mut events = Vec::new();
    let failed = |e| Error::io(format!("cannot open the namespace {}", namespace_dir.display()), e);
    make_namespace(&namespace_dir, &mut events).map_err(failed)?;
    owner::check_at(&config.dir, &namespace_dir)?;
    for name in namespaces::FILE_NAMES {
        owner::check_at(&config.dir, &namespace_dir.join(name))?;
    }
    claim_namespace(config, &namespace_dir, &mut events).map_err(failed)?;
    stats.fresh_starts = events.len() as u64;
    let seed = record_seed(&config.namespace);
    let files = SlotFiles::open(&namespace_dir, config.frame_bytes, seed, opener).map_err(failed)?;
    let (keep, foreign_bytes) = fit_cap(config, &files, &mut stats, &mut events).map_err(failed)?;
    let found = collect(&files, keep, &mut stats).map_err(failed)?;
    files.set_slots(keep).map_err(failed)?;
    let (slots, entries) = settle(&files, keep, found, &mut stats);
    events.extend(losses(&stats));
    Ok(Opened { lock, namespace_dir, files, slots, entries, stats, events, foreign_bytes })
}

fn validate(config: &DiskConfig) -> Result<()> {
    let frame_bytes = config.frame_bytes;
    if !superblock::is_frame_size(frame_bytes) {
        let message =
            format!("a frame of {frame_bytes} bytes cannot go to disk: it must be a multiple of 4096, at most 16 GiB");
        return Err(Error::new(ErrorKind::InvalidConfig, message));
    }
    let least = budget::min_cap_bytes(frame_bytes);
    if config.cap_bytes < least {
        let message = format!(
            "disk_size = {} does not hold one chunk of {frame_bytes} bytes: set disk_size to at least {least} bytes, or leave \
             disk_path out for no disk",
            size_text(config.cap_bytes)
        );
        return Err(Error::new(ErrorKind::InvalidConfig, message));
    }
    Ok(())
}

/// Makes the namespace's directory; what has its name and is none, or is a link to one, goes.
fn make_namespace(dir: &Path, events: &mut Vec<String>) -> io::Result<()> {
    if fs::symlink_metadata(dir).is_ok_and(|meta| !meta.is_dir()) {
        fs::remove_file(dir)?;
        start_afresh(dir, "it was not a directory", events);
    }
    namespaces::make_dir(dir)
}

/// Makes the namespace ours: its superblock is this namespace's, and files under any other are gone.
fn claim_namespace(config: &DiskConfig, dir: &Path, events: &mut Vec<String>) -> io::Result<()> {
    let ours = Superblock::new(&config.namespace, config.frame_bytes, &config.description);
    match Superblock::read(dir)? {
        Some(Ok(_)) if namespaces::has_strange_files(dir) => {
            start_afresh(dir, "one of its files is not a regular file", events);
        }
        Some(Ok(found)) if found == ours => return touch(dir),
        Some(Ok(found)) if found.namespace() != ours.namespace() => {
            start_afresh(dir, "its superblock.json is another namespace's", events);
        }
        Some(Ok(found)) if found.frame_bytes() != ours.frame_bytes() => {
            start_afresh(dir, &format!("its frames have {} bytes", found.frame_bytes()), events);
        }
        Some(Ok(_)) => {
            // Only the line for people changed; a full disk may keep the old one.
            let _ = ours.write(dir);
            return Ok(());
        }
        Some(Err(why)) => start_afresh(dir, &format!("its superblock.json is {why}"), events),
        None if namespaces::remove_files(dir)? => start_afresh(dir, "it had no superblock.json", events),
        None => return ours.write(dir),
    }
    namespaces::remove_files(dir)?;
    ours.write(dir)
}

fn start_afresh(dir: &Path, why: &str, events: &mut Vec<String>) {
    events.push(format!("{} starts afresh: {why}", dir.display()));
}

/// Marks the namespace as used now, for the choice of which goes first.
fn touch(dir: &Path) -> io::Result<()> {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    let times = Timestamps { last_access: now, last_modification: now };
    Ok(utimensat(CWD, dir.join(superblock::FILE_NAME), &times, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// Makes room where the directory is above its cap: (slots that may stay, bytes of other namespaces).
fn fit_cap(
    config: &DiskConfig,
    files: &SlotFiles,
    stats: &mut DiskStats,
    events: &mut Vec<String>,
) -> io::Result<(u32, u64)> {
    let (records, frames) = files.lens()?;
    let have = records.min(frames);
    let fits = |foreign_bytes| budget::max_slots_beside(foreign_bytes, config.cap_bytes, config.frame_bytes);
    let is_enough = |bytes| bytes <= config.cap_bytes - budget::FIXED_BYTES && fits(bytes) >= have;
    let own = namespaces::dir_name(&config.namespace);
    let (foreign_bytes, num_removed) = namespaces::make_room(&config.dir, &own, is_enough, |line| events.push(line))?;
    stats.namespaces_removed = num_removed;
    Ok((have.min(fits(foreign_bytes)), foreign_bytes))
}

/// Reads the index: entries of the first `keep` slots, and counts of what is given up.
fn collect(files: &SlotFiles, keep: u32, stats: &mut DiskStats) -> io::Result<(Vec<DiskEntry>, Vec<SlotId>)> {
    let (records, frames) = files.lens()?;
    let mut entries = Vec::new();
    let mut bad = Vec::new();
    files.for_each_record(records, |slot, parsed| match parsed {
        Parsed::Valid(record) if slot.0 < keep => entries.push(record.entry(slot)),
        Parsed::Valid(_) if slot.0 < frames => stats.dropped_over_cap += 1,
        Parsed::Valid(_) | Parsed::Bad if slot.0 >= keep => stats.dropped_records += 1,
        Parsed::Valid(_) | Parsed::Bad | Parsed::Empty => {
            stats.dropped_records += 1;
            bad.push(slot);
        }
    })?;
    Ok((entries, bad))
}

/// Orders the entries, empties the records of the others, and makes the slots' states.
fn settle(
    files: &SlotFiles,
    keep: u32,
    (entries, bad): (Vec<DiskEntry>, Vec<SlotId>),
    stats: &mut DiskStats,
) -> (Slots, Vec<DiskEntry>) {
    let Recovered { entries, duplicates, orphans } = recover::recover(&entries);
    stats.recovered = entries.len() as u64;
    stats.dropped_duplicates = duplicates.len() as u64;
    stats.dropped_orphans = orphans.len() as u64;
    let mut slots = Slots::default();
    slots.grow(keep);
    for entry in &entries {
        slots.mark_used(entry.slot);
    }
    for slot in bad.into_iter().chain(duplicates).chain(orphans) {
        if files.clear_record(slot).is_err() {
            slots.mark_unsure(slot);
        }
    }
    slots.collect_free();
    (slots, entries)
}

/// What opening gave up, for people.
fn losses(stats: &DiskStats) -> Option<String> {
    let DiskStats { recovered, dropped_over_cap, dropped_records, dropped_duplicates, dropped_orphans, .. } = stats;
    let any = dropped_over_cap + dropped_records + dropped_duplicates + dropped_orphans > 0;
    any.then(|| {
        format!(
            "{recovered} chunks recovered; dropped: {dropped_records} damaged, {dropped_orphans} without parent, \
             {dropped_duplicates} superseded, {dropped_over_cap} above disk_size"
        )
    })
}
