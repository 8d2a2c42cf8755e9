//! What a frame is to all who only name one: a number, and a size in whole pages. It must not know
//! where memory is mapped.

/// Frames start and end on pages, so that a disk can read and write them without a bounce copy.
pub const FRAME_ALIGN: u64 = 4096;

/// A frame's place in the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FrameId(pub u32);
