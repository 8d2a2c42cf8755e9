//! The host tier: which frames of the arena are free, and the one right to each frame's bytes.
//!
//! It must not know what a frame holds nor why it was taken; the store does.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::Result;
use crate::io::{Frame, FrameId, HostArena};

/// The arena with its free frames. Frames are lent to the threads that fill or copy them, one borrower at a time.
#[derive(Debug)]
pub(crate) struct HostTier {
    arena: HostArena,
    frames: Vec<Option<Frame>>,
    free: Vec<FrameId>,
    /// Free frames that are not handed out: those from `limit` on.
    held_back: BinaryHeap<Reverse<u32>>,
    limit: u32,
}

impl HostTier {
    /// New memory; see [`HostArena::create`].
    pub(crate) fn create(frame_bytes: u64, num_frames: u32) -> Result<Self> {
        let (arena, frames) = HostArena::create(frame_bytes, num_frames)?;
        // Taken from the end, so that the lowest frames, whose memory is already touched, are used first.
        let free = frames.iter().rev().map(Frame::id).collect();
        let frames = frames.into_iter().map(Some).collect();
        Ok(Self { arena, frames, free, held_back: BinaryHeap::new(), limit: num_frames })
    }

    pub(crate) fn arena(&self) -> &HostArena {
        &self.arena
    }

    pub(crate) fn num_free(&self) -> usize {
        self.free.len() + self.held_back.len()
    }

    /// Hands out only frames below `limit` from now on: workers cannot copy to the others yet. Lowering it is for once.
    pub(crate) fn limit(&mut self, limit: u32) {
        if limit < self.limit {
            self.held_back.extend(self.free.extract_if(.., |frame| frame.0 >= limit).map(|frame| Reverse(frame.0)));
        }
        self.limit = limit;
        while let Some(&Reverse(frame)) = self.held_back.peek()
            && frame < limit
        {
            self.held_back.pop();
            self.free.push(FrameId(frame));
        }
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
        if frame.0 < self.limit { self.free.push(frame) } else { self.held_back.push(Reverse(frame.0)) }
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
