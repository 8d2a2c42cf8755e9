//! Server settings.

use std::path::PathBuf;
use std::time::Duration;

use kvloft_core::evict::Eviction;
use kvloft_core::store::{DiskSettings, TenantLimits};

/// Settings of a server.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Path of the socket to listen on.
    pub socket: PathBuf,
    /// Size of the host memory for frames, in bytes.
    pub host_bytes: u64,
    /// Eviction policy of each tier.
    pub eviction: Eviction,
    /// Returns the available memory in bytes, if known. Called when an engine connects, so that
    /// memory freed by other processes can be used without restarting the server.
    pub available_bytes: fn() -> Option<u64>,
    /// Settings of the disk tier, if any. Each engine's description replaces `description`.
    pub disk: Option<DiskSettings>,
    /// Host memory shares in percent, keyed by a namespace's first hex digits. All other namespaces
    /// with engines share the remaining memory equally.
    pub shares: Vec<(String, u32)>,
    /// NUMA node of each shard, in order, or a single node for all shards. If empty, the kernel
    /// chooses the nodes.
    pub numa: Vec<u32>,
    /// Limits for each tenant in each namespace.
    pub limits: TenantLimits,
    /// Settings to report in the status, as (name, text) pairs.
    pub settings: Vec<(String, String)>,
    /// Maximum number of open connections.
    pub max_connections: usize,
    /// How long frames stay reserved after every process that could write to them has unmapped
    /// them.
    pub gpu_settle: Duration,
    /// If an engine reserves a chunk but does not save it, other engines can save the chunk after
    /// one to two times this duration. An engine can hang for minutes during a step.
    pub save_grace: Duration,
    /// How long a namespace stays open after its last engine disconnects, even if another namespace
    /// needs its space, so that a restarted engine finds its chunks.
    pub restart_grace: Duration,
}

impl ServerConfig {
    /// Returns settings with no disk, the default eviction policy, at most 16 connections, a
    /// `gpu_settle` of 500 ms, a `save_grace` of 1 minute and a `restart_grace` of 5 minutes.
    #[must_use]
    pub fn new(socket: PathBuf, host_bytes: u64) -> Self {
        Self {
            socket,
            host_bytes,
            eviction: Eviction::default(),
            available_bytes: || None,
            disk: None,
            shares: Vec::new(),
            numa: Vec::new(),
            limits: TenantLimits::default(),
            settings: Vec::new(),
            max_connections: 16,
            gpu_settle: Duration::from_millis(500),
            save_grace: Duration::from_secs(60),
            restart_grace: Duration::from_secs(300),
        }
    }
}
