//! Lists what each tenant has in a store, for status reports.

use crate::index::TenantId;
use crate::key::SaltTag;
use crate::store::open::Store;
use crate::store::state::State;
use crate::store::tenants::limits::Ceiling;
use crate::store::tenants::table::TENANTS_PER_SLICE;

/// Usage and limits of one tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tenant {
    /// None for requests without a salt.
    pub tag: Option<SaltTag>,
    /// Its frames in host memory.
    pub num_host: u32,
    /// Its chunks on disk.
    pub num_disk: u32,
    /// Its quota in host memory, in frames.
    pub max_host: Option<u32>,
    /// Its quota on disk, in chunks.
    pub max_disk: Option<u32>,
    /// Time to live of its chunks, in seconds.
    pub ttl_s: Option<u32>,
}

impl State {
    fn tenants(&self, next: &mut usize) -> (Vec<Tenant>, u64) {
        let is_set = |number: u32| Some(number).filter(|number| *number != Ceiling::NONE);
        let tenant = |tenant: TenantId| {
            let ceiling = self.tenants.ceiling(tenant);
            Tenant {
                tag: self.tenants.tag(tenant),
                num_host: self.tenants.num_frames(tenant),
                num_disk: self.tenants.num_slots(tenant),
                max_host: is_set(ceiling.host),
                max_disk: is_set(ceiling.disk),
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
    /// Returns the `limit` tenants with the most frames, then slots, and the number of salts that
    /// have chunks.
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
                std::cmp::Reverse((tenant.num_host, tenant.num_disk, tenant.tag.map(|tag| tag.0)))
            });
            all.truncate(limit);
        }
        all.retain(|tenant| tenant.num_host > 0 || tenant.num_disk > 0);
        (all, num)
    }
}
