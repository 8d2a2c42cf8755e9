//! One store's grid of frames over shared memory: which slabs are its own, and so which frames are.
//!
//! A frame is usable while every slab that it lies in is the store's own and not being emptied. It
//! must not know why a frame was taken; it remembers the chunk that has it, so that a slab can be
//! emptied.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use crate::evict::ChunkId;
use crate::io::FrameId;
use crate::pool::{Member, SlabId};

/// Slabs without a used frame that a store keeps for the next one; more are given up.
const MAX_EMPTY: u32 = 1;
/// In `holders`: no chunk. Zero, so that `vec!` asks for zeroed memory, which is not touched for
/// frames that are never used.
pub(super) const FREE: u32 = 0;
const TAKEN: u32 = 1;
const FIRST_CHUNK: u32 = 2;

/// In `holders`: the chunk has the frame.
pub(super) fn held_by(chunk: ChunkId) -> u32 {
    chunk.0 + FIRST_CHUNK
}

/// The chunk that has a frame, of what `holders` says.
pub(super) fn chunk_of(holder: u32) -> Option<ChunkId> {
    holder.checked_sub(FIRST_CHUNK).map(ChunkId)
}

/// What a slab is to this store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slab {
    Foreign,
    Own,
    /// No frame of it is handed out any more.
    Draining,
}

/// The slabs as one store sees them.
#[derive(Debug)]
pub(crate) struct Grid {
    member: Member,
    frame_bytes: u64,
    slab_bytes: u64,
    slabs: Vec<Slab>,
    /// Frames taken that lie in it, whole or in part.
    used: Vec<u32>,
    num_empty: u32,
    /// The chunk that has each frame.
    holders: Vec<u32>,
}

impl Grid {
    pub(super) fn new(member: Member, frame_bytes: u64, num_frames: u32) -> Self {
        let slab_bytes = member.pool.slab_bytes();
        let num_slabs = member.pool.num_slabs() as usize;
        Self {
            member,
            frame_bytes,
            slab_bytes,
            slabs: vec![Slab::Foreign; num_slabs],
            used: vec![0; num_slabs],
            num_empty: 0,
            holders: vec![FREE; num_frames as usize],
        }
    }

    pub(crate) fn member(&self) -> &Member {
        &self.member
    }

    /// Frames of its share of the slabs.
    pub(crate) fn share(&self) -> u64 {
        u64::from(self.member.share()) * self.slab_bytes / self.frame_bytes
    }

    /// Slabs that a frame lies in.
    fn slabs_of(&self, frame: FrameId) -> RangeInclusive<usize> {
        let start = u64::from(frame.0) * self.frame_bytes;
        let last = self.slabs.len() - 1;
        let at =
            |byte: u64| usize::try_from(byte / self.slab_bytes).map_or(last, |slab| slab.min(last));
        at(start)..=at(start + self.frame_bytes - 1)
    }

    /// Frames that lie in a slab, whole or in part, from the `from`th frame on.
    fn frames_of(&self, slab: SlabId, from: u32) -> impl Iterator<Item = FrameId> + use<> {
        let start = u64::from(slab.0) * self.slab_bytes;
        let num = self.holders.len() as u64;
        let first = u32::try_from((start / self.frame_bytes).min(num)).unwrap_or(u32::MAX);
        let is_last = slab.0 as usize + 1 == self.slabs.len();
        let end = if is_last {
            num
        } else {
            (start + self.slab_bytes).div_ceil(self.frame_bytes).min(num)
        };
        let end = u32::try_from(end).unwrap_or(u32::MAX);
        (first.max(from)..end).map(FrameId)
    }

    fn is_usable(&self, frame: FrameId) -> bool {
        self.slabs_of(frame).all(|slab| self.slabs[slab] == Slab::Own)
    }

    pub(super) fn holder(&self, frame: FrameId) -> u32 {
        self.holders[frame.0 as usize]
    }

    pub(super) fn is_taken(&self, frame: FrameId) -> bool {
        self.holders[frame.0 as usize] != FREE
    }

    pub(super) fn take(&mut self, frame: FrameId) {
        self.holders[frame.0 as usize] = TAKEN;
        for slab in self.slabs_of(frame) {
            self.num_empty -= u32::from(self.used[slab] == 0);
            self.used[slab] += 1;
        }
    }

    pub(super) fn hand(&mut self, frame: FrameId, to: ChunkId) {
        self.holders[frame.0 as usize] = held_by(to);
    }

    pub(super) fn give(&mut self, frame: FrameId, free: &mut BTreeSet<FrameId>) {
        debug_assert!(self.is_taken(frame), "invariant I8: frame {} given twice", frame.0);
        self.holders[frame.0 as usize] = FREE;
        if self.is_usable(frame) {
            free.insert(frame);
        }
        for slab in self.slabs_of(frame) {
            self.used[slab] -= 1;
            let is_own = self.slabs[slab] == Slab::Own;
            self.num_empty += u32::from(self.used[slab] == 0 && is_own);
            if self.used[slab] == 0 && (!is_own || self.num_empty > MAX_EMPTY) {
                self.lose(slab, free);
            }
        }
    }

    /// Gives up a slab in which no frame is used.
    fn lose(&mut self, slab: usize, free: &mut BTreeSet<FrameId>) {
        let Some(id) = u32::try_from(slab).ok().map(SlabId) else { return };
        debug_assert!(
            self.used[slab] == 0 && self.slabs[slab] != Slab::Foreign,
            "invariant I4: slab {slab} is used"
        );
        self.num_empty -= u32::from(self.slabs[slab] == Slab::Own);
        self.slabs[slab] = Slab::Foreign;
        for frame in self.frames_of(id, 0) {
            free.remove(&frame);
        }
        self.member.give(id);
    }

    /// The slab is its own from now on.
    fn own(&mut self, slab: SlabId, free: &mut BTreeSet<FrameId>) {
        let at = slab.0 as usize;
        self.slabs[at] = Slab::Own;
        self.num_empty += u32::from(self.used[at] == 0);
        for frame in self.frames_of(slab, 0) {
            if !self.is_taken(frame) && self.is_usable(frame) {
                free.insert(frame);
            }
        }
    }

    pub(super) fn collect(&mut self, free: &mut BTreeSet<FrameId>) {
        for slab in self.member.collect() {
            self.own(slab, free);
        }
    }

    /// Takes one more slab, if there is one that holds a frame below `limit`.
    pub(super) fn grow(&mut self, limit: u32, free: &mut BTreeSet<FrameId>) -> bool {
        let slab = self.member.take(self.end_of(limit));
        slab.map(|slab| self.own(slab, free)).is_some()
    }

    /// Slabs before this one hold frames below `limit`.
    fn end_of(&self, limit: u32) -> u32 {
        let end = (u64::from(limit) * self.frame_bytes).div_ceil(self.slab_bytes);
        u32::try_from(end).unwrap_or(u32::MAX)
    }

    pub(super) fn drain(
        &mut self,
        before: u32,
        limit: u32,
        coldest: Option<FrameId>,
        free: &mut BTreeSet<FrameId>,
    ) -> Option<SlabId> {
        let (end, own_end) = (self.slabs.len().min(before as usize), self.end_of(limit) as usize);
        let is_own = |slab: &usize| *slab < end && self.slabs[*slab] == Slab::Own;
        let fewest = |from: usize| (from..end).filter(is_own).min_by_key(|&slab| self.used[slab]);
        // Saves cannot use what lies behind the limit.
        let (from, fewest) = match fewest(own_end) {
            Some(slab) => (own_end, slab),
            None => (0, fewest(0)?),
        };
        let coldest = coldest.map(|frame| *self.slabs_of(frame).start());
        let is_better = |slab: &usize| {
            *slab >= from && is_own(slab) && self.used[*slab] < 2 * self.used[fewest]
        };
        let slab = coldest.filter(is_better).unwrap_or(fewest);
        let id = SlabId(u32::try_from(slab).ok()?);
        self.num_empty -= u32::from(self.used[slab] == 0);
        self.slabs[slab] = Slab::Draining;
        for frame in self.frames_of(id, 0) {
            free.remove(&frame);
        }
        if self.used[slab] == 0 {
            self.lose(slab, free);
        }
        Some(id)
    }

    pub(super) fn keep(&mut self, slab: SlabId, free: &mut BTreeSet<FrameId>) {
        if self.is_draining(slab) {
            self.own(slab, free);
        }
    }

    /// Whether the slab is still to be given up.
    pub(crate) fn is_draining(&self, slab: SlabId) -> bool {
        self.slabs[slab.0 as usize] == Slab::Draining
    }

    /// The first chunk that has a frame in the slab, from the `from`th frame on; and its frame.
    pub(crate) fn next_holder(&self, slab: SlabId, from: u32) -> Option<(FrameId, ChunkId)> {
        let holder =
            |frame: FrameId| chunk_of(self.holders[frame.0 as usize]).map(|chunk| (frame, chunk));
        self.frames_of(slab, from).find_map(holder)
    }
}
