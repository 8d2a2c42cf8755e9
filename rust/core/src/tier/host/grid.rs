//! The frames of one size: the free frames, and the chunk in each used frame.

use std::collections::BTreeSet;

use crate::evict::ChunkId;
use crate::io::{FrameGrid, SizeClass};
use crate::pool::SlabId;

/// Value in `holders` for a free frame. This value is zero so that `vec!` requests zeroed memory,
/// which takes no physical pages for frames that are never used.
const FREE: u32 = 0;
/// Value in `holders` for a frame that is in use but not yet assigned to a chunk.
const TAKEN: u32 = 1;
/// Offset that is added to each chunk id before it is stored in `holders`.
const FIRST_CHUNK: u32 = 2;

/// The frames of one size in the slabs of one store.
#[derive(Debug)]
pub(super) struct Grid {
    pub(super) class: SizeClass,
    pub(super) frames: FrameGrid,
    /// Uncompressed size of a chunk of this class, in bytes.
    pub(super) raw_bytes: u64,
    /// Numbers of all free frames. The lowest-numbered frame is taken first.
    free: BTreeSet<u32>,
    pub(super) num_taken: u64,
    /// State of each frame, indexed by frame number. See `FREE`, `TAKEN` and `FIRST_CHUNK`.
    holders: Vec<u32>,
    /// The frame that `next_holder_within` examined last.
    hand: u32,
}

impl Grid {
    pub(super) fn new(class: SizeClass, frames: FrameGrid, raw_bytes: u64) -> Self {
        let holders = vec![FREE; frames.num_frames() as usize];
        Self { class, frames, raw_bytes, free: BTreeSet::new(), num_taken: 0, holders, hand: 0 }
    }

    pub(super) fn num_free(&self) -> u64 {
        self.free.len() as u64
    }

    pub(super) fn first_free(&self) -> Option<u32> {
        self.free.first().copied()
    }

    pub(super) fn slab_of(&self, number: u32) -> usize {
        self.frames.slab_of(number) as usize
    }

    pub(super) fn is_taken(&self, number: u32) -> bool {
        self.holders.get(number as usize).is_some_and(|holder| *holder != FREE)
    }

    pub(super) fn take(&mut self) -> Option<u32> {
        let number = self.free.pop_first()?;
        self.holders[number as usize] = TAKEN;
        self.num_taken += 1;
        Some(number)
    }

    pub(super) fn assign(&mut self, number: u32, to: ChunkId) {
        self.holders[number as usize] = to.0 + FIRST_CHUNK;
    }

    /// Releases a frame. If `is_own` is false, the frame's slab is draining, so the frame does not
    /// become available.
    pub(super) fn release(&mut self, number: u32, is_own: bool) {
        debug_assert!(self.is_taken(number), "invariant I8: frame {number} returned twice");
        self.holders[number as usize] = FREE;
        self.num_taken -= 1;
        if is_own {
            self.free.insert(number);
        }
    }

    pub(super) fn add_slab(&mut self, slab: usize) {
        let frames = self.frames.frames_of(u32::try_from(slab).unwrap_or(u32::MAX));
        self.free.extend(frames.filter(|number| self.holders[*number as usize] == FREE));
    }

    pub(super) fn remove_slab(&mut self, slab: usize) {
        for number in self.frames.frames_of(u32::try_from(slab).unwrap_or(u32::MAX)) {
            self.free.remove(&number);
        }
    }

    /// Returns the slab's first frame at or after `from` that holds a chunk, along with that chunk.
    pub(super) fn next_holder(&self, slab: SlabId, from: u32) -> Option<(u32, ChunkId)> {
        let frames = self.frames.frames_of(slab.0);
        let mut left = frames.start.max(from)..frames.end;
        left.find_map(|number| self.chunk_of(number).map(|chunk| (number, chunk)))
    }

    fn chunk_of(&self, number: u32) -> Option<ChunkId> {
        self.holders[number as usize].checked_sub(FIRST_CHUNK).map(ChunkId)
    }

    /// Advances to the next frame within the first `bytes` bytes of the arena, wrapping around.
    /// Returns the frame's chunk, if any.
    pub(super) fn next_holder_within(&mut self, bytes: u64) -> Option<ChunkId> {
        self.hand += 1;
        if self.hand >= self.frames.num_frames() || !self.frames.is_within(self.hand, bytes) {
            self.hand = 0;
        }
        self.chunk_of(self.hand).filter(|_| self.frames.is_within(self.hand, bytes))
    }
}
