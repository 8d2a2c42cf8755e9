//! Adds chunks to the index, detaches chunks that are in no tier, frees unused entries, and removes
//! chunk trees.
//!
//! | method | called after | effect |
//! |---|---|---|
//! | `settle` | a chunk left a tier | `detach` if the chunk is now in no tier, otherwise `reap` |
//! | `detach` | `settle`, tree removal | removes the key; frees slot and frame once unused |
//! | `reap` | a user finished | frees a detached entry without users, then detached ancestors |
//! | `leave_failed` | a child left host memory | frees the frames of failed ancestors |
//!
//! Lookups miss a tree as soon as its removal starts, because the root's key is removed
//! immediately. The tree is then walked depth-first, one slice per call, children before parents as
//! the policies require. Descendants keep their keys until the walk reaches them, so lookups check
//! all ancestors during tree removals. A clear removes all keys in one step, and the index keeps
//! the roots of the remaining trees.

use std::time::Duration;

use crate::evict::{ChunkId, Removal};
use crate::index::{Entry, HostEvent, HostState};
use crate::key::{ChunkKey, SaltTag};
use crate::store::disk::work::{Clearing, DiskOpening};
use crate::store::state::{Cause, State, Subtree};

/// Maximum number of discarded keys remembered until the on-disk chunks are indexed. If there are
/// more, all chunks not yet indexed are removed from the disk.
const MAX_REJECTED: usize = 1 << 16;
/// Maximum time that an idle store stays open only because of slots that cannot be freed. After that,
/// these slots are probably in bad sectors, whose chunks are unreadable too.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(600);

impl State {
    /// Adds an entry for a chunk that is not in any tier yet. The caller sets `saved_s`.
    pub(crate) fn add(&mut self, new: Entry) -> ChunkId {
        let tenant = match new.parent {
            Some(parent) => self.index[parent].tenant,
            None => self.tenants.find_or_add(SaltTag::of_root(&new.parent_key)),
        };
        self.tenants.count_entry(tenant, true);
        let expires_s = self.expiry(self.tenants.ceiling(tenant).ttl_s, new.parent, new.saved_s);
        let id = self.index.insert(Entry { tenant, expires_s, ..new });
        self.track_expiry(id);
        id
    }

    /// Detaches a chunk, which must have no attached children. The entry stays until its last user
    /// finishes.
    pub(crate) fn detach(&mut self, id: ChunkId) {
        let parent = self.index[id].parent;
        self.leave_host_policy(id, Removal::Dropped);
        self.leave_disk_policy(id, Removal::Dropped);
        self.cancel_write(id);
        self.index.detach(id);
        self.note_change(id);
        let host = self.index[id].host;
        if host.is_pending() && !host.is_filling() {
            self.change_host(id, HostEvent::Leave(Removal::Dropped));
        }
        if self.index[id].disk.slot().is_some() {
            self.disk.num_detached_slots += 1;
            self.leave_slot_if_unused(id);
        }
        self.reap(id);
        self.leave_failed(parent);
    }

    /// Frees the frame of a detached chunk after its fill has ended.
    pub(crate) fn drop_detached_fill(&mut self, id: ChunkId) {
        let parent = self.index[id].parent;
        self.change_host(id, HostEvent::Leave(Removal::Dropped));
        self.leave_slot_if_unused(id);
        self.reap(id);
        self.leave_failed(parent);
    }

    /// Detaches the chunk if it is in no tier; otherwise, reaps it.
    pub(crate) fn settle(&mut self, id: ChunkId) {
        let entry = &self.index[id];
        if entry.host.is_absent() && !entry.disk.takes_slot() && !entry.detached {
            self.detach(id);
        } else {
            self.reap(id);
        }
    }

    /// Frees an unused detached entry, then any detached ancestors that are no longer used.
    pub(crate) fn reap(&mut self, id: ChunkId) {
        let mut next = Some(id);
        while let Some(id) = next {
            let entry = &self.index[id];
            let is_used = entry.holds > 0
                || entry.has_children()
                || entry.host.is_filling()
                || entry.disk.takes_slot();
            if !entry.detached || is_used {
                break;
            }
            next = entry.parent;
            if !entry.host.is_absent() {
                self.change_host(id, HostEvent::Leave(Removal::Dropped));
            }
            self.untrack_expiry(id);
            self.tenants.count_entry(self.index[id].tenant, false);
            self.index.remove(id);
        }
        self.leave_failed(next);
    }

    /// Removes a childless failed chunk from host memory, then its failed ancestors.
    pub(crate) fn leave_failed(&mut self, mut next: Option<ChunkId>) {
        while let Some(id) = next {
            let entry = &self.index[id];
            if !matches!(entry.host, HostState::Failed(_))
                || entry.host_children > 0
                || entry.detached
            {
                break;
            }
            next = entry.parent;
            self.change_host(id, HostEvent::Leave(Removal::Dropped));
            self.settle(id);
        }
    }

    /// Starts removing chunks and their descendants. Returns how many chunks the first slice
    /// removed.
    pub(crate) fn discard(&mut self, keys: &[ChunkKey]) -> u64 {
        self.disk.unfreed_may_be_removed |= !keys.is_empty();
        if self.disk.is_recovering() {
            self.reject(keys);
        }
        for key in keys {
            if let Some(id) = self.index.get(key) {
                self.remove_tree(id);
            }
        }
        self.remove_slice()
    }

    /// Records discarded keys, so that on-disk chunks with these keys are not indexed later.
    fn reject(&mut self, keys: &[ChunkKey]) {
        let work = &mut self.disk;
        if work.clearing == Clearing::No {
            work.rejected.extend(keys);
        }
        if work.rejected.len() > MAX_REJECTED {
            work.rejected.clear();
            work.to_free.extend(work.found.drain(..).map(|entry| entry.slot));
            if work.opening != DiskOpening::Open {
                work.clearing = Clearing::Wanted;
            }
        }
    }

    /// Removes all chunks. Lookups miss them immediately.
    pub(crate) fn clear(&mut self) {
        self.index.unmap_all();
        self.note_all();
        self.removals.clear();
        self.disk.found.clear();
        self.disk.rejected.clear();
        if self.disk.opening != DiskOpening::NoTier {
            self.disk.clearing = Clearing::Wanted;
            self.note_removal();
        }
        self.remove_slice();
    }

    /// Implements [`super::Store::must_stay_open`].
    pub(crate) fn must_stay_open(&mut self) -> bool {
        let work = &self.disk;
        let is_in_progress =
            self.is_removing() || work.in_flight.iter().any(|job| job.writes_chunk);
        if !is_in_progress && !work.has_removed() {
            self.disk.removal_deadline = None;
            return false;
        }
        let is_only_unfreed = !is_in_progress && work.has_only_unfreed();
        work.removal_deadline.is_some_and(|deadline| !is_only_unfreed || self.now < deadline)
    }

    /// Records a removal that a user requested.
    pub(crate) fn note_removal(&mut self) {
        self.disk.unfreed_may_be_removed = true;
        self.disk.removal_deadline = Some(self.now + REMOVAL_TIMEOUT);
    }

    pub(crate) fn is_removing(&self) -> bool {
        !self.removals.is_empty() || self.index.old_root().is_some()
    }

    /// Removes the chunk's key immediately, and the chunk and its descendants in slices.
    pub(crate) fn remove_tree(&mut self, id: ChunkId) {
        self.remove_tree_for(id, Cause::Discard);
    }

    pub(crate) fn remove_tree_for(&mut self, id: ChunkId, cause: Cause) {
        if !self.index[id].removing && !self.index[id].detached {
            self.index.unmap(id);
            self.index[id].removing = true;
            self.note_change(id);
            self.push_subtree(id, cause);
        }
    }

    fn push_subtree(&mut self, id: ChunkId, cause: Cause) {
        self.removals.push(Subtree { id, generation: self.index[id].generation, cause });
    }

    pub(crate) fn remove_slice(&mut self) -> u64 {
        self.remove_some(self.slice)
    }

    /// Continues tree removals for at most `budget` steps. Returns the number of chunks removed.
    pub(crate) fn remove_some(&mut self, budget: usize) -> u64 {
        let mut removed = 0;
        for _ in 0..budget {
            let Some(&Subtree { id, generation, cause }) = self.removals.last() else {
                let Some(root) = self.index.old_root() else { break };
                self.push_subtree(root, Cause::Clear);
                continue;
            };
            if !self.index.is_same(id, generation) || self.index[id].detached {
                self.removals.pop();
            } else if let Some(child) = self.index[id].first_child {
                self.push_subtree(child, cause);
            } else {
                self.removals.pop();
                match cause {
                    Cause::Discard => self.stats.discards += 1,
                    Cause::Clear => self.stats.cleared += 1,
                    Cause::Evict => self.evicted.count(&self.index[id], &self.host),
                    Cause::Age => self.stats.expired += 1,
                    Cause::Unfinished => {} // counted as aborted when its save ends
                }
                self.detach(id);
                self.evicted.num_in_use +=
                    u64::from(cause == Cause::Evict && self.index.is_same(id, generation));
                removed += 1;
            }
        }
        removed
    }
}
