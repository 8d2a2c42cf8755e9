//! The keys of a request's prefix, extended as the prefix grows.
//!
//! Whole blocks are hashed once, straight from the caller's memory. Positions past the last whole
//! block are buffered until their block is complete. Only digests are chained, which takes one
//! compression per block.

use rayon::prelude::*;

use super::ChunkKey;
use super::content::{Item, Items, Kind, Pending, Row, Run, View};
use super::mode::{CHAIN, Digest, GROUP, PARALLEL_BYTES, TOKENS};
use crate::{Error, Result};

/// Returns the keys in `group` of the prefixes identified by `keys`: `keyed(K("group"), key | group
/// as u32 | zeros)` with a 64-byte input.
fn of_group(keys: &[ChunkKey], group: u32) -> impl Iterator<Item = ChunkKey> + use<> {
    let mut inputs = vec![[0; 64]; keys.len()];
    for (input, key) in inputs.iter_mut().zip(keys) {
        input[..32].copy_from_slice(&key.0);
        input[32..36].copy_from_slice(&group.to_le_bytes());
    }
    let mut digests = vec![Digest::default(); keys.len()];
    GROUP.hash_each(inputs.as_flattened(), 64, &mut digests);
    digests.into_iter().map(ChunkKey)
}

/// Returns a group's root key, which carries the salt tag of `root`.
fn root_of_group(root: ChunkKey, group: u32) -> ChunkKey {
    of_group(&[root], group).next().unwrap_or_default().with_salt_of(&root)
}

/// A prefix's keys in one group.
#[derive(Debug, Clone)]
struct OfGroup {
    group: u32,
    root: ChunkKey,
    keys: Vec<ChunkKey>,
}

/// Number of token ids hashed per round: enough to fill all SIMD lanes, but few enough to fit in
/// the L1 cache.
const BATCH_IDS: usize = 4 << 10;
/// Number of blocks hashed per round before their digests are chained.
const BATCH_BLOCKS: usize = 64;

/// The keys of one prefix, one per block, computed incrementally.
///
/// With a `lookahead` of n positions, a block's key also covers the n positions after the block.
/// The first digest covers n extra positions, and each later digest covers `block_tokens` positions
/// starting n positions into its block.
///
/// All errors are `InvalidConfig` and leave the chain unchanged. Positions start at 0 and fit in
/// 32 bits.
#[derive(Debug, Clone)]
pub struct KeyChain {
    root: ChunkKey,
    block_tokens: u32,
    lookahead: u32,
    keys: Vec<ChunkKey>,
    pending: Pending,
    items: Items,
    groups: Vec<OfGroup>,
}

impl KeyChain {
    /// Creates an empty prefix under `root`. `block_tokens` is the number of positions per block,
    /// which must be at least 1. `lookahead` is the number of positions after a block that its key
    /// also covers, which must not exceed `block_tokens`.
    pub fn with_lookahead(root: ChunkKey, block_tokens: u32, lookahead: u32) -> Result<Self> {
        if block_tokens == 0 {
            return Err(Error::invalid("block_tokens must be at least 1"));
        }
        if lookahead > block_tokens {
            return Err(Error::invalid("lookahead must be at most block_tokens")
                .with_context("lookahead", lookahead));
        }
        Ok(Self {
            root,
            block_tokens,
            lookahead,
            keys: Vec::new(),
            pending: Pending::default(),
            items: Items::default(),
            groups: Vec::new(),
        })
    }

    /// Returns the key of the empty prefix.
    pub fn root(&self) -> ChunkKey {
        self.root
    }

    /// Returns the number of positions per block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Returns the number of positions appended so far.
    pub fn num_tokens(&self) -> u32 {
        self.hashed() + self.pending.len()
    }

    /// Returns the number of blocks that have a key. A block gets its key once all positions that
    /// the key covers have been appended.
    pub fn num_blocks(&self) -> u32 {
        // This cannot overflow, because `check_room` limits positions to u32.
        u32::try_from(self.keys.len()).unwrap_or(u32::MAX)
    }

    /// Returns all block keys, in order.
    pub fn keys(&self) -> &[ChunkKey] {
        &self.keys
    }

    /// Returns a block's key, which identifies the prefix ending with that block.
    pub fn key(&self, block: u32) -> Result<ChunkKey> {
        self.keys.get(block as usize).copied().ok_or_else(|| {
            Error::invalid("the block has no key yet")
                .with_context("block", block)
                .with_context("num_blocks", self.keys.len())
        })
    }

    /// Returns the key of a block's chunk in `group`, or the block's key if `group` is None.
    pub fn key_of(&self, block: u32, group: Option<u32>) -> Result<ChunkKey> {
        let own = self.key(block)?;
        Ok(group.and_then(|group| of_group(&[own], group).next()).unwrap_or(own))
    }

    /// Computes the prefix's missing keys in KV cache group `group`.
    pub fn extend_group(&mut self, group: u32) {
        let known = self.groups.iter().position(|of| of.group == group).unwrap_or_else(|| {
            self.groups.push(OfGroup {
                group,
                root: root_of_group(self.root, group),
                keys: Vec::new(),
            });
            self.groups.len() - 1
        });
        let keys = &mut self.groups[known].keys;
        keys.extend(of_group(&self.keys[keys.len()..], group));
    }

    /// Returns the root key of `group` and the block keys computed by `extend_group`. If `group` is
    /// None, returns the root key and block keys of the chain.
    pub fn kept_by(&self, group: Option<u32>) -> (ChunkKey, &[ChunkKey]) {
        let Some(group) = group else { return (self.root, &self.keys) };
        let known = self.groups.iter().find(|of| of.group == group);
        known.map_or((self.root, &[]), |of| (of.root, &of.keys))
    }

    /// Returns the root key of `group` and the keys of its independent chunks for `blocks`. The
    /// root key is the parent key of these chunks.
    pub fn independent_keys(
        &self,
        group: u32,
        blocks: impl IntoIterator<Item = u32>,
    ) -> Result<(ChunkKey, Vec<ChunkKey>)> {
        let own = blocks.into_iter().map(|block| self.key(block)).collect::<Result<Vec<_>>>()?;
        Ok((root_of_group(self.root, group), of_group(&own, group).collect()))
    }

    /// Declares a multimodal item at positions [`start`, `start + num_tokens`), which must not have
    /// been appended yet.
    ///
    /// Declaring the same item twice has no effect.
    pub fn add_item(&mut self, identifier: &str, start: u32, num_tokens: u32) -> Result<()> {
        let item = Item { identifier: identifier.into(), start, num_tokens };
        let fail = |message: &str| {
            let error = Error::invalid(message)
                .with_context("start", start)
                .with_context("num_tokens", num_tokens);
            Err(error.with_context("appended", self.num_tokens()))
        };
        if num_tokens == 0
            || start.checked_add(num_tokens).is_none()
            || u32::try_from(identifier.len()).is_err()
        {
            return fail("a multimodal item must cover at least one position and end below 2^32");
        }
        if start < self.num_tokens() && !self.items.contains(&item) {
            return fail("a multimodal item must be declared before its positions are appended");
        }
        self.items.add(item)
    }

    /// Appends token ids.
    pub fn append_tokens(&mut self, ids: &[u32]) -> Result<()> {
        self.check_room(ids.len())?;
        let block = self.block_tokens as usize;
        let mut bytes = Vec::with_capacity(4 * ids.len().min(BATCH_IDS + block));
        for ids in ids.chunks((BATCH_IDS / block).max(1) * block) {
            bytes.clear();
            bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
            self.append(Kind::Tokens, &bytes);
        }
        Ok(())
    }

    /// Appends embedding rows, each with `width` elements of type `dtype` (a torch name such as
    /// `bfloat16`). `rows` holds the raw bytes of the rows, with no gaps.
    pub fn append_embeds(&mut self, dtype: &str, width: u32, rows: &[u8]) -> Result<()> {
        let row = Row::new(dtype, width)?;
        if !rows.len().is_multiple_of(row.size_bytes) {
            return Err(Error::invalid("the embedding size must be a whole number of rows")
                .with_context("bytes", rows.len())
                .with_context("width", width)
                .with_context("dtype", dtype));
        }
        self.check_room(rows.len() / row.size_bytes)?;
        self.append(Kind::Embeds(row), rows);
        Ok(())
    }

    pub(super) fn check_room(&self, num: usize) -> Result<()> {
        match u32::try_from(num) {
            Ok(num) if self.num_tokens().checked_add(num).is_some() => Ok(()),
            _ => Err(Error::invalid("a prefix must have fewer than 2^32 positions")
                .with_context("num_tokens", self.num_tokens())),
        }
    }

    /// Appends positions: completes the pending block, hashes whole blocks, and buffers the rest as
    /// the next pending block.
    fn append(&mut self, kind: Kind, bytes: &[u8]) {
        let (each, block_bytes) =
            (kind.size_bytes(), self.block_tokens as usize * kind.size_bytes());
        let is_whole = self.pending.len() == 0 && self.next_len() == self.block_tokens;
        let missing =
            if is_whole { 0 } else { (self.next_len() - self.pending.len()) as usize * each };
        let (head, rest) = bytes.split_at(missing.min(bytes.len()));
        let (body, rest) = rest.split_at(rest.len() / block_bytes * block_bytes);
        self.push_pending(kind, head);
        if kind == Kind::Tokens {
            self.push_token_blocks(body, block_bytes);
        } else {
            self.push_embed_blocks(kind, body, block_bytes);
        }
        self.push_pending(kind, rest);
    }

    /// Returns true if the next key adds exactly the next `num` positions and they form one whole
    /// block with no items.
    pub(super) fn is_next_block(&self, num: usize) -> bool {
        let (start, len) = (self.block_start(), self.block_tokens);
        let is_whole = num == len as usize && self.pending.len() == 0 && self.next_len() == len;
        is_whole
            && self
                .items
                .next_covered(start)
                .is_none_or(|position| position >= start + u64::from(len))
    }

    /// Returns the last block's key, or the root key if there are no blocks.
    pub(super) fn last(&self) -> ChunkKey {
        self.keys.last().copied().unwrap_or(self.root)
    }

    /// Appends the key of the next block, computed by the caller.
    pub(super) fn push(&mut self, key: Digest) {
        self.keys.push(ChunkKey(key));
    }

    /// Returns the number of positions covered by keys.
    fn hashed(&self) -> u32 {
        if self.keys.is_empty() {
            0
        } else {
            self.num_blocks() * self.block_tokens + self.lookahead
        }
    }

    /// Returns the number of positions that the next key covers but the last key does not.
    fn next_len(&self) -> u32 {
        self.block_tokens + if self.keys.is_empty() { self.lookahead } else { 0 }
    }

    fn block_start(&self) -> u64 {
        u64::from(self.hashed())
    }

    /// Returns the content digest of the positions in `view`, which start at `start` and belong to
    /// the next key or to a later key.
    fn digest(&self, view: &View<'_>, start: u64) -> Digest {
        view.digest(start, self.items.overlapping(start..start + u64::from(self.next_len())))
    }

    fn push_pending(&mut self, kind: Kind, bytes: &[u8]) {
        let num = u32::try_from(bytes.len() / kind.size_bytes()).expect("at most a block");
        if num == 0 {
            return;
        }
        self.pending.push(kind, num, bytes);
        if self.pending.len() == self.next_len() {
            let digest = self.digest(&self.pending.view(), self.block_start());
            self.push_digests(&[digest]);
            self.pending.clear();
        }
    }

    fn push_digests(&mut self, digests: &[Digest]) {
        self.keys.reserve(digests.len());
        for digest in digests {
            self.push(CHAIN.hash_pair(&self.last().0, digest));
        }
    }

    /// Appends whole blocks of token ids. There must be no pending positions. Hashes runs of
    /// item-free blocks in SIMD lanes.
    fn push_token_blocks(&mut self, mut bytes: &[u8], block_bytes: usize) {
        while !bytes.is_empty() {
            let start = self.block_start();
            let covered =
                self.items.next_covered(start).map_or(u64::MAX, |position| position - start);
            let clear =
                usize::try_from(covered / u64::from(self.block_tokens)).unwrap_or(usize::MAX);
            let (plain, rest) = bytes.split_at(clear.min(bytes.len() / block_bytes) * block_bytes);
            for some in plain.chunks(BATCH_BLOCKS * block_bytes) {
                let mut digests = [Digest::default(); BATCH_BLOCKS];
                let digests = &mut digests[..some.len() / block_bytes];
                TOKENS.hash_each(some, block_bytes, digests);
                self.push_digests(digests);
            }
            let (touched, rest) = rest.split_at(block_bytes.min(rest.len()));
            self.push_pending(Kind::Tokens, touched);
            bytes = rest;
        }
    }

    /// Appends whole blocks of embedding rows. There must be no pending positions. Hashes large
    /// inputs in parallel with rayon.
    fn push_embed_blocks(&mut self, kind: Kind, rows: &[u8], block_bytes: usize) {
        let runs = [Run { kind, num: self.block_tokens }];
        let digest_of = |(block, bytes): (usize, &[u8])| {
            let start = self.block_start() + block as u64 * u64::from(self.block_tokens);
            self.digest(&View { runs: &runs, bytes }, start)
        };
        let digests: Vec<Digest> = if rows.len() < PARALLEL_BYTES {
            rows.chunks_exact(block_bytes).enumerate().map(digest_of).collect()
        } else {
            rows.par_chunks_exact(block_bytes).enumerate().map(digest_of).collect()
        };
        self.push_digests(&digests);
    }
}
