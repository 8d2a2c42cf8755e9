//! The host tier: tracks free frames of the arena and lends out access to their bytes.
//!
//! Frames have the sizes of the namespace. A slab of the arena holds frames of one size at a time:
//! `grid` tracks the frames of one size, and this file assigns slabs. Must not depend on the
//! contents or the purpose of a frame; the store does.

mod grid;

use std::sync::Arc;

use self::grid::Grid;
use crate::Result;
use crate::evict::ChunkId;
use crate::io::{FRAME_ALIGN, Frame, FrameId, FrameSizes, Frames, HostArena, SizeClass};
use crate::pool::{Member, Pool, SlabId};

/// Empty slabs that a store keeps for later frames; further ones are released.
const MAX_EMPTY: u32 = 1;

/// The purpose of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FrameFor {
    /// Workers copy to it.
    Save,
    /// A disk thread fills it.
    Read,
}

/// The owner of a slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SlabState {
    Foreign,
    /// It holds this tier's frames of one size.
    Own(SizeClass),
    /// As `Own`, but its free frames are no longer handed out.
    Draining(SizeClass),
}

#[derive(Debug, Clone, Copy)]
struct Slab {
    state: SlabState,
    /// Used frames in it.
    num_used: u32,
}

/// Which slabs others need, of this store or in the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// Only slabs below this number help.
    pub(crate) end: u32,
    /// The class that needs one, if it belongs to this store.
    class: Option<SizeClass>,
}

/// The frames of one store. Frames are lent to the threads that fill or copy them, one borrower at
/// a time.
#[derive(Debug)]
pub(crate) struct HostTier {
    pub(crate) member: Member,
    frames: Frames,
    /// By size class.
    grids: Vec<Grid>,
    slabs: Vec<Slab>,
    /// Number of own slabs without a used frame, and the number to keep.
    num_empty: u32,
    max_empty: u32,
    /// Workers can copy to the first bytes of the arena only.
    limit_bytes: u64,
    /// A class that found no frame while other classes have free frames.
    hungry: Option<SizeClass>,
}

impl HostTier {
    /// Creates memory for a single store. `InvalidConfig` for sizes that do not fit; `Io` if the
    /// system refuses memory.
    pub(crate) fn create(host_bytes: u64, sizes: &FrameSizes) -> Result<Self> {
        let mut tier = Self::join(&Pool::of_one(host_bytes, sizes)?, None, sizes)?;
        tier.max_empty = u32::MAX;
        if tier.grids.len() == 1 {
            while tier.add_slab(SizeClass::default(), FrameFor::Read) {}
        }
        Ok(tier)
    }

    /// Creates the tier of a store that shares a pool, without slabs yet; see [`Pool::check`].
    pub(crate) fn join(pool: &Arc<Pool>, percent: Option<u32>, sizes: &FrameSizes) -> Result<Self> {
        pool.check(sizes)?;
        let frames = pool.arena.frames(pool.slab_bytes(), sizes)?;
        let grids = sizes.classes().zip(frames.grids()).zip(sizes.raw());
        let grids = grids.map(|((class, grid), raw)| Grid::new(class, *grid, *raw));
        Ok(Self {
            member: Member::join(pool, percent),
            grids: grids.collect(),
            frames,
            slabs: vec![Slab { state: SlabState::Foreign, num_used: 0 }; pool.num_slabs() as usize],
            num_empty: 0,
            max_empty: MAX_EMPTY,
            limit_bytes: u64::MAX,
            hungry: None,
        })
    }

    pub(crate) fn arena(&self) -> &HostArena {
        &self.member.pool.arena
    }

    fn grid(&self, class: SizeClass) -> &Grid {
        &self.grids[class.index()]
    }

    pub(crate) fn num_classes(&self) -> usize {
        self.grids.len()
    }

    pub(crate) fn frame_bytes(&self, class: SizeClass) -> u64 {
        self.grid(class).frames.frame_bytes
    }

    pub(crate) fn pages(&self, class: SizeClass) -> u32 {
        u32::try_from(self.frame_bytes(class) / FRAME_ALIGN).unwrap_or(u32::MAX)
    }

    /// Returns the numbers of all frames of this tier and of free ones.
    pub(crate) fn num_frames(&self) -> (u64, u64) {
        let num_free: u64 = self.grids.iter().map(Grid::num_free).sum();
        (self.grids.iter().map(|grid| grid.num_taken).sum::<u64>() + num_free, num_free)
    }

    /// Bytes of used frames.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.grids.iter().map(|grid| grid.num_taken * grid.frames.frame_bytes).sum()
    }

    /// Bytes that the chunks in those frames would take uncompressed.
    pub(crate) fn raw_bytes(&self) -> u64 {
        self.grids.iter().map(|grid| grid.num_taken * grid.raw_bytes).sum()
    }

    /// Bytes that a chunk of a class takes uncompressed.
    pub(crate) fn raw_frame_bytes(&self, class: SizeClass) -> u64 {
        self.grid(class).raw_bytes
    }

    /// Bytes that it can keep while other stores need memory.
    pub(crate) fn share_bytes(&self) -> u64 {
        let (share, pool) = (self.member.share(), &self.member.pool);
        if share >= pool.num_slabs() {
            pool.size_bytes()
        } else {
            u64::from(share) * pool.slab_bytes()
        }
    }

    /// From now on, saves use only frames in the first `limit_bytes`: workers cannot copy to the
    /// others yet.
    pub(crate) fn limit(&mut self, limit_bytes: u64) {
        self.limit_bytes = limit_bytes;
    }

    /// The lowest free frame, if it will do. Its memory is likely to be touched already.
    pub(crate) fn take(&mut self, class: SizeClass, what_for: FrameFor) -> Option<FrameId> {
        if !self.has_free(class, what_for) {
            return None;
        }
        let number = self.grids[class.index()].take()?;
        let slab = &mut self.slabs[self.grids[class.index()].slab_of(number)];
        self.num_empty -= u32::from(slab.num_used == 0);
        slab.num_used += 1;
        Some(FrameId::new(class, number))
    }

    /// Returns whether [`Self::take`] would return a frame.
    pub(crate) fn has_free(&self, class: SizeClass, what_for: FrameFor) -> bool {
        let free = self.grid(class).first_free();
        free.is_some_and(|number| self.is_reachable(FrameId::new(class, number), what_for))
    }

    /// Takes a frame after adding free slabs to this class.
    pub(crate) fn grow(&mut self, class: SizeClass, what_for: FrameFor) -> Option<FrameId> {
        self.collect();
        loop {
            let frame = self.take(class, what_for);
            if frame.is_some() || !self.add_slab(class, what_for) {
                return frame;
            }
        }
    }

    /// Returns whether evicting the chunk of a frame helps: not if workers cannot copy to the
    /// frame, nor if it has another class while a slab is being emptied for this class.
    pub(crate) fn is_fit(&self, frame: FrameId, class: SizeClass, what_for: FrameFor) -> bool {
        let is_class = frame.class() == class || self.hungry != Some(class);
        is_class && self.is_reachable(frame, what_for)
    }

    fn is_reachable(&self, frame: FrameId, what_for: FrameFor) -> bool {
        let grid = self.grid(frame.class());
        what_for == FrameFor::Read || grid.frames.is_within(frame.number(), self.limit_bytes)
    }

    /// Records that no chunk could be evicted for a frame of this class, so another class must
    /// release a slab.
    pub(crate) fn set_hungry(&mut self, class: SizeClass) {
        if self.grids.len() > 1 {
            self.hungry = Some(class);
        }
    }

    /// Assigns a taken frame to its chunk.
    pub(crate) fn hand(&mut self, frame: FrameId, to: ChunkId) {
        self.grids[frame.class().index()].hand(frame.number(), to);
    }

    /// Returns the chunk of the next frame that saves can use, in rounds.
    pub(crate) fn next_below_limit(&mut self, class: SizeClass) -> Option<ChunkId> {
        self.grids[class.index()].next_holder_within(self.limit_bytes)
    }

    /// Takes back a frame that is no longer used.
    pub(crate) fn give(&mut self, frame: FrameId) {
        debug_assert!(!self.frames.is_lent(frame), "invariant I4: {frame:?} is lent");
        let (class, number) = (frame.class(), frame.number());
        let grid = &mut self.grids[class.index()];
        let at = grid.slab_of(number);
        let slab = &mut self.slabs[at];
        let is_own = slab.state == SlabState::Own(class);
        grid.give(number, is_own);
        slab.num_used -= 1;
        if slab.num_used == 0 {
            self.num_empty += u32::from(is_own);
            if !is_own || self.num_empty > self.max_empty {
                self.lose(at);
            }
        }
    }

    /// Lends access to a frame's bytes; None if it is lent already, or free: in shared memory,
    /// another store may use the bytes.
    pub(crate) fn lend(&mut self, frame: FrameId) -> Option<Frame> {
        let grid = self.grids.get(frame.class().index())?;
        if grid.is_taken(frame.number()) { self.frames.lend(frame) } else { None }
    }

    pub(crate) fn give_back(&mut self, frame: Frame) {
        self.frames.give_back(frame);
    }

    // -- slabs ----------------------------------------------------------------------------------

    /// Uses the slabs received since a class was hungry.
    pub(crate) fn collect(&mut self) {
        let arrived = self.member.collect();
        let class = self.hungry.or_else(|| self.fullest());
        for slab in arrived {
            if let Some(class) = class {
                self.own(slab.0 as usize, class);
            }
        }
    }

    fn fullest(&self) -> Option<SizeClass> {
        self.grids.iter().min_by_key(|grid| grid.num_free()).map(|grid| grid.class)
    }

    /// Takes one more slab with a suitable frame, if there is one: a free slab, or an empty one of
    /// another class.
    fn add_slab(&mut self, class: SizeClass, what_for: FrameFor) -> bool {
        let end = if what_for == FrameFor::Save { self.end_of_limit() } else { u32::MAX };
        let is_spare = |slab: &Slab| {
            slab.num_used == 0 && matches!(slab.state, SlabState::Own(other) if other != class)
        };
        let spare = || self.slabs.iter().take(end as usize).position(is_spare);
        let at = if self.num_empty > 0 { spare() } else { None };
        if let Some(at) = at {
            self.disown(at);
        }
        let at = at.or_else(|| self.member.take(end).map(|slab| slab.0 as usize));
        at.map(|at| self.own(at, class)).is_some()
    }

    /// Returns the number of slabs with frames that workers can copy to.
    fn end_of_limit(&self) -> u32 {
        let end = self.limit_bytes.div_ceil(self.member.pool.slab_bytes());
        u32::try_from(end).unwrap_or(u32::MAX)
    }

    /// Assigns the slab to frames of `class`.
    fn own(&mut self, at: usize, class: SizeClass) {
        let Slab { state, num_used } = &mut self.slabs[at];
        *state = SlabState::Own(class);
        self.num_empty += u32::from(*num_used == 0);
        self.grids[class.index()].add_slab(at);
        self.hungry = self.hungry.filter(|hungry| *hungry != class);
    }

    /// Makes the slab foreign, so that none of its frames is free.
    fn disown(&mut self, at: usize) {
        let Slab { state, num_used } = &mut self.slabs[at];
        let (SlabState::Own(class) | SlabState::Draining(class)) = *state else { return };
        self.num_empty -= u32::from(*num_used == 0 && *state == SlabState::Own(class));
        *state = SlabState::Foreign;
        self.grids[class.index()].remove_slab(at);
    }

    /// Releases a slab without used frames: to a class of this store that needs a slab, or to the
    /// pool.
    fn lose(&mut self, at: usize) {
        debug_assert!(
            self.slabs[at].num_used == 0 && self.slabs[at].state != SlabState::Foreign,
            "invariant I4: slab {at} is used"
        );
        self.disown(at);
        match self.hungry {
            Some(class) if self.member.asked().is_none() => self.own(at, class),
            _ => self.member.give(SlabId(u32::try_from(at).unwrap_or(u32::MAX))),
        }
    }

    /// Returns whether another store, or a class of this store, needs one of its slabs.
    pub(crate) fn wanted(&self) -> Option<Wanted> {
        let asked = self.member.asked().map(|end| Wanted { end, class: None });
        let own = |class| Wanted { end: self.end_of_limit(), class: Some(class) };
        asked.or_else(|| self.hungry.map(own))
    }

    /// Returns whether one of its own classes needs a slab.
    pub(crate) fn is_hungry(&self) -> bool {
        self.hungry.is_some()
    }

    /// Starts to empty a slab: the slab of `coldest`, unless another has far fewer frames in use.
    /// For other stores, a slab that saves cannot use comes first. The slab is released with its
    /// last used frame. None if there is no such slab.
    pub(crate) fn drain(&mut self, wanted: Wanted, coldest: Option<FrameId>) -> Option<SlabId> {
        let end = self.slabs.len().min(wanted.end as usize);
        let is_own = |at: &usize| {
            *at < end
                && matches!(self.slabs[*at].state, SlabState::Own(of) if Some(of) != wanted.class)
        };
        let fewest =
            |from: usize| (from..end).filter(is_own).min_by_key(|&at| self.slabs[at].num_used);
        // Saves cannot use frames after the limit.
        let behind = self.end_of_limit() as usize;
        let (from, fewest) = match fewest(behind) {
            Some(at) => (behind, at),
            None => (0, fewest(0)?),
        };
        let coldest = coldest.map(|frame| self.grid(frame.class()).slab_of(frame.number()));
        let is_better = |at: &usize| {
            let num_used = self.slabs[*at].num_used;
            *at >= from && is_own(at) && num_used < 2 * self.slabs[fewest].num_used
        };
        let at = coldest.filter(is_better).unwrap_or(fewest);
        let id = SlabId(u32::try_from(at).ok()?);
        let SlabState::Own(class) = self.slabs[at].state else { return None };
        self.num_empty -= u32::from(self.slabs[at].num_used == 0);
        self.slabs[at].state = SlabState::Draining(class);
        self.grids[class.index()].remove_slab(at);
        if self.slabs[at].num_used == 0 {
            self.lose(at);
        }
        Some(id)
    }

    /// The slab is used again, if it is still being emptied.
    pub(crate) fn keep(&mut self, slab: SlabId) {
        let at = slab.0 as usize;
        if let SlabState::Draining(class) = self.slabs[at].state {
            self.own(at, class);
        }
    }

    /// True if the slab is to be released once its last frame is free.
    pub(crate) fn is_draining(&self, slab: SlabId) -> bool {
        matches!(self.slabs[slab.0 as usize].state, SlabState::Draining(_))
    }

    /// Returns the first chunk with a frame in a slab that is being emptied, from frame number
    /// `from`, and the number of its frame.
    pub(crate) fn next_holder(&self, slab: SlabId, from: u32) -> Option<(u32, ChunkId)> {
        match self.slabs[slab.0 as usize].state {
            SlabState::Foreign => None,
            SlabState::Own(class) | SlabState::Draining(class) => {
                self.grid(class).next_holder(slab, from)
            }
        }
    }
}

#[cfg(test)]
mod tests;
