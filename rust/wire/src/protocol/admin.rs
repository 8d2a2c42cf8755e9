//! Admin messages: JSON requests and results of `kvloft status`, `kvloft evict` and `kvloft clear`.
//!
//! The JSON has the field names that `kvloft status --json` prints. A cache salt never crosses the
//! socket: messages identify a tenant by the tag of its salt.

use std::collections::BTreeMap;

use kvloft_core::key::SaltTag;
use kvloft_core::store::{Evicted, Tenant};
use kvloft_core::{Error, Result};
use serde::{Deserialize, Serialize};

use super::MAX_HELLO;

/// An admin request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum AdminRequest {
    /// Returns a [`Status`].
    Status,
    /// Removes every chunk of a namespace from every tier and returns their number as `u64`.
    Clear {
        /// First hex digits of the namespace; may be empty if the server has only one.
        namespace: String,
    },
    /// Evicts chunks; returns an [`EvictReport`].
    Evict(EvictRequest),
}

/// The chunks to evict.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvictRequest {
    /// First hex digits of the namespaces; empty for all.
    pub namespace: String,
    /// Tag of the tenant's salt; None for every chunk.
    pub tenant: Option<SaltTag>,
    /// Evict only from host memory.
    pub host_only: bool,
}

/// Result of an eviction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvictReport {
    /// Number of namespaces searched, including closed namespaces on disk.
    pub num_namespaces: u64,
    /// Chunks evicted from these namespaces.
    #[serde(flatten)]
    pub evicted: Evicted,
}

/// Counters and gauges by name.
pub type Stats = BTreeMap<String, u64>;

/// State of a server.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Size of the arena in bytes; 0 before the first engine connects.
    pub host_bytes: u64,
    /// Size of each slab in bytes; the last slab of the arena is larger.
    pub slab_bytes: u64,
    /// Counters and gauges of the server, across all namespaces.
    pub stats: Stats,
    /// Settings that the server was started with.
    pub settings: BTreeMap<String, String>,
    /// Open namespaces, sorted.
    pub namespaces: Vec<NamespaceStatus>,
    /// Namespaces whose engines the server rejects, sorted.
    #[serde(default)]
    pub refusals: Vec<RefusalStatus>,
    /// Reason why the server cannot use its disk directory; None if it can or has no disk.
    #[serde(default)]
    pub disk_trouble: Option<String>,
}

/// A namespace whose engines the server rejects; the engines retry.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusalStatus {
    /// First hex digits of the namespace.
    pub namespace: String,
    /// Number of rejected connections.
    pub count: u64,
    /// Reason of the last rejection.
    pub reason: String,
}

/// State of one namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceStatus {
    /// The namespace's digest.
    pub namespace: [u8; 32],
    /// One-line description of the namespace.
    pub description: String,
    /// Frame sizes in bytes, by size class.
    pub frame_sizes: Vec<u64>,
    /// Number of slabs that hold frames of this namespace.
    #[serde(rename = "slabs")]
    pub num_slabs: u32,
    /// Counters and gauges of the store; empty before the store is open.
    pub stats: Stats,
    /// The tenants with the most chunks.
    pub tenants: Vec<Tenant>,
    /// Connected engines.
    pub engines: Vec<EngineStatus>,
}

/// One connected engine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineStatus {
    /// Process id; 0 if the process is in another PID namespace.
    pub pid: u32,
    /// Milliseconds since the engine connected.
    pub connected_ms: u64,
    /// Number of open reservations.
    #[serde(rename = "reservations")]
    pub num_reserved: u64,
    /// Number of open read leases.
    #[serde(rename = "leases")]
    pub num_leases: u64,
    /// Lookups, loads and saves so far.
    #[serde(flatten)]
    pub counters: Stats,
}

impl AdminRequest {
    /// Parses a request; None if it is malformed or longer than [`MAX_HELLO`].
    pub fn parse(json: &[u8]) -> Option<Self> {
        if json.len() > MAX_HELLO {
            return None;
        }
        serde_json::from_slice(json).ok()
    }
}

impl Status {
    /// Encodes the status in JSON.
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(self)
            .map_err(|error| Error::io("cannot encode the status", error.into()))
    }

    /// Returns every connected engine.
    pub fn engines(&self) -> impl Iterator<Item = &EngineStatus> {
        self.namespaces.iter().flat_map(|namespace| &namespace.engines)
    }
}
