//! Encodes messages as little-endian bytes. The [`messages`] macro defines all messages sent in one
//! direction. Each message field implements [`Field`]. Decoding never panics, and allocates memory
//! only for bytes that have arrived.

use kvloft_core::ChunkKey;
use kvloft_core::io::{FrameId, FrameSizes};
use kvloft_core::store::{
    Anchors, Changes, LeasedFrame, Lookup, Progress, Reservation, Reserved, TierName, Tiers,
};

/// Size of the length prefix of each message, in bytes.
pub const LENGTH_BYTES: usize = 4;

/// Appends a message to a buffer.
#[derive(Debug)]
pub(crate) struct Writer<'a> {
    to: &'a mut Vec<u8>,
    /// Offset of the message in the buffer.
    start: usize,
    /// The last root key written.
    root: Option<ChunkKey>,
}

impl<'a> Writer<'a> {
    pub(crate) fn begin(to: &'a mut Vec<u8>, number: u32) -> Self {
        let start = to.len();
        let mut writer = Self { to, start, root: None };
        0_u32.write(&mut writer); // placeholder for the length
        number.write(&mut writer);
        writer
    }

    /// Completes the message by filling in its length.
    pub(crate) fn end(self) {
        let num_bytes = self.to.len() - self.start - LENGTH_BYTES;
        let length = u32::try_from(num_bytes).unwrap_or(u32::MAX).to_le_bytes();
        self.to[self.start..self.start + LENGTH_BYTES].copy_from_slice(&length);
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.to.extend_from_slice(bytes);
    }

    /// Writes the number of items that follow. There are always fewer than `u32::MAX` items.
    pub(crate) fn count(&mut self, num: usize) {
        u32::try_from(num).unwrap_or(u32::MAX).write(self);
    }

    pub(crate) fn keys<'k>(&mut self, keys: impl ExactSizeIterator<Item = &'k [u8; 32]>) {
        self.count(keys.len());
        self.to.reserve(keys.len() * 32);
        keys.for_each(|key| self.bytes(key));
    }

    /// Writes a root key, or just a flag if it equals the previous root key.
    pub(crate) fn root(&mut self, root: ChunkKey) {
        let is_same = self.root == Some(root);
        is_same.write(self);
        if !is_same {
            root.write(self);
            self.root = Some(root);
        }
    }
}

/// Reads a message from front to back. Its methods return None if the bytes are malformed.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
    root: Option<ChunkKey>,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(message: &'a [u8]) -> Self {
        Self { rest: message, root: None }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// Skips the remaining fields, which can differ between protocol versions.
    pub(crate) fn skip_all(&mut self) {
        self.rest = &[];
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (value, rest) = self.rest.split_first_chunk::<N>()?;
        self.rest = rest;
        Some(*value)
    }

    /// Reads an item count and returns the bytes of all items.
    fn slice(&mut self, item_bytes: usize) -> Option<&'a [u8]> {
        let num = usize::try_from(u32::read(self)?).ok()?;
        let (slice, rest) = self.rest.split_at_checked(num.checked_mul(item_bytes)?)?;
        self.rest = rest;
        Some(slice)
    }

    pub(crate) fn keys(&mut self) -> Option<&'a [[u8; 32]]> {
        Some(self.slice(32)?.as_chunks().0)
    }

    pub(crate) fn root(&mut self) -> Option<ChunkKey> {
        if !bool::read(self)? {
            self.root = Some(ChunkKey::read(self)?);
        }
        self.root
    }
}

/// Encodes and decodes a field of a message.
pub(crate) trait Field<'a>: Sized {
    /// Maximum number of items in a list of this type.
    const MAX_ITEMS: u32 = u32::MAX;

    fn write(&self, to: &mut Writer<'_>);

    fn read(from: &mut Reader<'a>) -> Option<Self>;
}

/// Implements [`Field`] for integers.
macro_rules! numbers {
    ($($number:ty)+) => {$(
        impl<'a> Field<'a> for $number {
            fn write(&self, to: &mut Writer<'_>) {
                to.bytes(&self.to_le_bytes());
            }

            fn read(from: &mut Reader<'a>) -> Option<Self> {
                from.array().map(Self::from_le_bytes)
            }
        }
    )+};
}

/// Implements [`Field`] for structs by encoding the listed fields in order.
macro_rules! fields {
    ($($name:ident$(<$life:lifetime>)? { $($field:tt),+ })+) => {$(
        impl<'a> Field<'a> for $name$(<$life>)? {
            fn write(&self, to: &mut Writer<'_>) {
                $(self.$field.write(to);)+
            }

            fn read(from: &mut Reader<'a>) -> Option<Self> {
                Some(Self { $($field: Field::read(from)?),+ })
            }
        }
    )+};
}

/// Implements [`Field`] for types that are sent as a different type.
macro_rules! converted {
    ($($name:ty = $sent:ty: $to:expr, $from:expr;)+) => {$(
        impl<'a> Field<'a> for $name {
            fn write(&self, to: &mut Writer<'_>) {
                let to_sent: fn(&Self) -> $sent = $to;
                to_sent(self).write(to);
            }

            fn read(from: &mut Reader<'a>) -> Option<Self> {
                let from_sent: fn($sent) -> Option<Self> = $from;
                from_sent(Field::read(from)?)
            }
        }
    )+};
}

numbers! { u8 u32 u64 }

fields! {
    ChunkKey { 0 }
    FrameId { 0 }
    Lookup { host_units, stored_units }
    Progress { ready_units, pending_units }
    Anchors { num_known, num_stored }
    LeasedFrame { frame, key, tier }
    Reservation { ticket, frame, key, unit }
    Reserved { num_dropped, chunks }
    Changes { lost, rows }
}

converted! {
    bool = u8: |flag| u8::from(*flag), |byte| (byte < 2).then_some(byte == 1);
    TierName = bool: |tier| *tier == TierName::Disk,
        |is_disk| Some(if is_disk { TierName::Disk } else { TierName::Host });
    Tiers = u8: |tiers| tiers.bits(), Tiers::of_bits;
    String = Vec<u8>: |text| text.as_bytes().to_vec(), |bytes| String::from_utf8(bytes).ok();
    FrameSizes = Vec<(u64, u64)>: FrameSizes::with_raw, |sizes| Some(sizes.into());
}

impl<'a> Field<'a> for [u8; 32] {
    fn write(&self, to: &mut Writer<'_>) {
        to.bytes(self);
    }

    fn read(from: &mut Reader<'a>) -> Option<Self> {
        from.array()
    }
}

impl<'a> Field<'a> for &'a [u8] {
    fn write(&self, to: &mut Writer<'_>) {
        to.count(self.len());
        to.bytes(self);
    }

    fn read(from: &mut Reader<'a>) -> Option<Self> {
        from.slice(1)
    }
}

impl<'a, T: Field<'a>, U: Field<'a>> Field<'a> for (T, U) {
    fn write(&self, to: &mut Writer<'_>) {
        self.0.write(to);
        self.1.write(to);
    }

    fn read(from: &mut Reader<'a>) -> Option<Self> {
        Some((T::read(from)?, U::read(from)?))
    }
}

impl<'a, T: Field<'a>> Field<'a> for Vec<T> {
    fn write(&self, to: &mut Writer<'_>) {
        to.count(self.len());
        for item in self {
            item.write(to);
        }
    }

    fn read(from: &mut Reader<'a>) -> Option<Self> {
        let num = Some(u32::read(from)?).filter(|num| *num <= T::MAX_ITEMS)?;
        (0..num).map(|_| T::read(from)).collect()
    }
}

/// Defines the messages sent in one direction, each with its kind and its fields in order.
macro_rules! messages {
    (
        $(#[$about:meta])*
        enum $name:ident$(<$life:lifetime>)? {
            $($(#[$doc:meta])* $kind:literal = $variant:ident$(($($field:ident: $type:ty),+))?,)+
        }
    ) => {
        $(#[$about])*
        #[derive(Debug, Clone, PartialEq)]
        pub enum $name$(<$life>)? {
            $($(#[$doc])* $variant$(($($type),+))?,)+
        }

        impl<'a> $name$(<$life>)? {
            /// Appends the message and its length prefix to `to`.
            pub fn encode(&self, number: u32, to: &mut Vec<u8>) {
                let mut message = Writer::begin(to, number);
                match self {
                    $(Self::$variant$(($($field),+))? => {
                        let kind: u8 = $kind;
                        kind.write(&mut message);
                        $($($field.write(&mut message);)+)?
                    })+
                }
                message.end();
            }

            /// Decodes a message and its number. Returns None if the message is malformed.
            pub fn decode(bytes: &'a [u8]) -> Option<(u32, Self)> {
                let mut from = Reader::new(bytes);
                let (number, kind) = (u32::read(&mut from)?, u8::read(&mut from)?);
                let message = match kind {
                    $($kind => Self::$variant$(($(<$type>::read(&mut from)?),+))?,)+
                    _ => return None,
                };
                from.is_empty().then_some((number, message))
            }
        }
    };
}

pub(crate) use {fields, messages};
