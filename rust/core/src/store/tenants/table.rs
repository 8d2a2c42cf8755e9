//! Current use of each tenant. Chunks under roots with one `cache_salt` belong to one tenant,
//! whatever their adapter.
//!
//! An entry has its parent's tenant, and a first chunk that of its root, so no lookup walks a tree.
//! A tenant whose last chunk is gone is removed. Salts appear here only as the tags at the end of
//! root keys.

use rustc_hash::FxHashMap;

use crate::index::TenantId;
use crate::key::SaltTag;
use crate::store::tenants::limits::{Ceiling, Class, Table};

/// The tenant of requests without a salt.
const NO_SALT: TenantId = TenantId(0);
/// Tenants visited by one call: some 0.2 ms.
pub(crate) const TENANTS_PER_SLICE: usize = 4096;

/// Use of one tenant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TenantCounts {
    /// None if the id is vacant, or for requests without a salt.
    tag: Option<SaltTag>,
    num_entries: u32,
    /// Pages of its chunks' frames, including those being filled.
    host_pages: u32,
    /// Pages of its chunks that are on disk, being written or being freed.
    disk_pages: u32,
    class: Class,
}

#[derive(Debug)]
pub(crate) struct TenantTable {
    by_tag: FxHashMap<SaltTag, TenantId>,
    all: Vec<TenantCounts>,
    vacant: Vec<TenantId>,
    /// The limits of each class of tenants.
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
    /// Returns the tenant of roots with that tag, if it has an entry.
    pub(crate) fn find(&self, tag: SaltTag) -> Option<TenantId> {
        self.by_tag.get(&tag).copied()
    }

    /// As [`Self::find`]; without a tag, the tenant of requests without a salt.
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
                        .expect("each has an entry, and entries are counted in u32"),
                )
            });
            let tenant = &mut all[id.0 as usize];
            (tenant.tag, tenant.class) = (Some(tag), limits.class_of(Some(tag)));
            id
        })
    }

    /// Adds one entry to a tenant or takes one away; a tenant whose last entry is gone is removed.
    pub(crate) fn count_entry(&mut self, id: TenantId, is_more: bool) {
        let tenant = &mut self.all[id.0 as usize];
        count(&mut tenant.num_entries, 1, is_more);
        if let (0, Some(tag)) = (tenant.num_entries, tenant.tag) {
            *tenant = TenantCounts::default();
            self.by_tag.remove(&tag);
            self.vacant.push(id);
        }
    }

    /// Adds the pages of a frame or takes them away, in any state of its chunk.
    pub(crate) fn count_host(&mut self, id: TenantId, pages: u32, is_more: bool) {
        count(&mut self.all[id.0 as usize].host_pages, pages, is_more);
    }

    /// Adds the pages of a slot on disk or takes them away, including those being written or freed.
    pub(crate) fn count_disk(&mut self, id: TenantId, pages: u32, is_more: bool) {
        count(&mut self.all[id.0 as usize].disk_pages, pages, is_more);
    }

    pub(crate) fn host_pages(&self, id: TenantId) -> u32 {
        self.all[id.0 as usize].host_pages
    }

    pub(crate) fn disk_pages(&self, id: TenantId) -> u32 {
        self.all[id.0 as usize].disk_pages
    }

    pub(crate) fn ceiling(&self, id: TenantId) -> Ceiling {
        self.limits.ceiling(self.all[id.0 as usize].class)
    }

    /// Returns the `nth` id, which may be vacant; None behind the last one.
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

fn count(number: &mut u32, by: u32, is_more: bool) {
    *number = if is_more { *number + by } else { *number - by };
}

#[cfg(any(test, feature = "testing"))]
mod tests;
