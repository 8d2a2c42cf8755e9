//! Tests the tenant counts, and defines a consistency check that other tests call.

#[cfg(test)]
use super::NO_SALT;
use super::{TenantCounts, TenantTable};
use crate::evict::TenantId;
use crate::index::Entry;
use crate::io::SizeClass;

impl TenantTable {
    /// Returns true if the table matches the usage recounted from the entries.
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
            tenant.host_pages +=
                entry.host.frame().map_or(0, |frame| u64::from(pages_of(frame.class())));
            tenant.disk_pages += u64::from(entry.disk_pages);
        }
        let is_used = |tenant: &&TenantCounts| tenant.tag.is_some() && tenant.num_entries > 0;
        let num_used = counted.iter().filter(is_used).count();
        counted == self.all && self.by_tag.len() == num_used
    }
}

#[test]
fn disk_usage_above_16_tib_is_counted() {
    let mut table = TenantTable::default();
    for _ in 0..3 {
        table.count_disk(NO_SALT, 1 << 31, true);
    }
    assert_eq!(table.disk_pages(NO_SALT), 3 << 31);
}
