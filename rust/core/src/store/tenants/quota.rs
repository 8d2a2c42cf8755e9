//! Quotas: who has as much of a tier as it may gets room from what is its own only, the coldest first, or none.
//!
//! A frame counts from the moment it is taken, so a quota is kept at every instant. It is above what its tenant has only where it
//! became smaller, or where the disk held more when it was opened: then `trim` takes what may go, a slice a call.

use crate::evict::{ChunkId, GroupId};
use crate::index::{Entry, TenantId};
use crate::key::SaltTag;
use crate::store::state::State;
use crate::store::tenants::limits::{Bases, Ceiling};
use crate::tier::host::Grid;

/// Where room for a chunk may come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Room {
    /// From the whole tier.
    Any,
    /// From this tenant's chunks: it has as much as it may.
    Own(TenantId),
    /// It may have nothing.
    None,
}

/// The group of a policy that a tenant's chunks are.
pub(crate) fn group(tenant: TenantId) -> GroupId {
    GroupId(tenant.0)
}

impl State {
    /// Where a frame for a new chunk may come from.
    pub(crate) fn room_for(&self, new: &Entry, parent: Option<ChunkId>) -> Room {
        if !self.tenants.limits.has_quotas {
            return Room::Any;
        }
        let tag = SaltTag::of_root(&new.parent_key);
        match parent.map(|parent| self.index[parent].tenant).or_else(|| self.tenants.find_any(tag)) {
            Some(tenant) => self.room_of(tenant),
            None if self.tenants.limits.ceiling(self.tenants.limits.class_of(tag)).host == 0 => Room::None,
            None => Room::Any,
        }
    }

    /// Where another frame for a tenant may come from.
    pub(crate) fn room_of(&self, tenant: TenantId) -> Room {
        let has_room =
            !self.tenants.limits.has_quotas || self.tenants.num_frames(tenant) < self.tenants.ceiling(tenant).host;
        if has_room { Room::Any } else { Room::Own(tenant) }
    }

    /// The chunk has a frame, so the host policy knows it: it may be asked for its tenant's.
    pub(crate) fn group_in_host(&mut self, id: ChunkId) {
        let tenant = self.index[id].tenant;
        if self.tenants.limits.has_quotas && self.tenants.ceiling(tenant).host != Ceiling::NONE {
            self.host_policy.set_group(id, group(tenant));
        }
    }

    /// The same of the disk.
    pub(crate) fn group_on_disk(&mut self, id: ChunkId) {
        let tenant = self.index[id].tenant;
        if self.tenants.limits.has_quotas && self.tenants.ceiling(tenant).disk != Ceiling::NONE {
            self.disk_policy.set_group(id, group(tenant));
        }
    }

    /// Looks again what percentages are of. A store without engines has no share, and keeps what it has.
    pub(crate) fn update_bases(&mut self) {
        let host = self.host.grid().map_or_else(|| self.host.num_frames().0, Grid::share);
        let host = if host > 0 { host } else { self.tenants.limits.bases().host };
        let bases = Bases { host, ..self.tenants.limits.bases() };
        self.tenants.limits.set_bases(bases);
    }
}
