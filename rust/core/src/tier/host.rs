//! The host tier: which frames of the arena are free, and the one right to each frame's bytes.
//!
//! It must not know what a frame holds nor why it was taken; the store does.

use std::collections::BTreeSet;

use crate::Result;
use crate::io::{Frame, FrameId, HostArena};

/// What a frame is taken for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FrameFor {
    /// Workers copy to it.
    Save,
    /// A disk thread fills it.
    Read,
}

/// The arena with its free frames. Frames are lent to the threads that fill or copy them, one borrower at a time.
#[derive(Debug)]
pub(crate) struct HostTier {
    arena: HostArena,
    frames: Vec<Option<Frame>>,
    /// The lowest are handed out first: their memory is already touched, and workers can copy to those below `limit`.
    free: BTreeSet<FrameId>,
    limit: u32,
}

impl HostTier {
    /// New memory; see [`HostArena::create`].
    pub(crate) fn create(frame_bytes: u64, num_frames: u32) -> Result<Self> {
        let (arena, frames) = HostArena::create(frame_bytes, num_frames)?;
        let free = frames.iter().map(Frame::id).collect();
        let frames = frames.into_iter().map(Some).collect();
        Ok(Self { arena, frames, free, limit: num_frames })
    }

    pub(crate) fn arena(&self) -> &HostArena {
        &self.arena
    }

    /// All frames, and the free ones.
    pub(crate) fn num_frames(&self) -> (u64, u64) {
        (self.frames.len() as u64, self.free.len() as u64)
    }

    /// Only frames below `limit` are for saves from now on: workers cannot copy to the others yet.
    pub(crate) fn limit(&mut self, limit: u32) {
        self.limit = limit;
    }

    /// The lowest free frame, if it will do.
    pub(crate) fn take(&mut self, what_for: FrameFor) -> Option<FrameId> {
        let fits = self.free.first().is_some_and(|frame| self.is_fit(*frame, what_for));
        if fits { self.free.pop_first() } else { None }
    }

    /// Whether the frame will do: workers can copy to those below the limit only, and from any.
    pub(crate) fn is_fit(&self, frame: FrameId, what_for: FrameFor) -> bool {
        what_for == FrameFor::Read || frame.0 < self.limit
    }

    /// Takes a frame back that is not used any more.
    pub(crate) fn give(&mut self, frame: FrameId) {
        debug_assert!(self.frames[frame.0 as usize].is_some(), "invariant I4: frame {} is lent", frame.0);
        let is_new = self.free.insert(frame);
        debug_assert!(is_new, "invariant I8: frame {} given twice", frame.0);
    }

    /// Hands out the right to a frame's bytes; None if it is lent already.
    pub(crate) fn lend(&mut self, frame: FrameId) -> Option<Frame> {
        self.frames[frame.0 as usize].take()
    }

    /// Takes a lent frame back.
    pub(crate) fn give_back(&mut self, frame: Frame) {
        let at = frame.id().0 as usize;
        debug_assert!(self.frames[at].is_none(), "there is one right to a frame");
        self.frames[at] = Some(frame);
    }
}

#[cfg(test)]
mod tests;
