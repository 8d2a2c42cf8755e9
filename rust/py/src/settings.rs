//! Converts Python settings: tenant limits (with hashed salts), frame sizes, the disk tier and
//! timeouts.

use std::path::PathBuf;
use std::time::Duration;

use kvloft_core::io::FrameSizes;
use kvloft_core::key::SaltTag;
use kvloft_core::store::{DiskSettings, Limits, Quota, TenantLimits};
use kvloft_core::{Error, Result};
use pyo3::prelude::*;

/// A size in bytes, or a fraction of the tier, between 0.0 and 1.0.
#[derive(FromPyObject)]
pub(crate) enum PyQuota {
    Bytes(u64),
    Share(f64),
}

/// Host memory limit, disk limit, and seconds until chunks expire. None means unlimited.
type PyLimits = (Option<PyQuota>, Option<PyQuota>, Option<u32>);

/// Default limits per salt, limits for requests without a salt, and limits for individual salts.
pub(crate) type PyTenantLimits = (PyLimits, PyLimits, Vec<(String, PyLimits)>);

fn quota(quota: &PyQuota) -> Result<Quota> {
    match quota {
        PyQuota::Bytes(bytes) => Ok(Quota::Bytes(*bytes)),
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the range is checked"
        )]
        PyQuota::Share(share) if (0.0..=1.0).contains(share) => {
            Ok(Quota::Share((share * 1e6).round() as u32))
        }
        PyQuota::Share(share) => Err(Error::invalid(format!(
            "a quota of {share} is out of range; use a fraction from 0.0 to 1.0"
        ))),
    }
}

fn limits((host, disk, ttl_s): &PyLimits) -> Result<Limits> {
    Ok(Limits {
        host: host.as_ref().map(quota).transpose()?,
        disk: disk.as_ref().map(quota).transpose()?,
        ttl_s: *ttl_s,
    })
}

/// Converts tenant limits. Returns `InvalidConfig` if a fraction is not between 0.0 and 1.0.
pub(crate) fn tenant_limits(given: Option<PyTenantLimits>) -> Result<TenantLimits> {
    let Some((salted, unsalted, by_salt)) = given else { return Ok(TenantLimits::default()) };
    let own = |(salt, given): (String, PyLimits)| Ok((SaltTag::of(&salt), limits(&given)?));
    let by_salt = by_salt.into_iter().map(own).collect::<Result<_>>()?;
    Ok(TenantLimits { unsalted: limits(&unsalted)?, salted: limits(&salted)?, by_salt })
}

/// Frame size of each size class, in bytes. A single number means a single class. In a pair, the
/// second number is the class's uncompressed chunk size.
#[derive(FromPyObject)]
pub(crate) enum PySizes {
    One(u64),
    Many(Vec<u64>),
    WithRaw(Vec<(u64, u64)>),
}

impl From<PySizes> for FrameSizes {
    fn from(sizes: PySizes) -> Self {
        match sizes {
            PySizes::One(size) => size.into(),
            PySizes::Many(sizes) => sizes.into(),
            PySizes::WithRaw(sizes) => sizes.into(),
        }
    }
}

pub(crate) fn disk_settings(
    path: Option<PathBuf>,
    cap_bytes: u64,
    num_threads: u32,
    description: &str,
) -> Option<DiskSettings> {
    let description = description.to_owned();
    path.map(|dir| DiskSettings { dir, cap_bytes, num_threads, description })
}

/// Converts seconds to a duration. Negative values and NaN become 0; huge values mean no limit.
pub(crate) fn timeout(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
}
