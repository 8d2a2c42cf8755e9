//! Memory shared by one or more stores. Tracks which store owns each arena slab and which store
//! should release a slab.
//!
//! A store divides each of its slabs into frames of a single size. A free slab goes to the first
//! store that requests it. If no slab is free, a requesting store below its share becomes *hungry*,
//! and stores above their share should release a slab. No call waits for a release. If a store's
//! workers can copy only to the first part of the arena, the store is also entitled to its share of
//! that part, so that other stores cannot fill all of it. Code may take the pool's lock while
//! holding a store's lock, but never the other way around.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::io::arena::FRAME_ALIGN;
use crate::io::{FrameSizes, HostArena, numa};
use crate::sync::{Mutex, MutexGuard, locked};
use crate::tier::disk::DiskRoot;
use crate::units::size_text;
use crate::{Error, Result};

/// Target number of slabs. The actual number can differ because of the limits below and the search
/// for a slab size that wastes little space.
const NUM_SLABS: u64 = 64;
/// Maximum slab size. Workers register memory with the GPU slab by slab, and each registration
/// blocks kernel launches.
const MAX_SLAB_BYTES: u64 = 256 << 20;
/// Wasted space is compared in units of `1 / PRECISION` of a slab.
const PRECISION: u64 = 1000;
/// Minimum number of frames of the largest size per slab, unless the arena would then have fewer
/// than `MIN_SLABS` slabs. With fewer frames, too much space could be wasted at the end of a slab.
const MIN_FRAMES: u64 = 4;
const MIN_SLABS: u64 = 8;

/// Index of a slab in the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SlabId(pub(crate) u32);

#[derive(Debug, Default)]
struct MemberState {
    /// Number of slabs owned by the store, including `arrived`.
    num_slabs: u32,
    /// Slabs that have been assigned to the store but not yet collected.
    arrived: Vec<SlabId>,
    /// Share of the arena, in percent. Stores whose share is None split the rest equally.
    percent: Option<u32>,
    /// True if the store is entitled to a share.
    is_active: bool,
    /// Number of slabs that the store may keep when other stores need slabs.
    share: u32,
    /// If set, the store needs a slab whose number is below this limit.
    hungry: Option<u32>,
}

#[derive(Debug, Default)]
struct PoolState {
    /// Owner of each slab, or None if the slab is free.
    slabs: Vec<Option<u32>>,
    num_free: u32,
    members: BTreeMap<u32, MemberState>,
    next_id: u32,
}

/// An arena and its slabs.
pub struct Pool {
    pub(crate) arena: HostArena,
    slab_bytes: u64,
    /// The disk directory shared by the stores.
    pub(crate) disk: Arc<DiskRoot>,
    state: Mutex<PoolState>,
    wake: Box<dyn Fn() + Send + Sync>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("arena", &self.arena)
            .field("slab_bytes", &self.slab_bytes)
            .finish_non_exhaustive()
    }
}

impl Pool {
    /// Creates an arena of `host_bytes` bytes with slabs suited to these frame sizes. Calls `wake`
    /// when a store becomes hungry, possibly while that store's lock is held. The pool's owner
    /// should then call [`crate::store::Store::release_slab`] on all other stores.
    ///
    /// Returns `InvalidConfig` if no frame fits, and `Io` if memory cannot be allocated.
    pub fn create(
        disk: Arc<DiskRoot>,
        host_bytes: u64,
        sizes: impl Into<FrameSizes>,
        wake: impl Fn() + Send + Sync + 'static,
    ) -> Result<Arc<Self>> {
        let (sizes, host_bytes) = (sizes.into(), host_bytes - host_bytes % FRAME_ALIGN);
        sizes.check()?;
        let frame_bytes = sizes.largest();
        if host_bytes < frame_bytes {
            return Err(Error::invalid(format!(
                "host_size = {} is too small for a chunk of {frame_bytes} bytes; raise it",
                size_text(host_bytes)
            )));
        }
        Self::of_slabs(disk, host_bytes, slab_bytes(host_bytes, &sizes), Box::new(wake))
    }

    /// Creates a pool for a single store.
    pub(crate) fn of_one(host_bytes: u64, sizes: &FrameSizes) -> Result<Arc<Self>> {
        let frame_bytes = sizes.largest();
        let host_bytes = if let [_] = sizes.all() {
            host_bytes - host_bytes % frame_bytes
        } else {
            host_bytes - host_bytes % FRAME_ALIGN
        };
        let slab_bytes = slab_bytes(host_bytes, sizes);
        Self::of_slabs(DiskRoot::shared(), host_bytes, slab_bytes, Box::new(|| {}))
    }

    fn of_slabs(
        disk: Arc<DiskRoot>,
        host_bytes: u64,
        slab_bytes: u64,
        wake: Box<dyn Fn() + Send + Sync>,
    ) -> Result<Arc<Self>> {
        let num_slabs = u32::try_from(host_bytes / slab_bytes).unwrap_or(u32::MAX);
        let state = PoolState {
            slabs: vec![None; num_slabs as usize],
            num_free: num_slabs,
            ..PoolState::default()
        };
        let arena = HostArena::of_bytes(host_bytes)?;
        Ok(Arc::new(Self { arena, slab_bytes, disk, state: Mutex::new(state), wake }))
    }

    /// Places unallocated memory so that shard i of each frame of `frame_bytes` bytes is on NUMA
    /// node `nodes[i]`. Returns the number of ranges placed, or `Io` if the kernel rejects the
    /// placement.
    pub fn place(&self, frame_bytes: u64, nodes: &[u32]) -> Result<usize> {
        let num_frames = u32::try_from(self.size_bytes() / frame_bytes.max(1)).unwrap_or(u32::MAX);
        let places = numa::by_shard(frame_bytes, num_frames, nodes);
        self.arena.place(&places)?;
        Ok(places.len())
    }

    /// Returns the arena size, in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.arena.size_bytes()
    }

    /// Returns the slab size, in bytes. The last slab also includes the arena's remaining bytes.
    pub fn slab_bytes(&self) -> u64 {
        self.slab_bytes
    }

    /// Returns the number of slabs.
    pub fn num_slabs(&self) -> u32 {
        u32::try_from(self.size_bytes() / self.slab_bytes).unwrap_or(u32::MAX)
    }

    /// Returns true if any store is hungry, in which case other stores should release a slab.
    pub fn is_wanted(&self) -> bool {
        self.state().wanting().next().is_some()
    }

    /// Returns `InvalidConfig` if any frame size exceeds the slab size. Without this check, a store
    /// could own slabs that are too small for its largest frames.
    pub fn check(&self, sizes: &FrameSizes) -> Result<()> {
        sizes.check()?;
        let (slab_bytes, frame_bytes) = (self.slab_bytes, sizes.largest());
        if frame_bytes <= slab_bytes {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "chunks of {frame_bytes} bytes are too large for this server's slabs of {slab_bytes} \
             bytes, sized from --host-size and the first engine; raise --host-size, use a smaller \
             vLLM block size, or start the engine with the larger chunks first"
        )))
    }

    fn state(&self) -> MutexGuard<'_, PoolState> {
        locked(&self.state)
    }
}

/// Returns the slab size in bytes: a multiple of the largest frame size, chosen so that frames of
/// other sizes waste little space.
fn slab_bytes(host_bytes: u64, sizes: &FrameSizes) -> u64 {
    let frame_bytes = sizes.largest();
    let num_frames = host_bytes / frame_bytes;
    let most = (MAX_SLAB_BYTES / frame_bytes).max(1);
    let many = (num_frames / NUM_SLABS).min(most);
    let few =
        if num_frames / MIN_FRAMES >= MIN_SLABS { MIN_FRAMES } else { num_frames / MIN_SLABS };
    let least = many.max(few).max(1);
    let left = |num: &u64| {
        let slab_bytes = num * frame_bytes;
        let left: u64 = sizes.all().iter().map(|size| slab_bytes % size).sum();
        left * PRECISION / slab_bytes
    };
    let most = most.min(num_frames / MIN_SLABS).min(2 * least).max(least);
    frame_bytes * (least..=most).min_by_key(left).unwrap_or(least)
}

impl PoolState {
    /// Recomputes the share of each store from the set of active stores.
    fn share_out(&mut self) {
        let num_slabs = self.slabs.len() as u64;
        let of = |percent: u32| (num_slabs * u64::from(percent) / 100).max(1);
        let active = || self.members.values().filter(|member| member.is_active);
        let fixed: u64 = active().filter_map(|member| member.percent).map(of).sum();
        let num_equal = active().filter(|member| member.percent.is_none()).count().max(1) as u64;
        let left = num_slabs.saturating_sub(fixed);
        let equal = (left / num_equal).max(left.min(1)); // without a slab, a store could never save
        for member in self.members.values_mut() {
            let share = if member.is_active { member.percent.map_or(equal, of) } else { 0 };
            member.share = u32::try_from(share).unwrap_or(u32::MAX);
            member.hungry = member.hungry.filter(|_| member.is_active);
        }
    }

    fn num_slabs(&self) -> u32 {
        u32::try_from(self.slabs.len()).unwrap_or(u32::MAX)
    }

    /// Returns how many of a store's slabs are numbered below `end`.
    fn num_before(&self, end: u32, id: u32, member: &MemberState) -> u32 {
        if end >= self.num_slabs() {
            return member.num_slabs;
        }
        let own = self.slabs.iter().take(end as usize).filter(|of| **of == Some(id));
        u32::try_from(own.count()).unwrap_or(u32::MAX)
    }

    /// Returns the number of slabs below `end` that a store may keep when other stores need slabs.
    fn share_before(&self, end: u32, member: &MemberState) -> u32 {
        let part = u64::from(member.share) * u64::from(end.min(self.num_slabs()))
            / u64::from(self.num_slabs().max(1));
        u32::try_from(part).unwrap_or(u32::MAX).max(member.share.min(end).min(1))
    }

    fn wants(&self, end: u32, id: u32, member: &MemberState) -> bool {
        self.num_before(end, id, member) < self.share_before(end, member)
    }

    /// Returns the stores that need a slab, each with the limit that the slab's number must be
    /// below.
    fn wanting(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        let end = |(id, member): (&u32, &MemberState)| {
            member.hungry.filter(|end| self.wants(*end, *id, member)).map(|end| (*id, end))
        };
        self.members.iter().filter_map(end)
    }

    /// Takes a slab from store `from` and assigns it to another hungry store: the store with the
    /// lowest limit or, if limits are equal, the store furthest below its share. If no other store
    /// is hungry, the slab becomes free. A hungry store that releases a slab does not get the slab
    /// back and remains hungry. Otherwise, its size classes would pass the slab around, and the
    /// store would never get another slab.
    fn reassign(&mut self, from: u32, slab: SlabId) {
        if let Some(member) = self.members.get_mut(&from) {
            member.num_slabs -= 1;
        }
        self.slabs[slab.0 as usize] = None;
        let lacks = |id: u32, end: u32| {
            let member =
                self.members.get(&id).map(|member| (member, self.num_before(end, id, member)));
            member.map(|(member, has)| self.share_before(end, member) - has)
        };
        let next = self.wanting().filter(|(id, end)| *id != from && slab.0 < *end);
        let next = next.max_by_key(|(id, end)| (Reverse(*end), lacks(*id, *end))).map(|(id, _)| id);
        if let Some(member) = next.and_then(|id| self.members.get_mut(&id)) {
            (member.num_slabs, member.hungry) = (member.num_slabs + 1, None);
            member.arrived.push(slab);
        }
        self.slabs[slab.0 as usize] = next;
        self.num_free += u32::from(self.slabs[slab.0 as usize].is_none());
    }
}

/// A store's membership in a pool. Dropping it releases every slab that the store owns.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) pool: Arc<Pool>,
    id: u32,
}

impl Member {
    /// Adds a store that has no slabs yet. The store's share is `percent` of the arena. Stores
    /// whose share is None split the rest equally.
    pub(crate) fn join(pool: &Arc<Pool>, percent: Option<u32>) -> Self {
        let mut state = pool.state();
        let id = state.next_id;
        state.next_id += 1;
        state
            .members
            .insert(id, MemberState { percent, is_active: true, ..MemberState::default() });
        state.share_out();
        drop(state);
        Self { pool: Arc::clone(pool), id }
    }

    fn with<T>(&self, what: impl FnOnce(&mut MemberState) -> T) -> T {
        what(self.pool.state().members.entry(self.id).or_default())
    }

    pub(crate) fn set_active(&self, is_active: bool) {
        let mut state = self.pool.state();
        state.members.entry(self.id).or_default().is_active = is_active;
        state.share_out();
    }

    /// Returns the slabs that other stores have released to this store since the last call.
    pub(crate) fn collect(&self) -> Vec<SlabId> {
        self.with(|own| std::mem::take(&mut own.arrived))
    }

    /// Takes the lowest-numbered free slab below `end`. If no slab is free and the store owns less
    /// than its share below `end`, the store becomes hungry.
    pub(crate) fn take(&self, end: u32) -> Option<SlabId> {
        let mut state = self.pool.state();
        let PoolState { slabs, num_free, members, .. } = &mut *state;
        let own = members.entry(self.id).or_default();
        let free = if *num_free > 0 {
            slabs.iter().take(end as usize).position(Option::is_none)
        } else {
            None
        };
        if let Some(at) = free {
            slabs[at] = Some(self.id);
            *num_free -= 1;
            (own.num_slabs, own.hungry) = (own.num_slabs + 1, None);
            return u32::try_from(at).ok().map(SlabId);
        }
        let wants = state.members.get(&self.id).is_some_and(|own| state.wants(end, self.id, own));
        let own = state.members.get_mut(&self.id).filter(|_| wants)?;
        let is_news = own.hungry.replace(end).is_none();
        drop(state);
        if is_news {
            (self.pool.wake)();
        }
        None
    }

    /// Releases a slab that has no frames in use.
    pub(crate) fn release(&self, slab: SlabId) {
        self.pool.state().reassign(self.id, slab);
    }

    pub(crate) fn share(&self) -> u32 {
        self.with(|own| own.share)
    }

    /// Returns the number of slabs the store owns, and how many of them other stores can claim.
    pub(crate) fn num_slabs(&self) -> (u32, u32) {
        self.with(|own| (own.num_slabs, own.num_slabs.saturating_sub(own.share)))
    }

    /// If this store should release a slab to another store, returns the limit that the slab's
    /// number must be below.
    pub(crate) fn asked(&self) -> Option<u32> {
        let state = self.pool.state();
        let own = state.members.get(&self.id)?;
        let ends = state.wanting().map(|(_, end)| end);
        ends.filter(|end| state.num_before(*end, self.id, own) > state.share_before(*end, own))
            .min()
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        if let Some(own) = state.members.get_mut(&self.id) {
            own.is_active = false;
        }
        state.share_out();
        let slabs = (0..).map(SlabId).zip(&state.slabs);
        let own = slabs.filter(|(_, member)| **member == Some(self.id)).map(|(slab, _)| slab);
        for slab in own.collect::<Vec<_>>() {
            state.reassign(self.id, slab);
        }
        state.members.remove(&self.id);
    }
}
