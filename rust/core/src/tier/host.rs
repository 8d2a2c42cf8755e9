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
    /// Free frames from `limit` on.
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

    /// Only frames below `limit` are for saves from now on: workers cannot copy to the others yet. Lowering it is for once.
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

    /// A free frame that workers can copy to, if there is one.
    pub(crate) fn take(&mut self) -> Option<FrameId> {
        self.free.pop()
    }

    /// A free frame to read into, if there is one: workers can copy from any, only not from all as fast.
    pub(crate) fn take_any(&mut self) -> Option<FrameId> {
        self.take().or_else(|| self.held_back.pop().map(|Reverse(frame)| FrameId(frame)))
    }

    /// Whether workers can copy to any frame at all.
    pub(crate) fn takes_saves(&self) -> bool {
        self.limit > 0
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
mod tests {
    use super::*;

    fn taken(tier: &mut HostTier) -> Vec<u32> {
        std::iter::from_fn(|| tier.take()).map(|frame| frame.0).collect()
    }

    #[test]
    fn frames_from_the_limit_on_are_held_back_until_it_rises() {
        let mut tier = HostTier::create(4096, 8).unwrap();
        let high: Vec<_> = (0..8).filter_map(|_| tier.take()).filter(|frame| frame.0 > 4).collect();
        tier.limit(3);
        (0..5).rev().map(FrameId).chain(high).for_each(|frame| tier.give(frame));
        assert_eq!(tier.num_free(), 8);
        assert_eq!(taken(&mut tier), [0, 1, 2]);
        assert_eq!(tier.num_free(), 5);
        tier.limit(6);
        assert_eq!(
            {
                let mut more = taken(&mut tier);
                more.sort_unstable();
                more
            },
            [3, 4, 5]
        );
        tier.give(FrameId(1));
        tier.limit(1);
        assert_eq!((taken(&mut tier), tier.num_free()), (vec![], 3));
        tier.limit(u32::MAX);
        assert_eq!(taken(&mut tier).len(), 3);
    }
}
