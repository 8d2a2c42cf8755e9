//! Whose chunks are whose: those under roots of one cache salt have one owner, whatever their adapter.
//!
//! An entry has its parent's owner, and a first chunk that of its root, so asking walks nothing. Owners without chunks are
//! forgotten. Nothing here knows salts, only the tags that roots end with.

use rustc_hash::FxHashMap;

use super::state::State;
use crate::evict::ChunkId;
use crate::index::{Entry, OwnerId};
use crate::key::SaltTag;

/// What has no salt.
const NO_SALT: OwnerId = OwnerId(0);

/// What one has now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Owner {
    /// None: nobody has this number.
    tag: Option<SaltTag>,
    num_entries: u32,
    num_host: u32,
    num_disk: u32,
}

#[derive(Debug)]
pub(super) struct Owners {
    by_tag: FxHashMap<SaltTag, OwnerId>,
    all: Vec<Owner>,
    vacant: Vec<OwnerId>,
}

impl Default for Owners {
    fn default() -> Self {
        Self { by_tag: FxHashMap::default(), all: vec![Owner::default()], vacant: Vec::new() }
    }
}

impl Owners {
    /// The owner of what hangs on roots with that tag, if there is anything.
    pub(super) fn find(&self, tag: SaltTag) -> Option<OwnerId> {
        self.by_tag.get(&tag).copied()
    }

    fn find_or_add(&mut self, tag: Option<SaltTag>) -> OwnerId {
        let Some(tag) = tag else { return NO_SALT };
        let Self { by_tag, all, vacant } = self;
        *by_tag.entry(tag).or_insert_with(|| {
            let id = vacant.pop().unwrap_or_else(|| {
                all.push(Owner::default());
                OwnerId(u32::try_from(all.len() - 1).expect("each has an entry, and entries are counted in u32"))
            });
            all[id.0 as usize].tag = Some(tag);
            id
        })
    }

    fn change(&mut self, id: OwnerId, change: impl FnOnce(&mut Owner)) {
        let owner = &mut self.all[id.0 as usize];
        change(owner);
        if let (0, Some(tag)) = (owner.num_entries, owner.tag) {
            *owner = Owner::default();
            self.by_tag.remove(&tag);
            self.vacant.push(id);
        }
    }

    /// It has an entry more, or one less.
    pub(super) fn count_entry(&mut self, id: OwnerId, is_more: bool) {
        self.change(id, |owner| step(&mut owner.num_entries, is_more));
    }

    /// The same of visible chunks in host.
    pub(super) fn count_host(&mut self, id: OwnerId, is_more: bool) {
        self.change(id, |owner| step(&mut owner.num_host, is_more));
    }

    /// The same of chunks on disk.
    pub(super) fn count_disk(&mut self, id: OwnerId, is_more: bool) {
        self.change(id, |owner| step(&mut owner.num_disk, is_more));
    }

    /// Every number again, from the entries; for checks.
    #[cfg(any(test, feature = "faults"))]
    pub(super) fn check<'a>(&self, entries: impl Iterator<Item = (OwnerId, &'a Entry)>) -> bool {
        let mut counted = vec![Owner::default(); self.all.len()];
        for (id, entry) in entries {
            let owner = &mut counted[id.0 as usize];
            owner.tag = self.all[id.0 as usize].tag;
            owner.num_entries += 1;
            owner.num_host += u32::from(entry.host.is_here());
            owner.num_disk += u32::from(entry.disk.place().is_some());
        }
        let num_known = self.all.iter().filter(|owner| owner.tag.is_some()).count();
        counted == self.all && self.by_tag.len() == num_known
    }
}

fn step(number: &mut u32, is_more: bool) {
    *number = if is_more { *number + 1 } else { *number - 1 };
}

impl State {
    /// Enters a chunk that is in no tier yet.
    pub(super) fn add(&mut self, new: Entry) -> ChunkId {
        let owner = match new.parent {
            Some(parent) => self.index[parent].owner,
            None => self.owners.find_or_add(SaltTag::of_root(&new.parent_key)),
        };
        self.owners.count_entry(owner, true);
        self.index.insert(Entry { owner, ..new })
    }
}
