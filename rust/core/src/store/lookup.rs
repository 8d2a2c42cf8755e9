//! How much of a prefix is here. Presence is monotone in each tier, so a few probes find its end.
//!
//! While chunks are being forgotten presence has gaps, and a record on disk may lie about its place: so what was found is
//! compared on the way up to the root, once for each chunk.

use crate::evict::ChunkId;
use crate::index::Entry;
use crate::key::{ChunkKey, KeyChain};
use crate::store::state::State;

/// The keys of a prefix, one a unit, and the key of the empty prefix.
#[derive(Debug, Clone, Copy)]
pub struct Prefix<'a> {
    /// The key of the empty prefix.
    pub root: ChunkKey,
    /// Keys of the units, from unit `first` on; fewer than 2^32.
    pub keys: &'a [ChunkKey],
    /// Units whose keys are left out. If there are any, the first key has to end a chunk that [`Store::anchors`] knows: without
    /// it, nothing of the prefix is found. Only for lookups and leases.
    ///
    /// [`Store::anchors`]: super::Store::anchors
    pub first: u32,
}

impl<'a> From<&'a KeyChain> for Prefix<'a> {
    fn from(chain: &'a KeyChain) -> Self {
        Self::new(chain.root(), chain.keys())
    }
}

impl<'a> Prefix<'a> {
    /// With all its keys.
    pub fn new(root: ChunkKey, keys: &'a [ChunkKey]) -> Self {
        Self { root, keys, first: 0 }
    }

    /// Units that it has, those without keys too.
    pub fn num_units(&self) -> u32 {
        u32::try_from(self.keys.len()).unwrap_or(u32::MAX).saturating_add(self.first)
    }

    /// The key of its first `num_units` units, 0 for none; it must not be left out.
    pub(crate) fn key_of(&self, num_units: u32) -> ChunkKey {
        num_units.checked_sub(1).map_or(self.root, |last| self.keys[(last - self.first) as usize])
    }

    /// Units up to its first key, if some are left out before that; and the key.
    fn base(&self) -> Option<(u32, ChunkKey)> {
        let key = self.keys.first().filter(|_| self.first > 0)?;
        Some((self.first.saturating_add(1), *key))
    }
}

/// How many of a prefix's anchors are stored; see [`Store::anchors`](super::Store::anchors).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Anchors {
    /// Those whose way up is known to be right: a prefix may begin with the last of them.
    pub num_known: u32,
    /// Those that are stored.
    pub num_stored: u32,
}

impl State {
    /// The entry of the chunk that ends the first `end` units, if a lease may use its frame.
    pub(crate) fn visible(&self, prefix: &Prefix<'_>, end: u32) -> Option<ChunkId> {
        let is_here = |entry: &Entry| entry.host.is_visible();
        if end == 0 {
            return None;
        }
        match prefix.base().filter(|(base, _)| end < *base) {
            None => self.get(&prefix.key_of(end), end, is_here),
            Some((_, key)) => {
                let mut above = self.index.ancestry(self.index.get(&key)?);
                above.find(|id| self.index[*id].depth + 1 == end).filter(|id| is_here(&self.index[*id]))
            }
        }
    }

    /// The entry of the chunk that ends the first `end` units with `key`, if it is `present`, not too old, and its shape is right.
    fn get(&self, key: &ChunkKey, end: u32, present: impl Fn(&Entry) -> bool) -> Option<ChunkId> {
        let id = self.index.get(key)?;
        let entry = &self.index[id];
        (entry.depth + 1 == end && !self.is_expired(entry) && present(entry)).then_some(id)
    }

    /// In host, or on a disk that can be read.
    fn is_stored(&self) -> impl Fn(&Entry) -> bool + Copy + use<> {
        let answers = self.disk.answers(self.now);
        move |entry| entry.host.is_visible() || answers && entry.disk.is_stored()
    }

    /// How many of `anchors` are stored: numbers of units of one prefix and their keys, in order.
    pub(crate) fn anchors(&self, anchors: &[(u32, ChunkKey)]) -> Anchors {
        let num = u32::try_from(anchors.len()).unwrap_or(u32::MAX);
        let is_stored = self.is_stored();
        let at = |nth: u32| anchors[nth as usize];
        let num_stored = leading(num, |nth| self.get(&at(nth).1, at(nth).0, is_stored).is_some());
        Anchors { num_stored, num_known: leading(num_stored, |nth| self.knows(at(nth)).is_some()) }
    }

    /// A chunk that is stored, if all above it is known to be what its keys say.
    fn knows(&self, (end, key): (u32, ChunkKey)) -> Option<ChunkId> {
        let is_known = |entry: &Entry| entry.proven && !entry.removing && !entry.detached;
        let is_stored = self.is_stored();
        if self.is_removing() {
            return None;
        }
        self.get(&key, end, |entry| is_known(entry) && is_stored(entry))
    }

    /// Leading units in host memory, and in host memory or on a readable disk. Removes chunks that are not what their keys say.
    pub(crate) fn find(&mut self, prefix: &Prefix<'_>) -> (u32, u32) {
        let mut prefix = *prefix;
        if prefix.first > 0 && prefix.base().and_then(|base| self.knows(base)).is_none() {
            return (0, 0); // what its keys say of the blocks before cannot be compared
        }
        loop {
            let (host, any) = self.find_present(&prefix);
            match self.first_unsound(&prefix, any) {
                None => return (host, any),
                Some(depth) => prefix.keys = &prefix.keys[..(depth - prefix.first) as usize],
            }
        }
    }

    fn find_present(&self, prefix: &Prefix<'_>) -> (u32, u32) {
        let stored = self.find_end(prefix, prefix.num_units(), self.is_stored());
        (self.find_end(prefix, stored, |entry| entry.host.is_visible()), stored)
    }

    /// How many of the first `most` units are `present`.
    fn find_end(&self, prefix: &Prefix<'_>, most: u32, present: impl Fn(&Entry) -> bool + Copy) -> u32 {
        let base = prefix.base();
        if let Some((_, key)) = base.filter(|(end, key)| self.get(key, *end, present).is_none()) {
            let mut above = self.index.get(&key).into_iter().flat_map(|id| self.index.ancestry(id));
            return above.find(|id| present(&self.index[*id])).map_or(0, |id| self.index[id].depth + 1);
        }
        let before = base.map_or(0, |(end, _)| end);
        let is_present = |unit: u32| {
            let end = before + unit + 1;
            self.get(&prefix.key_of(end), end, present).is_some()
        };
        before + leading(most - before, is_present)
    }

    /// The highest of the chunks found that is not this prefix's: it is being forgotten, or a forged record says that it is
    /// elsewhere than its key does. What was compared once need not be again.
    fn first_unsound(&mut self, prefix: &Prefix<'_>, units: u32) -> Option<u32> {
        let end = self.index.get(&prefix.key_of(units))?;
        let (is_removing, base) = (self.is_removing(), prefix.base());
        let (mut unsound, mut unproven, mut behind) = (None, Vec::new(), units);
        for id in self.index.ancestry(end) {
            let entry = &self.index[id];
            // The base was looked at before anything was doomed, and before it there are no keys to compare.
            if entry.proven && (!is_removing || base == Some((behind, entry.key))) {
                break;
            }
            let fits = entry.depth + 1 == behind && entry.parent.is_none() == (entry.depth == 0);
            let is_ours = fits && entry.key == prefix.key_of(behind) && entry.parent_key == prefix.key_of(entry.depth);
            if !is_ours || entry.removing || entry.detached {
                unsound = Some((id, entry.depth, is_ours));
            }
            unproven.push(id);
            behind = entry.depth;
            if !is_ours || behind == 0 {
                break;
            }
        }
        let Some((id, depth, is_ours)) = unsound else {
            for id in unproven {
                self.index[id].proven = true;
            }
            return None;
        };
        if !is_ours {
            self.stats.disk_verify_failures += 1;
            self.remove_tree(id);
        }
        Some(depth.min(units))
    }
}

/// How many of 0..num hold, where none holds behind one that does not: all, or gallop and halve.
pub(crate) fn leading(num: u32, mut holds: impl FnMut(u32) -> bool) -> u32 {
    if num == 0 || holds(num - 1) {
        return num;
    }
    let (mut yes, mut no) = (0, num - 1); // the first `yes` hold, index `no` does not
    let mut step = 1;
    while yes + step <= no && holds(yes + step - 1) {
        yes += step;
        step *= 2;
    }
    no = no.min(yes + step - 1);
    while yes < no {
        let middle = yes + (no - yes) / 2;
        if holds(middle) { yes = middle + 1 } else { no = middle }
    }
    yes
}
