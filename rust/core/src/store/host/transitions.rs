//! Changes a chunk's host memory state and updates everything derived from it.
//!
//! The states are defined in `index/host_state.rs`. Invariants between calls:
//!
//! - If a chunk is not absent, its parent is not absent either, unless the chunk is detached.
//! - If a chunk has a frame, so does its parent, and if a chunk is visible, so is its parent.
//! - The policy holds every attached chunk with a frame. The policy may evict complete, unused
//!   leaves.

use crate::evict::{ChunkId, Removal, TenantId};
use crate::index::{Entry, HostEvent, HostState};
use crate::io::FrameId;
use crate::store::state::State;

impl State {
    /// Applies an event to a chunk. No other code changes `Entry::host`. This method also:
    ///
    /// - counts the chunk as its parent's child, and as a waiter if the parent is not visible,
    /// - assigns the event's frame to the chunk, or returns the chunk's frame to the tier,
    /// - adds the chunk to the host policy when it gets a frame, and removes it when it loses its
    ///   frame,
    /// - updates the gauges, the read queue and the change log,
    /// - updates which chunks each policy may evict.
    ///
    /// If the chunk becomes absent, the caller must settle or reap it.
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
        }
        if before.is_complete() != after.is_complete() {
            self.sync_host(id);
        }
    }

    /// Records a child that is in host memory or is expected there.
    fn enter_host(&mut self, id: ChunkId, parent: Option<ChunkId>) {
        let Some(parent) = parent else { return };
        self.index[parent].host_children += 1;
        self.sync_host(parent);
        if !self.index[parent].host.is_visible() {
            self.waiters.push(parent, id);
        }
    }

    /// Records a child that left host memory or will not be filled.
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
        self.set_tenant_in_host(id);
    }

    /// Counts queued reads, and keeps a chunk on disk while its read is queued or running.
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

    pub(crate) fn leave_host_policy(&mut self, id: ChunkId, removal: Removal) {
        if self.index[id].host_evictable.take().is_some() {
            self.host_policy.remove(id, removal);
        }
    }

    /// Updates the host policy if the chunk's evictability has changed.
    pub(crate) fn sync_host(&mut self, id: ChunkId) {
        let entry = &mut self.index[id];
        let is_evictable = entry.is_host_evictable();
        if entry.host_evictable.is_some_and(|before| before != is_evictable) {
            entry.host_evictable = Some(is_evictable);
            self.host_policy.set_evictable(id, is_evictable);
        }
    }

    /// Returns the next chunk to evict: one of `tenant`'s chunks, or any chunk if `tenant` is None.
    ///
    /// Evicts unwritten chunks last if the disk accepts writes and unwritten chunks fill at most
    /// half of the frames. If unwritten chunks filled more than half, sparing them would evict
    /// recently used chunks instead.
    pub(crate) fn host_victim(&mut self, tenant: Option<TenantId>) -> Option<ChunkId> {
        let are_few = 2 * self.disk.num_unwritten <= self.host.num_frames().0;
        self.host_policy.spare_unwritten(are_few && self.disk.accepts_writes(self.now));
        match tenant {
            Some(tenant) => self.host_policy.victim_of(tenant),
            None => self.host_policy.victim(),
        }
    }
}
