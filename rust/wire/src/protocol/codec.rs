//! Encodes numbers, keys and text as little-endian bytes. Reading never panics, and allocates
//! memory only for bytes that were received.

use kvloft_core::ChunkKey;

/// Bytes of the length before each message.
pub const LENGTH_BYTES: usize = 4;

/// Appends to a buffer.
#[derive(Debug)]
pub(crate) struct Writer<'a>(pub(crate) &'a mut Vec<u8>);

impl Writer<'_> {
    pub(crate) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn key(&mut self, key: &[u8; 32]) {
        self.0.extend_from_slice(key);
    }

    /// Writes the number of items that follow. A message has room for fewer than `u32::MAX` items.
    pub(crate) fn count(&mut self, num: usize) {
        self.u32(u32::try_from(num).unwrap_or(u32::MAX));
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.count(bytes.len());
        self.0.extend_from_slice(bytes);
    }

    pub(crate) fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }

    pub(crate) fn keys<'k>(&mut self, keys: impl ExactSizeIterator<Item = &'k [u8; 32]>) {
        self.count(keys.len());
        self.0.reserve(keys.len() * 32);
        keys.for_each(|key| self.key(key));
    }

    pub(crate) fn numbers(&mut self, numbers: &[u64]) {
        self.count(numbers.len());
        for number in numbers {
            self.u64(*number);
        }
    }
}

/// Reads from the front of a buffer. Every function returns None if the bytes are malformed.
#[derive(Debug)]
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (value, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*value)
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[value]| value)
    }

    pub(crate) fn flag(&mut self) -> Option<bool> {
        match self.u8()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn key(&mut self) -> Option<[u8; 32]> {
        self.array()
    }

    pub(crate) fn chunk_key(&mut self) -> Option<ChunkKey> {
        self.key().map(ChunkKey)
    }

    fn slice(&mut self, num_bytes: usize) -> Option<&'a [u8]> {
        let (slice, rest) = self.0.split_at_checked(num_bytes)?;
        self.0 = rest;
        Some(slice)
    }

    pub(crate) fn bytes(&mut self) -> Option<&'a [u8]> {
        let num_bytes = usize::try_from(self.u32()?).ok()?;
        self.slice(num_bytes)
    }

    pub(crate) fn text(&mut self) -> Option<String> {
        str::from_utf8(self.bytes()?).ok().map(str::to_owned)
    }

    pub(crate) fn keys(&mut self) -> Option<&'a [[u8; 32]]> {
        let num = usize::try_from(self.u32()?).ok()?;
        Some(self.slice(num.checked_mul(32)?)?.as_chunks().0)
    }

    pub(crate) fn numbers(&mut self) -> Option<Vec<u64>> {
        let num = usize::try_from(self.u32()?).ok()?;
        let items = self.slice(num.checked_mul(8)?)?.as_chunks().0;
        Some(items.iter().map(|item| u64::from_le_bytes(*item)).collect())
    }

    /// Reads the number of items and the items, each of at least `num_bytes`.
    pub(crate) fn list<T>(
        &mut self,
        num_bytes: usize,
        mut read: impl FnMut(&mut Self) -> Option<T>,
    ) -> Option<Vec<T>> {
        let num = usize::try_from(self.u32()?).ok()?;
        if num.checked_mul(num_bytes)? > self.0.len() {
            return None;
        }
        (0..num).map(|_| read(self)).collect()
    }
}

/// Appends a message with its length.
pub(crate) fn write_message(
    to: &mut Vec<u8>,
    number: u32,
    kind: u8,
    fields: impl FnOnce(&mut Writer<'_>),
) {
    let start = to.len();
    let mut writer = Writer(to);
    writer.u32(0);
    writer.u32(number);
    writer.u8(kind);
    fields(&mut writer);
    let num_bytes = u32::try_from(to.len() - start - LENGTH_BYTES).unwrap_or(u32::MAX);
    to[start..start + LENGTH_BYTES].copy_from_slice(&num_bytes.to_le_bytes());
}

/// Reads a message's number and fields. None if they are not exactly `bytes`.
pub(crate) fn read_message<'a, T>(
    bytes: &'a [u8],
    read: impl FnOnce(u8, &mut Reader<'a>) -> Option<T>,
) -> Option<(u32, T)> {
    let mut reader = Reader(bytes);
    let (number, kind) = (reader.u32()?, reader.u8()?);
    let value = read(kind, &mut reader)?;
    reader.0.is_empty().then_some((number, value))
}
