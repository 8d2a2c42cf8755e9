//! Store settings and their validation.

use std::path::PathBuf;

use crate::evict::Eviction;
use crate::io::{FrameSizes, MAX_FRAMES};
use crate::store::tenants::limits::TenantLimits;
use crate::tier::disk::DiskConfig;
use crate::units::size_text;
use crate::{Error, Result};

/// Maximum number of disk threads. No device benefits from more threads.
const MAX_DISK_THREADS: u32 = 64;

/// Store settings. The caller passes in the time and the available memory, so that the store never
/// reads the environment.
#[derive(Debug, Clone)]
pub struct StoreConfig {
    /// Frame size of each size class.
    pub frame_sizes: FrameSizes,
    /// Host memory for frames, in bytes (`host_size`), rounded down to whole pages or frames.
    pub host_bytes: u64,
    /// Eviction policy for every tier.
    pub eviction: Eviction,
    /// Available memory in bytes, if known (see [`crate::io::available_bytes`]). This is checked
    /// only when the store is opened. Pages are allocated when a frame is first used, so stores
    /// that open concurrently see the same available memory. Allocating all pages at startup would
    /// take several seconds per 10 GiB.
    pub available_bytes: Option<u64>,
    /// The namespace: a fingerprint of everything that affects KV bytes, except the content.
    pub namespace: [u8; 32],
    /// Disk tier settings, if any.
    pub disk: Option<DiskSettings>,
    /// Current Unix time in seconds. Chunks are dated in Unix time so that a restart does not
    /// extend their time to live.
    pub now_s: u64,
    /// Tenant limits.
    pub limits: TenantLimits,
}

/// The information that another process run by the same user needs to map the frames.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArenaInfo {
    /// Path to pass to [`crate::io::Arena::open`].
    pub path: String,
    /// Identifies the arena even if its path is reused (see [`crate::io::Arena::id`]).
    pub id: u64,
    /// Arena size, in bytes.
    pub size_bytes: u64,
    /// Slab size, in bytes (see [`crate::io::FrameGrid`]).
    pub slab_bytes: u64,
    /// The pipe that every process must keep open while it has a server's arena mapped. None for an
    /// embedded store.
    pub lifeline: Option<LifelineInfo>,
}

/// A pipe that signals end-of-file to the server once no process can write to an engine's frames.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LifelineInfo {
    /// Path at which workers open the pipe for writing.
    pub path: String,
    /// The pipe's inode, which identifies it even if the path is reused.
    pub id: u64,
}

/// Disk tier settings.
#[derive(Debug, Clone)]
pub struct DiskSettings {
    /// The disk directory (`disk_path`).
    pub dir: PathBuf,
    /// Maximum directory size, in bytes (`disk_size`).
    pub cap_bytes: u64,
    /// Number of threads for reads and writes (`disk_threads`).
    pub num_threads: u32,
    /// One-line description of the namespace for operators.
    pub description: String,
}

impl DiskSettings {
    /// Returns the disk tier's settings, or `InvalidConfig` with a message that names the invalid
    /// setting and explains how to fix it.
    pub(crate) fn tier(&self, store: &StoreConfig) -> Result<DiskConfig> {
        if !(1..=MAX_DISK_THREADS).contains(&self.num_threads) {
            let message = format!(
                "disk_threads = {} is out of range; use a number from 1 to {MAX_DISK_THREADS}",
                self.num_threads
            );
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
    /// Validates the settings. Returns `InvalidConfig` with a message that names the invalid
    /// setting and explains how to fix it. `host_size` is the name of the memory setting to show in
    /// messages.
    pub fn check(&self, host_size: &str) -> Result<()> {
        self.num_frames(host_size).map(drop)
    }

    /// Returns the number of average-sized frames that fit in host memory, or the same errors as
    /// [`Self::check`].
    pub(crate) fn num_frames(&self, host_size: &str) -> Result<u32> {
        let fail = |message: String| Err(Error::invalid(message));
        self.frame_sizes.check()?;
        let (frame_bytes, host_bytes) = (self.frame_sizes.largest(), self.host_bytes);
        if host_bytes < frame_bytes {
            return fail(format!(
                "{host_size} = {} is too small for a chunk of {frame_bytes} bytes; set it to at \
                 least that size",
                size_text(host_bytes)
            ));
        }
        if let Some(available) = self.available_bytes.filter(|&available| host_bytes > available) {
            return fail(format!(
                "{host_size} = {} is more than the {} of memory that this machine or container has \
                 left; lower it, or give the machine or container more memory",
                size_text(host_bytes),
                size_text(available)
            ));
        }
        let smallest = self.frame_sizes.smallest();
        if host_bytes / smallest > MAX_FRAMES {
            return fail(format!(
                "{host_size} = {} is too large: it would hold more than the limit of {MAX_FRAMES} \
                 chunks ({smallest} bytes each); lower it",
                size_text(host_bytes)
            ));
        }
        Ok(u32::try_from(host_bytes / self.frame_sizes.average()).unwrap_or(u32::MAX))
    }
}
