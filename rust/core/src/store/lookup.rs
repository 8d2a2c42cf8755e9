//! Finds how much of a prefix is stored. Presence is monotone in each tier, so a few probes find
//! where the stored part ends.
//!
//! During tree removals, presence can have gaps, so lookups also check the ancestors of the last
//! chunk found. If a disk record has the wrong parent or depth, a lookup can report more units than
//! a lease covers: only leases verify, once per chunk, that the chunk belongs to the prefix.

use crate::evict::ChunkId;
use crate::index::Entry;
use crate::key::{ChunkKey, KeyChain};
use crate::store::state::State;

/// How many of a prefix's leading units are stored, by tier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Lookup {
    /// Number of units in host memory.
    pub host_units: u32,
    /// Number of units in host memory or on disk.
    pub stored_units: u32,
}

/// A prefix's keys, one per unit, and the key of the empty prefix.
#[derive(Debug, Clone, Copy)]
pub struct Prefix<'a> {
    /// The key of the empty prefix.
    pub root: ChunkKey,
    /// Unit keys, starting at unit `first`. There must be fewer than 2^32 keys.
    pub keys: &'a [ChunkKey],
    /// Number of leading units whose keys are omitted. A save still needs the key of the unit
    /// before its range. Lookups and leases find units only if [`Store::anchors`] reports the first
    /// key as proven.
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
    /// Creates a prefix that omits no keys.
    pub fn new(root: ChunkKey, keys: &'a [ChunkKey]) -> Self {
        Self { root, keys, first: 0 }
    }

    /// Returns the number of units, including units whose keys are omitted.
    pub fn num_units(&self) -> u32 {
        u32::try_from(self.keys.len()).unwrap_or(u32::MAX).saturating_add(self.first)
    }

    /// Returns the key of the first `num_units` units: the root key for 0 units, and otherwise the
    /// key of the last unit, which must not be omitted.
    pub(crate) fn key_of(&self, num_units: u32) -> ChunkKey {
        num_units.checked_sub(1).map_or(self.root, |last| self.keys[(last - self.first) as usize])
    }

    /// Returns the prefix of the first `num_units` units. At least one of these units must have a
    /// key.
    fn cut(self, num_units: u32) -> Self {
        Self { keys: &self.keys[..(num_units - self.first) as usize], ..self }
    }

    /// If keys are omitted, returns the number of units that the first key covers, along with that
    /// key.
    fn base(&self) -> Option<(u32, ChunkKey)> {
        let key = self.keys.first().filter(|_| self.first > 0)?;
        Some((self.first.saturating_add(1), *key))
    }
}

/// Result of [`Store::anchors`](super::Store::anchors).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Anchors {
    /// Number of leading anchors that are proven. A prefix can start at the last proven anchor.
    pub num_known: u32,
    /// Number of leading anchors that are stored.
    pub num_stored: u32,
}

impl State {
    /// Returns the chunk that completes a prefix of `end` units, if the chunk is visible in host
    /// memory.
    pub(crate) fn visible(&self, prefix: &Prefix<'_>, end: u32) -> Option<ChunkId> {
        let is_here = |entry: &Entry| entry.host.is_visible();
        if end == 0 {
            return None;
        }
        match prefix.base().filter(|(base, _)| end < *base) {
            None => self.get(&prefix.key_of(end), end, is_here),
            Some((_, key)) => {
                let mut above = self.index.ancestry(self.index.get(&key)?);
                above
                    .find(|id| self.index[*id].depth + 1 == end)
                    .filter(|id| is_here(&self.index[*id]))
            }
        }
    }

    /// Returns the chunk with `key` if it completes a prefix of `end` units, satisfies `present`
    /// and is not expired.
    fn get(&self, key: &ChunkKey, end: u32, present: impl Fn(&Entry) -> bool) -> Option<ChunkId> {
        let id = self.index.get(key)?;
        let entry = &self.index[id];
        (entry.depth + 1 == end && !self.is_expired(entry) && present(entry)).then_some(id)
    }

    /// Returns a predicate for chunks in host memory or, unless reads are paused, on disk.
    fn is_stored(&self) -> impl Fn(&Entry) -> bool + Copy + use<> {
        let accepts_reads = self.disk.accepts_reads(self.now);
        move |entry| entry.host.is_visible() || accepts_reads && entry.disk.is_stored()
    }

    /// Implements [`super::Store::anchors`].
    pub(crate) fn anchors(&self, anchors: &[(u32, ChunkKey)]) -> Anchors {
        let num = u32::try_from(anchors.len()).unwrap_or(u32::MAX);
        let is_stored = self.is_stored();
        let at = |nth: u32| anchors[nth as usize];
        let num_stored = leading(num, |nth| self.get(&at(nth).1, at(nth).0, is_stored).is_some());
        Anchors {
            num_stored,
            num_known: leading(num_stored, |nth| self.find_proven(at(nth)).is_some()),
        }
    }

    /// Returns an anchor's chunk if the chunk is stored and proven. A proven chunk's ancestors are
    /// also proven.
    fn find_proven(&self, (end, key): (u32, ChunkKey)) -> Option<ChunkId> {
        let is_proven = |entry: &Entry| entry.proven && !entry.removing && !entry.detached;
        let is_stored = self.is_stored();
        if self.is_removing() {
            return None;
        }
        self.get(&key, end, |entry| is_proven(entry) && is_stored(entry))
    }

    /// Returns false if leading keys are omitted and the first key is not proven.
    fn has_proven_base(&self, prefix: &Prefix<'_>) -> bool {
        prefix.first == 0 || prefix.base().and_then(|base| self.find_proven(base)).is_some()
    }

    /// Counts the leading units in host memory and the leading units stored in any tier.
    pub(crate) fn find(&self, prefix: &Prefix<'_>) -> Lookup {
        if self.has_proven_base(prefix) { self.find_unremoved(*prefix) } else { Lookup::default() }
    }

    /// Like [`Self::find`], but verifies that each chunk belongs to the prefix. Removes chunks that
    /// do not belong to the prefix and marks the others as proven, so that no chunk is verified
    /// twice.
    pub(crate) fn find_verified(&mut self, prefix: &Prefix<'_>) -> Lookup {
        if !self.has_proven_base(prefix) {
            return Lookup::default();
        }
        let mut prefix = *prefix;
        loop {
            let found = self.find_unremoved(prefix);
            match self.remove_foreign(&prefix, found.stored_units) {
                None => return found,
                Some(depth) => prefix = prefix.cut(depth),
            }
        }
    }

    /// Like [`Self::find`], but does not check that the first key is proven. Stops before the first
    /// chunk that is being removed.
    fn find_unremoved(&self, mut prefix: Prefix<'_>) -> Lookup {
        loop {
            let stored_units = self.find_end(&prefix, prefix.num_units(), self.is_stored());
            let in_host = |entry: &Entry| entry.host.is_visible();
            let host_units = self.find_end(&prefix, stored_units, in_host);
            let found = Lookup { host_units, stored_units };
            match self.first_removed(&prefix, stored_units) {
                None => return found,
                Some(depth) => prefix = prefix.cut(depth),
            }
        }
    }

    /// Returns the depth of the topmost chunk being removed among the first `units` chunks.
    fn first_removed(&self, prefix: &Prefix<'_>, units: u32) -> Option<u32> {
        if units == 0 || !self.is_removing() {
            return None;
        }
        let end = self.index.get(&prefix.key_of(units))?;
        let ancestors = self.index.ancestry(end).map(|id| &self.index[id]);
        ancestors.filter(|entry| entry.removing || entry.detached).last().map(|entry| entry.depth)
    }

    /// Returns the number of leading units that satisfy `present`, at most `most`.
    fn find_end(
        &self,
        prefix: &Prefix<'_>,
        most: u32,
        present: impl Fn(&Entry) -> bool + Copy,
    ) -> u32 {
        let base = prefix.base();
        if let Some((_, key)) = base.filter(|(end, key)| self.get(key, *end, present).is_none()) {
            let mut above = self.index.get(&key).into_iter().flat_map(|id| self.index.ancestry(id));
            return above
                .find(|id| present(&self.index[*id]))
                .map_or(0, |id| self.index[id].depth + 1);
        }
        let before = base.map_or(0, |(end, _)| end);
        let is_present = |unit: u32| {
            let end = before + unit + 1;
            self.get(&prefix.key_of(end), end, present).is_some()
        };
        before + leading(most - before, is_present)
    }

    /// Finds the deepest chunk, among the first `units`, whose parent key is wrong because of a bad
    /// disk record. Removes that chunk and returns its depth. If all chunks match, marks them as
    /// proven.
    fn remove_foreign(&mut self, prefix: &Prefix<'_>, units: u32) -> Option<u32> {
        if units == 0 {
            return None;
        }
        let end = self.index.get(&prefix.key_of(units))?;
        let is_unproven = |id: &ChunkId| !self.index[*id].proven;
        let unproven: Vec<_> = self.index.ancestry(end).take_while(is_unproven).collect();
        // Comparing parent keys is enough: the last chunk's key is correct, and each ancestor's key
        // equals the parent key of the chunk below it.
        let is_foreign = |&id: &ChunkId| {
            let entry = &self.index[id];
            entry.parent_key != prefix.key_of(entry.depth)
        };
        let Some(id) = unproven.iter().copied().find(is_foreign) else {
            for id in unproven {
                self.index[id].proven = true;
            }
            return None;
        };
        self.stats.disk_verify_failures += 1;
        self.remove_tree(id);
        Some(self.index[id].depth)
    }
}

/// Returns how many leading numbers in `0..num` satisfy a monotone predicate. Probes the last
/// number first, then gallops and bisects.
pub(crate) fn leading(num: u32, mut holds: impl FnMut(u32) -> bool) -> u32 {
    if num == 0 || holds(num - 1) {
        return num;
    }
    let (mut yes, mut no) = (0, num - 1); // the predicate holds below `yes` but not at `no`
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
