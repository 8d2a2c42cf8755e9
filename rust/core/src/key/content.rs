//! The content of one block (tokens, embedding rows) and its digest.
//!
//! A block is a list of runs: neighboring positions of one kind. Their bytes are contiguous and in
//! order, so that a block is hashed without a copy. Must not depend on chains or earlier blocks.

use super::dtype::Row;
use super::items::Item;
use super::mode::{Digest, EMBEDS, MIXED, TOKENS};
use super::root::put_str;

/// What the model reads at a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A token id, as little-endian u32.
    Tokens,
    /// An embedding row.
    Embeds(Row),
}

impl Kind {
    pub(super) fn size_bytes(self) -> usize {
        match self {
            Kind::Tokens => 4,
            Kind::Embeds(row) => row.size_bytes,
        }
    }
}

/// `num` neighboring positions of one kind.
#[derive(Debug, Clone, Copy)]
pub(super) struct Run {
    pub(super) kind: Kind,
    pub(super) num: u32,
}

/// A block's content, borrowed: the bytes of all runs in order.
#[derive(Debug, Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) runs: &'a [Run],
    pub(super) bytes: &'a [u8],
}

/// A block being filled. Its memory is reused for the next block.
#[derive(Debug, Clone, Default)]
pub(super) struct Pending {
    runs: Vec<Run>,
    bytes: Vec<u8>,
}

impl Pending {
    pub(super) fn len(&self) -> u32 {
        self.runs.iter().map(|run| run.num).sum()
    }

    pub(super) fn push(&mut self, kind: Kind, num: u32, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        match self.runs.last_mut() {
            Some(run) if run.kind == kind => run.num += num,
            _ => self.runs.push(Run { kind, num }),
        }
    }

    pub(super) fn clear(&mut self) {
        self.runs.clear();
        self.bytes.clear();
    }

    pub(super) fn view(&self) -> View<'_> {
        View { runs: &self.runs, bytes: &self.bytes }
    }
}

impl View<'_> {
    /// The content digest; `block_start` is the block's first position, `items` those that overlap
    /// its positions.
    pub(super) fn digest<'i>(
        &self,
        block_start: u64,
        items: impl Iterator<Item = &'i Item>,
    ) -> Digest {
        let mut items = items.peekable();
        if let ([Run { kind: Kind::Tokens, .. }], None) = (self.runs, items.peek()) {
            return TOKENS.hash(self.bytes);
        }
        let mut out = Vec::with_capacity(64 * self.runs.len());
        let mut rest = self.bytes;
        for &Run { kind, num } in self.runs {
            let (these, after) = rest.split_at(num as usize * kind.size_bytes());
            rest = after;
            out.push(if kind == Kind::Tokens { 1 } else { 2 });
            out.extend_from_slice(&num.to_le_bytes());
            let mode = match kind {
                Kind::Tokens => &TOKENS,
                Kind::Embeds(row) => {
                    put_str(&mut out, row.dtype).expect("names of types are short");
                    out.extend_from_slice(&row.width.to_le_bytes());
                    &EMBEDS
                }
            };
            out.extend_from_slice(&mode.hash(these));
        }
        for item in items {
            out.push(3);
            put_str(&mut out, &item.identifier).expect("its length was checked in add_item");
            out.extend_from_slice(
                &i64::from(item.start).wrapping_sub_unsigned(block_start).to_le_bytes(),
            );
            out.extend_from_slice(&item.num_tokens.to_le_bytes());
        }
        MIXED.hash(&out)
    }
}
