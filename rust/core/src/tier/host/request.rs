//! Requests for frames. A request includes the writer of the frame, because workers might not be
//! able to copy to the whole arena yet.

use crate::io::SizeClass;

/// The writer of a frame's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FrameFor {
    /// A worker, which might reach only the first part of the arena.
    Save,
    /// A disk thread, which reaches the whole arena.
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

    /// Requests a frame that a disk thread fills.
    pub(crate) fn for_read(class: SizeClass) -> Self {
        Self { class, purpose: FrameFor::Read }
    }
}
