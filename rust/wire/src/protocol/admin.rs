//! Admin messages: JSON requests and results for `kvloft status`, `kvloft evict` and `kvloft
//! clear`.
//!
//! The JSON uses the field names printed by `kvloft status --json`. Cache salts never cross the
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
    /// Requests the status. The result is a [`Status`].
    Status,
    /// Removes all chunks of a namespace from every tier. The result is the number of removed
    /// chunks, as a `u64`.
    Clear {
        /// First hex digits of the namespace. May be empty if the server has only one namespace.
        namespace: String,
    },
    /// Evicts chunks. The result is an [`EvictReport`].
    Evict(EvictRequest),
}

/// Selects the chunks to evict.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvictRequest {
    /// First hex digits of the namespaces to match. If empty, all namespaces match.
    pub namespace: String,
    /// Tag of the tenant's salt, or None to evict the chunks of all tenants.
    pub tenant: Option<SaltTag>,
    /// If true, chunks are evicted only from host memory.
    pub host_only: bool,
}

/// Result of an eviction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvictReport {
    /// Number of namespaces searched, including closed namespaces on disk.
    pub num_namespaces: u64,
    /// Totals for the chunks evicted from these namespaces.
    #[serde(flatten)]
    pub evicted: Evicted,
}

/// Counters and gauges by name.
pub type Stats = BTreeMap<String, u64>;

/// Status of a server.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Arena size in bytes, or 0 before the first engine connects.
    pub host_bytes: u64,
    /// Slab size in bytes. The arena's last slab may be larger.
    pub slab_bytes: u64,
    /// The server's counters and gauges, across all namespaces.
    pub stats: Stats,
    /// Settings that the server was started with.
    pub settings: BTreeMap<String, String>,
    /// Open namespaces, sorted.
    pub namespaces: Vec<NamespaceStatus>,
    /// Namespaces whose engines are being rejected, sorted.
    #[serde(default)]
    pub refusals: Vec<RefusalStatus>,
    /// The reason the server cannot use its disk directory, if any.
    #[serde(default)]
    pub disk_trouble: Option<String>,
}

/// A namespace whose engines the server rejects. The engines keep retrying.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusalStatus {
    /// First hex digits of the namespace.
    pub namespace: String,
    /// Number of rejected connections.
    pub count: u64,
    /// Reason for the last rejection.
    pub reason: String,
}

/// Status of a namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceStatus {
    /// Digest of the namespace.
    pub namespace: [u8; 32],
    /// One-line description of the namespace.
    pub description: String,
    /// Frame size of each size class, in bytes.
    pub frame_sizes: Vec<u64>,
    /// Number of slabs that hold frames of this namespace.
    #[serde(rename = "slabs")]
    pub num_slabs: u32,
    /// The store's counters and gauges. Empty until the store is open.
    pub stats: Stats,
    /// The tenants with the most chunks.
    pub tenants: Vec<Tenant>,
    /// Connected engines.
    pub engines: Vec<EngineStatus>,
}

/// Status of a connected engine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineStatus {
    /// The engine's process id, or 0 if it runs in a different PID namespace.
    pub pid: u32,
    /// Time since the engine connected, in milliseconds.
    pub connected_ms: u64,
    /// Number of open reservations held by the engine.
    #[serde(rename = "reservations")]
    pub num_reserved: u64,
    /// Number of open read leases held by the engine.
    #[serde(rename = "leases")]
    pub num_leases: u64,
    /// Lookup, load and save counters.
    #[serde(flatten)]
    pub counters: Stats,
}

impl AdminRequest {
    /// Parses a request. Returns None if the request is malformed or longer than [`MAX_HELLO`].
    pub fn parse(json: &[u8]) -> Option<Self> {
        if json.len() > MAX_HELLO {
            return None;
        }
        serde_json::from_slice(json).ok()
    }
}

impl Status {
    /// Encodes the status as JSON.
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(self)
            .map_err(|error| Error::io("cannot encode the status", error.into()))
    }

    /// Returns all connected engines.
    pub fn engines(&self) -> impl Iterator<Item = &EngineStatus> {
        self.namespaces.iter().flat_map(|namespace| &namespace.engines)
    }
}
