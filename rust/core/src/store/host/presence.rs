//! The small moves that keep counts right in host memory.
//!
//! An entry is *present* in host while its presence there is not `Absent`. A present chunk's parent is present (but for detached
//! entries, which nothing finds); only chunks that are here, are leaves and are not held are offered to the policy.

use crate::evict::{ChunkId, GroupId, Removal};
use crate::index::{Filler, Presence, Wish};
use crate::io::FrameId;
use crate::store::state::State;

impl State {
    /// A chunk that is not in host will come there. Its parent is present.
    pub(crate) fn enter_host(&mut self, id: ChunkId, filler: Filler) {
        debug_assert!(self.index[id].host.is_absent());
        let entry = &mut self.index[id];
        (entry.host, entry.filler) = (Presence::Coming(None), filler);
        if let Some(parent) = entry.parent {
            self.index[parent].host_children += 1;
            self.sync_host(parent);
            if !self.index[parent].host.is_here() {
                self.waiters.push(parent, id);
            }
        }
    }

    /// A chunk that is coming has a frame from now on. Its parent has one.
    pub(crate) fn give_frame(&mut self, id: ChunkId, frame: FrameId) {
        debug_assert!(self.index[id].is_queued());
        self.change_host(id, Presence::Coming(Some(frame)));
        let entry = &mut self.index[id];
        entry.host_evictable = Some(false);
        let (parent, key, tenant) = (entry.parent, entry.key, entry.tenant);
        self.host.hand(frame, id);
        self.tenants.count_frame(tenant, true);
        self.host_policy.insert(id, parent, &key);
        self.group_in_host(id);
    }

    /// From one presence to another, with the same frame if it had one.
    pub(crate) fn change_host(&mut self, id: ChunkId, presence: Presence<FrameId>) {
        let before = std::mem::replace(&mut self.index[id].host, presence);
        self.stats.frames_visible += u64::from(presence.is_here());
        self.stats.frames_visible -= u64::from(before.is_here());
        if before.is_here() != presence.is_here() {
            self.note_change(id);
        }
        self.sync_host(id);
    }

    /// Takes the frame away and makes the chunk absent; it may have to be settled or reaped after.
    pub(crate) fn leave_host(&mut self, id: ChunkId, removal: Removal) {
        self.leave_host_policy(id, removal);
        drop(self.waiters.take(id));
        let before = self.index[id].host;
        debug_assert!(!before.is_absent());
        if self.index[id].is_queued() {
            self.disk.num_queued_reads -= 1;
        }
        self.change_host(id, Presence::Absent);
        self.index[id].filler = Filler::Done;
        if let Some(frame) = before.place() {
            self.host.give(frame);
            self.tenants.count_frame(self.index[id].tenant, false);
        }
        if let Some(parent) = self.index[id].parent {
            self.index[parent].host_children -= 1;
            self.sync_host(parent);
        }
    }

    /// Takes the chunk from the host policy, if it is there.
    pub(crate) fn leave_host_policy(&mut self, id: ChunkId, removal: Removal) {
        if self.index[id].host_evictable.take().is_some() {
            self.host_policy.remove(id, removal);
        }
    }

    /// Records in the host policy whether the chunk waits to be written to disk.
    pub(crate) fn sync_unwritten(&mut self, id: ChunkId) {
        let entry = &self.index[id];
        if entry.host_evictable.is_some() {
            self.host_policy.set_unwritten(id, entry.wish != Wish::None);
        }
    }

    /// The chunk that should leave host memory next, of all or of one group. Chunks that wait to be written are last while the
    /// disk takes writes and they are at most half of the frames: with more, chunks in use would have to go for them.
    pub(crate) fn host_victim(&mut self, group: Option<GroupId>) -> Option<ChunkId> {
        let are_few = 2 * self.disk.num_unwritten <= self.host.num_frames().0;
        self.host_policy.spare_unwritten(are_few && self.disk.takes_writes(self.now));
        match group {
            Some(group) => self.host_policy.victim_of(group),
            None => self.host_policy.victim(),
        }
    }

    /// Tells the host policy whether the chunk may go now, if that changed.
    pub(crate) fn sync_host(&mut self, id: ChunkId) {
        let entry = &mut self.index[id];
        let evictable = entry.host.is_here() && entry.host_children == 0 && entry.holds == 0 && !entry.detached;
        if entry.host_evictable.is_some_and(|before| before != evictable) {
            entry.host_evictable = Some(evictable);
            self.host_policy.set_evictable(id, evictable);
        }
    }
}
