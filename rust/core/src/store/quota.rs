//! Quotas: who has as much of a tier as it may gets room from what is its own only, the coldest first, or none.
//!
//! A frame counts from the moment it is taken, so a quota is kept at every instant. It is above what its owner has only where it
//! became smaller, or where the disk held more when it was opened: then `trim` takes what may go, a slice a call.

use super::Store;
use super::limits::{Bases, Ceiling};
use super::state::State;
use crate::evict::{ChunkId, GroupId, Removal};
use crate::index::{Entry, OwnerId};
use crate::io::FrameId;
use crate::key::SaltTag;
use crate::tier::disk::SlotId;
use crate::tier::host::{FrameFor, Grid};

/// Most chunks looked at for one frame whose own frames would not do.
const MAX_SPARED: usize = 64;
/// Owners looked at by one call of `trim`, and chunks taken by it: some 0.2 ms.
const OWNERS: usize = 4096;
const MAX_TRIMMED: u32 = 128;

/// Where room for a chunk may come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Room {
    /// From the whole tier.
    Any,
    /// From this owner's chunks: it has as much as it may.
    Own(OwnerId),
    /// It may have nothing.
    None,
}

/// Room on disk for a chunk that is about to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// It is within its owner's quota.
    Fits,
    /// This one of its owner's has to leave first; `end_eviction` must follow.
    After(ChunkId, SlotId),
    /// Nothing of its owner's may go.
    None,
}

fn group(owner: OwnerId) -> GroupId {
    GroupId(owner.0)
}

impl State {
    /// Where a frame for a new chunk may come from.
    pub(super) fn room_for(&self, new: &Entry, parent: Option<ChunkId>) -> Room {
        if !self.owners.limits.has_quotas {
            return Room::Any;
        }
        let tag = SaltTag::of_root(&new.parent_key);
        match parent.map(|parent| self.index[parent].owner).or_else(|| self.owners.find_any(tag)) {
            Some(owner) => self.room_of(owner),
            None if self.owners.limits.ceiling(self.owners.limits.class_of(tag)).host == 0 => Room::None,
            None => Room::Any,
        }
    }

    /// Where another frame for an owner may come from.
    pub(super) fn room_of(&self, owner: OwnerId) -> Room {
        let has_room =
            !self.owners.limits.has_quotas || self.owners.num_frames(owner) < self.owners.ceiling(owner).host;
        if has_room { Room::Any } else { Room::Own(owner) }
    }

    /// The chunk has a frame, so the host policy knows it: it may be asked for its owner's.
    pub(super) fn group_in_host(&mut self, id: ChunkId) {
        let owner = self.index[id].owner;
        if self.owners.limits.has_quotas && self.owners.ceiling(owner).host != Ceiling::NONE {
            self.host_policy.set_group(id, group(owner));
        }
    }

    /// The same of the disk.
    pub(super) fn group_on_disk(&mut self, id: ChunkId) {
        let owner = self.index[id].owner;
        if self.owners.limits.has_quotas && self.owners.ceiling(owner).disk != Ceiling::NONE {
            self.disk_policy.set_group(id, group(owner));
        }
    }

    /// A frame for an owner that has as many as it may: one of its own chunks leaves, and no other's.
    pub(super) fn take_own_frame(&mut self, owner: OwnerId, what_for: FrameFor) -> Option<FrameId> {
        if self.owners.num_frames(owner) > self.owners.ceiling(owner).host {
            return None; // its quota became smaller: `trim` comes first
        }
        let has_free = self.host.has_free(what_for);
        let (mut frame, mut spared) = (None, Vec::new());
        while frame.is_none()
            && spared.len() < MAX_SPARED
            && let Some(victim) = self.host_policy.victim_of(group(owner))
        {
            let its_frame = self.index[victim].host.place();
            if has_free || its_frame.is_some_and(|its_frame| self.host.is_fit(its_frame, what_for)) {
                self.evict_for_quota(victim);
                frame = self.host.take(what_for);
            } else {
                self.host_policy.set_evictable(victim, false); // its frame would not do, so it must not go for it
                spared.push(victim);
            }
        }
        for id in spared {
            self.host_policy.set_evictable(id, true);
        }
        frame
    }

    fn evict_for_quota(&mut self, id: ChunkId) {
        self.stats.quota_evictions += 1;
        self.evict(id);
    }

    /// Whether the chunk, which is counted already, may be written to disk; what has to leave for it begins to.
    pub(super) fn place_on_disk(&mut self, id: ChunkId) -> Place {
        let owner = self.index[id].owner;
        if !self.owners.limits.has_quotas || self.owners.num_slots(owner) <= self.owners.ceiling(owner).disk {
            return Place::Fits;
        }
        match self.disk_policy.victim_of(group(owner)).and_then(|victim| self.leave_slot(victim)) {
            Some((victim, slot)) => Place::After(victim, slot),
            None => Place::None,
        }
    }

    /// Looks at some owners, from the `next`th on, and takes what they have beyond their quotas and may go; true at the end.
    pub(super) fn trim(&mut self, next: &mut usize) -> bool {
        let mut budget = MAX_TRIMMED;
        for _ in 0..OWNERS {
            let Some(owner) = self.owners.nth(*next).filter(|_| self.owners.limits.has_quotas) else { return true };
            let ceiling = self.owners.ceiling(owner);
            while budget > 0
                && self.owners.num_frames(owner) > ceiling.host
                && let Some(victim) = self.host_policy.victim_of(group(owner))
            {
                self.evict_for_quota(victim);
                budget -= 1;
            }
            while budget > 0
                && self.owners.num_slots(owner) > ceiling.disk
                && let Some(victim) = self.disk_policy.victim_of(group(owner))
            {
                self.drop_for_quota(victim);
                budget -= 1;
            }
            if budget == 0 {
                return false;
            }
            *next += 1;
        }
        false
    }

    /// Takes a chunk off the disk; its slot is freed in time.
    fn drop_for_quota(&mut self, id: ChunkId) {
        self.stats.disk_evictions += 1;
        self.stats.quota_disk_evictions += 1;
        let slot = self.leave_disk(id, Removal::Evicted);
        self.disk.trash.extend(slot);
        self.note_change(id);
        self.wake_behind(id);
        self.settle(id);
    }

    /// Looks again what percentages are of. A store without engines has no share, and keeps what it has.
    pub(super) fn look_at_bases(&mut self) {
        let host = self.host.grid().map_or_else(|| self.host.num_frames().0, Grid::share);
        let host = if host > 0 { host } else { self.owners.limits.bases().host };
        let bases = Bases { host, ..self.owners.limits.bases() };
        self.owners.limits.set_bases(bases);
    }
}

/// One salt, or what has none, and what it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tenant {
    /// None: what has no salt.
    pub tag: Option<SaltTag>,
    /// Frames of host memory that its chunks have.
    pub num_host: u32,
    /// Its chunks on disk.
    pub num_disk: u32,
    /// The most frames that it may have, where there is a quota.
    pub max_host: Option<u32>,
    /// The most chunks on disk.
    pub max_disk: Option<u32>,
    /// Seconds since it was saved after which a chunk is forgotten, where it is.
    pub ttl_s: Option<u32>,
}

impl Store {
    /// Those of its salts that have most, in host memory first, and how many salts have something.
    pub fn tenants(&self, limit: usize) -> (Vec<Tenant>, u64) {
        let (mut all, mut next, mut num) = (Vec::new(), 0, 0);
        while let Some((some, num_salts)) = self.inner.with_books(|state| state.tenants(&mut next)) {
            num = num_salts;
            if some.is_empty() {
                break;
            }
            all.extend(some);
            all.sort_by_key(|tenant: &Tenant| {
                std::cmp::Reverse((tenant.num_host, tenant.num_disk, tenant.tag.map(|tag| tag.0)))
            });
            all.truncate(limit);
        }
        all.retain(|tenant| tenant.num_host > 0 || tenant.num_disk > 0);
        (all, num)
    }
}

impl State {
    fn tenants(&self, next: &mut usize) -> (Vec<Tenant>, u64) {
        let is_set = |number: u32| Some(number).filter(|number| *number != Ceiling::NONE);
        let tenant = |owner: OwnerId| {
            let ceiling = self.owners.ceiling(owner);
            Tenant {
                tag: self.owners.tag(owner),
                num_host: self.owners.num_frames(owner),
                num_disk: self.owners.num_slots(owner),
                max_host: is_set(ceiling.host),
                max_disk: is_set(ceiling.disk),
                ttl_s: is_set(ceiling.ttl_s),
            }
        };
        let some: Vec<_> = (*next..*next + OWNERS).map_while(|nth| self.owners.nth(nth)).map(tenant).collect();
        *next += some.len();
        (some, self.owners.num_salts())
    }
}
