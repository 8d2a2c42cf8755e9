//! Current usage per tenant. All chunks under roots with the same `cache_salt` belong to one
//! tenant, regardless of their adapter.
//!
//! An entry takes its tenant from its parent or, if it has no parent, from its root key, so finding
//! a tenant needs no tree walk. A tenant is removed once it has no chunks left. Salts appear only
//! as tags at the end of root keys.

use rustc_hash::FxHashMap;

use crate::evict::TenantId;
use crate::key::SaltTag;
use crate::store::tenants::limits::{Ceiling, Class, Table};

/// The tenant of requests without a salt.
const NO_SALT: TenantId = TenantId(0);
/// Maximum number of tenants to visit per call of `State::trim`. Visiting this many tenants takes
/// about 0.2 ms.
pub(crate) const TENANTS_PER_SLICE: usize = 4096;

/// One tenant's usage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TenantCounts {
    /// The salt's tag. None for vacant ids and for requests without a salt.
    tag: Option<SaltTag>,
    num_entries: u64,
    /// Number of pages in the tenant's host frames, including frames being filled.
    host_pages: u64,
    /// Number of pages in the tenant's disk slots, including slots being written or freed.
    disk_pages: u64,
    class: Class,
}

#[derive(Debug)]
pub(crate) struct TenantTable {
    by_tag: FxHashMap<SaltTag, TenantId>,
    all: Vec<TenantCounts>,
    vacant: Vec<TenantId>,
    pub(crate) limits: Table,
}

impl Default for TenantTable {
    fn default() -> Self {
        Self {
            by_tag: FxHashMap::default(),
            all: vec![TenantCounts::default()],
            vacant: Vec::new(),
            limits: Table::default(),
        }
    }
}

impl TenantTable {
    /// Returns the tenant with this tag, or None if it has no chunks.
    pub(crate) fn find(&self, tag: SaltTag) -> Option<TenantId> {
        self.by_tag.get(&tag).copied()
    }

    /// Like [`Self::find`], but returns the tenant of requests without a salt if `tag` is None.
    pub(crate) fn find_any(&self, tag: Option<SaltTag>) -> Option<TenantId> {
        tag.map_or(Some(NO_SALT), |tag| self.find(tag))
    }

    pub(crate) fn find_or_add(&mut self, tag: Option<SaltTag>) -> TenantId {
        let Some(tag) = tag else { return NO_SALT };
        let Self { by_tag, all, vacant, limits, .. } = self;
        *by_tag.entry(tag).or_insert_with(|| {
            let id = vacant.pop().unwrap_or_else(|| {
                all.push(TenantCounts::default());
                TenantId(
                    u32::try_from(all.len() - 1)
                        .expect("each tenant has an entry, and the number of entries fits in u32"),
                )
            });
            let tenant = &mut all[id.0 as usize];
            (tenant.tag, tenant.class) = (Some(tag), limits.class_of(Some(tag)));
            id
        })
    }

    /// Increments or decrements a tenant's entry count. Removes the tenant if no entries remain.
    pub(crate) fn count_entry(&mut self, id: TenantId, is_more: bool) {
        let tenant = &mut self.all[id.0 as usize];
        count(&mut tenant.num_entries, 1, is_more);
        if let (0, Some(tag)) = (tenant.num_entries, tenant.tag) {
            *tenant = TenantCounts::default();
            self.by_tag.remove(&tag);
            self.vacant.push(id);
        }
    }

    /// Adds or subtracts a frame's pages, regardless of the chunk's state.
    pub(crate) fn count_host(&mut self, id: TenantId, pages: u32, is_more: bool) {
        count(&mut self.all[id.0 as usize].host_pages, pages.into(), is_more);
    }

    /// Adds or subtracts a disk slot's pages, even while the slot is being written or freed.
    pub(crate) fn count_disk(&mut self, id: TenantId, pages: u32, is_more: bool) {
        count(&mut self.all[id.0 as usize].disk_pages, pages.into(), is_more);
    }

    pub(crate) fn host_pages(&self, id: TenantId) -> u64 {
        self.all[id.0 as usize].host_pages
    }

    pub(crate) fn disk_pages(&self, id: TenantId) -> u64 {
        self.all[id.0 as usize].disk_pages
    }

    pub(crate) fn ceiling(&self, id: TenantId) -> Ceiling {
        self.limits.ceiling(self.all[id.0 as usize].class)
    }

    /// Returns the `nth` id, which may be vacant. Returns None after the last id.
    pub(crate) fn nth(&self, nth: usize) -> Option<TenantId> {
        u32::try_from(nth).ok().filter(|_| nth < self.all.len()).map(TenantId)
    }

    pub(crate) fn tag(&self, id: TenantId) -> Option<SaltTag> {
        self.all[id.0 as usize].tag
    }

    pub(crate) fn num_salts(&self) -> u64 {
        self.by_tag.len() as u64
    }
}

fn count(number: &mut u64, by: u64, is_more: bool) {
    *number = if is_more { *number + by } else { *number - by };
}

#[cfg(any(test, feature = "testing"))]
mod tests;
