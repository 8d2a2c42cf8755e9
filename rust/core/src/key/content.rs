//! What stands at the positions of one block, and its digest.
//!
//! A block is a list of runs: neighbouring positions of one kind. Ids and row bytes lie flat, in order, so that a block can be
//! hashed where the caller has it, without a copy. This file must not know chains or what came before the block.

use super::dtype::Dtype;
use super::items::Item;
use super::mode::{Digest, EMBEDS, MIXED, TOKENS};

/// What the model reads at a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A token id.
    Tokens,
    /// A row of `width` elements.
    Embeds { dtype: Dtype, width: u32 },
}

impl Kind {
    /// Bytes of one row; 0 for token ids, which are kept as numbers.
    fn row_bytes(self) -> usize {
        match self {
            Kind::Tokens => 0,
            Kind::Embeds { dtype, width } => dtype.size_bytes as usize * width as usize,
        }
    }
}

/// `num` neighbouring positions of one kind.
#[derive(Debug, Clone, Copy)]
pub(super) struct Run {
    pub(super) kind: Kind,
    pub(super) num: u32,
}

/// A block's content, borrowed: ids of all token runs in order, row bytes of all embedding runs in order.
#[derive(Debug, Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) runs: &'a [Run],
    pub(super) ids: &'a [u32],
    pub(super) rows: &'a [u8],
}

/// A block being filled. Clearing keeps its memory for the next block.
#[derive(Debug, Clone, Default)]
pub(super) struct Pending {
    runs: Vec<Run>,
    ids: Vec<u32>,
    rows: Vec<u8>,
    len: u32,
}

impl Pending {
    /// Positions held.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Appends `num` positions of one kind: `ids` if they are tokens, else `rows`.
    pub(super) fn push(&mut self, kind: Kind, num: u32, ids: &[u32], rows: &[u8]) {
        self.ids.extend_from_slice(ids);
        self.rows.extend_from_slice(rows);
        self.len += num;
        match self.runs.last_mut() {
            Some(run) if run.kind == kind => run.num += num,
            _ => self.runs.push(Run { kind, num }),
        }
    }

    pub(super) fn clear(&mut self) {
        self.runs.clear();
        self.ids.clear();
        self.rows.clear();
        self.len = 0;
    }

    /// All of it.
    pub(super) fn view(&self) -> View<'_> {
        View { runs: &self.runs, ids: &self.ids, rows: &self.rows }
    }
}

impl View<'_> {
    /// The content digest; `block_start` is the block's first position, `items` those that overlap its positions.
    pub(super) fn digest<'i>(&self, block_start: u64, items: impl Iterator<Item = &'i Item>) -> Digest {
        let mut items = items.peekable();
        if let ([Run { kind: Kind::Tokens, num }], None) = (self.runs, items.peek()) {
            return tokens_digest(&self.ids[..*num as usize]);
        }
        let mut bytes = Vec::with_capacity(64 * self.runs.len());
        let (mut ids, mut rows) = (self.ids, self.rows);
        for run in self.runs {
            let digest;
            match run.kind {
                Kind::Tokens => {
                    let (these, rest) = ids.split_at(run.num as usize);
                    ids = rest;
                    bytes.push(1);
                    bytes.extend_from_slice(&run.num.to_le_bytes());
                    digest = tokens_digest(these);
                }
                Kind::Embeds { dtype, width } => {
                    let (these, rest) = rows.split_at(run.num as usize * run.kind.row_bytes());
                    rows = rest;
                    bytes.push(2);
                    bytes.extend_from_slice(&run.num.to_le_bytes());
                    put_short(&mut bytes, dtype.name);
                    bytes.extend_from_slice(&width.to_le_bytes());
                    digest = EMBEDS.hash(these);
                }
            }
            bytes.extend_from_slice(&digest);
        }
        for item in items {
            bytes.push(3);
            put_short(&mut bytes, &item.identifier);
            bytes.extend_from_slice(&i64::from(item.start).wrapping_sub_unsigned(block_start).to_le_bytes());
            bytes.extend_from_slice(&item.num_tokens.to_le_bytes());
        }
        MIXED.hash(&bytes)
    }
}

/// Appends u32 length and UTF-8 bytes of a string whose length was checked when it came in.
fn put_short(bytes: &mut Vec<u8>, text: &str) {
    let len = u32::try_from(text.len()).expect("identifiers are checked in add_item, dtype names are ours");
    bytes.extend_from_slice(&len.to_le_bytes());
    bytes.extend_from_slice(text.as_bytes());
}

/// The digest of a run of token ids.
fn tokens_digest(ids: &[u32]) -> Digest {
    let mut bytes = vec![0; ids.len() * 4];
    write_ids(ids, &mut bytes);
    TOKENS.hash(&bytes)
}

/// Writes `ids` as little-endian u32 into `bytes`, which is four times as long.
pub(super) fn write_ids(ids: &[u32], bytes: &mut [u8]) {
    let (words, _) = bytes.as_chunks_mut::<4>();
    for (word, id) in words.iter_mut().zip(ids) {
        *word = id.to_le_bytes();
    }
}
