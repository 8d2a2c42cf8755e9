//! Keys of one request's prefix, extended as it grows.
//!
//! Whole blocks are hashed once, straight from the caller's memory; positions after the last whole block are kept until it
//! is whole. Only digests are chained, one compression per block. The chain must not know how many blocks a chunk has,
//! nor where chunks are stored.

use rayon::prelude::*;

use super::ChunkKey;
use super::content::{Kind, Pending, Run, View, write_ids};
use super::dtype::{Dtype, row_bytes};
use super::items::{Item, Items};
use super::mode::{CHAIN, Digest, PARALLEL_BYTES, TOKENS};
use crate::{Error, ErrorKind, Result};

/// Token bytes hashed per round: enough for all SIMD lanes, small enough for the first-level cache.
const BATCH_BYTES: usize = 16 << 10;

/// Incremental keys of one prefix, one a block.
///
/// Every error is `InvalidConfig` and leaves the chain as it was. Positions count from 0 and fit in 32 bits.
#[derive(Debug, Clone)]
pub struct KeyChain {
    root: ChunkKey,
    block_tokens: u32,
    keys: Vec<ChunkKey>,
    pending: Pending,
    items: Items,
}

impl KeyChain {
    /// An empty prefix under `root`; blocks have `block_tokens` positions, at least one.
    pub fn new(root: ChunkKey, block_tokens: u32) -> Result<Self> {
        if block_tokens == 0 {
            return Err(bad("block_tokens must be at least 1"));
        }
        Ok(Self { root, block_tokens, keys: Vec::new(), pending: Pending::default(), items: Items::default() })
    }

    /// The key of the empty prefix.
    pub fn root(&self) -> ChunkKey {
        self.root
    }

    /// Positions per block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Positions appended so far.
    pub fn num_tokens(&self) -> u32 {
        self.num_blocks() * self.block_tokens + self.pending.len()
    }

    /// Full blocks so far, each with a key.
    pub fn num_blocks(&self) -> u32 {
        u32::try_from(self.keys.len()).unwrap_or(u32::MAX) // never: check_room keeps positions in u32
    }

    /// Keys of all full blocks, from position 0.
    pub fn keys(&self) -> &[ChunkKey] {
        &self.keys
    }

    /// Key of full block `block`, that is of the prefix that ends with it.
    pub fn key(&self, block: u32) -> Result<ChunkKey> {
        self.keys.get(block as usize).copied().ok_or_else(|| {
            bad("no such full block").with_context("block", block).with_context("num_blocks", self.keys.len())
        })
    }

    /// Declares a multimodal item on positions [start, start + `num_tokens`), before any of them is appended.
    ///
    /// Declaring the same item again does nothing, at any time. Truncating forgets no item.
    pub fn add_item(&mut self, identifier: &str, start: u32, num_tokens: u32) -> Result<()> {
        let item = Item { identifier: identifier.into(), start, num_tokens };
        let fail = |message: &str| {
            let error = bad(message).with_context("start", start).with_context("num_tokens", num_tokens);
            Err(error.with_context("appended", self.num_tokens()))
        };
        if num_tokens == 0 || start.checked_add(num_tokens).is_none() || u32::try_from(identifier.len()).is_err() {
            return fail("an item covers at least one position and ends below 2^32");
        }
        if start < self.num_tokens() && !self.items.contains(&item) {
            return fail("an item must be declared before its positions are appended");
        }
        self.items.add(item).map(|_| ())
    }

    /// Appends token ids.
    pub fn append_tokens(&mut self, ids: &[u32]) -> Result<()> {
        self.check_room(ids.len())?;
        let (head, body, rest) = self.split(ids.len());
        if head > 0 {
            self.push_pending(Kind::Tokens, &ids[..head], &[], head);
        }
        self.push_token_blocks(&ids[head..head + body]);
        if rest > 0 {
            self.push_pending(Kind::Tokens, &ids[head + body..], &[], rest);
        }
        Ok(())
    }

    /// Appends embedding rows of `width` elements of `dtype` (torch's name, such as `bfloat16`): raw bytes, row after row.
    pub fn append_embeds(&mut self, dtype: &str, width: u32, rows: &[u8]) -> Result<()> {
        let row_bytes = row_bytes(dtype, width)?;
        let dtype = Dtype::parse(dtype)?;
        if !rows.len().is_multiple_of(row_bytes) {
            return Err(bad("embedding bytes must be a whole number of rows")
                .with_context("bytes", rows.len())
                .with_context("width", width)
                .with_context("dtype", dtype.name));
        }
        let num_rows = rows.len() / row_bytes;
        self.check_room(num_rows)?;
        let kind = Kind::Embeds { dtype, width };
        let (head, body, rest) = self.split(num_rows);
        let (first, others) = rows.split_at(head * row_bytes);
        let (middle, last) = others.split_at(body * row_bytes);
        if head > 0 {
            self.push_pending(kind, &[], first, head);
        }
        self.push_embed_blocks(kind, middle, self.block_tokens as usize * row_bytes);
        if rest > 0 {
            self.push_pending(kind, &[], last, rest);
        }
        Ok(())
    }

    fn check_room(&self, num: usize) -> Result<()> {
        match u32::try_from(num) {
            Ok(num) if self.num_tokens().checked_add(num).is_some() => Ok(()),
            _ => Err(bad("a prefix has fewer than 2^32 positions").with_context("num_tokens", self.num_tokens())),
        }
    }

    /// How many of `num` new positions fill the pending block, make whole blocks, and are left over.
    fn split(&self, num: usize) -> (usize, usize, usize) {
        let room = (self.block_tokens - self.pending.len()) as usize;
        let head = if self.pending.len() == 0 { 0 } else { room.min(num) };
        let rest = (num - head) % self.block_tokens as usize;
        (head, num - head - rest, rest)
    }

    fn block_start(&self) -> u64 {
        u64::from(self.num_blocks()) * u64::from(self.block_tokens)
    }

    /// The content digest of the block that starts at position `start`.
    fn digest(&self, view: &View<'_>, start: u64) -> Digest {
        view.digest(start, self.items.overlapping(start..start + u64::from(self.block_tokens)))
    }

    fn chained(&self, digest: &Digest) -> ChunkKey {
        ChunkKey(CHAIN.hash_pair(&self.keys.last().unwrap_or(&self.root).0, digest))
    }

    fn push_pending(&mut self, kind: Kind, ids: &[u32], rows: &[u8], num: usize) {
        self.pending.push(kind, u32::try_from(num).expect("at most a block"), ids, rows);
        if self.pending.len() == self.block_tokens {
            let key = self.chained(&self.digest(&self.pending.view(), self.block_start()));
            self.keys.push(key);
            self.pending.clear();
        }
    }

    /// Whole blocks of token ids, with nothing pending: many at once up to the next item.
    fn push_token_blocks(&mut self, mut ids: &[u32]) {
        let block_tokens = self.block_tokens as usize;
        while !ids.is_empty() {
            let start = self.block_start();
            let covered = self.items.next_covered(start).map_or(u64::MAX, |position| position - start);
            let clear = usize::try_from(covered).unwrap_or(usize::MAX).min(ids.len()) / block_tokens * block_tokens;
            let (plain, rest) = ids.split_at(clear);
            self.push_plain_blocks(plain);
            ids = rest;
            if let Some((block, rest)) = ids.split_at_checked(block_tokens) {
                self.push_pending(Kind::Tokens, block, &[], block_tokens);
                ids = rest;
            }
        }
    }

    /// Whole blocks of token ids that no item touches.
    fn push_plain_blocks(&mut self, ids: &[u32]) {
        let block_tokens = self.block_tokens as usize;
        let num_blocks = (BATCH_BYTES / (block_tokens * 4)).clamp(1, ids.len().max(block_tokens) / block_tokens);
        let mut bytes = vec![0; num_blocks * block_tokens * 4];
        let mut digests = vec![Digest::default(); num_blocks];
        self.keys.reserve(ids.len() / block_tokens);
        for batch in ids.chunks(num_blocks * block_tokens) {
            let bytes = &mut bytes[..batch.len() * 4];
            let digests = &mut digests[..batch.len() / block_tokens];
            write_ids(batch, bytes);
            TOKENS.hash_each(bytes, block_tokens * 4, digests);
            for digest in digests {
                self.keys.push(self.chained(digest));
            }
        }
    }

    /// Whole blocks of embedding rows, with nothing pending: block beside block over rayon's threads where they are big.
    fn push_embed_blocks(&mut self, kind: Kind, rows: &[u8], block_bytes: usize) {
        let runs = [Run { kind, num: self.block_tokens }];
        let digest_of = |block: u64, rows: &[u8]| {
            let start = self.block_start() + block * u64::from(self.block_tokens);
            self.digest(&View { runs: &runs, ids: &[], rows }, start)
        };
        let digests: Vec<Digest> = if rows.len() < PARALLEL_BYTES {
            (0..).zip(rows.chunks_exact(block_bytes)).map(|(block, rows)| digest_of(block, rows)).collect()
        } else {
            let blocks = rows.par_chunks_exact(block_bytes).enumerate();
            blocks.map(|(block, rows)| digest_of(block as u64, rows)).collect()
        };
        for digest in &digests {
            self.keys.push(self.chained(digest));
        }
    }
}

fn bad(message: &str) -> Error {
    Error::new(ErrorKind::InvalidConfig, message)
}
