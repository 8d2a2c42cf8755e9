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

/// A prefix cut into chunks: the keys that matter to the store.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Chunks<'a> {
    root: ChunkKey,
    keys: &'a [ChunkKey],
    per_chunk: u32,
}

impl<'a> Chunks<'a> {
    pub(crate) fn new(prefix: impl Into<Prefix<'a>>, per_chunk: u32) -> Self {
        let Prefix { root, keys } = prefix.into();
        // What lies behind 2^32 blocks is not looked at.
        let keys = &keys[..keys.len().min(u32::MAX as usize)];
        Self { root, keys, per_chunk }
    }

    pub(crate) fn num_blocks(&self) -> u32 {
        u32::try_from(self.keys.len()).expect("cut to fit when it was made")
    }

    /// Full chunks.
    pub(crate) fn num_full(&self) -> u32 {
        self.num_blocks() / self.per_chunk
    }

    /// The key of the prefix of so many blocks.
    pub(crate) fn key_of_blocks(&self, num_blocks: u32) -> &'a ChunkKey {
        &self.keys[num_blocks as usize - 1]
    }

    /// Full chunk `chunk`'s key.
    pub(crate) fn key(&self, chunk: u32) -> &'a ChunkKey {
        self.key_of_blocks((chunk + 1) * self.per_chunk)
    }

    /// The key that the chunk behind `chunks` full ones has as its parent.
    pub(crate) fn parent_key(&self, chunks: u32) -> ChunkKey {
        if chunks == 0 { self.root } else { *self.key(chunks - 1) }
    }

    /// The first `num_full` chunks alone.
    fn before(self, num_full: u32) -> Self {
        Self { keys: &self.keys[..(num_full * self.per_chunk) as usize], ..self }
    }

    pub(crate) fn per_chunk(&self) -> u32 {
        self.per_chunk
    }
}

/// What one tier, or any, holds of a chain: full chunks, and blocks of the longest tail behind them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) chunks: u32,
    pub(crate) tail_blocks: u32,
}

impl Found {
    pub(crate) fn blocks(self, per_chunk: u32) -> u32 {
        self.chunks * per_chunk + self.tail_blocks
    }
}

impl State {
    /// The entry of the chunk that ends behind `end` blocks, if a lease may have its frame.
    pub(super) fn visible(&self, chunks: &Chunks<'_>, end: u32) -> Option<ChunkId> {
        self.get(chunks, end, |entry| entry.host.is_here())
    }

    /// The entry of the chunk that ends behind `end` blocks, if it is `present` and its shape is right.
    fn get(&self, chunks: &Chunks<'_>, end: u32, present: impl Fn(&Entry) -> bool) -> Option<ChunkId> {
        let id = self.index.get(chunks.key_of_blocks(end))?;
        let entry = &self.index[id];
        let fits = entry.end_block() == end && entry.first_block == (end - 1) / chunks.per_chunk * chunks.per_chunk;
        (fits && present(entry)).then_some(id)
    }

    /// What is in host, and what is in host or can be read from disk. What is not what its key says is forgotten on the way.
    pub(crate) fn find(&mut self, chunks: &Chunks<'_>) -> (Found, Found) {
        let mut chunks = *chunks;
        loop {
            let (host, any) = self.find_present(&chunks);
            match self.first_unsound(&chunks, any) {
                None => return (host, any),
                Some(depth) => chunks = chunks.before(depth),
            }
        }
    }

    fn find_present(&self, chunks: &Chunks<'_>) -> (Found, Found) {
        let per_chunk = chunks.per_chunk;
        let is_here = |entry: &Entry| entry.host.is_here();
        let any = |entry: &Entry| entry.host.is_here() || entry.disk.is_here();
        let answers = self.disk.as_ref().is_some_and(|disk| disk.answers(self.now));
        let find = |most: u32, present: &dyn Fn(&Entry) -> bool| {
            let chunks_found = leading(most, |chunk| self.get(chunks, (chunk + 1) * per_chunk, present).is_some());
            Found { chunks: chunks_found, tail_blocks: self.find_tail(chunks, chunks_found, present) }
        };
        let stored = if answers { find(chunks.num_full(), &any) } else { find(chunks.num_full(), &is_here) };
        (if answers { find(stored.chunks, &is_here) } else { stored }, stored)
    }

    /// The highest of the chunks found that is not this prefix's: it is being forgotten, or a forged record says that it is
    /// elsewhere than its key does. What was compared once need not be again.
    fn first_unsound(&mut self, chunks: &Chunks<'_>, found: Found) -> Option<u32> {
        let blocks = found.blocks(chunks.per_chunk);
        let end = self.index.get(chunks.keys.get(blocks.checked_sub(1)? as usize)?)?;
        let is_forgetting = self.is_forgetting();
        let (mut unsound, mut unproven, mut behind) = (None, Vec::new(), blocks);
        for id in self.index.ancestry(end) {
            let entry = &self.index[id];
            if entry.proven && !is_forgetting {
                break;
            }
            let fits = entry.end_block() == behind && entry.parent.is_none() == (entry.first_block == 0);
            let is_ours = fits
                && entry.key == *chunks.key_of_blocks(behind)
                && entry.parent_key == chunks.parent_key(entry.depth);
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
            self.counters.disk_verify_failures += 1;
            self.doom(id);
        }
        Some(depth.min(found.chunks))
    }

    /// Blocks of the longest tail behind `num_full` chunks.
    fn find_tail(&self, chunks: &Chunks<'_>, num_full: u32, present: &dyn Fn(&Entry) -> bool) -> u32 {
        let first = num_full * chunks.per_chunk;
        let longest = (chunks.per_chunk - 1).min(chunks.num_blocks() - first);
        (1..=longest).rev().find(|blocks| self.get(chunks, first + blocks, present).is_some()).unwrap_or(0)
    }
}

/// How many of 0..num hold, where none holds behind one that does not: all, or gallop and halve.
fn leading(num: u32, mut holds: impl FnMut(u32) -> bool) -> u32 {
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

#[cfg(test)]
mod tests {
    use super::leading;

    #[test]
    fn leading_finds_every_end_with_few_probes() {
        for num in 0..200 {
            for end in 0..=num {
                let mut probes = 0;
                let found = leading(num, |at| {
                    assert!(at < num);
                    probes += 1;
                    at < end
                });
                assert_eq!(found, end, "{num}");
                assert!(probes <= 17, "{probes} probes for {end} of {num}");
            }
        }
    }
}
