//! Whose chunks are whose: those under roots of one cache salt have one owner, whatever their adapter.
//!
//! An entry has its parent's owner, and a first chunk that of its root, so asking walks nothing. Owners without chunks are
//! forgotten. Nothing here knows salts, only the tags that roots end with.

use rustc_hash::FxHashMap;

use super::limits::{Ceiling, Class, Table};
use crate::index::OwnerId;
use crate::key::SaltTag;

/// What has no salt.
const NO_SALT: OwnerId = OwnerId(0);
/// Owners looked at by one call: some 0.2 ms.
pub(super) const OWNERS: usize = 4096;

/// What one has now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Owner {
    /// None: the number is free.
    tag: Option<SaltTag>,
    num_entries: u32,
    /// Frames that its chunks have, those being filled too.
    num_frames: u32,
    /// Its chunks on disk, on their way there or away.
    num_slots: u32,
    class: Class,
}

#[derive(Debug)]
pub(super) struct Owners {
    by_tag: FxHashMap<SaltTag, OwnerId>,
    all: Vec<Owner>,
    vacant: Vec<OwnerId>,
    /// What each may have.
    pub(super) limits: Table,
}

impl Default for Owners {
    fn default() -> Self {
        Self { by_tag: FxHashMap::default(), all: vec![Owner::default()], vacant: Vec::new(), limits: Table::default() }
    }
}

impl Owners {
    /// The owner of what hangs on roots with that tag, if there is anything.
    pub(super) fn find(&self, tag: SaltTag) -> Option<OwnerId> {
        self.by_tag.get(&tag).copied()
    }

    /// The same, with the one of what has no salt.
    pub(super) fn find_any(&self, tag: Option<SaltTag>) -> Option<OwnerId> {
        tag.map_or(Some(NO_SALT), |tag| self.find(tag))
    }

    pub(super) fn find_or_add(&mut self, tag: Option<SaltTag>) -> OwnerId {
        let Some(tag) = tag else { return NO_SALT };
        let Self { by_tag, all, vacant, limits, .. } = self;
        *by_tag.entry(tag).or_insert_with(|| {
            let id = vacant.pop().unwrap_or_else(|| {
                all.push(Owner::default());
                OwnerId(u32::try_from(all.len() - 1).expect("each has an entry, and entries are counted in u32"))
            });
            let owner = &mut all[id.0 as usize];
            (owner.tag, owner.class) = (Some(tag), limits.class_of(Some(tag)));
            id
        })
    }

    /// Counts one entry more, or one less; an owner whose last entry is gone is removed.
    pub(super) fn count_entry(&mut self, id: OwnerId, is_more: bool) {
        let owner = &mut self.all[id.0 as usize];
        step(&mut owner.num_entries, is_more);
        if let (0, Some(tag)) = (owner.num_entries, owner.tag) {
            *owner = Owner::default();
            self.by_tag.remove(&tag);
            self.vacant.push(id);
        }
    }

    /// It has a frame more, or one less, for a chunk in whatever state.
    pub(super) fn count_frame(&mut self, id: OwnerId, is_more: bool) {
        step(&mut self.all[id.0 as usize].num_frames, is_more);
    }

    /// The same of places on disk, that are being written or freed too.
    pub(super) fn count_slot(&mut self, id: OwnerId, is_more: bool) {
        step(&mut self.all[id.0 as usize].num_slots, is_more);
    }

    pub(super) fn num_frames(&self, id: OwnerId) -> u32 {
        self.all[id.0 as usize].num_frames
    }

    pub(super) fn num_slots(&self, id: OwnerId) -> u32 {
        self.all[id.0 as usize].num_slots
    }

    /// What it may have.
    pub(super) fn ceiling(&self, id: OwnerId) -> Ceiling {
        self.limits.ceiling(self.all[id.0 as usize].class)
    }

    /// The `nth` place of an owner, which may have nothing.
    pub(super) fn nth(&self, nth: usize) -> Option<OwnerId> {
        u32::try_from(nth).ok().filter(|_| nth < self.all.len()).map(OwnerId)
    }

    pub(super) fn tag(&self, id: OwnerId) -> Option<SaltTag> {
        self.all[id.0 as usize].tag
    }

    /// Number of salts that have at least one entry.
    pub(super) fn num_salts(&self) -> u64 {
        self.by_tag.len() as u64
    }

    /// Every number again, from the entries; for checks.
    #[cfg(any(test, feature = "faults"))]
    pub(super) fn check<'a>(&self, entries: impl Iterator<Item = (OwnerId, &'a crate::index::Entry)>) -> bool {
        let keep = |&Owner { tag, class, .. }: &Owner| Owner { tag, class, ..Owner::default() };
        let mut counted: Vec<_> = self.all.iter().map(keep).collect();
        for (id, entry) in entries {
            let owner = &mut counted[id.0 as usize];
            owner.num_entries += 1;
            owner.num_frames += u32::from(entry.host.place().is_some());
            owner.num_slots += u32::from(!entry.disk.is_absent());
        }
        let is_used = |owner: &&Owner| owner.tag.is_some() && owner.num_entries > 0;
        let num_used = counted.iter().filter(is_used).count();
        counted == self.all && self.by_tag.len() == num_used
    }
}

fn step(number: &mut u32, is_more: bool) {
    *number = if is_more { *number + 1 } else { *number - 1 };
}
