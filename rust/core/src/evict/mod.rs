//! Eviction policies: which chunk to evict when a tier is full.
//!
//! The store decides *which chunks can be evicted* (leaves that are not pinned, written or read),
//! and the policy *chooses one of them*. No policy can therefore evict a parent before its
//! children. Policies see numbers and keys only: no frames, no clock, no randomness. The same calls
//! return the same victims.

mod adaptive;
mod ghosts;
mod groups;
mod policy;
#[cfg(test)]
mod tests;

pub use adaptive::Adaptive;
pub use policy::{ChunkId, GroupId, Policy, Removal};

use crate::{Error, Result};

/// Which policy a tier has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Eviction {
    /// Least recently used, but reused chunks age more slowly; the rate follows from the evicted
    /// chunks that return.
    #[default]
    Adaptive,
    /// Least recently used.
    Lru,
}

impl Eviction {
    /// `adaptive` or `lru`; else `InvalidConfig`.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "adaptive" => Ok(Eviction::Adaptive),
            "lru" => Ok(Eviction::Lru),
            _ => Err(Error::invalid(format!(
                "eviction = \"{name}\" is unknown; use \"adaptive\" or \"lru\""
            ))),
        }
    }

    /// A policy for a tier that holds `capacity` chunks.
    pub fn policy(self, capacity: usize) -> Box<dyn Policy> {
        match self {
            Eviction::Adaptive => Box::new(Adaptive::new(capacity)),
            Eviction::Lru => Box::new(Adaptive::lru()),
        }
    }
}
