//! The host tier: which frames of the arena are free, and the one right to each frame's bytes.
//!
//! It must not know what a frame holds nor why it was taken; the store does.

mod grid;

use std::collections::BTreeSet;
use std::sync::Arc;

pub(crate) use grid::Grid;

use crate::Result;
use crate::evict::ChunkId;
use crate::io::{Frame, FrameId, Frames, HostArena};
use crate::pool::{Member, Pool, SlabId};

/// What a frame is taken for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FrameFor {
    /// Workers copy to it.
    Save,
    /// A disk thread fills it.
    Read,
}

/// The arena with its free frames. Frames are lent to the threads that fill or copy them, one
/// borrower at a time.
#[derive(Debug)]
pub(crate) struct HostTier {
    memory: Memory,
    frames: Frames,
    /// The lowest are handed out first: their memory is already touched, and workers can copy to
    /// those below `limit`.
    free: BTreeSet<FrameId>,
    num_taken: u64,
    limit: u32,
    /// The frame that was looked at last for its chunk.
    hand: u32,
}

/// Whose the memory is.
#[derive(Debug)]
enum Memory {
    /// All frames are this tier's; and the chunk that has each.
    Own(HostArena, Vec<u32>),
    /// Those in its slabs are.
    Shared(Box<Grid>),
}

impl HostTier {
    /// New memory; see [`HostArena::create`].
    pub(crate) fn create(frame_bytes: u64, num_frames: u32) -> Result<Self> {
        let (arena, frames) = HostArena::create(frame_bytes, num_frames)?;
        let free = (0..num_frames).map(FrameId).collect();
        let holders = vec![grid::FREE; num_frames as usize];
        Ok(Self::new(Memory::Own(arena, holders), frames, free))
    }

    /// A grid over the memory of a pool, without a frame yet; see [`HostArena::frames`] and
    /// [`Pool::check`].
    pub(crate) fn join(
        pool: &Arc<Pool>,
        percent: Option<u32>,
        frame_bytes: u64,
        num_frames: u32,
    ) -> Result<Self> {
        pool.check(frame_bytes)?;
        let frames = pool.arena().frames(frame_bytes, num_frames)?;
        let grid = Grid::new(Member::join(pool, percent), frame_bytes, num_frames);
        Ok(Self::new(Memory::Shared(Box::new(grid)), frames, BTreeSet::new()))
    }

    fn new(memory: Memory, frames: Frames, free: BTreeSet<FrameId>) -> Self {
        Self { memory, limit: frames.num(), frames, free, num_taken: 0, hand: 0 }
    }

    pub(crate) fn arena(&self) -> &HostArena {
        match &self.memory {
            Memory::Own(arena, _) => arena,
            Memory::Shared(grid) => grid.member().pool.arena(),
        }
    }

    /// The slabs, where memory is shared.
    pub(crate) fn grid(&self) -> Option<&Grid> {
        match &self.memory {
            Memory::Own(..) => None,
            Memory::Shared(grid) => Some(grid),
        }
    }

    /// All frames that are this tier's, and the free ones.
    pub(crate) fn num_frames(&self) -> (u64, u64) {
        let num_free = self.free.len() as u64;
        (self.num_taken + num_free, num_free)
    }

    /// Only frames below `limit` are for saves from now on: workers cannot copy to the others yet.
    pub(crate) fn limit(&mut self, limit: u32) {
        self.limit = limit;
    }

    /// The lowest free frame, if it will do.
    pub(crate) fn take(&mut self, what_for: FrameFor) -> Option<FrameId> {
        let frame = if self.has_free(what_for) { self.free.pop_first() } else { None }?;
        self.num_taken += 1;
        if let Memory::Shared(grid) = &mut self.memory {
            grid.take(frame);
        }
        Some(frame)
    }

    /// Whether [`Self::take`] would give one.
    pub(crate) fn has_free(&self, what_for: FrameFor) -> bool {
        self.free.first().is_some_and(|frame| self.is_fit(*frame, what_for))
    }

    /// Takes a frame after adding free slabs to this tier.
    pub(crate) fn grow(&mut self, what_for: FrameFor) -> Option<FrameId> {
        let Memory::Shared(grid) = &mut self.memory else { return None };
        grid.collect(&mut self.free);
        let limit = if what_for == FrameFor::Save { self.limit } else { u32::MAX };
        loop {
            let frame = self.take(what_for);
            let Memory::Shared(grid) = &mut self.memory else { return None };
            if frame.is_some() || !grid.grow(limit, &mut self.free) {
                return frame;
            }
        }
    }

    /// Whether the frame will do: workers can copy to those below the limit only, and from any.
    pub(crate) fn is_fit(&self, frame: FrameId, what_for: FrameFor) -> bool {
        what_for == FrameFor::Read || frame.0 < self.limit
    }

    /// The chunk has the frame, which was taken for it.
    pub(crate) fn hand(&mut self, frame: FrameId, to: ChunkId) {
        match &mut self.memory {
            Memory::Own(_, holders) => holders[frame.0 as usize] = grid::held_by(to),
            Memory::Shared(grid) => grid.hand(frame, to),
        }
    }

    /// The chunk that has the next frame of those that are for saves, round after round.
    pub(crate) fn next_below_limit(&mut self) -> Option<ChunkId> {
        let end = self.frames.num().min(self.limit).max(1);
        self.hand = (self.hand + 1) % end;
        let holder = match &self.memory {
            Memory::Own(_, holders) => holders[self.hand as usize],
            Memory::Shared(grid) => grid.holder(FrameId(self.hand)),
        };
        grid::chunk_of(holder).filter(|_| self.hand < self.limit)
    }

    /// Takes a frame back that is not used any more.
    pub(crate) fn give(&mut self, frame: FrameId) {
        debug_assert!(!self.frames.is_lent(frame), "invariant I4: frame {} is lent", frame.0);
        self.num_taken -= 1;
        match &mut self.memory {
            Memory::Own(_, holders) => {
                holders[frame.0 as usize] = grid::FREE;
                let is_new = self.free.insert(frame);
                debug_assert!(is_new, "invariant I8: frame {} given twice", frame.0);
            }
            Memory::Shared(grid) => grid.give(frame, &mut self.free),
        }
    }

    /// Hands out the right to a frame's bytes; None if it is lent already, or free: in shared
    /// memory its bytes may be another store's.
    pub(crate) fn lend(&mut self, frame: FrameId) -> Option<Frame> {
        if self.grid().is_some_and(|grid| !grid.is_taken(frame)) {
            return None;
        }
        self.frames.lend(frame)
    }

    /// Takes a lent frame back.
    pub(crate) fn give_back(&mut self, frame: Frame) {
        self.frames.give_back(frame);
    }

    // -- slabs that others should have
    // ------------------------------------------------------------------------

    /// Uses the slabs that came since it was hungry.
    pub(crate) fn collect(&mut self) {
        if let Memory::Shared(grid) = &mut self.memory {
            grid.collect(&mut self.free);
        }
    }

    /// Begins to empty a slab before the `end`th: the one of `coldest`, unless another has far
    /// fewer frames in use; first of those that saves cannot use. It is given up with the last of
    /// them. None if there is none.
    pub(crate) fn drain(&mut self, end: u32, coldest: Option<FrameId>) -> Option<SlabId> {
        let Memory::Shared(grid) = &mut self.memory else { return None };
        grid.drain(end, self.limit, coldest, &mut self.free)
    }

    /// The slab is used again, if it is still being emptied.
    pub(crate) fn keep(&mut self, slab: SlabId) {
        if let Memory::Shared(grid) = &mut self.memory {
            grid.keep(slab, &mut self.free);
        }
    }
}

#[cfg(test)]
mod tests;
