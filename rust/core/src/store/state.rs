//! All that the store's one lock guards, and the small moves that keep its counts right.
//!
//! Everything else (reserve, commit, leases, disk threads) is made of these moves. An entry is *present* in host while its
//! host state is not `Absent`. Rules upheld here: a present chunk's parent is present (but for detached entries, which
//! nobody finds); only visible leaves that nobody holds are offered to the policy; a detached entry is freed with its last
//! user; `frames_reserved + frames_visible + free = all` (I8).

use super::disk::DiskBooks;
use super::stats::{Counters, Gauges};
use crate::Result;
use crate::evict::{ChunkId, Policy, Removal};
use crate::index::{DiskState, HostState, Index};
use crate::io::FrameId;
use crate::tier::host::HostTier;

/// The index, the tiers' books and the policies.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) index: Index,
    pub(crate) host: HostTier,
    pub(crate) host_policy: Box<dyn Policy>,
    pub(crate) disk: Option<DiskBooks>,
    pub(crate) counters: Counters,
    pub(crate) pins: u64,
    pub(crate) read_leases: u64,
    pub(crate) write_leases: u64,
    pub(crate) closed: bool,
    next_ticket: u64,
    reserved: u64,
    visible: u64,
}

impl State {
    pub(crate) fn new(host: HostTier, host_policy: Box<dyn Policy>, disk_policy: Option<Box<dyn Policy>>) -> Self {
        Self {
            index: Index::default(),
            host,
            host_policy,
            disk: disk_policy.map(DiskBooks::new),
            counters: Counters::default(),
            pins: 0,
            read_leases: 0,
            write_leases: 0,
            closed: false,
            next_ticket: 1,
            reserved: 0,
            visible: 0,
        }
    }

    pub(crate) fn new_ticket(&mut self) -> u64 {
        self.next_ticket += 1;
        self.next_ticket - 1
    }

    pub(crate) fn gauges(&self) -> Gauges {
        let disk = self.disk.as_ref();
        Gauges {
            frames_total: u64::from(self.host.arena().num_frames()),
            frames_reserved: self.reserved,
            frames_visible: self.visible,
            frames_free: self.host.num_free() as u64,
            entries: self.index.len() as u64,
            disk_used: disk.map_or(0, |disk| disk.used),
            disk_pending: disk.map_or(0, |disk| disk.num_dirty),
            disk_slots: disk.map_or(0, |disk| disk.slots),
            disk_bytes: disk.map_or(0, |disk| disk.bytes),
            reads_pending: disk.map_or(0, |disk| disk.reads.len() as u64),
            pins: self.pins,
            read_leases: self.read_leases,
            write_leases: self.write_leases,
        }
    }

    // -- host presence ------------------------------------------------------------------------------------------

    /// Makes an absent chunk present with a frame to be filled.
    pub(crate) fn enter_host(&mut self, id: ChunkId, state: HostState) {
        debug_assert_eq!(self.index[id].host, HostState::Absent);
        let parent = self.index[id].parent;
        if let Some(parent) = parent {
            self.index[parent].host_children += 1;
            self.sync_host(parent);
        }
        self.count_host(HostState::Absent, state);
        let entry = &mut self.index[id];
        entry.host = state;
        entry.host_evictable = Some(false);
        let key = entry.key;
        self.host_policy.insert(id, parent, &key);
    }

    /// From one present state to another, with the same frame.
    pub(crate) fn change_host(&mut self, id: ChunkId, state: HostState) {
        let before = std::mem::replace(&mut self.index[id].host, state);
        debug_assert_eq!(before.frame(), state.frame());
        self.count_host(before, state);
        self.sync_host(id);
    }

    /// Takes the frame away and makes the chunk absent; it may have to be settled or reaped after.
    pub(crate) fn leave_host(&mut self, id: ChunkId, removal: Removal) {
        self.forget_host(id, removal);
        let before = std::mem::replace(&mut self.index[id].host, HostState::Absent);
        debug_assert_ne!(before, HostState::Absent);
        self.count_host(before, HostState::Absent);
        if let Some(frame) = before.frame() {
            self.host.give(frame);
        }
        if let Some(parent) = self.index[id].parent {
            self.index[parent].host_children -= 1;
            self.sync_host(parent);
        }
    }

    /// A chunk that was to be filled is not; its frame is free, and it stays as failed until nobody waits for it.
    pub(crate) fn fail_host(&mut self, id: ChunkId) {
        let before = std::mem::replace(&mut self.index[id].host, HostState::Failed);
        self.count_host(before, HostState::Failed);
        if let Some(frame) = before.frame() {
            self.host.give(frame);
        }
    }

    /// Takes the chunk from the host policy, if it is there.
    fn forget_host(&mut self, id: ChunkId, removal: Removal) {
        if self.index[id].host_evictable.take().is_some() {
            self.host_policy.remove(id, removal);
        }
    }

    fn count_host(&mut self, before: HostState, after: HostState) {
        for (state, up) in [(before, false), (after, true)] {
            let count = match state {
                HostState::Absent | HostState::Failed => continue,
                HostState::Visible(_) => &mut self.visible,
                HostState::Reserved(_) | HostState::Loading(_) | HostState::Waiting(_) => &mut self.reserved,
            };
            *count = if up { *count + 1 } else { *count - 1 };
        }
    }

    /// Tells the host policy whether the chunk may go now, if that changed.
    pub(crate) fn sync_host(&mut self, id: ChunkId) {
        let entry = &mut self.index[id];
        let evictable = entry.is_visible() && entry.host_children == 0 && entry.holds == 0 && !entry.detached;
        if entry.host_evictable.is_some_and(|before| before != evictable) {
            entry.host_evictable = Some(evictable);
            self.host_policy.set_evictable(id, evictable);
        }
    }

    /// A free frame, made free if need be; None if every frame is in use. What must stay is held by the caller.
    pub(crate) fn take_frame(&mut self) -> Option<FrameId> {
        if let Some(frame) = self.host.take() {
            return Some(frame);
        }
        let victim = self.host_policy.victim()?;
        debug_assert_eq!(self.index[victim].host_evictable, Some(true), "a policy returns evictable chunks only");
        self.counters.host_evictions += 1;
        self.counters.disk_dropped += u64::from(self.unwant(victim));
        self.leave_host(victim, Removal::Evicted);
        self.settle(victim);
        self.host.take()
    }

    /// A frame for a child of `parent`, which does not leave meanwhile.
    pub(crate) fn take_frame_under(&mut self, parent: Option<ChunkId>) -> Option<FrameId> {
        let Some(parent) = parent else { return self.take_frame() };
        self.hold(parent);
        let frame = self.take_frame();
        self.unhold(parent);
        frame
    }

    // -- holds, and leaving ---------------------------------------------------------------------------------------

    /// Keeps the chunk, and so its whole prefix, in host.
    pub(crate) fn hold(&mut self, id: ChunkId) {
        self.index[id].holds += 1;
        self.sync_host(id);
    }

    /// Ends one hold.
    pub(crate) fn unhold(&mut self, id: ChunkId) {
        self.index[id].holds -= 1;
        self.sync_host(id);
        self.reap(id);
    }

    /// Makes the chunk visible if it is filled and its parent is visible, and then what waited for it; returns how many.
    pub(crate) fn rise(&mut self, id: ChunkId) -> u32 {
        let mut risen = 0;
        let mut ready = vec![id];
        while let Some(id) = ready.pop() {
            let entry = &self.index[id];
            let HostState::Waiting(frame) = entry.host else { continue };
            if entry.detached || entry.parent.is_some_and(|parent| !self.index[parent].is_visible()) {
                continue;
            }
            self.change_host(id, HostState::Visible(frame));
            self.want_on_disk(id);
            risen += 1;
            ready.extend(
                self.index.children(id).filter(|&child| matches!(self.index[child].host, HostState::Waiting(_))),
            );
        }
        risen
    }

    /// Forgets a chunk that is in no tier any more, and all below it.
    pub(crate) fn settle(&mut self, id: ChunkId) {
        let entry = &self.index[id];
        let gone = entry.host == HostState::Absent && entry.disk == DiskState::Absent;
        if gone && !entry.detached {
            self.detach_tree(id);
        } else {
            self.reap(id);
        }
    }

    /// Forgets a chunk and all below it: no key leads to them from now on, and what nobody uses is freed. Returns how many.
    pub(crate) fn detach_tree(&mut self, id: ChunkId) -> u64 {
        let tree = self.index.subtree(id);
        let mut detached = 0;
        // Children first, as the policies are promised.
        for &id in tree.iter().rev() {
            if !self.index[id].detached {
                self.forget_host(id, Removal::Dropped);
                self.unwant(id);
                self.index.detach(id);
                self.doom(id);
                self.drop_from_disk(id);
                detached += 1;
            }
        }
        for &id in tree.iter().rev() {
            self.free_if_unused(id);
        }
        detached
    }

    /// Frees a detached entry that nobody uses any more, and those above it that only waited for it.
    pub(crate) fn reap(&mut self, id: ChunkId) {
        let mut next = Some(id);
        while let Some(id) = next {
            next = self.index[id].parent;
            if !self.free_if_unused(id) {
                break;
            }
        }
    }

    fn free_if_unused(&mut self, id: ChunkId) -> bool {
        let entry = &self.index[id];
        let filling = matches!(entry.host, HostState::Reserved(_) | HostState::Loading(_));
        if !entry.detached || entry.holds > 0 || entry.has_children() || filling || entry.reading {
            return false;
        }
        if entry.host != HostState::Absent {
            self.leave_host(id, Removal::Dropped);
        }
        self.index.remove(id);
        true
    }

    /// Everything the counts say, counted again from the entries; the first contradiction is the error.
    pub(crate) fn check(&self) -> Result<(), String> {
        super::check::check(self)
    }
}
