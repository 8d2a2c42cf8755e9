//! The host tier tracks the used and free frames of the arena and lends access to their bytes.
//!
//! A namespace can have multiple frame sizes, but each slab of the arena holds frames of only one
//! size at a time. `grid` tracks the frames of one size, and this file assigns slabs to sizes. The
//! tier never accesses the contents of frames.

mod grid;
mod request;
mod slab;

use std::sync::Arc;

use self::grid::Grid;
use self::request::FrameFor;
pub(crate) use self::request::FrameRequest;
pub(crate) use self::slab::Wanted;
use self::slab::{Slab, SlabState};
use crate::Result;
use crate::evict::ChunkId;
use crate::io::{FRAME_ALIGN, Frame, FrameId, FrameSizes, Frames, HostArena, SizeClass};
use crate::pool::{Member, Pool, SlabId};

/// Number of empty slabs that a store in a shared pool keeps for future frames. Extra empty
/// slabs are released.
const MAX_EMPTY: u32 = 1;

/// A store's frames. Disk threads borrow frames to fill or copy them, and only one thread at a time
/// can borrow a given frame.
#[derive(Debug)]
pub(crate) struct HostTier {
    pub(crate) member: Member,
    frames: Frames,
    /// The frames of each size class, indexed by class.
    grids: Vec<Grid>,
    slabs: Vec<Slab>,
    /// Number of `Own` slabs with no frames in use.
    num_empty: u32,
    /// Maximum number of empty slabs to keep.
    max_empty: u32,
    /// Workers can copy only to this many bytes at the start of the arena.
    limit_bytes: u64,
    /// Requests whose size class needs a slab from another class, most recent last.
    hungry: Vec<FrameRequest>,
}

impl HostTier {
    /// Allocates memory for a single store. Returns `InvalidConfig` if the frame sizes are
    /// unsuitable, or `Io` if memory cannot be allocated.
    pub(crate) fn create(host_bytes: u64, sizes: &FrameSizes) -> Result<Self> {
        let mut tier = Self::join(&Pool::of_one(host_bytes, sizes)?, None, sizes)?;
        tier.max_empty = u32::MAX;
        if tier.grids.len() == 1 {
            let request = FrameRequest::for_read(SizeClass::default());
            while tier.add_slab(request) {}
        }
        Ok(tier)
    }

    /// Creates a tier in a shared pool. The new tier has no slabs. See [`Pool::check`] for errors.
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
            hungry: Vec::new(),
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

    /// Returns the number of frames and the number of free frames.
    pub(crate) fn num_frames(&self) -> (u64, u64) {
        let num_free: u64 = self.grids.iter().map(Grid::num_free).sum();
        (self.grids.iter().map(|grid| grid.num_taken).sum::<u64>() + num_free, num_free)
    }

    pub(crate) fn num_taken(&self, class: SizeClass) -> usize {
        usize::try_from(self.grid(class).num_taken).unwrap_or(usize::MAX / 2)
    }

    /// Returns the total size of all frames in use, in bytes.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.grids.iter().map(|grid| grid.num_taken * grid.frames.frame_bytes).sum()
    }

    /// Returns the uncompressed size of all chunks that are in frames, in bytes.
    pub(crate) fn raw_bytes(&self) -> u64 {
        self.grids.iter().map(|grid| grid.num_taken * grid.raw_bytes).sum()
    }

    /// Returns a class's uncompressed chunk size, in bytes.
    pub(crate) fn raw_frame_bytes(&self, class: SizeClass) -> u64 {
        self.grid(class).raw_bytes
    }

    /// Returns how many bytes the store can keep when other stores need memory.
    pub(crate) fn share_bytes(&self) -> u64 {
        let (share, pool) = (self.member.share(), &self.member.pool);
        if share >= pool.num_slabs() {
            pool.size_bytes()
        } else {
            u64::from(share) * pool.slab_bytes()
        }
    }

    /// Restricts saves to frames in the first `limit_bytes` bytes of the arena, because workers
    /// cannot copy to the rest yet.
    pub(crate) fn limit(&mut self, limit_bytes: u64) {
        self.limit_bytes = limit_bytes;
    }

    /// Takes the class's lowest-numbered free frame if that frame is suitable. Frames with low
    /// numbers are the most likely to already be backed by physical memory.
    pub(crate) fn take(&mut self, request: FrameRequest) -> Option<FrameId> {
        let FrameRequest { class, .. } = request;
        if !self.has_free(request) {
            return None;
        }
        let number = self.grids[class.index()].take()?;
        let slab = &mut self.slabs[self.grids[class.index()].slab_of(number)];
        self.num_empty -= u32::from(slab.num_used == 0);
        slab.num_used += 1;
        Some(FrameId::new(class, number))
    }

    /// Returns true if [`Self::take`] would return a frame.
    pub(crate) fn has_free(&self, request: FrameRequest) -> bool {
        let FrameRequest { class, purpose } = request;
        let free = self.grid(class).first_free();
        free.is_some_and(|number| self.is_reachable(FrameId::new(class, number), purpose))
    }

    /// Takes a frame, adding slabs to the class if needed.
    pub(crate) fn grow(&mut self, request: FrameRequest) -> Option<FrameId> {
        self.collect();
        loop {
            let frame = self.take(request);
            if frame.is_some() || !self.add_slab(request) {
                return frame;
            }
        }
    }

    /// Returns true if evicting the chunk in `frame` can help the request. Eviction does not help a
    /// save if workers cannot copy to the frame. If the frame belongs to a different class,
    /// eviction does not help a request that is already waiting for a slab or cannot use the
    /// frame's slab.
    pub(crate) fn is_fit(&self, frame: FrameId, request: FrameRequest) -> bool {
        let slab = self.grid(frame.class()).slab_of(frame.number());
        let is_slab_fit = slab < self.end_for(request) as usize && !self.hungry.contains(&request);
        let is_class_fit = frame.class() == request.class || is_slab_fit;
        is_class_fit && self.is_reachable(frame, request.purpose)
    }

    fn is_reachable(&self, frame: FrameId, purpose: FrameFor) -> bool {
        let grid = self.grid(frame.class());
        purpose == FrameFor::Read || grid.frames.is_within(frame.number(), self.limit_bytes)
    }

    /// Records that evictions did not free a frame for this request, so another class must release
    /// a slab.
    pub(crate) fn set_hungry(&mut self, request: FrameRequest) {
        if self.grids.len() > 1 {
            self.hungry.retain(|other| *other != request);
            self.hungry.push(request);
        }
    }

    /// Withdraws a request that no slab can serve. Otherwise, its class could take a slab later,
    /// even if the class has free frames by then.
    pub(crate) fn withdraw(&mut self, wanted: Wanted) {
        self.hungry.pop_if(|request| wanted.class == Some(request.class));
    }

    pub(crate) fn assign(&mut self, frame: FrameId, to: ChunkId) {
        self.grids[frame.class().index()].assign(frame.number(), to);
    }

    /// Advances to the next frame that saves can use, wrapping around. Returns the frame's chunk,
    /// if any.
    pub(crate) fn next_below_limit(&mut self, class: SizeClass) -> Option<ChunkId> {
        self.grids[class.index()].next_holder_within(self.limit_bytes)
    }

    /// Releases a frame, and also its slab if the slab is now empty and not needed.
    pub(crate) fn release_frame(&mut self, frame: FrameId) {
        debug_assert!(!self.frames.is_lent(frame), "invariant I4: {frame:?} is lent");
        let (class, number) = (frame.class(), frame.number());
        let grid = &mut self.grids[class.index()];
        let at = grid.slab_of(number);
        let slab = &mut self.slabs[at];
        let is_own = slab.state == SlabState::Own(class);
        grid.release(number, is_own);
        slab.num_used -= 1;
        if slab.num_used == 0 {
            self.num_empty += u32::from(is_own);
            if !is_own || self.num_empty > self.max_empty {
                self.release_empty_slab(at);
            }
        }
    }

    /// Lends a frame's bytes. Returns None if the frame is already lent, or if it is free, because
    /// another store may be using a free frame's bytes.
    pub(crate) fn lend(&mut self, frame: FrameId) -> Option<Frame> {
        let grid = self.grids.get(frame.class().index())?;
        if grid.is_taken(frame.number()) { self.frames.lend(frame) } else { None }
    }

    pub(crate) fn return_frame(&mut self, frame: Frame) {
        self.frames.take_back(frame);
    }

    // -- slabs ----------------------------------------------------------------------------------

    /// Assigns newly received slabs to a hungry class, or else to the class with the fewest free
    /// frames.
    pub(crate) fn collect(&mut self) {
        for slab in self.member.collect() {
            let at = slab.0 as usize;
            if let Some(class) = self.hungry_class(at).or_else(|| self.fullest()) {
                self.assign_slab(at, class);
            }
        }
    }

    /// Returns the class of the most recent hungry request that can use the slab.
    fn hungry_class(&self, at: usize) -> Option<SizeClass> {
        let is_suitable = |request: &&FrameRequest| at < self.end_for(**request) as usize;
        self.hungry.iter().rev().find(is_suitable).map(|request| request.class)
    }

    fn fullest(&self) -> Option<SizeClass> {
        self.grids.iter().min_by_key(|grid| grid.num_free()).map(|grid| grid.class)
    }

    /// Adds a slab with a suitable frame to the class: another class's empty slab, or else a slab
    /// from the pool. Returns false if neither is available.
    fn add_slab(&mut self, request: FrameRequest) -> bool {
        let (class, end) = (request.class, self.end_for(request));
        let is_spare = |slab: &Slab| {
            slab.num_used == 0 && matches!(slab.state, SlabState::Own(other) if other != class)
        };
        let spare = || self.slabs.iter().take(end as usize).position(is_spare);
        let at = if self.num_empty > 0 { spare() } else { None };
        if let Some(at) = at {
            self.unassign_slab(at);
        }
        let at = at.or_else(|| self.member.take(end).map(|slab| slab.0 as usize));
        at.map(|at| self.assign_slab(at, class)).is_some()
    }

    /// Returns the number of leading slabs that have a suitable frame for the request.
    fn end_for(&self, request: FrameRequest) -> u32 {
        let frame_bytes = self.frame_bytes(request.class);
        request.num_slabs(self.limit_bytes, self.member.pool.slab_bytes(), frame_bytes)
    }

    /// Returns the number of leading slabs that workers can copy to, at least in part.
    fn end_of_limit(&self) -> u32 {
        let end = self.limit_bytes.div_ceil(self.member.pool.slab_bytes());
        u32::try_from(end).unwrap_or(u32::MAX)
    }

    fn assign_slab(&mut self, at: usize, class: SizeClass) {
        let Slab { state, num_used } = &mut self.slabs[at];
        *state = SlabState::Own(class);
        self.num_empty += u32::from(*num_used == 0);
        self.grids[class.index()].add_slab(at);
        self.hungry.retain(|request| request.class != class);
    }

    /// Marks the slab as `Foreign`, which makes its frames unavailable.
    fn unassign_slab(&mut self, at: usize) {
        let Slab { state, num_used } = &mut self.slabs[at];
        let (SlabState::Own(class) | SlabState::Draining(class)) = *state else { return };
        self.num_empty -= u32::from(*num_used == 0 && *state == SlabState::Own(class));
        *state = SlabState::Foreign;
        self.grids[class.index()].remove_slab(at);
    }

    /// Moves an empty slab to a hungry class that can use it. Returns the slab to the pool instead
    /// if no class can use it or another store needs a slab.
    fn release_empty_slab(&mut self, at: usize) {
        debug_assert!(
            self.slabs[at].num_used == 0 && self.slabs[at].state != SlabState::Foreign,
            "invariant I4: slab {at} is used"
        );
        self.unassign_slab(at);
        match self.hungry_class(at) {
            Some(class) if self.member.asked().is_none() => self.assign_slab(at, class),
            _ => self.member.release(SlabId(u32::try_from(at).unwrap_or(u32::MAX))),
        }
    }

    /// Returns the most urgent request for one of this store's slabs. Requests from other stores
    /// come first.
    pub(crate) fn wanted(&self) -> Option<Wanted> {
        let asked = self.member.asked().map(|end| Wanted { end, class: None });
        let own = |request: &FrameRequest| Wanted {
            end: self.end_for(*request),
            class: Some(request.class),
        };
        asked.or_else(|| self.hungry.last().map(own))
    }

    /// Returns true if any class of this store needs a slab.
    pub(crate) fn is_hungry(&self) -> bool {
        !self.hungry.is_empty()
    }

    /// Starts draining a slab. Picks the slab that contains the frame `coldest`, unless another
    /// slab has at most half as many frames in use. Prefers slabs that saves cannot use. The slab
    /// is released once its last frame is freed. Returns None if no slab is suitable.
    pub(crate) fn drain(&mut self, wanted: Wanted, coldest: Option<FrameId>) -> Option<SlabId> {
        let end = self.slabs.len().min(wanted.end as usize);
        let is_own = |at: &usize| {
            *at < end
                && matches!(self.slabs[*at].state, SlabState::Own(of) if Some(of) != wanted.class)
        };
        let fewest =
            |from: usize| (from..end).filter(is_own).min_by_key(|&at| self.slabs[at].num_used);
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
            self.release_empty_slab(at);
        }
        Some(id)
    }

    /// Stops draining a slab and makes its free frames available again.
    pub(crate) fn keep(&mut self, slab: SlabId) {
        let at = slab.0 as usize;
        if let SlabState::Draining(class) = self.slabs[at].state {
            self.assign_slab(at, class);
        }
    }

    pub(crate) fn is_draining(&self, slab: SlabId) -> bool {
        matches!(self.slabs[slab.0 as usize].state, SlabState::Draining(_))
    }

    /// Returns the slab's first frame at or after `from` that holds a chunk, along with that chunk.
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
