//! How much of a prefix is here. Presence is monotone in each tier, so a few probes find its end.
//!
//! This file only reads.

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
    /// The entry of `key`, if a lease may have its host frame.
    pub(crate) fn visible(&self, key: &ChunkKey) -> Option<ChunkId> {
        self.index.get(key).filter(|&id| self.index[id].is_visible())
    }

    /// What is in host, and what is in host or on disk.
    pub(crate) fn find(&self, chunks: &Chunks<'_>) -> (Found, Found) {
        let any = |entry: &Entry| entry.is_visible() || entry.is_on_disk();
        let num_any = leading(chunks.num_full(), |chunk| self.has(chunks.key(chunk), any));
        let num_host = leading(num_any, |chunk| self.has(chunks.key(chunk), Entry::is_visible));
        let host = Found { chunks: num_host, tail_blocks: self.find_tail(chunks, num_host, Entry::is_visible) };
        if self.disk.is_none() {
            return (host, host);
        }
        (host, Found { chunks: num_any, tail_blocks: self.find_tail(chunks, num_any, any) })
    }

    fn has(&self, key: &ChunkKey, present: impl Fn(&Entry) -> bool) -> bool {
        self.index.get(key).is_some_and(|id| present(&self.index[id]))
    }

    /// Blocks of the longest tail behind `num_full` chunks.
    pub(crate) fn find_tail(&self, chunks: &Chunks<'_>, num_full: u32, present: impl Fn(&Entry) -> bool) -> u32 {
        let first = num_full * chunks.per_chunk;
        let longest = (chunks.per_chunk - 1).min(chunks.num_blocks() - first);
        (1..=longest).rev().find(|blocks| self.has(chunks.key_of_blocks(first + blocks), &present)).unwrap_or(0)
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
