//! Completes fills: makes filled chunks visible after their parents, fails chunks together with
//! their waiting children, and cancels queued reads that no lease holds.

use crate::evict::{ChunkId, Removal};
use crate::index::{HostEvent, HostState};
use crate::store::state::State;

impl State {
    /// Keeps a chunk, and thus its entire prefix, in host memory until `unhold`.
    pub(crate) fn hold(&mut self, id: ChunkId) {
        self.index[id].holds += 1;
        self.sync_host(id);
    }

    /// Releases one hold. Cancels a queued read when the last hold is released.
    pub(crate) fn unhold(&mut self, id: ChunkId) {
        self.index[id].holds -= 1;
        self.sync_host(id);
        let entry = &self.index[id];
        let parent = entry.parent;
        if entry.holds > 0 || entry.host != HostState::Queued || entry.host_children > 0 {
            return self.reap(id);
        }
        self.change_host(id, HostEvent::Leave(Removal::Dropped));
        self.settle(id);
        self.leave_failed(parent);
    }

    /// Completes a fill: the chunk becomes visible after its parent, or fails if the parent has
    /// failed. Returns how many chunks became visible.
    pub(crate) fn fill(&mut self, id: ChunkId) -> u32 {
        let parent = self.index[id].parent;
        if parent.is_some_and(|parent| !self.index[parent].host.may_have_children()) {
            self.fail_host(id);
            return 0;
        }
        self.change_host(id, HostEvent::Fill);
        self.show(id)
    }

    /// Makes a filled chunk visible if its parent is visible, then does the same for the filled
    /// children waiting for it. Returns how many chunks became visible.
    fn show(&mut self, id: ChunkId) -> u32 {
        let mut shown = 0;
        let (mut next, mut ready) = (Some(id), Vec::new());
        while let Some(id) = next.take().or_else(|| ready.pop()) {
            let entry = &self.index[id];
            let is_filled = matches!(entry.host, HostState::Filled(_));
            let has_parent = entry.parent.is_none_or(|parent| self.index[parent].host.is_visible());
            if !is_filled || entry.detached || !has_parent {
                continue;
            }
            self.change_host(id, HostEvent::Show);
            self.want_on_disk(id);
            shown += 1;
            ready.extend(self.take_waiters(id, |state| matches!(state, HostState::Filled(_))));
        }
        shown
    }

    /// Takes the list of children waiting for `id`. Returns the children whose state satisfies
    /// `wanted`.
    fn take_waiters(
        &mut self,
        id: ChunkId,
        wanted: fn(HostState) -> bool,
    ) -> impl Iterator<Item = ChunkId> {
        let (children, index) = (self.waiters.take(id), &self.index);
        children.filter(move |&child| index.is_child(child, id) && wanted(index[child].host))
    }

    /// Fails a chunk that cannot be filled, along with all descendants waiting for it.
    ///
    /// If a worker or disk thread owns a descendant's frame, the descendant fails only after its
    /// fill ends. Until then, the descendant's ancestors stay in the index.
    pub(crate) fn fail_host(&mut self, id: ChunkId) {
        let mut all = vec![id];
        let mut at = 0;
        while let Some(&next) = all.get(at) {
            all.extend(self.take_waiters(next, HostState::is_pending));
            at += 1;
        }
        for &next in all.iter().rev() {
            let entry = &self.index[next];
            if entry.host.is_absent() || entry.detached {
                continue; // already removed with its last child, or listed twice
            }
            let (parent, is_filling) = (entry.parent, next != id && entry.host.is_filling());
            if !is_filling {
                self.change_host(next, HostEvent::Fail);
            }
            let entry = &self.index[next];
            // A child that failed while its own children were being filled may remain in the tree.
            if !entry.disk.takes_slot() && entry.first_child.is_none() {
                self.detach(next);
            } else if !is_filling {
                self.leave_failed(if entry.host.is_absent() { parent } else { Some(next) });
            } else if let Some(parent) = parent {
                // Keep the chunk listed, so that it is visited again if the parent fails again.
                self.waiters.push(parent, next);
            }
        }
    }
}
