//! Frame requests. A request names the frame's writer, because workers may not be able to copy to
//! the whole arena yet.

use crate::io::SizeClass;

/// The writer of a frame's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FrameFor {
    /// A worker, which may be able to reach only the first part of the arena.
    Save,
    /// A disk thread, which can reach the whole arena.
    Read,
}

/// A request for a frame: its size class and its writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FrameRequest {
    pub(crate) class: SizeClass,
    pub(super) purpose: FrameFor,
}

impl FrameRequest {
    /// Requests a frame that workers can copy to.
    pub(crate) fn for_save(class: SizeClass) -> Self {
        Self { class, purpose: FrameFor::Save }
    }

    /// Requests a frame for a disk thread to fill.
    pub(crate) fn for_read(class: SizeClass) -> Self {
        Self { class, purpose: FrameFor::Read }
    }

    /// Returns the number of leading slabs that have a suitable frame.
    pub(super) fn num_slabs(self, limit_bytes: u64, slab_bytes: u64, frame_bytes: u64) -> u32 {
        if self.purpose == FrameFor::Read {
            return u32::MAX;
        }
        let last_start = limit_bytes.checked_sub(frame_bytes);
        u32::try_from(last_start.map_or(0, |start| start / slab_bytes + 1)).unwrap_or(u32::MAX)
    }
}
