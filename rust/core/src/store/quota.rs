//! Quotas: who has as much of a tier as it may gets room from what is its own only, the coldest first, or none.
//!
//! A frame counts from the moment it is taken, so a quota is kept at every instant. It is above what its owner has only where it
//! became smaller, or where the disk held more when it was opened: then `trim` takes what may go, a slice a call.

use super::limits::{Bases, Ceiling};
use super::state::State;
use crate::evict::{ChunkId, GroupId};
use crate::index::{Entry, OwnerId};
use crate::key::SaltTag;
use crate::tier::host::Grid;

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

/// The group of a policy that an owner's chunks are.
pub(super) fn group(owner: OwnerId) -> GroupId {
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

    /// Looks again what percentages are of. A store without engines has no share, and keeps what it has.
    pub(super) fn look_at_bases(&mut self) {
        let host = self.host.grid().map_or_else(|| self.host.num_frames().0, Grid::share);
        let host = if host > 0 { host } else { self.owners.limits.bases().host };
        let bases = Bases { host, ..self.owners.limits.bases() };
        self.owners.limits.set_bases(bases);
    }
}
