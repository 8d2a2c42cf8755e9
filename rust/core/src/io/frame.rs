//! Frame ids (a size class and a number) and the layout of frames in an arena.

use std::ops::Range;

use crate::{Error, Result};

/// Frames start and end on page boundaries, so that direct I/O needs no bounce buffer.
pub const FRAME_ALIGN: u64 = 4096;

/// Maximum number of frame sizes in a namespace.
pub const MAX_SIZES: usize = 1 << CLASS_BITS;
/// Maximum number of frames or slots of one size.
pub const MAX_FRAMES: u64 = 1 << NUMBER_BITS;
const CLASS_BITS: u32 = 4;
const NUMBER_BITS: u32 = u32::BITS - CLASS_BITS;

/// A frame size, represented as an index into the namespace's list of frame sizes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SizeClass(pub u8);

impl SizeClass {
    /// Returns the class as an index.
    pub fn index(self) -> usize {
        self.0.into()
    }
}

/// Id of a frame in the arena: its size class and its number among the frames of that size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FrameId(pub u32);

impl FrameId {
    /// Creates the id of frame `number` in a size class. `number` must be less than
    /// [`MAX_FRAMES`].
    pub fn new(class: SizeClass, number: u32) -> Self {
        Self(u32::from(class.0) << NUMBER_BITS | number)
    }

    /// Returns the size class.
    pub fn class(self) -> SizeClass {
        SizeClass((self.0 >> NUMBER_BITS) as u8)
    }

    /// Returns the frame's number among all frames of its size.
    pub fn number(self) -> u32 {
        self.0 & ((1 << NUMBER_BITS) - 1)
    }
}

/// The frame sizes of a namespace, in bytes. A [`SizeClass`] is an index into this list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrameSizes {
    bytes: Vec<u64>,
    raw_bytes: Vec<u64>,
}

impl From<u64> for FrameSizes {
    fn from(frame_bytes: u64) -> Self {
        vec![frame_bytes].into()
    }
}

impl From<Vec<u64>> for FrameSizes {
    fn from(bytes: Vec<u64>) -> Self {
        Self { raw_bytes: bytes.clone(), bytes }
    }
}

/// Creates the sizes from one (frame size, uncompressed chunk size) pair per class, in bytes.
impl From<Vec<(u64, u64)>> for FrameSizes {
    fn from(sizes: Vec<(u64, u64)>) -> Self {
        let (bytes, raw_bytes) = sizes.into_iter().unzip();
        Self { bytes, raw_bytes }
    }
}

impl FrameSizes {
    /// Checks that there are 1 to [`MAX_SIZES`] distinct sizes and that all of them are positive
    /// multiples of 4096. Returns `InvalidConfig` otherwise.
    pub fn check(&self) -> Result<()> {
        let are_pages = self.bytes.iter().all(|size| *size > 0 && size.is_multiple_of(FRAME_ALIGN));
        let are_different =
            self.bytes.iter().enumerate().all(|(nth, size)| !self.bytes[..nth].contains(size));
        if are_pages && are_different && (1..=MAX_SIZES).contains(&self.bytes.len()) {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "frame sizes {:?} are invalid; use 1 to {MAX_SIZES} different positive multiples of \
             {FRAME_ALIGN}",
            self.bytes
        )))
    }

    /// Returns all sizes, indexed by class.
    pub fn all(&self) -> &[u64] {
        &self.bytes
    }

    /// Returns the uncompressed chunk size of each class, in bytes.
    pub fn raw(&self) -> &[u64] {
        &self.raw_bytes
    }

    /// Returns one (frame size, uncompressed chunk size) pair per class, in bytes.
    pub fn with_raw(&self) -> Vec<(u64, u64)> {
        self.bytes.iter().copied().zip(self.raw_bytes.iter().copied()).collect()
    }

    /// Returns the frame size of `class` in bytes, or 0 if there is no such class.
    pub fn bytes(&self, class: SizeClass) -> u64 {
        self.bytes.get(class.index()).copied().unwrap_or(0)
    }

    /// Returns the largest size.
    pub fn largest(&self) -> u64 {
        self.bytes.iter().copied().max().unwrap_or(0)
    }

    /// Returns the smallest size.
    pub fn smallest(&self) -> u64 {
        self.bytes.iter().copied().min().unwrap_or(0)
    }

    /// Returns the average size, which is at least 1.
    pub fn average(&self) -> u64 {
        (self.bytes.iter().sum::<u64>() / (self.bytes.len() as u64).max(1)).max(1)
    }

    /// Iterates over all classes.
    pub fn classes(&self) -> impl Iterator<Item = SizeClass> + use<> {
        (0..u8::try_from(self.bytes.len()).unwrap_or(u8::MAX)).map(SizeClass)
    }
}

/// The layout of all frames of one size in an arena. Frames are adjacent within a slab and never
/// cross a slab boundary. The last slab also includes the remaining bytes of the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameGrid {
    /// Frame size, in bytes.
    pub frame_bytes: u64,
    arena_bytes: u64,
    slab_bytes: u64,
    per_slab: u32,
    num_slabs: u32,
}

impl FrameGrid {
    /// Creates the layout. Returns `InvalidConfig` if the slab or frame size is not a positive
    /// multiple of 4096, if a slab is too small for a frame, or if there would be more than
    /// [`MAX_FRAMES`] frames.
    pub fn new(arena_bytes: u64, slab_bytes: u64, frame_bytes: u64) -> Result<Self> {
        let num = |bytes: u64, of: u64| u32::try_from(bytes / of.max(1)).unwrap_or(0);
        let (per_slab, num_slabs) = (num(slab_bytes, frame_bytes), num(arena_bytes, slab_bytes));
        let are_pages =
            [slab_bytes, frame_bytes].iter().all(|s| *s > 0 && s.is_multiple_of(FRAME_ALIGN));
        if per_slab == 0 || num_slabs == 0 || !are_pages || arena_bytes / frame_bytes > MAX_FRAMES {
            return Err(Error::invalid("frames do not fit in the arena's slabs")
                .with_context("frame_bytes", frame_bytes)
                .with_context("slab_bytes", slab_bytes)
                .with_context("arena_bytes", arena_bytes));
        }
        Ok(Self { frame_bytes, arena_bytes, slab_bytes, per_slab, num_slabs })
    }

    /// Returns the number of frames.
    pub fn num_frames(&self) -> u32 {
        self.frames_of(self.num_slabs - 1).end
    }

    /// Returns the slab that contains a frame.
    pub fn slab_of(&self, number: u32) -> u32 {
        (number / self.per_slab).min(self.num_slabs - 1)
    }

    /// Returns the range of frame numbers in a slab.
    pub fn frames_of(&self, slab: u32) -> Range<u32> {
        let start = u64::from(slab) * self.slab_bytes;
        let is_last = slab + 1 >= self.num_slabs;
        let bytes = if is_last { self.arena_bytes - start } else { self.slab_bytes };
        let first = slab * self.per_slab;
        first..first + u32::try_from(bytes / self.frame_bytes).unwrap_or(0)
    }

    /// Returns the offset of a frame from the start of the arena.
    pub fn start(&self, number: u32) -> u64 {
        let slab = self.slab_of(number);
        u64::from(slab) * self.slab_bytes
            + u64::from(number - slab * self.per_slab) * self.frame_bytes
    }

    /// Returns true if the frame ends within the first `bytes` bytes of the arena.
    pub fn is_within(&self, number: u32, bytes: u64) -> bool {
        self.start(number) + self.frame_bytes <= bytes
    }
}

#[cfg(test)]
mod tests;
