//! Prefixes as they cross: keys, and the roots that they hang on, each root once where it is the same.

use std::iter::zip;

use kvloft_core::ChunkKey;
use kvloft_core::store::SaveRange;

use crate::protocol::codec::{Reader, Writer};

/// Most keys of a prefix: what is behind them is not asked for.
pub const MAX_KEYS: usize = 1 << 20;
/// Most prefixes of a message.
pub const MAX_PREFIXES: u32 = 1 << 16;

/// Keys, as the sender has them or as they arrived.
#[derive(Debug, Clone, Copy)]
pub enum Keys<'a> {
    /// To be sent.
    Own(&'a [ChunkKey]),
    /// Received.
    Bytes(&'a [[u8; 32]]),
}

impl<'a> Keys<'a> {
    /// In order.
    pub fn iter(self) -> impl ExactSizeIterator<Item = &'a [u8; 32]> {
        let (own, bytes): (&[ChunkKey], &[[u8; 32]]) = match self {
            Self::Own(keys) => (keys, &[]),
            Self::Bytes(keys) => (&[], keys),
        };
        let num = own.len() + bytes.len();
        (0..num).map(move |nth| own.get(nth).map_or_else(|| &bytes[nth], |key| &key.0))
    }

    pub(crate) fn write(self, to: &mut Writer<'_>) {
        match self {
            Self::Own(keys) => to.keys(keys.iter().map(|key| &key.0)),
            Self::Bytes(keys) => to.keys(keys.iter()),
        }
    }
}

impl PartialEq for Keys<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.iter().len() == other.iter().len() && zip(self.iter(), other.iter()).all(|(own, other)| own == other)
    }
}

/// Prefixes: of the first one its receiver has `num_same` keys, from the last long first one that was sent.
#[derive(Debug, Clone, PartialEq)]
pub struct SentPrefixes<'a> {
    /// Keys that are not sent again.
    pub num_same: u32,
    /// Of each the key of the empty prefix, and its keys.
    pub all: Vec<(ChunkKey, Keys<'a>)>,
}

/// What is to be reserved of a prefix. No key before block `first` is needed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SentRange<'a> {
    /// Key of the empty prefix.
    pub root: ChunkKey,
    /// Where in the prefix the keys begin.
    pub first: u32,
    /// Keys from there on.
    pub keys: Keys<'a>,
    /// Which chunks.
    pub range: SaveRange,
    /// As of `ToSave`.
    pub is_attached: bool,
}

/// A root, or a mark that it is the one before: what is attached hangs on few.
fn write_root(to: &mut Writer<'_>, root: ChunkKey, before: &mut Option<ChunkKey>) {
    let is_same = *before == Some(root);
    to.u8(is_same.into());
    if !is_same {
        to.key(&root.0);
        *before = Some(root);
    }
}

fn root(from: &mut Reader<'_>, before: &mut Option<ChunkKey>) -> Option<ChunkKey> {
    if !from.flag()? {
        *before = Some(from.chunk_key()?);
    }
    *before
}

impl SentPrefixes<'_> {
    pub(crate) fn write(&self, to: &mut Writer<'_>) {
        to.u32(self.num_same);
        to.count(self.all.len());
        let mut before = None;
        for (root, keys) in &self.all {
            write_root(to, *root, &mut before);
            keys.write(to);
        }
    }
}

pub(crate) fn prefixes<'a>(from: &mut Reader<'a>) -> Option<SentPrefixes<'a>> {
    let (num_same, mut before) = (from.u32()?, None);
    let all = few(from, |from| Some((root(from, &mut before)?, Keys::Bytes(from.keys()?))))?;
    Some(SentPrefixes { num_same, all })
}

/// A list that is not longer than any message's.
fn few<'a, T>(from: &mut Reader<'a>, read: impl FnMut(&mut Reader<'a>) -> Option<T>) -> Option<Vec<T>> {
    let (num, _) = from.0.split_first_chunk()?;
    if u32::from_le_bytes(*num) > MAX_PREFIXES { None } else { from.list(5, read) }
}

pub(crate) fn write_ranges(to: &mut Writer<'_>, ranges: &[SentRange<'_>]) {
    to.count(ranges.len());
    let mut before = None;
    for SentRange { root, first, keys, range, is_attached } in ranges {
        write_root(to, *root, &mut before);
        to.u8(u8::from(*is_attached));
        for number in [*first, range.start, range.stop, range.tail_blocks] {
            to.u32(number);
        }
        keys.write(to);
    }
}

pub(crate) fn ranges<'a>(from: &mut Reader<'a>) -> Option<Vec<SentRange<'a>>> {
    let mut before = None;
    few(from, |from| {
        let (root, is_attached, first) = (root(from, &mut before)?, from.flag()?, from.u32()?);
        let range = SaveRange { start: from.u32()?, stop: from.u32()?, tail_blocks: from.u32()? };
        Some(SentRange { root, first, keys: Keys::Bytes(from.keys()?), range, is_attached })
    })
}
