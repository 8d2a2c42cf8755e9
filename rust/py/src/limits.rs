//! Limits of salts: parses Python's values into those of the store. Salts are hashed here.

use kvloft_core::key::SaltTag;
use kvloft_core::store::{Limits, Quota, TenantLimits};
use kvloft_core::{Error, Result};
use pyo3::prelude::*;

/// Bytes, or a part of the tier from 0.0 to 1.0.
#[derive(FromPyObject)]
pub(crate) enum PyQuota {
    Bytes(u64),
    Share(f64),
}

/// Limits of host memory and of the disk, and seconds until chunks expire; None for no limit.
type PyLimits = (Option<PyQuota>, Option<PyQuota>, Option<u32>);

/// Limits of each salt, of requests without a salt, and of single salts.
pub(crate) type PyTenantLimits = (PyLimits, PyLimits, Vec<(String, PyLimits)>);

fn quota(quota: &PyQuota) -> Result<Quota> {
    match quota {
        PyQuota::Bytes(bytes) => Ok(Quota::Bytes(*bytes)),
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it was compared"
        )]
        PyQuota::Share(share) if (0.0..=1.0).contains(share) => {
            Ok(Quota::Share((share * 1e6).round() as u32))
        }
        PyQuota::Share(share) => {
            Err(Error::invalid(format!("a quota of {share} is no part of a tier, from 0.0 to 1.0")))
        }
    }
}

fn limits((host, disk, ttl_s): &PyLimits) -> Result<Limits> {
    Ok(Limits {
        host: host.as_ref().map(quota).transpose()?,
        disk: disk.as_ref().map(quota).transpose()?,
        ttl_s: *ttl_s,
    })
}

/// `InvalidConfig` for an invalid part of a tier.
pub(crate) fn tenant_limits(given: Option<PyTenantLimits>) -> Result<TenantLimits> {
    let Some((salted, unsalted, by_salt)) = given else { return Ok(TenantLimits::default()) };
    let own = |(salt, given): (String, PyLimits)| Ok((SaltTag::of(&salt), limits(&given)?));
    let by_salt = by_salt.into_iter().map(own).collect::<Result<_>>()?;
    Ok(TenantLimits { unsalted: limits(&unsalted)?, salted: limits(&salted)?, by_salt })
}
