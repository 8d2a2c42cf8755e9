//! Empties slabs for other stores in the pool and for the store's other size classes.
//!
//! A slab is emptied chunk by chunk, children before parents, with at most `SLICE` steps per call.
//! A chunk that is pinned, reserved, being read or being written cannot be evicted until that use
//! ends. In the meantime, the slab takes no new chunks, and other slabs are emptied too.

use rustc_hash::FxHashSet;

use crate::evict::ChunkId;
use crate::pool::SlabId;
use crate::store::host::{Drain, Drains, Next, Step};
use crate::store::state::State;
use crate::tier::host::Wanted;

/// Maximum number of steps per call. This many steps take about 0.2 ms.
const SLICE: usize = 256;
/// Maximum number of slabs to empty at the same time. The store starts emptying another slab only
/// once all remaining chunks of the current slabs are in use.
const MAX_DRAINS: usize = 4;

/// Outcome of `Store::release_slab`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlabRelease {
    /// No other store or size class needs a slab.
    NotNeeded,
    /// A slab was released.
    Released,
    /// More calls are needed.
    InProgress,
    /// All remaining chunks are in use.
    Blocked,
}

impl State {
    pub(crate) fn release_slab(&mut self) -> SlabRelease {
        self.host.collect();
        let wanted = self.host.wanted();
        let mut drains = std::mem::take(&mut self.drains);
        for drain in
            drains.all.extract_if(.., |drain| wanted.is_none_or(|slab| drain.slab.0 >= slab.end))
        {
            self.host.keep(drain.slab);
        }
        let Some(wanted) = wanted else { return SlabRelease::NotNeeded };
        drains.all.retain(|drain| self.is_draining(drain.slab));
        let outcome = self.empty_drains(&mut drains, wanted);
        if outcome == SlabRelease::Blocked {
            if drains.all.is_empty() {
                self.host.withdraw(wanted);
            }
            drains.stuck.clear();
            drains.all.iter_mut().for_each(|drain| drain.is_done = false);
        }
        self.drains = drains;
        outcome
    }

    fn empty_drains(&mut self, drains: &mut Drains, wanted: Wanted) -> SlabRelease {
        let mut budget = SLICE;
        for nth in 0..MAX_DRAINS {
            if nth == drains.all.len() {
                let coldest = self.host_victim(None).and_then(|id| self.index[id].host.frame());
                let Some(slab) = self.host.drain(wanted, coldest) else { break };
                drains.all.push(Drain { slab, next: 0, path: Vec::new(), is_done: false });
            }
            if drains.all[nth].is_done {
                continue;
            }
            let outcome = self.empty(&mut drains.all[nth], &mut drains.stuck, &mut budget);
            if outcome == SlabRelease::Released {
                drains.all.swap_remove(nth);
            }
            if outcome != SlabRelease::Blocked {
                return outcome;
            }
            drains.all[nth].is_done = true;
        }
        SlabRelease::Blocked
    }

    fn is_draining(&self, slab: SlabId) -> bool {
        self.host.is_draining(slab)
    }

    /// Evicts a slab's unused chunks, descendants first.
    fn empty(
        &mut self,
        drain: &mut Drain,
        stuck: &mut FxHashSet<(ChunkId, u32)>,
        budget: &mut usize,
    ) -> SlabRelease {
        while self.is_draining(drain.slab) {
            if *budget == 0 {
                return SlabRelease::InProgress;
            }
            *budget -= 1;
            if !drain.path.is_empty() {
                self.step(&mut drain.path, stuck);
            } else if let Some((frame, id)) = self.host.next_holder(drain.slab, drain.next) {
                drain.next = frame + 1;
                self.go_to(id, &mut drain.path, stuck);
            } else {
                drain.next = 0;
                return SlabRelease::Blocked;
            }
        }
        SlabRelease::Released
    }

    fn go_to(&self, id: ChunkId, path: &mut Vec<Step>, stuck: &FxHashSet<(ChunkId, u32)>) {
        let generation = self.index[id].generation;
        if !stuck.contains(&(id, generation)) {
            path.push(Step { id, generation, next: Next::First });
        }
    }

    /// Evicts the path's last chunk if possible. Otherwise, descends to the next child in host
    /// memory, or drops the chunk from the path if no child is left.
    fn step(&mut self, path: &mut Vec<Step>, stuck: &mut FxHashSet<(ChunkId, u32)>) {
        let Some(Step { id, generation, next }) = path.last_mut() else { return };
        let (id, entry) = (*id, &self.index[*id]);
        let is_gone =
            !self.index.is_same(id, *generation) || entry.host.is_absent() || entry.detached;
        if !is_gone && entry.host_evictable == Some(true) {
            path.pop();
            return self.evict(id);
        }
        let child = match *next {
            Next::Child(child, generation)
                if self.index.is_same(child, generation) && self.index.is_child(child, id) =>
            {
                Some(child)
            }
            Next::First | Next::Child(..) => entry.first_child, // the child was removed: start over
            Next::None => None,
        };
        let Some(child) = child.filter(|_| !is_gone && entry.host_children > 0) else {
            stuck.insert((id, *generation));
            path.pop();
            return;
        };
        let behind = self.index[child].next_sibling;
        *next =
            behind.map_or(Next::None, |behind| Next::Child(behind, self.index[behind].generation));
        if !self.index[child].host.is_absent() {
            self.go_to(child, path, stuck);
        }
    }
}
