//! Caches the keys of the last long prefix at both ends of a connection. The next prefix is sent
//! without the keys that it shares with the cached prefix.
//!
//! Before sending a long new prefix, the client sends anchors: the keys at the ends of some of the
//! prefix's chunks. A key identifies its whole prefix, so keys before the last known anchor are
//! omitted. This module does not access sockets.

use kvloft_core::ChunkKey;
use kvloft_core::store::Prefix;

use crate::protocol::codec::{Field, Reader, Writer, fields};
use crate::protocol::prefixes::{Keys, MAX_KEYS, SentPrefixes};

/// Anchors are sent only for prefixes with more than this many new keys.
const MAX_KEYS_WITHOUT_ANCHORS: usize = 128;
/// Minimum distance between anchors, in units.
const MIN_STRIDE: usize = 64;

/// Anchors of a prefix: the keys at the ends of some of its chunks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SentAnchors<'a> {
    /// Distance between anchors, in units. Only the distance to the last anchor can differ.
    pub stride: u32,
    /// Number of units that the last anchor covers.
    pub last: u32,
    /// The key of each anchor.
    pub keys: Keys<'a>,
}

/// Keys of the last long prefix, starting at unit `first`. If `first` is greater than 0, the first
/// key is an anchor that identifies all units before it.
#[derive(Debug, Default)]
pub(crate) struct PrefixCache {
    first: usize,
    keys: Vec<ChunkKey>,
}

fields! {
    SentAnchors<'a> { stride, last, keys }
}

impl SentAnchors<'_> {
    /// Returns each anchor's end, in units, and its key. Returns None if the anchors are out of
    /// order or extend beyond [`MAX_KEYS`] units.
    pub(crate) fn all(&self) -> Option<Vec<(u32, ChunkKey)>> {
        let num_before = u32::try_from(self.keys.iter().len()).ok()?.checked_sub(1)?;
        let end = num_before.checked_mul(self.stride)?;
        if self.stride == 0 || end >= self.last || self.last as usize > MAX_KEYS {
            return None;
        }
        let ends = (1..=num_before).map(|nth| nth * self.stride).chain([self.last]);
        Some(ends.zip(self.keys.iter()).collect())
    }
}

/// Returns the anchors' ends, in units, for a prefix with `num_keys` keys. The last anchor is at
/// the end of the prefix.
pub(crate) fn anchor_ends(num_keys: usize) -> Vec<u32> {
    // With this stride, there are about as many anchors as there are keys between two anchors.
    let stride = num_keys.isqrt().max(MIN_STRIDE);
    let before = (stride..num_keys).step_by(stride);
    before
        .chain((num_keys > 0).then_some(num_keys))
        .filter_map(|end| u32::try_from(end).ok())
        .collect()
}

impl PrefixCache {
    fn len(&self) -> usize {
        self.first + self.keys.len()
    }

    fn num_same(&self, keys: &[ChunkKey]) -> usize {
        // A key identifies its whole prefix, so a single comparison is sufficient.
        let num_both = self.len().min(keys.len());
        let last = num_both.checked_sub(1).filter(|last| *last >= self.first);
        let is_same = last.is_some_and(|last| self.keys[last - self.first] == keys[last]);
        if is_same { num_both } else { 0 }
    }

    pub(crate) fn needs_anchors(&self, keys: &[ChunkKey]) -> bool {
        keys.len() - self.num_same(keys) > MAX_KEYS_WITHOUT_ANCHORS
    }

    /// Keeps the keys of the first `num_same` units and appends `keys`. Returns false and changes
    /// nothing if these units are not cached.
    pub(crate) fn extend(&mut self, num_same: usize, keys: impl Iterator<Item = ChunkKey>) -> bool {
        if num_same > self.len() || num_same > 0 && num_same <= self.first {
            return false;
        }
        self.first = if num_same == 0 { 0 } else { self.first };
        self.keys.truncate(num_same - self.first);
        self.keys.extend(keys);
        true
    }

    /// Replaces the cached keys with `anchor`, which identifies the prefix up to the anchor's end.
    /// Clears the cache if `anchor` is None.
    pub(crate) fn reset(&mut self, anchor: Option<(u32, ChunkKey)>) {
        self.keys.clear();
        self.first = anchor.map_or(0, |(end, _)| end as usize - 1);
        self.keys.extend(anchor.map(|(_, key)| key));
    }

    /// Caches the first prefix. Returns the prefixes to send, omitting any keys of the first prefix
    /// that were already cached. The caller must send the result, because both ends must cache the
    /// same keys.
    pub(crate) fn prefixes_to_send<'a>(&mut self, prefixes: &[Prefix<'a>]) -> SentPrefixes<'a> {
        let mut all: Vec<_> = prefixes.iter().map(|prefix| (prefix.root, prefix.keys)).collect();
        let num_same = all.first_mut().map_or(0, |(_, keys)| self.strip_cached(keys));
        let num_same = u32::try_from(num_same).unwrap_or(0);
        SentPrefixes {
            num_same,
            all: all.into_iter().map(|(root, keys)| (root, Keys::Own(keys))).collect(),
        }
    }

    /// Removes cached keys from `keys` and caches the remaining keys. Returns the number of keys
    /// removed. Does nothing if there is only one key, because it can belong to an independent
    /// chunk.
    fn strip_cached(&mut self, keys: &mut &[ChunkKey]) -> usize {
        if keys.len() < 2 {
            return 0;
        }
        let num_same = self.num_same(keys);
        *keys = &keys[num_same..];
        self.extend(num_same, keys.iter().copied());
        num_same
    }

    /// Clears the cache and returns true if the anchor covers more units than are stored, which
    /// means that the anchor's chunk was evicted.
    pub(crate) fn reset_if_lost(&mut self, num_units: u32) -> bool {
        let has_lost = self.first > 0 && num_units as usize <= self.first;
        if has_lost {
            self.reset(None);
        }
        has_lost
    }

    pub(crate) fn prefix(&self, root: ChunkKey) -> Prefix<'_> {
        Prefix { root, keys: &self.keys, first: u32::try_from(self.first).unwrap_or(u32::MAX) }
    }
}

#[cfg(test)]
mod tests;
