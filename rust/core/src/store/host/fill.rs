//! What becomes of chunks that are coming to host memory: filled ones become visible behind their parents, others fail with all
//! that waits for them, and what has no holder left need not come.

use crate::evict::{ChunkId, Removal};
use crate::index::{Entry, Filler, Presence};
use crate::store::state::State;

impl State {
    /// Keeps the chunk, and so its whole prefix, in host.
    pub(crate) fn hold(&mut self, id: ChunkId) {
        self.index[id].holds += 1;
        self.sync_host(id);
    }

    /// Ends one hold. A read that has not begun and that nothing wants any more is cancelled.
    pub(crate) fn unhold(&mut self, id: ChunkId) {
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

    /// A chunk's bytes are in its frame: it becomes visible with its parent, or fails with it. Returns how many became so.
    pub(crate) fn fill(&mut self, id: ChunkId) -> u32 {
        let parent = self.index[id].parent;
        if parent.is_some_and(|parent| !self.index[parent].has_frame()) {
            self.fail_host(id);
            return 0;
        }
        self.index[id].filler = Filler::Done;
        self.sync_disk(id);
        self.rise(id)
    }

    /// Makes the chunk visible if it is filled and its parent is visible, and then what waited for it; returns how many.
    pub(crate) fn rise(&mut self, id: ChunkId) -> u32 {
        let mut risen = 0;
        let (mut next, mut ready) = (Some(id), Vec::new());
        while let Some(id) = next.take().or_else(|| ready.pop()) {
            let entry = &self.index[id];
            let (Presence::Coming(Some(frame)), Filler::Done) = (entry.host, entry.filler) else { continue };
            if entry.detached || entry.parent.is_some_and(|parent| !self.index[parent].host.is_here()) {
                continue;
            }
            self.change_host(id, Presence::Here(frame));
            self.want_on_disk(id);
            risen += 1;
            ready.extend(self.take_waiters(id, |entry| entry.filler == Filler::Done));
        }
        risen
    }

    /// Children that came to host while `id` was not visible, are still coming, and are `wanted`. None waits for it any more.
    fn take_waiters(&mut self, id: ChunkId, wanted: fn(&Entry) -> bool) -> impl Iterator<Item = ChunkId> {
        let (children, index) = (self.waiters.take(id), &self.index);
        let is_coming = move |child| index.is_child(child, id) && matches!(index[child].host, Presence::Coming(_));
        children.filter(move |&child| is_coming(child) && wanted(&index[child]))
    }

    /// A chunk will not come to host, nor what could only wait for it. Those whose frame somebody else has, and those above
    /// them, leave when that ends.
    pub(crate) fn fail_host(&mut self, id: ChunkId) {
        let mut all = vec![id];
        let mut at = 0;
        while let Some(&next) = all.get(at) {
            all.extend(self.take_waiters(next, |_| true));
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
                    self.waiters.push(parent, next);
                }
                self.sync_disk(next);
                self.end_failed(Some(next));
            }
        }
    }
}
