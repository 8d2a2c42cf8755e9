//! Records chunks that did not fit the smaller frames for compressed chunks, so that their next
//! save gets a larger frame.
//!
//! Misfits are rare with real bfloat16 KV, because its compressed size hardly varies. If a group's
//! KV does not compress, all of its chunks get larger frames after the first `MANY` misfits, except
//! for one trial in a smaller frame per `TRIAL_EVERY` saves, in case the KV changes.

use rustc_hash::FxHashSet;

use crate::key::ChunkKey;

/// Maximum number of keys. Once this maximum is reached, all keys are dropped.
const MAX_KEYS: usize = 1 << 16;
/// After `MANY` misfits, no chunk is expected to fit unless more than `FEW_FITS` chunks have fit
/// per misfit. The next `MANY` trials can reverse this decision.
const MANY: u64 = 64;
const FEW_FITS: u64 = 4;
/// Number of saves in larger frames between two trials.
const TRIAL_EVERY: u64 = 64;
/// Once this many results have been counted, the weight of all results so far is halved.
const MAX_RESULTS: u64 = 1024;

/// One KV cache group's misfits.
#[derive(Debug, Default)]
pub(super) struct Misfits {
    keys: FxHashSet<ChunkKey>,
    /// Number of chunks that did not fit, including chunks whose keys have been dropped.
    pub(super) num_failed: u64,
    /// Recent saves in smaller frames: the number of fits and the number of misfits.
    recent: [u64; 2],
    /// True if no chunk is expected to fit.
    are_all: bool,
    /// Number of saves in larger frames since the last trial.
    num_full: u64,
}

impl Misfits {
    /// Counts a chunk that was saved in a smaller or larger frame.
    pub(super) fn count_saved(&mut self, is_compact: bool) {
        if is_compact {
            self.count([1, 0]);
        } else {
            self.num_full += 1;
        }
    }

    /// Records a chunk that did not fit a smaller frame.
    pub(super) fn add(&mut self, key: ChunkKey) {
        if self.keys.len() >= MAX_KEYS {
            self.keys.clear();
        }
        self.keys.insert(key);
        self.num_failed += 1;
        self.count([0, 1]);
    }

    fn count(&mut self, [fits, fails]: [u64; 2]) {
        self.recent = [self.recent[0] + fits, self.recent[1] + fails];
        let [num_fits, num_fails] = self.recent;
        let are_many = if self.are_all { num_fits + num_fails } else { num_fails } >= MANY;
        let are_all = num_fits <= FEW_FITS * num_fails;
        if are_many && (are_all || self.are_all) {
            (self.are_all, self.recent) = (are_all, [0, 0]);
        } else if num_fits + num_fails >= MAX_RESULTS {
            self.recent = [num_fits / 2, num_fails / 2];
        }
    }

    /// Returns the units of a request that may get smaller frames if `may_fit` returns true. The
    /// other units get larger frames. Only a request's last unit can be a trial, because a failure
    /// to save the last chunk does not affect the request's other chunks.
    pub(super) fn candidates(&mut self, units: &std::ops::Range<u32>) -> std::ops::Range<u32> {
        if !self.are_all {
            return units.clone();
        }
        let is_trial = self.num_full >= TRIAL_EVERY && !units.is_empty();
        if is_trial {
            self.num_full = 0;
        }
        units.end - u32::from(is_trial)..units.end
    }

    pub(super) fn may_fit(&self, key: &ChunkKey) -> bool {
        !self.keys.contains(key)
    }

    /// Returns true if `may_fit` returns true for all keys.
    pub(super) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }
}

#[cfg(test)]
mod tests;
