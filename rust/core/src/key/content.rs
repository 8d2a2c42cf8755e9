//! A block's content (tokens, embedding rows and multimodal items) and its digest.
//!
//! A block is a list of runs, and a run is a sequence of positions of the same kind. Run bytes are
//! contiguous and in order, so hashing a block requires no copying. Items can overlap each other,
//! for example a video and its audio, so a block's digest includes every item that overlaps the
//! block. Unknown element types are rejected, because two names for the same type would yield
//! different keys.

use std::ops::Range;

use super::mode::{Digest, EMBEDS, MIXED, TOKENS};
use super::root::put_str;
use crate::{Error, Result};

/// Supported element types: names (without the `torch.` prefix) and sizes in bytes.
const DTYPES: [(&str, u32); 9] = [
    ("bfloat16", 2),
    ("float16", 2),
    ("float32", 4),
    ("float64", 8),
    ("float8_e4m3fn", 1),
    ("float8_e5m2", 1),
    ("int8", 1),
    ("uint8", 1),
    ("int32", 4),
];

/// The shape of an embedding row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Row {
    /// Canonical name of the element type, which is hashed into keys.
    pub(super) dtype: &'static str,
    /// Number of elements.
    pub(super) width: u32,
    pub(super) size_bytes: usize,
}

impl Row {
    /// Creates the shape of a row with `width` elements of type `dtype`. Returns `InvalidConfig` if
    /// `dtype` is unknown or `width` is 0 or too large.
    pub(super) fn new(dtype: &str, width: u32) -> Result<Self> {
        let bad = |message| Error::invalid(message);
        let (dtype, bytes) =
            DTYPES.into_iter().find(|(name, _)| *name == dtype).ok_or_else(|| {
                let known = DTYPES.map(|(name, _)| name).join(", ");
                bad(format!("unsupported embedding dtype {dtype:?}; use one of {known}"))
            })?;
        match usize::try_from(u64::from(bytes) * u64::from(width)) {
            Ok(size_bytes) if size_bytes > 0 => Ok(Self { dtype, width, size_bytes }),
            _ => Err(bad(format!("embedding width {width} is zero or too large"))),
        }
    }
}

/// Returns the size in bytes of an embedding row with `width` elements of type `dtype` (a torch
/// name). Returns `InvalidConfig` if `dtype` is unknown or `width` is 0 or too large.
pub fn row_bytes(dtype: &str, width: u32) -> Result<usize> {
    Row::new(dtype, width).map(|row| row.size_bytes)
}

/// A multimodal item covering `num_tokens` placeholder positions, starting at `start`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) identifier: Box<str>,
    pub(super) start: u32,
    pub(super) num_tokens: u32,
}

impl Item {
    fn end(&self) -> u64 {
        u64::from(self.start) + u64::from(self.num_tokens)
    }
}

/// Items sorted by start, then by identifier. Keys include items in this order.
#[derive(Debug, Clone, Default)]
pub(super) struct Items {
    sorted: Vec<Item>,
    /// `reach[i]` is the largest end of any item in `sorted[..=i]`. The values never decrease, so
    /// they can be binary-searched.
    reach: Vec<u64>,
}

impl Items {
    /// Adds an item unless it is already present. Returns `InvalidConfig` if the item is already
    /// present with a different length.
    pub(super) fn add(&mut self, item: Item) -> Result<()> {
        match self.sorted.binary_search_by(|have| {
            (have.start, &have.identifier).cmp(&(item.start, &item.identifier))
        }) {
            Ok(at) if self.sorted[at].num_tokens == item.num_tokens => return Ok(()),
            Ok(at) => {
                let message =
                    "a multimodal item was declared with two different lengths; declare it once";
                return Err(Error::invalid(message)
                    .with_context("identifier", &item.identifier)
                    .with_context("start", item.start)
                    .with_context("num_tokens", self.sorted[at].num_tokens)
                    .with_context("again", item.num_tokens));
            }
            Err(at) => {
                self.sorted.insert(at, item);
                self.reach.truncate(at);
            }
        }
        for item in &self.sorted[self.reach.len()..] {
            self.reach.push(item.end().max(self.reach.last().copied().unwrap_or(0)));
        }
        Ok(())
    }

    pub(super) fn contains(&self, item: &Item) -> bool {
        self.sorted.contains(item)
    }

    /// Returns the first position at or after `position` that an item covers.
    pub(super) fn next_covered(&self, position: u64) -> Option<u64> {
        let after = self.sorted.partition_point(|item| u64::from(item.start) <= position);
        if after > 0 && self.reach[after - 1] > position {
            return Some(position);
        }
        self.sorted.get(after).map(|item| u64::from(item.start))
    }

    /// Returns the items that overlap `positions`, in order.
    pub(super) fn overlapping(&self, positions: Range<u64>) -> impl Iterator<Item = &Item> {
        let stop = self.sorted.partition_point(|item| u64::from(item.start) < positions.end);
        let start = self.reach[..stop].partition_point(|&reach| reach <= positions.start);
        self.sorted[start..stop].iter().filter(move |item| item.end() > positions.start)
    }
}

/// Kind of model input at a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A token id, as a little-endian u32.
    Tokens,
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

/// `num` consecutive positions of one kind.
#[derive(Debug, Clone, Copy)]
pub(super) struct Run {
    pub(super) kind: Kind,
    pub(super) num: u32,
}

/// A borrowed view of a block's content. `bytes` holds the bytes of all runs, in order.
#[derive(Debug, Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) runs: &'a [Run],
    pub(super) bytes: &'a [u8],
}

/// A block being filled. The block's memory is reused for the next block.
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
    /// Returns the content digest. `block_start` is the block's first position, and `items` yields
    /// all items that overlap the block.
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
                    put_str(&mut out, row.dtype).expect("type names are short");
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
