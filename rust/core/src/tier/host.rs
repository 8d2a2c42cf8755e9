//! The host tier: which frames of the arena are free, and the one right to each frame's bytes.
//!
//! It must not know what a frame holds nor why it was taken; the store does.

use crate::Result;
use crate::io::{Frame, FrameId, HostArena};

/// The arena with its free frames. Frames are lent to the threads that fill or copy them, one borrower at a time.
#[derive(Debug)]
pub(crate) struct HostTier {
    arena: HostArena,
    frames: Vec<Option<Frame>>,
    free: Vec<FrameId>,
}

impl HostTier {
    /// New memory; see [`HostArena::create`].
    pub(crate) fn create(frame_bytes: u64, num_frames: u32) -> Result<Self> {
        let (arena, frames) = HostArena::create(frame_bytes, num_frames)?;
        // Taken from the end, so that the lowest frames, whose memory is already touched, are used first.
        let free = frames.iter().rev().map(Frame::id).collect();
        Ok(Self { arena, frames: frames.into_iter().map(Some).collect(), free })
    }

    pub(crate) fn arena(&self) -> &HostArena {
        &self.arena
    }

    pub(crate) fn num_free(&self) -> usize {
        self.free.len()
    }

    /// A free frame, if there is one.
    pub(crate) fn take(&mut self) -> Option<FrameId> {
        self.free.pop()
    }

    /// Takes a frame back that nobody uses any more.
    pub(crate) fn give(&mut self, frame: FrameId) {
        debug_assert!(self.frames[frame.0 as usize].is_some(), "invariant I4: frame {} is lent", frame.0);
        debug_assert!(
            !self.free.contains(&frame) || self.free.len() > 64,
            "invariant I8: frame {} given twice",
            frame.0
        );
        self.free.push(frame);
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
