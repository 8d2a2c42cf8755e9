//! Removes prefixes, selected by their first chunk, from closed namespaces.
//!
//! A namespace is opened only if a chunk or an unreadable record must be removed, because opening a
//! namespace marks it as recently used.

use std::collections::{BTreeSet, HashSet};
use std::path::Path;
use std::sync::Arc;

use super::inspect::open_namespace;
use super::namespaces::{self, Found};
use super::root::DiskRoot;
use super::superblock::Superblock;
use super::tier::DiskTier;
use super::types::{DiskConfig, DiskEntry, DiskMeta};
use crate::io::FrameSizes;
use crate::key::{namespace_hex, namespace_id};
use crate::tier::LocalTier;
use crate::{Error, Result};

/// Result of a removal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RemovedChunks {
    /// Number of namespaces searched.
    pub num_namespaces: u64,
    /// Number of chunks removed.
    pub num_chunks: u64,
    /// Total frame size of the removed chunks, in bytes.
    pub num_bytes: u64,
    /// True if matching chunks may remain because a namespace was in use or an I/O error occurred.
    pub is_cut_short: bool,
    /// Names of matching namespaces that were skipped because this process has them open. Chunks of
    /// open namespaces must be removed through the open tier.
    pub open: BTreeSet<String>,
}

/// Removes the chunks of depth 0 that match `is_meant`, and their descendants, from all namespaces
/// in `dir` whose hex digest starts with `prefix`. `is_meant` gets None for an unreadable record.
/// Skips namespaces that `root` has open. A missing directory is treated as empty. Returns `Io` if
/// the directory cannot be read.
pub(crate) fn remove_closed(
    dir: &Path,
    root: &Arc<DiskRoot>,
    prefix: &str,
    is_meant: impl Fn(Option<&DiskMeta>) -> bool,
) -> Result<RemovedChunks> {
    let mut all = RemovedChunks::default();
    if !dir.exists() {
        return Ok(all);
    }
    let is_named = |name: &str| name.starts_with(prefix) || prefix.starts_with(name);
    let open = root.open_names();
    let found = namespaces::scan(dir, &open)
        .map_err(|e| Error::io(format!("cannot list {}", dir.display()), e))?;
    all.open = open.into_iter().filter(|name| is_named(name)).collect();
    for found in found.iter().filter(|found| is_named(&found.name)) {
        match remove_in(found, dir, root, (prefix, &is_meant)) {
            Ok(removed) => {
                all.num_namespaces += removed.num_namespaces;
                all.num_chunks += removed.num_chunks;
                all.num_bytes += removed.num_bytes;
                all.is_cut_short |= removed.is_cut_short;
            }
            Err(_) => all.is_cut_short = true,
        }
    }
    Ok(all)
}

fn remove_in(
    found: &Found,
    dir: &Path,
    root: &Arc<DiskRoot>,
    (prefix, is_meant): (&str, &impl Fn(Option<&DiskMeta>) -> bool),
) -> Result<RemovedChunks> {
    let (superblock, files) = match open_namespace(found) {
        Ok((_, files)) if files.is_empty() => return Ok(RemovedChunks::default()),
        Ok((superblock, files)) if files.iter().all(Result::is_ok) => (superblock, files),
        _ => {
            return Ok(RemovedChunks { is_cut_short: is_whole(found), ..RemovedChunks::default() });
        }
    };
    let named =
        superblock.namespace().filter(|namespace| namespace_hex(namespace).starts_with(prefix));
    let Some(namespace) = named else { return Ok(RemovedChunks::default()) };
    let mut has_some = false;
    for files in files.iter().flatten() {
        let walked = files.for_each_record(|_, record| {
            has_some |= match record {
                Ok(record) => record.meta.depth == 0 && is_meant(Some(&record.meta)),
                Err(_) => is_meant(None), // opening the tier clears the record
            };
        });
        walked.map_err(|e| Error::io(format!("cannot read {}", found.path.display()), e))?;
    }
    if !has_some {
        return Ok(RemovedChunks { num_namespaces: 1, ..RemovedChunks::default() });
    }
    let config = DiskConfig {
        dir: dir.to_owned(),
        cap_bytes: u64::MAX, // the files do not grow, and opening must not delete other chunks
        frame_sizes: FrameSizes::from(superblock.frame_sizes),
        namespace,
        description: superblock.description,
    };
    let (tier, entries) = DiskTier::open_in(&config, root)?;
    let removed = remove_from(&tier, entries, is_meant);
    tier.close();
    Ok(RemovedChunks { num_namespaces: 1, ..removed })
}

/// Removes the chunks in `entries` that match `is_meant`, and their descendants, from an open tier.
/// `entries` lists parents before children. Also frees uncleared slots, which may hold matching
/// chunks.
///
/// If a chunk cannot be removed, keeps its ancestors, so that the next removal finds the chunk.
pub(super) fn remove_from(
    tier: &DiskTier,
    mut entries: Vec<DiskEntry>,
    is_meant: impl Fn(Option<&DiskMeta>) -> bool,
) -> RemovedChunks {
    let mut gone = HashSet::new();
    entries.retain(|DiskEntry { meta, .. }| {
        let is_gone =
            if meta.depth == 0 { is_meant(Some(meta)) } else { gone.contains(&meta.parent) };
        is_gone && gone.insert(meta.key)
    });
    let (mut removed, mut kept) = (RemovedChunks::default(), HashSet::new());
    for DiskEntry { meta, slot, .. } in entries.into_iter().rev() {
        if !kept.contains(&meta.key) && tier.free(slot).is_ok() {
            removed.num_chunks += 1;
            removed.num_bytes += tier.frame_bytes(slot.class());
        } else {
            kept.insert(meta.parent);
            removed.is_cut_short = true;
        }
    }
    for slot in tier.uncleared() {
        removed.is_cut_short |= tier.free(slot).is_err();
    }
    removed
}

/// Returns true if the namespace might be intact and the error temporary, for example because the
/// process is out of file descriptors. Damaged namespaces are ignored, because they are recreated
/// before use.
fn is_whole(found: &Found) -> bool {
    let is_there = |name: String| found.path.join(name).is_file();
    let is_whole = |size: &u64| {
        is_there(namespaces::index_name(*size)) == is_there(namespaces::frames_name(*size))
    };
    let has_files = |size: &u64| is_there(namespaces::frames_name(*size));
    let is_ours = |superblock: Superblock| {
        let sizes = &superblock.frame_sizes;
        superblock.namespace().is_some_and(|of| namespace_id(&of) == found.name)
            && sizes.iter().all(is_whole)
            && sizes.iter().any(has_files)
    };
    let may_be_ours = match Superblock::read(&found.path) {
        Ok(read) => read.is_some_and(|read| read.is_ok_and(is_ours)),
        Err(_) => true,
    };
    may_be_ours && !namespaces::has_strange_files(&found.path)
}
