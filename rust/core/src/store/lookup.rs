//! How much of a prefix is here. Presence is monotone in each tier, so a few probes find its end.
//!
//! While chunks are being forgotten presence has gaps, and a record on disk may lie about its place: so what was found is
//! compared on the way up to the root, once for each chunk.

use super::state::State;
use crate::evict::ChunkId;
use crate::index::Entry;
use crate::key::{ChunkKey, KeyChain};

/// What the store is asked about: the keys of a prefix, one a block, and the key of the empty prefix.
#[derive(Debug, Clone, Copy)]
pub struct Prefix<'a> {
    /// The key of the empty prefix.
    pub root: ChunkKey,
    /// Keys of the blocks, from position 0; fewer than 2^32.
    pub keys: &'a [ChunkKey],
}

impl<'a> From<&'a KeyChain> for Prefix<'a> {
    fn from(chain: &'a KeyChain) -> Self {
        Self { root: chain.root(), keys: chain.keys() }
    }
}

impl Prefix<'_> {
    pub(crate) fn num_blocks(&self) -> u32 {
        u32::try_from(self.keys.len()).unwrap_or(u32::MAX)
    }

    /// The key of its first `num_blocks` blocks, 0 for none.
    pub(crate) fn key_of(&self, num_blocks: u32) -> ChunkKey {
        num_blocks.checked_sub(1).map_or(self.root, |last| self.keys[last as usize])
    }
}

impl State {
    /// The entry of the chunk that ends behind `end` blocks, if a lease may have its frame.
    pub(super) fn visible(&self, prefix: &Prefix<'_>, end: u32) -> Option<ChunkId> {
        if end == 0 { None } else { self.get(prefix, end, |entry| entry.host.is_here()) }
    }

    /// The entry of the chunk that ends behind `end` blocks, if it is `present` and its shape is right.
    fn get(&self, prefix: &Prefix<'_>, end: u32, present: impl Fn(&Entry) -> bool) -> Option<ChunkId> {
        let id = self.index.get(&prefix.key_of(end))?;
        let entry = &self.index[id];
        let fits = entry.end_block() == end && entry.first_block == (end - 1) / self.per_chunk * self.per_chunk;
        (fits && present(entry)).then_some(id)
    }

    /// Blocks in host, and blocks in host or on a disk that can be read: full chunks, then the longest tail behind them. What is
    /// not what its key says is forgotten on the way.
    pub(crate) fn find(&mut self, prefix: &Prefix<'_>) -> (u32, u32) {
        let mut prefix = *prefix;
        loop {
            let (host, any) = self.find_present(&prefix);
            match self.first_unsound(&prefix, any) {
                None => return (host, any),
                Some(depth) => prefix.keys = &prefix.keys[..(depth * self.per_chunk) as usize],
            }
        }
    }

    fn find_present(&self, prefix: &Prefix<'_>) -> (u32, u32) {
        let is_here = |entry: &Entry| entry.host.is_here();
        let num_full = prefix.num_blocks() / self.per_chunk;
        if !self.disk.answers(self.now) {
            let host = self.find_end(prefix, num_full, is_here);
            return (host, host);
        }
        let stored = self.find_end(prefix, num_full, |entry| is_here(entry) || entry.disk.is_here());
        (self.find_end(prefix, stored / self.per_chunk, is_here), stored)
    }

    /// Blocks that are `present`: of the first `num_full` full chunks, and of the longest tail behind those.
    fn find_end(&self, prefix: &Prefix<'_>, num_full: u32, present: impl Fn(&Entry) -> bool + Copy) -> u32 {
        let per_chunk = self.per_chunk;
        let full = leading(num_full, |chunk| self.get(prefix, (chunk + 1) * per_chunk, present).is_some()) * per_chunk;
        let longest = (per_chunk - 1).min(prefix.num_blocks() - full);
        (1..=longest)
            .rev()
            .map(|tail| full + tail)
            .find(|&end| self.get(prefix, end, present).is_some())
            .unwrap_or(full)
    }

    /// The highest of the chunks found that is not this prefix's: it is being forgotten, or a forged record says that it is
    /// elsewhere than its key does. What was compared once need not be again.
    fn first_unsound(&mut self, prefix: &Prefix<'_>, blocks: u32) -> Option<u32> {
        let end = self.index.get(&prefix.key_of(blocks))?;
        let is_forgetting = self.is_forgetting();
        let (mut unsound, mut unproven, mut behind) = (None, Vec::new(), blocks);
        for id in self.index.ancestry(end) {
            let entry = &self.index[id];
            if entry.proven && !is_forgetting {
                break;
            }
            let fits = entry.end_block() == behind && entry.parent.is_none() == (entry.first_block == 0);
            let is_ours =
                fits && entry.key == prefix.key_of(behind) && entry.parent_key == prefix.key_of(entry.first_block);
            if !is_ours || entry.doomed || entry.detached {
                unsound = Some((id, entry.depth, is_ours));
            }
            unproven.push(id);
            behind = entry.first_block;
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
            self.doom(id);
        }
        Some(depth.min(blocks / self.per_chunk))
    }
}

/// How many of 0..num hold, where none holds behind one that does not: all, or gallop and halve.
pub(super) fn leading(num: u32, mut holds: impl FnMut(u32) -> bool) -> u32 {
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
