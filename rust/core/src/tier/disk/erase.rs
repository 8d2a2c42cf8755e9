//! Erasing chunks of namespaces that are not open, by the first chunks that they hang on.
//!
//! A namespace is opened only if a record in it says that there is something to erase: to open one
//! counts as its use.

use std::collections::{BTreeSet, HashSet};
use std::path::Path;
use std::sync::Arc;

use super::inspect::open_namespace;
use super::namespaces::{self, FRAMES_NAME, Found, INDEX_NAME};
use super::root::DiskRoot;
use super::superblock::{self, Superblock};
use super::tier::DiskTier;
use super::types::{DiskConfig, DiskMeta};
use crate::tier::LocalTier;
use crate::{Error, Result};

/// What was erased.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Erased {
    /// Namespaces that were looked at.
    pub num_namespaces: u64,
    /// Chunks that are not there any more.
    pub num_chunks: u64,
    /// Bytes of their frames.
    pub num_bytes: u64,
    /// A namespace is in use, or the system refused: something may be there yet.
    pub is_cut_short: bool,
    /// Names of those that were meant and not looked at, for they are open here: whoever has them
    /// open must do it.
    pub open: BTreeSet<String>,
}

/// Frees the first chunks that are `meant`, and what hangs on those, in all namespaces of `dir`
/// whose names begin as `prefix` does, as far as both go, but those that `root` has open. A
/// directory that is not there holds nothing. `Io` if it cannot be listed.
pub(crate) fn erase(
    dir: &Path,
    cap_bytes: u64,
    root: &Arc<DiskRoot>,
    prefix: &str,
    is_meant: impl Fn(&DiskMeta) -> bool,
) -> Result<Erased> {
    let mut all = Erased::default();
    if !dir.exists() {
        return Ok(all);
    }
    let is_named = |name: &str| name.starts_with(prefix) || prefix.starts_with(name);
    let open = root.open_names();
    let found = namespaces::scan(dir, &open)
        .map_err(|e| Error::io(format!("cannot list {}", dir.display()), e))?;
    all.open = open.into_iter().filter(|name| is_named(name)).collect();
    for found in found.iter().filter(|found| is_named(&found.name)) {
        match erase_in(found, dir, cap_bytes, root, (prefix, &is_meant)) {
            Ok(erased) => {
                all.num_namespaces += erased.num_namespaces;
                all.num_chunks += erased.num_chunks;
                all.num_bytes += erased.num_bytes;
                all.is_cut_short |= erased.is_cut_short;
            }
            Err(_) => all.is_cut_short = true,
        }
    }
    Ok(all)
}

fn erase_in(
    found: &Found,
    dir: &Path,
    cap_bytes: u64,
    root: &Arc<DiskRoot>,
    (prefix, is_meant): (&str, &impl Fn(&DiskMeta) -> bool),
) -> Result<Erased> {
    let (superblock, files) = match open_namespace(found) {
        Ok((superblock, Some(files))) => (superblock, files),
        Ok(_) => return Ok(Erased::default()),
        Err(_) => return Ok(Erased { is_cut_short: is_whole(found), ..Erased::default() }),
    };
    let named =
        superblock.namespace().filter(|namespace| superblock::hex(namespace).starts_with(prefix));
    let Some(namespace) = named else { return Ok(Erased::default()) };
    let nothing = Erased { num_namespaces: 1, ..Erased::default() };
    let mut has_some = false;
    let walked = files.for_each_record(|_, record| {
        has_some |= record.is_ok_and(|record| record.meta.depth == 0 && is_meant(&record.meta));
    });
    walked.map_err(|e| Error::io(format!("cannot read {}", found.path.display()), e))?;
    if !has_some {
        return Ok(nothing);
    }
    let (frame_bytes, description) = (superblock.frame_bytes, superblock.description);
    let config = DiskConfig {
        dir: dir.to_owned(),
        cap_bytes,
        frame_sizes: frame_bytes.into(),
        namespace,
        description,
    };
    let (tier, entries) = DiskTier::open_beside(&config, root)?;
    let mut gone = HashSet::new();
    let mut slots = Vec::new();
    for entry in entries {
        let meta = entry.meta;
        if if meta.depth == 0 { is_meant(&meta) } else { gone.contains(&meta.parent) } {
            gone.insert(meta.key);
            slots.push(entry.slot);
        }
    }
    let num_chunks = slots.len() as u64;
    let num_left = slots.iter().rev().filter(|slot| tier.free(**slot).is_err()).count() as u64;
    tier.close();
    let num_freed = num_chunks - num_left;
    let num_bytes = num_freed * frame_bytes;
    Ok(Erased { num_chunks: num_freed, num_bytes, is_cut_short: num_left > 0, ..nothing })
}

/// Whether a namespace that cannot be read now may be read later, when the system has descriptors
/// again, say. With anything wrong in it, it is started over before it is used.
fn is_whole(found: &Found) -> bool {
    let has_files = [INDEX_NAME, FRAMES_NAME].iter().all(|name| found.path.join(name).is_file());
    let is_ours = |superblock: &Superblock| {
        superblock.namespace().is_some_and(|of| namespaces::dir_name(&of) == found.name)
    };
    let may_be_ours = match Superblock::read(&found.path) {
        Ok(read) => read.is_some_and(|read| read.is_ok_and(|superblock| is_ours(&superblock))),
        Err(_) => true,
    };
    has_files && may_be_ours && !namespaces::has_strange_files(&found.path)
}
