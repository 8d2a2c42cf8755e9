//! Checks the consistency of the tenant counts for other tests.

use super::{TenantCounts, TenantTable};
use crate::index::{Entry, TenantId};
use crate::io::SizeClass;

impl TenantTable {
    /// Returns true if the table equals the usage recounted from the entries.
    pub(crate) fn check<'a>(
        &self,
        entries: impl Iterator<Item = (TenantId, &'a Entry)>,
        pages_of: impl Fn(SizeClass) -> u32,
    ) -> bool {
        let keep = |&TenantCounts { tag, class, .. }: &TenantCounts| TenantCounts {
            tag,
            class,
            ..TenantCounts::default()
        };
        let mut counted: Vec<_> = self.all.iter().map(keep).collect();
        for (id, entry) in entries {
            let tenant = &mut counted[id.0 as usize];
            tenant.num_entries += 1;
            tenant.host_pages += entry.host.frame().map_or(0, |frame| pages_of(frame.class()));
            tenant.disk_pages += entry.disk_pages;
        }
        let is_used = |tenant: &&TenantCounts| tenant.tag.is_some() && tenant.num_entries > 0;
        let num_used = counted.iter().filter(is_used).count();
        counted == self.all && self.by_tag.len() == num_used
    }
}
