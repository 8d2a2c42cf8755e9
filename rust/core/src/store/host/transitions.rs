//! Changes a chunk's state in host memory and updates everything that depends on it.
//!
//! The states are in `index/host_state.rs`. Invariants between two calls:
//!
//! - A chunk that is not absent has a parent that is not absent, unless the chunk is detached.
//! - A chunk with a frame has a parent with a frame; a visible chunk has a visible parent.
//! - The policy contains every chunk that has a frame and is not detached. Visible leaves without
//!   users are evictable.

use crate::evict::{ChunkId, GroupId, Removal};
use crate::index::{Entry, HostEvent, HostState};
use crate::io::FrameId;
use crate::store::state::State;

impl State {
    /// Applies an event to a chunk. This is the only code that changes `Entry::host`. It also:
    ///
    /// - counts the chunk among its parent's children, and as a waiter of a parent that is not
    ///   visible,
    /// - takes the frame from the event, or returns the chunk's frame to the tier,
    /// - inserts the chunk into the host policy with its frame, and removes it with its frame,
    /// - updates the gauges, the queue of reads and the change log,
    /// - updates which chunks each policy may evict.
    ///
    /// The caller settles or reaps a chunk that became absent.
    pub(crate) fn change_host(&mut self, id: ChunkId, event: HostEvent) {
        let entry = &self.index[id];
        let (before, parent, is_detached) = (entry.host, entry.parent, entry.detached);
        let Some(after) = before.after(event) else {
            unreachable!("host tier: {event:?} in state {before:?}")
        };
        if let HostEvent::Leave(removal) = event {
            self.leave_host_policy(id, removal);
        }
        self.index[id].host = after;
        if before.is_absent() {
            self.enter_host(id, parent);
        }
        match (before.frame(), after.frame()) {
            (None, Some(frame)) => self.take_frame_for(id, frame),
            (Some(frame), None) => {
                self.host.release_frame(frame);
                let pages = self.host.pages(frame.class());
                self.tenants.count_host(self.index[id].tenant, pages, false);
            }
            _ => {}
        }
        if after.is_absent() {
            self.exit_host(id, parent);
        }
        self.count_read(id, before, after);
        if before.is_visible() != after.is_visible() {
            self.stats.frames_visible += u64::from(after.is_visible());
            self.stats.frames_visible -= u64::from(before.is_visible());
            if !is_detached {
                self.note_change(id);
            }
            self.sync_host(id);
        }
    }

    /// Records a child that is in host memory or will be.
    fn enter_host(&mut self, id: ChunkId, parent: Option<ChunkId>) {
        let Some(parent) = parent else { return };
        self.index[parent].host_children += 1;
        self.sync_host(parent);
        if !self.index[parent].host.is_visible() {
            self.waiters.push(parent, id);
        }
    }

    /// Records a child that left host memory, or that will not be filled.
    fn exit_host(&mut self, id: ChunkId, parent: Option<ChunkId>) {
        drop(self.waiters.take(id));
        if let Some(parent) = parent {
            self.index[parent].host_children -= 1;
            self.sync_host(parent);
        }
    }

    fn take_frame_for(&mut self, id: ChunkId, frame: FrameId) {
        let entry = &mut self.index[id];
        entry.host_evictable = Some(false);
        let (parent, key, tenant) = (entry.parent, entry.key, entry.tenant);
        self.host.assign(frame, id);
        self.tenants.count_host(tenant, self.host.pages(frame.class()), true);
        self.host_policy.insert(id, parent, &key);
        self.group_in_host(id);
    }

    /// Counts queued reads, and protects a chunk from eviction on disk while it is being read.
    fn count_read(&mut self, id: ChunkId, before: HostState, after: HostState) {
        if after == HostState::Queued {
            if !self.disk.wants_reads() {
                self.disk.reading_since = self.now;
            }
            self.disk.num_queued_reads += 1;
            self.disk.read_queue.push(
                &self.index,
                id,
                self.disk.num_queued_reads,
                Entry::is_to_read,
            );
        } else if before == HostState::Queued {
            self.disk.num_queued_reads -= 1;
        }
        if before.awaits_read() != after.awaits_read() {
            self.sync_disk(id);
        }
    }

    /// Removes a chunk from the host policy, if the policy has it.
    pub(crate) fn leave_host_policy(&mut self, id: ChunkId, removal: Removal) {
        if self.index[id].host_evictable.take().is_some() {
            self.host_policy.remove(id, removal);
        }
    }

    /// Reports to the host policy whether it may evict the chunk, if that changed.
    pub(crate) fn sync_host(&mut self, id: ChunkId) {
        let entry = &mut self.index[id];
        let is_evictable = entry.is_host_evictable();
        if entry.host_evictable.is_some_and(|before| before != is_evictable) {
            entry.host_evictable = Some(is_evictable);
            self.host_policy.set_evictable(id, is_evictable);
        }
    }

    /// Returns the next chunk to evict, from one group or from all chunks.
    ///
    /// Unwritten chunks come last while the disk accepts writes and they occupy at most half of the
    /// frames. With more unwritten chunks, this rule would evict recently used chunks instead.
    pub(crate) fn host_victim(&mut self, group: Option<GroupId>) -> Option<ChunkId> {
        let are_few = 2 * self.disk.num_unwritten <= self.host.num_frames().0;
        self.host_policy.spare_unwritten(are_few && self.disk.accepts_writes(self.now));
        match group {
            Some(group) => self.host_policy.victim_of(group),
            None => self.host_policy.victim(),
        }
    }
}
