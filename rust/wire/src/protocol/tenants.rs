//! What a salt has in a namespace, as it crosses: by its tag, which does not tell the salt.

use kvloft_core::key::SaltTag;
use kvloft_core::store::Tenant;

use crate::protocol::codec::{Reader, Writer};

/// Where there is no limit.
const NONE: u32 = u32::MAX;

pub(crate) fn write_tenant(to: &mut Writer<'_>, tenant: &Tenant) {
    to.u8(tenant.tag.is_some().into());
    if let Some(tag) = tenant.tag {
        to.u64(u64::from_le_bytes(tag.0));
    }
    let limits = [tenant.max_host, tenant.max_disk, tenant.ttl_s].map(|limit| limit.unwrap_or(NONE));
    [tenant.num_host, tenant.num_disk].into_iter().chain(limits).for_each(|number| to.u32(number));
}

pub(crate) fn tenant(from: &mut Reader<'_>) -> Option<Tenant> {
    let tag = if from.flag()? { Some(SaltTag(from.u64()?.to_le_bytes())) } else { None };
    let (num_host, num_disk) = (from.u32()?, from.u32()?);
    let mut limit = || from.u32().map(|number| Some(number).filter(|number| *number != NONE));
    let (max_host, max_disk, ttl_s) = (limit()?, limit()?, limit()?);
    Some(Tenant { tag, num_host, num_disk, max_host, max_disk, ttl_s })
}
