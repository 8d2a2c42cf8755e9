//! Settings of a store, and checks that need no I/O.

use std::path::PathBuf;

use crate::evict::Eviction;
use crate::io::{FrameSizes, MAX_FRAMES};
use crate::store::tenants::limits::TenantLimits;
use crate::tier::disk::DiskConfig;
use crate::units::size_text;
use crate::{Error, Result};

/// More threads do not make any device faster.
const MAX_DISK_THREADS: u32 = 64;

/// Settings of a store. The caller reads the clock, the environment and the machine; the store does
/// not.
#[derive(Debug, Clone)]
pub struct StoreConfig {
    /// Sizes of frames, by size class.
    pub frame_sizes: FrameSizes,
    /// Bytes of host memory for frames (`host_size`); rounded down.
    pub host_bytes: u64,
    /// Policy of each tier.
    pub eviction: Eviction,
    /// Available bytes of memory, if known: see [`crate::io::available_bytes`]. Compared once.
    /// Pages are allocated when frames are first used, so stores that open at the same time see the
    /// same free memory. Allocating them all at the start would take seconds per 10 GiB.
    pub available_bytes: Option<u64>,
    /// Fingerprint of everything except content that decides KV bytes.
    pub namespace: [u8; 32],
    /// The disk tier, if one is configured.
    pub disk: Option<DiskSettings>,
    /// Current Unix time in seconds, for expiry over restarts.
    pub now_s: u64,
    /// Limits of each tenant.
    pub limits: TenantLimits,
}

/// How another process of this user maps the frames.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArenaInfo {
    /// Path for [`crate::io::Arena::open`].
    pub path: String,
    /// Identity as in [`crate::io::Arena::id`], because paths are reused.
    pub id: u64,
    /// Total bytes.
    pub size_bytes: u64,
    /// Bytes of a slab: see [`crate::io::FrameGrid`].
    pub slab_bytes: u64,
    /// Pipe that every process that maps a server's arena must hold open; None for an embedded
    /// store.
    pub lifeline: Option<LifelineInfo>,
}

/// A pipe whose end-of-file shows a server that no process can write to an engine's frames any
/// longer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LifelineInfo {
    /// Path at which a worker opens it for writing.
    pub path: String,
    /// Its inode, because paths are reused.
    pub id: u64,
}

/// Settings of the disk tier.
#[derive(Debug, Clone)]
pub struct DiskSettings {
    /// Its directory (`disk_path`).
    pub dir: PathBuf,
    /// Its size limit in bytes (`disk_size`).
    pub cap_bytes: u64,
    /// Number of threads that read and write (`disk_threads`).
    pub num_threads: u32,
    /// One line that describes the namespace to operators.
    pub description: String,
}

impl DiskSettings {
    /// Returns the settings of the tier. `InvalidConfig` names the wrong setting and the fix.
    pub(crate) fn tier(&self, store: &StoreConfig) -> Result<DiskConfig> {
        if !(1..=MAX_DISK_THREADS).contains(&self.num_threads) {
            let message =
                format!("disk_threads = {} must be from 1 to {MAX_DISK_THREADS}", self.num_threads);
            return Err(Error::invalid(message));
        }
        Ok(DiskConfig {
            dir: self.dir.clone(),
            cap_bytes: self.cap_bytes,
            frame_sizes: store.frame_sizes.clone(),
            namespace: store.namespace,
            description: self.description.clone(),
        })
    }
}

impl StoreConfig {
    /// Checks the settings. `InvalidConfig` names the wrong setting and the fix; `host_size` names
    /// the memory setting.
    pub fn check(&self, host_size: &str) -> Result<()> {
        self.num_frames(host_size).map(drop)
    }

    /// Returns the number of frames of average size that fit. Errors as [`Self::check`].
    pub(crate) fn num_frames(&self, host_size: &str) -> Result<u32> {
        let fail = |message: String| Err(Error::invalid(message));
        self.frame_sizes.check()?;
        let (frame_bytes, host_bytes) = (self.frame_sizes.largest(), self.host_bytes);
        if host_bytes < frame_bytes {
            return fail(format!(
                "{host_size} = {} holds no chunk, which is {frame_bytes} bytes here; make it at least that",
                size_text(host_bytes)
            ));
        }
        if let Some(available) = self.available_bytes.filter(|&available| host_bytes > available) {
            return fail(format!(
                "{host_size} = {} is more than the {} of memory that this machine or container has left; lower it, or give \
                 the machine or container more memory",
                size_text(host_bytes),
                size_text(available)
            ));
        }
        let smallest = self.frame_sizes.smallest();
        if host_bytes / smallest > MAX_FRAMES {
            return fail(format!(
                "{host_size} = {} makes more than {MAX_FRAMES} chunks of {smallest} bytes; lower it",
                size_text(host_bytes)
            ));
        }
        Ok(u32::try_from(host_bytes / self.frame_sizes.average()).unwrap_or(u32::MAX))
    }
}
