//! What goes when a tier is full.
//!
//! The store decides *what may go* (a leaf that is not pinned, written or read) and the policy
//! decides *which of those goes*. So no policy can break the rule that a parent never leaves before
//! its children. Policies know numbers and keys only: no frames, no clock, no randomness; the same
//! calls give the same victims.

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
    /// Least recently used, where reused chunks age more slowly: how much follows from which
    /// evicted chunks come back.
    #[default]
    Adaptive,
    /// Least recently used.
    Lru,
}

impl Eviction {
    /// Every policy.
    pub const ALL: [Self; 2] = [Eviction::Adaptive, Eviction::Lru];

    /// `adaptive` or `lru`; else `InvalidConfig`.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "adaptive" => Ok(Eviction::Adaptive),
            "lru" => Ok(Eviction::Lru),
            _ => {
                let message =
                    format!("eviction = \"{name}\" is unknown; use \"adaptive\" or \"lru\"");
                Err(Error::invalid(message))
            }
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
