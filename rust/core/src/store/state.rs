//! All that the store's one lock guards, and the small moves that keep its counts right in host.
//!
//! Everything else (reserve, commit, leases, disk threads) is made of these moves. An entry is *present* in host while its
//! presence there is not `Absent`. Rules upheld here: a present chunk's parent is present (but for detached entries, which
//! nothing finds); only chunks that are here, are leaves and are not held are offered to the policy; a detached entry is
//! freed with its last user; `frames_reserved + frames_visible + free = all` (I8).

use std::time::Duration;

use rustc_hash::FxHashMap;

use super::ages::Ages;
use super::books::DiskBooks;
use super::changes::Watch;
use super::evict::Evicted;
use super::forget::Doomed;
use super::owners::{Owners, Spared};
use super::quota::Room;
use super::share::Drains;
use super::stats::Stats;
use crate::evict::{ChunkId, Policy, Removal};
use crate::index::{Filler, Index, Presence};
use crate::io::FrameId;
use crate::tier::host::{FrameFor, Grid, HostTier};

/// Chunks forgotten by one call: some 0.2 ms.
const SLICE: usize = 256;
/// Most chunks looked at for one frame whose own frames would not do.
const MAX_SPARED: usize = 64;
/// Most lines for people that wait to be taken.
const MAX_EVENTS: usize = 64;

/// The index, the tiers' books and the policies.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) index: Index,
    pub(crate) host: HostTier,
    pub(crate) host_policy: Box<dyn Policy>,
    /// Blocks in a full chunk.
    pub(crate) per_chunk: u32,
    pub(crate) disk: DiskBooks,
    pub(crate) disk_policy: Box<dyn Policy>,
    pub(crate) stats: Stats,
    /// Time since the store was opened, as the last caller read it.
    pub(crate) now: Duration,
    /// Seconds of Unix time now, and when the store was opened.
    pub(super) unix_s: u32,
    pub(super) opened_s: u32,
    pub(crate) closed: bool,
    /// What a person should see.
    pub(crate) events: Vec<String>,
    /// Keys of chunks that came to a tier or left one; None unless the store is watched.
    pub(super) watch: Option<Watch>,
    /// Children that came to host before their parent was visible.
    pub(super) waiters: FxHashMap<ChunkId, Vec<ChunkId>>,
    /// Chunks to forget with all below them: a stack, walked in slices.
    pub(super) doomed: Vec<Doomed>,
    /// Chunks forgotten by one call.
    pub(super) slice: usize,
    /// Forgotten by `evict` so far.
    pub(super) evicted: Evicted,
    pub(super) owners: Owners,
    pub(super) ages: Ages,
    /// Slabs that are emptied for other stores.
    pub(super) drains: Drains,
    next_ticket: u64,
}

impl State {
    /// Without a disk, until one is attached.
    pub(crate) fn new(
        host: HostTier,
        per_chunk: u32,
        host_policy: Box<dyn Policy>,
        disk_policy: Box<dyn Policy>,
    ) -> Self {
        Self {
            index: Index::default(),
            host,
            host_policy,
            per_chunk,
            disk: DiskBooks::default(),
            disk_policy,
            stats: Stats::default(),
            now: Duration::ZERO,
            unix_s: 0,
            opened_s: 0,
            closed: false,
            events: Vec::new(),
            watch: None,
            waiters: FxHashMap::default(),
            doomed: Vec::new(),
            slice: SLICE,
            evicted: Evicted::default(),
            owners: Owners::default(),
            ages: Ages::default(),
            drains: Drains::default(),
            next_ticket: 1,
        }
    }

    pub(crate) fn new_ticket(&mut self) -> u64 {
        self.next_ticket += 1;
        self.next_ticket - 1
    }

    /// Notes what a person should see; what is too much is dropped.
    pub(crate) fn tell(&mut self, event: String) {
        if self.events.len() < MAX_EVENTS {
            self.events.push(event);
        }
    }

    /// Every number, as it is now.
    pub(crate) fn stats(&self) -> Stats {
        let (host, disk) = (&self.host, &self.disk);
        let (frames_total, frames_free) = host.num_frames();
        Stats {
            frames_total,
            frames_share: host.grid().map_or(frames_total, Grid::share),
            frames_reserved: frames_total - frames_free - self.stats.frames_visible,
            frames_free,
            entries: self.index.len() as u64,
            evicted: self.evicted.num_chunks,
            kept_host: self.owners.kept.num_host,
            kept_disk: self.owners.kept.num_disk,
            kept_salts: self.owners.kept.num_salts,
            salts: self.owners.num_salts(),
            disk_pending: disk.num_dirty,
            disk_broken: disk.is_broken().into(),
            disk_trips: disk.reading.num_trips + disk.writes.num_trips,
            reads_pending: disk.num_queued,
            ..self.stats
        }
    }

    // -- host presence ------------------------------------------------------------------------------------------

    /// A chunk that is not in host will come there. Its parent is present.
    pub(super) fn enter_host(&mut self, id: ChunkId, filler: Filler) {
        debug_assert!(self.index[id].host.is_absent());
        let entry = &mut self.index[id];
        (entry.host, entry.filler) = (Presence::Coming(None), filler);
        if let Some(parent) = entry.parent {
            self.index[parent].host_children += 1;
            self.sync_host(parent);
            if !self.index[parent].host.is_here() {
                self.waiters.entry(parent).or_default().push(id);
            }
        }
    }

    /// A chunk that is coming has a frame from now on. Its parent has one.
    pub(super) fn give_frame(&mut self, id: ChunkId, frame: FrameId) {
        debug_assert!(self.index[id].is_queued());
        self.change_host(id, Presence::Coming(Some(frame)));
        let entry = &mut self.index[id];
        entry.host_evictable = Some(false);
        let (parent, key, owner) = (entry.parent, entry.key, entry.owner);
        self.host.hand(frame, id);
        self.owners.count_frame(owner, true);
        self.host_policy.insert(id, parent, &key);
        self.group_in_host(id);
    }

    /// From one presence to another, with the same frame if it had one.
    pub(super) fn change_host(&mut self, id: ChunkId, presence: Presence<FrameId>) {
        let before = std::mem::replace(&mut self.index[id].host, presence);
        self.stats.frames_visible += u64::from(presence.is_here());
        self.stats.frames_visible -= u64::from(before.is_here());
        if before.is_here() != presence.is_here() {
            self.owners.count_host(self.index[id].owner, presence.is_here());
            self.note_change(id);
        }
        self.sync_host(id);
    }

    /// Takes the frame away and makes the chunk absent; it may have to be settled or reaped after.
    pub(super) fn leave_host(&mut self, id: ChunkId, removal: Removal) {
        self.forget_host(id, removal);
        self.waiters.remove(&id);
        let before = self.index[id].host;
        debug_assert!(!before.is_absent());
        if self.index[id].is_queued() {
            self.disk.num_queued -= 1;
        }
        self.change_host(id, Presence::Absent);
        self.index[id].filler = Filler::Done;
        if let Some(frame) = before.place() {
            self.host.give(frame);
            self.owners.count_frame(self.index[id].owner, false);
        }
        if let Some(parent) = self.index[id].parent {
            self.index[parent].host_children -= 1;
            self.sync_host(parent);
        }
    }

    /// Takes the chunk from the host policy, if it is there.
    pub(super) fn forget_host(&mut self, id: ChunkId, removal: Removal) {
        if self.index[id].host_evictable.take().is_some() {
            self.host_policy.remove(id, removal);
        }
    }

    /// Tells the host policy whether the chunk may go now, if that changed.
    pub(super) fn sync_host(&mut self, id: ChunkId) {
        let entry = &mut self.index[id];
        let evictable = entry.host.is_here() && entry.host_children == 0 && entry.holds == 0 && !entry.detached;
        if entry.host_evictable.is_some_and(|before| before != evictable) {
            entry.host_evictable = Some(evictable);
            self.host_policy.set_evictable(id, evictable);
        }
    }

    /// A free frame, made free if need be; None if every frame that would do is in use. What must stay is held by the caller.
    fn take_frame(&mut self, what_for: FrameFor) -> Option<FrameId> {
        let mut frame = self.host.take(what_for).or_else(|| self.host.grow(what_for));
        let (mut spared, mut kept) = (Vec::new(), Spared::default());
        while frame.is_none()
            && spared.len() < MAX_SPARED
            && !kept.is_full()
            && let Some(victim) = self.host_policy.victim()
        {
            debug_assert_eq!(self.index[victim].host_evictable, Some(true), "a policy returns evictable chunks only");
            if self.keeps_in_host(victim) {
                if self.owners.is_in_vain {
                    break; // a step of hundreds of requests would take as many looks
                }
                kept.push(&mut *self.host_policy, victim);
                continue;
            }
            let its_frame = self.index[victim].host.place();
            if its_frame.is_some_and(|its_frame| !self.host.is_fit(its_frame, what_for)) {
                self.host_policy.set_evictable(victim, false); // its frame would not do, so it must not go for it
                spared.push(victim);
                continue;
            }
            self.evict(victim);
            frame = self.host.take(what_for);
        }
        let has_kept = kept.has_some();
        kept.end(&mut *self.host_policy); // before anything else may take one of them
        if spared.len() == MAX_SPARED {
            frame = frame.or_else(|| self.take_frame_below_limit());
        }
        self.owners.is_in_vain |= has_kept && frame.is_none();
        for id in spared {
            self.host_policy.set_evictable(id, true);
        }
        frame
    }

    /// A frame of the next chunk that may go and is in one for saves: the policy would name many others before.
    fn take_frame_below_limit(&mut self) -> Option<FrameId> {
        for _ in 0..MAX_SPARED {
            if let Some(id) = self.host.next_below_limit()
                && self.index[id].host_evictable == Some(true)
                && !self.keeps_in_host(id)
            {
                self.evict(id);
                return self.host.take(FrameFor::Save);
            }
        }
        None
    }

    /// Takes a chunk that may go out of host.
    pub(super) fn evict(&mut self, id: ChunkId) {
        self.stats.host_evictions += 1;
        self.stats.disk_dropped += u64::from(self.unwant(id));
        self.leave_host(id, Removal::Evicted);
        self.settle(id);
    }

    /// A frame from `room` for a child of `parent`, which does not leave meanwhile.
    pub(super) fn take_frame_under(
        &mut self,
        parent: Option<ChunkId>,
        room: Room,
        what_for: FrameFor,
    ) -> Option<FrameId> {
        if let Some(parent) = parent {
            self.hold(parent);
        }
        let frame = match room {
            Room::Any => self.take_frame(what_for),
            Room::Own(owner) => self.take_own_frame(owner, what_for),
            Room::None => None,
        };
        if let Some(parent) = parent {
            self.unhold(parent);
        }
        frame
    }

    /// Makes the chunk visible if it is filled and its parent is visible, and then what waited for it; returns how many.
    pub(super) fn rise(&mut self, id: ChunkId) -> u32 {
        let mut risen = 0;
        let mut ready = vec![id];
        while let Some(id) = ready.pop() {
            let entry = &self.index[id];
            let (Presence::Coming(Some(frame)), Filler::Done) = (entry.host, entry.filler) else { continue };
            if entry.detached || entry.parent.is_some_and(|parent| !self.index[parent].host.is_here()) {
                continue;
            }
            self.change_host(id, Presence::Here(frame));
            self.want_on_disk(id);
            risen += 1;
            ready.extend(self.take_waiters(id));
        }
        risen
    }

    /// Children that came to host while `id` was not visible, and are still coming.
    pub(super) fn take_waiters(&mut self, id: ChunkId) -> Vec<ChunkId> {
        let mut children = self.waiters.remove(&id).unwrap_or_default();
        let index = &self.index;
        children.retain(|&child| index.is_child(child, id) && matches!(index[child].host, Presence::Coming(_)));
        children
    }

    /// A chunk will not come to host, nor what could only wait for it. Those whose frame somebody else has, and those above
    /// them, leave when that ends.
    pub(super) fn fail_host(&mut self, id: ChunkId) {
        let mut all = vec![id];
        let mut at = 0;
        while let Some(&next) = all.get(at) {
            let children = self.take_waiters(next);
            all.extend(children);
            at += 1;
        }
        for &next in all.iter().rev() {
            let entry = &mut self.index[next];
            if entry.host.is_absent() || entry.detached {
                continue; // it left with its last child, or is here twice
            }
            if next == id || !entry.is_filling() {
                entry.filler = Filler::Failed;
            }
            if self.index[next].disk.is_absent() {
                self.detach(next);
            } else {
                if let Some(parent) = self.index[next].parent
                    && next != id
                    && self.index[next].is_filling()
                {
                    // Its parent may yet fail on its own, when this one is filled and waits for it.
                    self.waiters.entry(parent).or_default().push(next);
                }
                self.sync_disk(next);
                self.end_failed(Some(next));
            }
        }
    }

    /// Takes a failed chunk out of host, once nothing hangs on it there; then those above it.
    pub(super) fn end_failed(&mut self, mut next: Option<ChunkId>) {
        while let Some(id) = next {
            let entry = &self.index[id];
            if entry.filler != Filler::Failed || entry.host_children > 0 || entry.detached {
                break;
            }
            next = entry.parent;
            self.leave_host(id, Removal::Dropped);
            self.sync_disk(id);
            self.settle(id);
        }
    }

    // -- holds ----------------------------------------------------------------------------------------------------

    /// Keeps the chunk, and so its whole prefix, in host.
    pub(super) fn hold(&mut self, id: ChunkId) {
        self.index[id].holds += 1;
        self.sync_host(id);
    }

    /// Ends one hold. A read that has not begun and that nothing wants any more is cancelled.
    pub(super) fn unhold(&mut self, id: ChunkId) {
        self.index[id].holds -= 1;
        self.sync_host(id);
        let entry = &self.index[id];
        let parent = entry.parent;
        if entry.holds > 0 || !entry.is_queued() || entry.host_children > 0 {
            return self.reap(id);
        }
        self.leave_host(id, Removal::Dropped);
        self.sync_disk(id);
        self.settle(id);
        self.end_failed(parent);
    }
}
