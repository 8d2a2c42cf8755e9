//! Eviction at an operator's request: evicts one tenant's chunks, or all chunks, from host memory
//! or from every tier.
//!
//! A walk visits the index slice by slice and releases the lock between slices. Chunks saved during
//! the walk may survive it. An eviction from host memory evicts children before parents. An
//! eviction from every tier starts removing the chunks that have no parent, and `entries` removes
//! their trees.

use std::sync::Arc;
use std::time::Instant;

use crate::Result;
use crate::evict::{ChunkId, TenantId};
use crate::index::Entry;
use crate::key::SaltTag;
use crate::store::config::DiskSettings;
use crate::store::disk::time_shares::Direction;
use crate::store::disk::work::JobInFlight;
use crate::store::open::Store;
use crate::store::state::{Cause, State};
use crate::store::stats::Evicted;
use crate::tier::disk::{self, DiskRoot, RemovedChunks};

/// Maximum number of entries to visit per call. Visiting this many entries takes about 0.2 ms.
const SLICE: u32 = 2048;
/// Maximum number of chunks to evict from host memory per call.
const MAX_EVICTED: u32 = 256;

/// Selects the chunks to evict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Evict {
    /// Evicts only chunks of the tenant with this salt. None selects all chunks.
    pub salt: Option<SaltTag>,
    /// Evicts only from host memory and keeps chunks not yet written to disk.
    pub is_host_only: bool,
}

#[derive(Debug, Default)]
struct Walk {
    next: u32,
    /// Parent of the last evicted chunk, to be visited next unless its entry was freed.
    above: Option<(ChunkId, u32)>,
    /// True if the walk may have missed on-disk chunks that were not indexed yet.
    is_blind: bool,
    /// Position up to which in-use chunks have been counted. None until the walk has visited all
    /// chunks.
    counted: Option<u32>,
}

impl Store {
    /// Evicts the selected chunks. Unless `is_host_only` is set, waits until no lookup or restart
    /// can find the evicted chunks. Returns no later than the deadline.
    pub fn evict(&self, what: Evict, deadline: Instant) -> Evicted {
        let (mut walk, mut before) = (Walk::default(), None);
        loop {
            let done = self.inner.with_state(|state| {
                before.get_or_insert(state.evicted);
                state.evict_slice(what, &mut walk)
            });
            let is_late = Instant::now() >= deadline;
            match done {
                Some(false) if !is_late => std::thread::yield_now(),
                Some(true) => break,
                _ => return self.evicted_since(before, true),
            }
        }
        let is_off_disk = what.is_host_only || !walk.is_blind && self.wait_off_disk(deadline);
        self.evicted_since(before, !is_off_disk)
    }

    fn evicted_since(&self, before: Option<Evicted>, is_cut_short: bool) -> Evicted {
        let now = self.inner.with_state(|state| state.evicted).unwrap_or_default();
        Evicted { is_cut_short, ..before.map_or_else(Evicted::default, |before| now - before) }
    }

    fn wait_off_disk(&self, deadline: Instant) -> bool {
        let Some(mark) = self.inner.with_state(State::new_ticket) else { return false };
        self.inner.wait(deadline, |state| {
            let is_off_disk = state.is_off_disk(mark);
            (is_off_disk || !state.disk.cannot_settle_by(state.now)).then_some(is_off_disk)
        })
    }
}

impl State {
    /// Returns true if no chunks removed before ticket `mark` was issued remain on disk.
    fn is_off_disk(&self, mark: u64) -> bool {
        let work = &self.disk;
        let is_written =
            |job: &JobInFlight| job.direction == Some(Direction::Write) && job.ticket < mark;
        let has_removed = work.has_removed() || work.is_recovering();
        !has_removed && !work.in_flight.iter().any(is_written)
    }

    /// Continues a walk. Returns true once the walk is complete.
    fn evict_slice(&mut self, what: Evict, walk: &mut Walk) -> bool {
        if self.is_removing() || (!self.disk.found.is_empty() && self.recover_some()) {
            return false;
        }
        walk.is_blind |= self.disk.is_recovering();
        if !what.is_host_only {
            self.note_removal();
        }
        let tenant = match what.salt.map(|tag| self.tenants.find(tag)) {
            Some(None) => return true,
            Some(found) => found,
            None => None,
        };
        if !what.is_host_only {
            return self.remove_trees_slice(tenant, walk);
        }
        if walk.counted.is_none() && self.evict_from_host(tenant, walk) {
            walk.counted = Some(0);
            return false;
        }
        walk.counted.is_some_and(|from| self.count_in_use(tenant, from, walk))
    }

    /// Starts removing the chunks that have no parent. Each slice's trees are removed before the
    /// next slice starts.
    fn remove_trees_slice(&mut self, tenant: Option<TenantId>, walk: &mut Walk) -> bool {
        let end = walk.next.saturating_add(SLICE).min(self.index.num_places());
        for place in walk.next..end {
            if let Some((id, entry)) = self.index.at(place)
                && entry.parent.is_none()
                && tenant.is_none_or(|tenant| entry.tenant == tenant)
            {
                self.remove_tree_for(id, Cause::Evict);
            }
        }
        walk.next = end;
        end == self.index.num_places() && !self.is_removing()
    }

    /// Evicts chunks from host memory. Returns true once the walk has reached its end.
    fn evict_from_host(&mut self, tenant: Option<TenantId>, walk: &mut Walk) -> bool {
        let mut budget = MAX_EVICTED;
        let end = walk.next.saturating_add(SLICE).min(self.index.num_places());
        loop {
            let next = match walk.above.take() {
                Some((id, generation)) if self.index.is_same(id, generation) => Some(id),
                _ if walk.next == end => return end == self.index.num_places(),
                _ => {
                    walk.next += 1;
                    self.index.at(walk.next - 1).map(|(id, _)| id)
                }
            };
            let Some(id) =
                next.filter(|id| tenant.is_none_or(|tenant| self.index[*id].tenant == tenant))
            else {
                continue;
            };
            let above = self.index[id].parent.map(|parent| (parent, self.index[parent].generation));
            if self.evict_if_unused(id) {
                walk.above = above;
                budget -= 1;
            }
            if budget == 0 {
                return false;
            }
        }
    }

    /// Counts chunks that cannot be evicted because they or their descendants are in use. Returns
    /// true at the end of the index.
    fn count_in_use(&mut self, tenant: Option<TenantId>, from: u32, walk: &mut Walk) -> bool {
        let end = from.saturating_add(SLICE).min(self.index.num_places());
        let stays = |entry: &Entry| {
            let is_meant = tenant.is_none_or(|tenant| entry.tenant == tenant);
            is_meant && entry.is_in_host() && entry.is_in_use()
        };
        let entries = (from..end).filter_map(|place| self.index.at(place));
        self.evicted.num_in_use += entries.filter(|(_, entry)| stays(entry)).count() as u64;
        walk.counted = Some(end);
        end == self.index.num_places()
    }

    /// Evicts a chunk from host memory if the chunk is an unused leaf. Returns true if the chunk
    /// was evicted.
    fn evict_if_unused(&mut self, id: ChunkId) -> bool {
        let entry = self.index[id];
        if !entry.is_in_host() || entry.is_in_use() {
            return false;
        }
        self.evicted.num_chunks += 1;
        let frame = entry.host.frame();
        self.evicted.host_bytes += frame.map_or(0, |frame| self.host.frame_bytes(frame.class()));
        self.evict(id);
        true
    }
}

/// In a disk directory, removes one tenant's chunks, or all chunks, from every closed namespace
/// whose hex name starts with `prefix`.
///
/// `root` must be the [`DiskRoot`] of the open stores. Returns `Io` if the directory cannot be
/// read.
pub fn remove_closed(
    settings: &DiskSettings,
    root: &Arc<DiskRoot>,
    prefix: &str,
    salt: Option<SaltTag>,
) -> Result<RemovedChunks> {
    let is_meant = |root: &crate::ChunkKey| salt.is_none() || SaltTag::of_root(root) == salt;
    disk::remove_closed(&settings.dir, root, prefix, |first| {
        first.is_none_or(|first| is_meant(&first.parent))
    })
}
