//! Whose chunks are whose: those under roots of one cache salt have one owner, whatever their adapter.
//!
//! An entry has its parent's owner, and a first chunk that of its root, so asking walks nothing. Owners without chunks are
//! forgotten. Nothing here knows salts, only the tags that roots end with.
//! What an owner has may be *kept*, which is a mark and a count here; `kept` heeds it.

use rustc_hash::FxHashMap;

use super::limits::{Ceiling, Class, Table};
use crate::index::OwnerId;
use crate::key::SaltTag;
use crate::{Error, ErrorKind, Result};

/// What has no salt.
const NO_SALT: OwnerId = OwnerId(0);
/// Owners looked at by one call: some 0.2 ms.
pub(super) const OWNERS: usize = 4096;
/// Most owners whose chunks are kept.
const MAX_KEPT: u64 = 1024;

/// What one has now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Owner {
    /// None: the number is free.
    tag: Option<SaltTag>,
    num_entries: u32,
    num_host: u32,
    num_disk: u32,
    /// Frames that its chunks have, those being filled too.
    num_frames: u32,
    /// Its chunks on disk, on their way there or away.
    num_slots: u32,
    is_kept: bool,
    class: Class,
}

/// What is kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Kept {
    /// Salts.
    pub num_salts: u64,
    /// Chunks in host memory.
    pub num_host: u64,
    /// Chunks on disk.
    pub num_disk: u64,
}

#[derive(Debug)]
pub(super) struct Owners {
    by_tag: FxHashMap<SaltTag, OwnerId>,
    all: Vec<Owner>,
    vacant: Vec<OwnerId>,
    pub(super) kept: Kept,
    /// What each may have.
    pub(super) limits: Table,
    /// A look past kept chunks found none that may go, since the lock was taken: the next would find none either.
    pub(super) is_in_vain: bool,
}

impl Default for Owners {
    fn default() -> Self {
        Self {
            by_tag: FxHashMap::default(),
            all: vec![Owner::default()],
            vacant: Vec::new(),
            kept: Kept::default(),
            limits: Table::default(),
            is_in_vain: false,
        }
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

    fn change(&mut self, id: OwnerId, change: impl FnOnce(&mut Owner)) {
        let owner = &mut self.all[id.0 as usize];
        self.kept.count(owner, false);
        change(owner);
        self.kept.count(owner, true);
        if let (0, false, Some(tag)) = (owner.num_entries, owner.is_kept, owner.tag) {
            *owner = Owner::default();
            self.by_tag.remove(&tag);
            self.vacant.push(id);
        }
    }

    /// Keeps what has that tag from now on, or no more. `InvalidConfig` if that would be too many.
    pub(super) fn keep(&mut self, tag: SaltTag, is_kept: bool) -> Result<()> {
        let is_known = self.find(tag).is_some_and(|id| self.is_kept(id));
        if is_kept && !is_known && self.kept.num_salts >= MAX_KEPT {
            let message = format!("{MAX_KEPT} salts of this namespace are pinned, which is the most; unpin some");
            return Err(Error::new(ErrorKind::InvalidConfig, message));
        }
        if is_kept {
            let id = self.find_or_add(Some(tag));
            self.change(id, |owner| owner.is_kept = true);
        } else {
            self.unkeep(tag);
        }
        Ok(())
    }

    fn unkeep(&mut self, tag: SaltTag) {
        if let Some(id) = self.find(tag) {
            self.change(id, |owner| owner.is_kept = false);
        }
    }

    /// Keeps nothing any more.
    pub(super) fn keep_none(&mut self) {
        let kept: Vec<_> = self.all.iter().filter(|owner| owner.is_kept).filter_map(|owner| owner.tag).collect();
        for tag in kept {
            self.unkeep(tag);
        }
    }

    /// What is kept of that tag.
    pub(super) fn kept_of(&self, tag: SaltTag) -> Kept {
        let mut kept = Kept::default();
        if let Some(id) = self.find(tag) {
            kept.count(&self.all[id.0 as usize], true);
        }
        kept
    }

    pub(super) fn is_kept(&self, id: OwnerId) -> bool {
        self.all[id.0 as usize].is_kept
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

    /// Salts that have something, or are kept.
    pub(super) fn num_salts(&self) -> u64 {
        self.by_tag.len() as u64
    }

    /// Every number again, from the entries; for checks.
    #[cfg(any(test, feature = "faults"))]
    pub(super) fn check<'a>(&self, entries: impl Iterator<Item = (OwnerId, &'a crate::index::Entry)>) -> bool {
        let keep = |&Owner { tag, is_kept, class, .. }: &Owner| Owner { tag, is_kept, class, ..Owner::default() };
        let mut counted: Vec<_> = self.all.iter().map(keep).collect();
        for (id, entry) in entries {
            let owner = &mut counted[id.0 as usize];
            owner.num_entries += 1;
            owner.num_host += u32::from(entry.host.is_here());
            owner.num_disk += u32::from(entry.disk.place().is_some());
            owner.num_frames += u32::from(entry.host.place().is_some());
            owner.num_slots += u32::from(!entry.disk.is_absent());
        }
        let mut kept = Kept::default();
        for owner in &counted {
            kept.count(owner, true);
        }
        let is_used = |owner: &&Owner| owner.tag.is_some() && (owner.num_entries > 0 || owner.is_kept);
        let num_used = counted.iter().filter(is_used).count();
        counted == self.all && kept == self.kept && self.by_tag.len() == num_used
    }
}

impl Kept {
    fn count(&mut self, owner: &Owner, is_more: bool) {
        if owner.is_kept {
            let own = [1, owner.num_host, owner.num_disk].map(u64::from);
            for (number, own) in [&mut self.num_salts, &mut self.num_host, &mut self.num_disk].into_iter().zip(own) {
                *number = if is_more { *number + own } else { *number - own };
            }
        }
    }
}

fn step(number: &mut u32, is_more: bool) {
    *number = if is_more { *number + 1 } else { *number - 1 };
}
