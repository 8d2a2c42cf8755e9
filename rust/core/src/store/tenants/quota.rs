//! Quotas: a tenant at its quota gets a frame or slot only by evicting its own coldest chunk.
//!
//! A frame counts toward the quota as soon as it is taken, so a tenant exceeds its quota only if
//! the quota was lowered or the opened disk directory already held too many of its chunks. In
//! either case, the sweeper evicts the excess.

use crate::evict::{ChunkId, TenantId};
use crate::index::Entry;
use crate::io::{FRAME_ALIGN, SizeClass};
use crate::key::SaltTag;
use crate::store::state::State;
use crate::store::tenants::limits::{Bases, Ceiling};

/// The frames that a chunk may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FrameSource {
    /// Any frame of the tier, because the tenant is below its quota.
    Any,
    /// Only frames of this tenant's chunks, because the tenant is at its quota.
    Own(TenantId),
    /// No frame, because the requested frame is larger than the tenant's quota.
    None,
}

impl State {
    /// Returns which frames of `class` a new chunk may use.
    pub(crate) fn source_for(
        &self,
        new: &Entry,
        parent: Option<ChunkId>,
        class: SizeClass,
    ) -> FrameSource {
        if !self.tenants.limits.has_quotas {
            return FrameSource::Any;
        }
        let tag = SaltTag::of_root(&new.parent_key);
        match parent.map(|parent| self.index[parent].tenant).or_else(|| self.tenants.find_any(tag))
        {
            Some(tenant) => self.source_of(tenant, class),
            None if self.tenants.limits.ceiling(self.tenants.limits.class_of(tag)).host
                < self.host.pages(class).into() =>
            {
                FrameSource::None
            }
            None => FrameSource::Any,
        }
    }

    /// Returns which frames of `class` a tenant may use in addition to its current frames.
    pub(crate) fn source_of(&self, tenant: TenantId, class: SizeClass) -> FrameSource {
        if !self.tenants.limits.has_quotas {
            return FrameSource::Any;
        }
        let (pages, quota) = (u64::from(self.host.pages(class)), self.tenants.ceiling(tenant).host);
        match self.tenants.host_pages(tenant) + pages {
            wanted if wanted <= quota => FrameSource::Any,
            _ if pages > quota => FrameSource::None,
            _ => FrameSource::Own(tenant),
        }
    }

    /// Sets the chunk's tenant in the host policy if the tenant has a host quota.
    pub(crate) fn set_tenant_in_host(&mut self, id: ChunkId) {
        let tenant = self.index[id].tenant;
        if self.tenants.limits.has_quotas && self.tenants.ceiling(tenant).host != Ceiling::NONE {
            self.host_policy.set_tenant(id, tenant);
        }
    }

    /// Sets the chunk's tenant in the disk policy if the tenant has a disk quota.
    pub(crate) fn set_tenant_on_disk(&mut self, id: ChunkId) {
        let tenant = self.index[id].tenant;
        if self.tenants.limits.has_quotas && self.tenants.ceiling(tenant).disk != Ceiling::NONE {
            self.disk_policy.set_tenant(id, tenant);
        }
    }

    /// Updates the tier sizes that relative quotas are based on. A store that has lost its pool
    /// share keeps the previous size.
    pub(crate) fn update_bases(&mut self) {
        let host = self.host.share_bytes() / FRAME_ALIGN;
        let host = if host > 0 { host } else { self.tenants.limits.bases.host };
        let bases = Bases { host, ..self.tenants.limits.bases };
        self.tenants.limits.set_bases(bases);
    }
}
