//! Lists each tenant's chunks in a store, for status reports.

use serde::{Deserialize, Serialize};

use crate::index::TenantId;
use crate::io::FRAME_ALIGN;
use crate::key::SaltTag;
use crate::store::open::Store;
use crate::store::state::State;
use crate::store::tenants::limits::Ceiling;
use crate::store::tenants::table::TENANTS_PER_SLICE;

/// Usage and limits of one tenant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tenant {
    /// None for requests without a salt.
    pub tag: Option<SaltTag>,
    /// Bytes of its frames in host memory.
    pub host_bytes: u64,
    /// Bytes of its slots on disk.
    pub disk_bytes: u64,
    /// Its quota in host memory, in bytes.
    pub max_host_bytes: Option<u64>,
    /// Its quota on disk, in bytes.
    pub max_disk_bytes: Option<u64>,
    /// Time to live of its chunks, in seconds.
    pub ttl_s: Option<u32>,
}

impl State {
    fn tenants(&self, next: &mut usize) -> (Vec<Tenant>, u64) {
        let is_set = |number: u32| Some(number).filter(|number| *number != Ceiling::NONE);
        let bytes = |pages: u32| u64::from(pages) * FRAME_ALIGN;
        let tenant = |tenant: TenantId| {
            let ceiling = self.tenants.ceiling(tenant);
            Tenant {
                tag: self.tenants.tag(tenant),
                host_bytes: bytes(self.tenants.host_pages(tenant)),
                disk_bytes: bytes(self.tenants.disk_pages(tenant)),
                max_host_bytes: is_set(ceiling.host).map(bytes),
                max_disk_bytes: is_set(ceiling.disk).map(bytes),
                ttl_s: is_set(ceiling.ttl_s),
            }
        };
        let some: Vec<_> = (*next..*next + TENANTS_PER_SLICE)
            .map_while(|nth| self.tenants.nth(nth))
            .map(tenant)
            .collect();
        *next += some.len();
        (some, self.tenants.num_salts())
    }
}

impl Store {
    /// Returns the `limit` tenants with the most bytes in host memory, then on disk, and the number
    /// of salts that have chunks.
    pub fn tenants(&self, limit: usize) -> (Vec<Tenant>, u64) {
        let (mut all, mut next, mut num) = (Vec::new(), 0, 0);
        while let Some((some, num_salts)) = self.inner.with_state(|state| state.tenants(&mut next))
        {
            num = num_salts;
            if some.is_empty() {
                break;
            }
            all.extend(some);
            all.sort_by_key(|tenant: &Tenant| {
                std::cmp::Reverse((
                    tenant.host_bytes,
                    tenant.disk_bytes,
                    tenant.tag.map(|tag| tag.0),
                ))
            });
            all.truncate(limit);
        }
        all.retain(|tenant| tenant.host_bytes > 0 || tenant.disk_bytes > 0);
        (all, num)
    }
}
