//! Records chunks that did not fit the smaller frames for compressed chunks, so that they get a
//! larger frame the next time they are saved.
//!
//! Misfits are rare with real bfloat16 KV, because its compressed size hardly varies. If KV does
//! not compress at all, every chunk gets a larger frame after the first `MANY` misfits.

use rustc_hash::FxHashSet;

use crate::key::ChunkKey;

/// Maximum number of keys. When it is reached, all keys are dropped.
const MAX_KEYS: usize = 1 << 16;
/// After `MANY` misfits, no chunk is expected to fit unless more than `FEW_FITS` chunks have fit
/// per misfit.
const MANY: u64 = 64;
const FEW_FITS: u64 = 4;

#[derive(Debug, Default)]
pub(super) struct Misfits {
    keys: FxHashSet<ChunkKey>,
    /// Number of chunks that did not fit, including chunks whose keys were dropped.
    pub(super) num_failed: u64,
    /// Number of chunks that fit the smaller frames.
    pub(super) num_fits: u64,
}

impl Misfits {
    pub(super) fn add(&mut self, key: ChunkKey) {
        if self.keys.len() >= MAX_KEYS {
            self.keys.clear();
        }
        self.keys.insert(key);
        self.num_failed += 1;
    }

    /// Returns true if no chunk is expected to fit.
    pub(super) fn are_all(&self) -> bool {
        self.num_failed >= MANY && self.num_fits <= FEW_FITS * self.num_failed
    }

    pub(super) fn may_fit(&self, key: &ChunkKey) -> bool {
        !self.keys.contains(key)
    }

    /// Returns true if there are no keys, in which case lookups can be skipped.
    pub(super) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }
}

#[cfg(test)]
mod tests;
