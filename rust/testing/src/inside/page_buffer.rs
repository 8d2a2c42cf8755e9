//! Page-aligned memory for direct I/O in tests and benches that have no arena.

/// Alignment that direct I/O requires for memory, offsets and lengths.
const PAGE_BYTES: usize = 4096;

/// A zeroed buffer that starts on a page boundary.
#[derive(Debug)]
pub struct PageBuffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl PageBuffer {
    /// Creates a zeroed buffer of `len` bytes.
    pub fn new(len: usize) -> Self {
        let bytes = vec![0_u8; len + PAGE_BYTES];
        // A Vec's memory does not move unless its length changes, so this offset stays valid.
        let start = bytes.as_ptr().addr().next_multiple_of(PAGE_BYTES) - bytes.as_ptr().addr();
        Self { bytes, start, len }
    }
}

impl std::ops::Deref for PageBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

impl std::ops::DerefMut for PageBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}
