//! What both ends of a connection have of the last long prefix, so that little of the next one crosses.
//!
//! Of a long prefix that the server has not seen, anchors are asked about first: the keys of a few chunks' ends. A key stands for
//! all before it, so of what lies before the last chunk that is stored no other key crosses. It must not know sockets.

use kvloft_core::ChunkKey;
use kvloft_core::store::Prefix;

use crate::protocol::codec::{Reader, Writer};
use crate::protocol::prefixes::{Keys, MAX_KEYS};

/// Keys that are sent without anchors being asked about.
const MAX_UNASKED: usize = 128;
/// Least blocks between two anchors.
const MIN_STRIDE: usize = 64;

/// Ends of chunks in a prefix, and their keys.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SentAnchors<'a> {
    /// Blocks up to the first anchor, and from each to the next but the last.
    pub stride: u32,
    /// Blocks up to the last anchor.
    pub last: u32,
    /// Their keys.
    pub keys: Keys<'a>,
}

/// Keys of the last long prefix, or of its end only: the first key then stands for the blocks before it.
#[derive(Debug, Default)]
pub(crate) struct Known {
    first: usize,
    keys: Vec<ChunkKey>,
}

impl SentAnchors<'_> {
    pub(crate) fn write(&self, to: &mut Writer<'_>) {
        to.u32(self.stride);
        to.u32(self.last);
        self.keys.write(to);
    }

    /// Each with its end in blocks; None if they are not in order, or beyond any prefix.
    pub(crate) fn all(&self) -> Option<Vec<(u32, ChunkKey)>> {
        let num_before = u32::try_from(self.keys.iter().len()).ok()?.checked_sub(1)?;
        let end = num_before.checked_mul(self.stride)?;
        if self.stride == 0 || end >= self.last || self.last as usize > MAX_KEYS {
            return None;
        }
        let ends = (1..=num_before).map(|nth| nth * self.stride).chain([self.last]);
        Some(ends.zip(self.keys.iter().map(|key| ChunkKey(*key))).collect())
    }
}

pub(crate) fn anchors<'a>(from: &mut Reader<'a>) -> Option<SentAnchors<'a>> {
    Some(SentAnchors { stride: from.u32()?, last: from.u32()?, keys: Keys::Bytes(from.keys()?) })
}

/// Where a prefix of so many keys has its anchors, in blocks: ends of full chunks, the last full chunk's among them.
pub(crate) fn ends(num_keys: usize, per_chunk: u32) -> Vec<u32> {
    let per_chunk = per_chunk as usize;
    let last = num_keys / per_chunk * per_chunk;
    // As many anchors as keys between two of them.
    let stride = num_keys.isqrt().max(MIN_STRIDE).next_multiple_of(per_chunk);
    let before = (stride..last).step_by(stride);
    before.chain((last > 0).then_some(last)).filter_map(|end| u32::try_from(end).ok()).collect()
}

impl Known {
    fn len(&self) -> usize {
        self.first + self.keys.len()
    }

    /// How many blocks `keys` begin with that need not be sent.
    pub(crate) fn num_same(&self, keys: &[ChunkKey]) -> usize {
        // A key stands for its whole prefix, so one is enough to compare.
        let num_both = self.len().min(keys.len());
        let last = num_both.checked_sub(1).filter(|last| *last >= self.first);
        let is_same = last.is_some_and(|last| self.keys[last - self.first] == keys[last]);
        if is_same { num_both } else { 0 }
    }

    /// Whether anchors of the prefix are worth a question.
    pub(crate) fn is_far_from(&self, keys: &[ChunkKey]) -> bool {
        keys.len() - self.num_same(keys) > MAX_UNASKED
    }

    /// From now on the first `num_same` blocks of the last prefix, and `keys` behind those; false if those are not known.
    pub(crate) fn go_on(&mut self, num_same: usize, keys: impl Iterator<Item = ChunkKey>) -> bool {
        if num_same > self.len() || num_same > 0 && num_same <= self.first {
            return false;
        }
        self.first = if num_same == 0 { 0 } else { self.first };
        self.keys.truncate(num_same - self.first);
        self.keys.extend(keys);
        true
    }

    /// From now on the blocks up to an anchor; None: nothing.
    pub(crate) fn begin(&mut self, anchor: Option<(u32, ChunkKey)>) {
        self.keys.clear();
        self.first = anchor.map_or(0, |(end, _)| end as usize - 1);
        self.keys.extend(anchor.map(|(_, key)| key));
    }

    /// Whether the prefix began with an anchor, and this is less than that: the chunk is gone meanwhile.
    pub(crate) fn has_lost(&mut self, num_blocks: u32) -> bool {
        let has_lost = self.first > 0 && num_blocks as usize <= self.first;
        if has_lost {
            self.begin(None);
        }
        has_lost
    }

    pub(crate) fn prefix(&self, root: ChunkKey) -> Prefix<'_> {
        Prefix { root, keys: &self.keys, first: u32::try_from(self.first).unwrap_or(u32::MAX) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(num: u8) -> Vec<ChunkKey> {
        (0..num).map(|at| ChunkKey([at; 32])).collect()
    }

    #[test]
    fn a_prefix_that_ends_before_the_anchor_shares_no_block() {
        let keys = keys(6);
        let mut known = Known::default();
        known.begin(Some((4, keys[3])));
        for end in 0..=3 {
            assert_eq!(known.num_same(&keys[..end]), 0, "{end} blocks");
        }
        assert_eq!((known.num_same(&keys[..4]), known.num_same(&keys)), (4, 4));
        assert!(known.go_on(4, keys[4..].iter().copied()));
        assert_eq!((known.num_same(&keys[..3]), known.num_same(&keys[..5]), known.num_same(&keys)), (0, 5, 6));
    }
}
