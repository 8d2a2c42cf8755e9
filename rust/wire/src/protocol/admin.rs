//! Admin messages: JSON requests and results of `kvloft status`, `kvloft evict` and `kvloft clear`.
//!
//! Field names in JSON are those that `kvloft status --json` prints. A cache salt never crosses the
//! socket: a tenant is named by its salt's tag.

use std::collections::BTreeMap;

use kvloft_core::key::SaltTag;
use kvloft_core::store::Tenant;
use kvloft_core::{Error, Result};
use serde::{Deserialize, Serialize};

use super::MAX_HELLO;

/// An admin request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum AdminRequest {
    /// Returns a [`Status`].
    Status,
    /// Removes every chunk of one namespace from every tier; returns the number of chunks as `u64`.
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
    #[serde(with = "hex_tag")]
    pub tenant: Option<SaltTag>,
    /// Evict from host memory only.
    pub host_only: bool,
}

/// Result of an eviction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvictReport {
    /// Namespaces searched, including those on disk without an engine.
    pub num_namespaces: u64,
    /// Chunks evicted.
    pub num_chunks: u64,
    /// Bytes of host memory released.
    pub host_bytes: u64,
    /// Bytes of disk space released.
    pub disk_bytes: u64,
    /// Chunks skipped because they are in use; see `kvloft_core::store::Evicted`.
    pub num_in_use: u64,
    /// True if some matching chunks may still be found now or after a restart.
    pub is_cut_short: bool,
}

/// Counters and gauges by name.
pub type Stats = BTreeMap<String, u64>;

/// State of a server.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Bytes of the arena; 0 before the first engine connects.
    pub host_bytes: u64,
    /// Bytes of each slab; the last slab of the arena is larger.
    pub slab_bytes: u64,
    /// Counters and gauges of the server, over all namespaces.
    pub stats: Stats,
    /// Settings the server was started with.
    pub settings: BTreeMap<String, String>,
    /// Open namespaces, sorted.
    pub namespaces: Vec<NamespaceStatus>,
}

/// State of one namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceStatus {
    /// The namespace's digest.
    pub namespace: [u8; 32],
    /// One line about the namespace.
    pub description: String,
    /// Bytes of its frames, by size class.
    pub frame_sizes: Vec<u64>,
    /// Slabs of the arena that hold its frames.
    #[serde(rename = "slabs")]
    pub num_slabs: u32,
    /// Counters and gauges of its store; empty before the store is open.
    pub stats: Stats,
    /// The tenants with the most chunks.
    pub tenants: Vec<TenantStatus>,
    /// Connected engines.
    pub engines: Vec<EngineStatus>,
}

/// Chunks and limits of one tenant.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantStatus {
    /// Tag of the tenant's salt; None for requests without a salt.
    #[serde(with = "hex_tag")]
    pub tag: Option<SaltTag>,
    /// Bytes in host memory.
    pub host_bytes: u64,
    /// Bytes on disk.
    pub disk_bytes: u64,
    /// Quota in host memory, in bytes.
    pub max_host_bytes: Option<u64>,
    /// Quota on disk, in bytes.
    pub max_disk_bytes: Option<u64>,
    /// Seconds until a chunk expires.
    pub ttl_s: Option<u32>,
}

/// One connected engine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineStatus {
    /// Process id; 0 if the process is in another PID namespace.
    pub pid: u32,
    /// Milliseconds since the engine connected.
    pub connected_ms: u64,
    /// Open reservations.
    #[serde(rename = "reservations")]
    pub num_reserved: u64,
    /// Open read leases.
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

    /// Every connected engine.
    pub fn engines(&self) -> impl Iterator<Item = &EngineStatus> {
        self.namespaces.iter().flat_map(|namespace| &namespace.engines)
    }
}

impl From<Tenant> for TenantStatus {
    fn from(tenant: Tenant) -> Self {
        let Tenant { tag, host_bytes, disk_bytes, max_host_bytes, max_disk_bytes, ttl_s } = tenant;
        Self { tag, host_bytes, disk_bytes, max_host_bytes, max_disk_bytes, ttl_s }
    }
}

/// Formats a salt's tag as 16 hex digits.
pub(crate) fn tag_text(tag: SaltTag) -> String {
    format!("{:016x}", u64::from_be_bytes(tag.0))
}

/// A salt's tag in JSON: 16 hex digits or null.
mod hex_tag {
    use kvloft_core::key::SaltTag;
    use serde::de::{Deserialize, Deserializer, Error};
    use serde::{Serialize, Serializer};

    use super::tag_text;

    #[expect(clippy::ref_option, reason = "serde calls it with a reference")]
    pub(super) fn serialize<S: Serializer>(
        tag: &Option<SaltTag>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        tag.map(tag_text).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<SaltTag>, D::Error> {
        let parse = |text: String| {
            let tag = u64::from_str_radix(&text, 16).map(|number| SaltTag(number.to_be_bytes()));
            tag.ok()
                .filter(|tag| tag_text(*tag) == text)
                .ok_or_else(|| D::Error::custom("not a salt's tag"))
        };
        Option::deserialize(from)?.map(parse).transpose()
    }
}
