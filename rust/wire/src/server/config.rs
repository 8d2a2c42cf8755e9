//! Settings of a server and of an engine that uses one. It must not know how either is served.

use std::path::PathBuf;
use std::time::Duration;

use kvloft_core::evict::Eviction;
use kvloft_core::store::{DiskSettings, TenantLimits};

/// Settings of a server.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Where it listens.
    pub socket: PathBuf,
    /// Bytes of host memory for frames.
    pub host_bytes: u64,
    /// Policy of each tier.
    pub eviction: Eviction,
    /// As `StoreConfig::available_bytes`.
    pub available_bytes: Option<u64>,
    /// The disk tier, if there is one; its description is the engine's.
    pub disk: Option<DiskSettings>,
    /// Percent of host memory for namespaces whose names in hex begin so; the others with engines share the rest equally.
    pub shares: Vec<(String, u32)>,
    /// The NUMA node of each shard's part of a chunk, in their order; one for all. Empty: wherever the system puts memory.
    pub numa: Vec<u32>,
    /// What each salt may have, in each namespace.
    pub limits: TenantLimits,
    /// What it was started with, as engines and people are told.
    pub settings: Vec<(String, String)>,
    /// Connections at one time.
    pub max_connections: usize,
    /// How long frames stay reserved after the last process that could write to them has closed them.
    pub gpu_settle: Duration,
}

impl ServerConfig {
    /// A server of host memory only, with the default policy and 16 connections.
    #[must_use]
    pub fn new(socket: PathBuf, host_bytes: u64) -> Self {
        Self {
            socket,
            host_bytes,
            eviction: Eviction::default(),
            available_bytes: None,
            disk: None,
            shares: Vec::new(),
            numa: Vec::new(),
            limits: TenantLimits::default(),
            settings: Vec::new(),
            max_connections: 16,
            gpu_settle: GPU_SETTLE,
        }
    }
}

/// Default of [`ServerConfig::gpu_settle`].
pub const GPU_SETTLE: Duration = Duration::from_millis(500);
