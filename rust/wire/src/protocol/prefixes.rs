//! Encodes prefixes in messages. A prefix is a root key plus one key per unit. A root key is
//! omitted if it equals the previous root key in the message.

use std::ops::Range;

use kvloft_core::ChunkKey;
use kvloft_core::io::SizeClass;

use crate::protocol::codec::{Field, Reader, Writer};

/// Maximum number of keys in a prefix. Clients truncate longer prefixes.
pub const MAX_KEYS: usize = 1 << 20;
/// Maximum number of prefixes in a message.
pub const MAX_PREFIXES: u32 = 1 << 16;

/// Keys that are to be sent, or keys that were received.
#[derive(Debug, Clone, Copy)]
pub enum Keys<'a> {
    /// Keys to send.
    Own(&'a [ChunkKey]),
    /// Received keys.
    Bytes(&'a [[u8; 32]]),
}

impl<'a> Keys<'a> {
    /// Returns the keys in order.
    pub fn iter(self) -> impl ExactSizeIterator<Item = ChunkKey> + use<'a> {
        let (own, bytes): (&[ChunkKey], &[[u8; 32]]) = match self {
            Self::Own(keys) => (keys, &[]),
            Self::Bytes(keys) => (&[], keys),
        };
        let num = own.len() + bytes.len();
        (0..num).map(move |nth| own.get(nth).copied().unwrap_or_else(|| ChunkKey(bytes[nth])))
    }
}

impl<'a> Field<'a> for Keys<'a> {
    fn write(&self, to: &mut Writer<'_>) {
        match self {
            Self::Own(keys) => to.keys(keys.iter().map(|key| &key.0)),
            Self::Bytes(keys) => to.keys(keys.iter()),
        }
    }

    fn read(from: &mut Reader<'a>) -> Option<Self> {
        from.keys().map(Self::Bytes)
    }
}

impl PartialEq for Keys<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

/// A list of prefixes in a message. The receiver takes the first `num_same` keys of the first
/// prefix from its prefix cache.
#[derive(Debug, Clone, PartialEq)]
pub struct SentPrefixes<'a> {
    /// Number of keys omitted from the start of the first prefix.
    pub num_same: u32,
    /// The root key and the other keys of each prefix.
    pub all: Vec<(ChunkKey, Keys<'a>)>,
}

/// A range of chunks to reserve. Keys of the prefix before unit `first` are omitted.
#[derive(Debug, Clone, PartialEq)]
pub struct SentRange<'a> {
    /// Root key of the prefix.
    pub root: ChunkKey,
    /// Position of the first sent key within the prefix.
    pub first: u32,
    /// Keys of the prefix, starting at `first`.
    pub keys: Keys<'a>,
    /// Units to reserve.
    pub units: Range<u32>,
    /// See `SaveRequest::class`.
    pub class: SizeClass,
    /// See `SaveRequest::is_independent`.
    pub is_independent: bool,
}

impl<'a> Field<'a> for SentPrefixes<'a> {
    fn write(&self, to: &mut Writer<'_>) {
        self.num_same.write(to);
        to.count(self.all.len());
        for (root, keys) in &self.all {
            to.root(*root);
            keys.write(to);
        }
    }

    fn read(from: &mut Reader<'a>) -> Option<Self> {
        let num_same = u32::read(from)?;
        let num = Some(u32::read(from)?).filter(|num| *num <= MAX_PREFIXES)?;
        let all =
            (0..num).map(|_| Some((from.root()?, Keys::read(from)?))).collect::<Option<_>>()?;
        Some(Self { num_same, all })
    }
}

impl<'a> Field<'a> for SentRange<'a> {
    const MAX_ITEMS: u32 = MAX_PREFIXES;

    fn write(&self, to: &mut Writer<'_>) {
        to.root(self.root);
        (self.class.0 << 1 | u8::from(self.is_independent)).write(to);
        for number in [self.first, self.units.start, self.units.end] {
            number.write(to);
        }
        self.keys.write(to);
    }

    fn read(from: &mut Reader<'a>) -> Option<Self> {
        let (root, bits, first) = (from.root()?, u8::read(from)?, u32::read(from)?);
        let (class, is_independent) = (SizeClass(bits >> 1), bits & 1 == 1);
        let units = u32::read(from)?..u32::read(from)?;
        Some(Self { root, first, units, keys: Field::read(from)?, class, is_independent })
    }
}
