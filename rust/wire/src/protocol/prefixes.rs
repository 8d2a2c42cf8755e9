//! Prefixes in messages: keys and root keys. A root key that repeats is sent once.

use kvloft_core::io::SizeClass;
use std::iter::zip;
use std::ops::Range;

use kvloft_core::ChunkKey;

use crate::protocol::codec::{Reader, Writer};

/// Maximum number of keys of a prefix; the client ignores further keys.
pub const MAX_KEYS: usize = 1 << 20;
/// Maximum number of prefixes of a message.
pub const MAX_PREFIXES: u32 = 1 << 16;

/// Keys to send, or keys received.
#[derive(Debug, Clone, Copy)]
pub enum Keys<'a> {
    /// Keys to send.
    Own(&'a [ChunkKey]),
    /// Keys received.
    Bytes(&'a [[u8; 32]]),
}

impl<'a> Keys<'a> {
    /// Returns the keys in order.
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
        self.iter().len() == other.iter().len()
            && zip(self.iter(), other.iter()).all(|(own, other)| own == other)
    }
}

/// Prefixes. The receiver has the first `num_same` keys of the first one in its prefix cache.
#[derive(Debug, Clone, PartialEq)]
pub struct SentPrefixes<'a> {
    /// Keys of the first prefix that are not sent.
    pub num_same: u32,
    /// Root key and keys of each prefix.
    pub all: Vec<(ChunkKey, Keys<'a>)>,
}

/// Chunks of a prefix to reserve. The keys before unit `first` are not sent.
#[derive(Debug, Clone, PartialEq)]
pub struct SentRange<'a> {
    /// Root key.
    pub root: ChunkKey,
    /// Position of the first key in the prefix.
    pub first: u32,
    /// Keys from `first` on.
    pub keys: Keys<'a>,
    /// Which units.
    pub units: Range<u32>,
    /// As in `SaveRequest`.
    pub class: SizeClass,
    /// As in `SaveRequest`.
    pub is_attached: bool,
}

/// Writes a root key, or a flag that it equals the one before.
fn write_root(to: &mut Writer<'_>, root: ChunkKey, before: &mut Option<ChunkKey>) {
    let is_same = *before == Some(root);
    to.u8(is_same.into());
    if !is_same {
        to.key(&root.0);
        *before = Some(root);
    }
}

fn read_root(from: &mut Reader<'_>, before: &mut Option<ChunkKey>) -> Option<ChunkKey> {
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

pub(crate) fn read_prefixes<'a>(from: &mut Reader<'a>) -> Option<SentPrefixes<'a>> {
    let (num_same, mut before) = (from.u32()?, None);
    let all =
        read_list(from, |from| Some((read_root(from, &mut before)?, Keys::Bytes(from.keys()?))))?;
    Some(SentPrefixes { num_same, all })
}

/// Reads a list of at most [`MAX_PREFIXES`] items.
fn read_list<'a, T>(
    from: &mut Reader<'a>,
    read: impl FnMut(&mut Reader<'a>) -> Option<T>,
) -> Option<Vec<T>> {
    let (num, _) = from.0.split_first_chunk()?;
    if u32::from_le_bytes(*num) > MAX_PREFIXES { None } else { from.list(5, read) }
}

pub(crate) fn write_ranges(to: &mut Writer<'_>, ranges: &[SentRange<'_>]) {
    to.count(ranges.len());
    let mut before = None;
    for SentRange { root, first, keys, units, class, is_attached } in ranges {
        write_root(to, *root, &mut before);
        to.u8(class.0 << 1 | u8::from(*is_attached));
        for number in [*first, units.start, units.end] {
            to.u32(number);
        }
        keys.write(to);
    }
}

pub(crate) fn read_ranges<'a>(from: &mut Reader<'a>) -> Option<Vec<SentRange<'a>>> {
    let mut before = None;
    read_list(from, |from| {
        let (root, bits, first) = (read_root(from, &mut before)?, from.u8()?, from.u32()?);
        let (class, is_attached) = (SizeClass(bits >> 1), bits & 1 == 1);
        let units = from.u32()?..from.u32()?;
        Some(SentRange { root, first, units, keys: Keys::Bytes(from.keys()?), class, is_attached })
    })
}
