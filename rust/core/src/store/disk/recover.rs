//! Indexes the chunks that a disk tier held when it was opened, at the start or while the store
//! serves.

use std::time::Duration;

use crate::evict::ChunkId;
use crate::index::{DiskEvent, Entry, NEVER};
use crate::store::disk::removed_dir::CHECK_EVERY;
use crate::store::disk::work::{Attached, Clearing};
use crate::store::state::State;
use crate::tier::disk::{DiskEntry, DiskMeta, SlotId};

/// Chunks indexed by one call: some 0.2 ms.
pub(crate) const SLICE: usize = 512;

impl State {
    /// Attaches an open tier that holds `found`, parents before children. Returns false if the
    /// store is closing.
    pub(crate) fn attach(&mut self, mut found: Vec<DiskEntry>) -> bool {
        self.disk.attached = Attached::Yes;
        self.disk.check_at = self.now + CHECK_EVERY;
        if !std::mem::take(&mut self.disk.last_event).is_empty() {
            self.log_recovery(format!("disk tier: open, with {} chunks", found.len()));
        }
        if self.disk.clearing == Clearing::No {
            found.reverse();
            self.disk.found = found;
        }
        !self.disk.stopping
    }

    /// Schedules another attempt to open the tier after `wait`.
    pub(crate) fn postpone(&mut self, wait: Duration, why: &str) {
        self.disk.attached = Attached::NotBefore(self.now + wait);
        if self.disk.last_event != why {
            why.clone_into(&mut self.disk.last_event);
            self.log(format!(
                "disk tier: cannot be opened; using host memory only and retrying: {why}"
            ));
        }
    }

    /// Lets a disk thread wait for the first attempt, which takes longer than `waited`.
    pub(crate) fn open_later(&mut self, waited: Duration) {
        self.disk.attached = Attached::NotBefore(self.now);
        let seconds = waited.as_secs();
        self.disk.last_event =
            format!("disk tier: not open after {seconds} s; using host memory only until it is");
        self.log(self.disk.last_event.clone());
    }

    /// Returns true if the caller should open the tier now; `attach` or `postpone` must follow.
    pub(crate) fn must_open(&mut self) -> bool {
        let is_due = matches!(self.disk.attached, Attached::NotBefore(time) if self.now >= time);
        if is_due {
            self.disk.attached = Attached::Opening;
        }
        is_due
    }

    /// Indexes some of the chunks found; returns false if none is left. Frees the slots of chunks
    /// that do not fit.
    pub(crate) fn recover_some(&mut self) -> bool {
        let mut ids: Vec<ChunkId> = Vec::new();
        for _ in 0..SLICE {
            let Some(entry) = self.disk.found.pop() else { break };
            // A prefix's chunks are adjacent, which saves most lookups of parents.
            let before = ids.last().copied().filter(|&id| self.index[id].key == entry.meta.parent);
            if let Some(id) = self.recover(entry.meta, entry.slot, before) {
                ids.push(id);
            } else {
                self.disk.to_free.push(entry.slot);
                self.disk.rejected.insert(entry.meta.key);
            }
        }
        self.stats.disk_recovered += ids.len() as u64;
        // Last, so that chains do not become and cease to be leaves link by link.
        for id in ids {
            self.sync_disk(id);
        }
        if !self.disk.is_recovering() {
            self.disk.rejected.clear();
        }
        !self.disk.found.is_empty()
    }

    /// Indexes a chunk; None if its place is impossible, it was discarded, or another slot has it.
    fn recover(
        &mut self,
        found: DiskMeta,
        slot: SlotId,
        before: Option<ChunkId>,
    ) -> Option<ChunkId> {
        let DiskMeta { key, parent: parent_key, depth, saved_s } = found;
        let saved_s = u32::try_from(saved_s).unwrap_or(u32::MAX);
        let parent =
            if depth == 0 { None } else { Some(before.or_else(|| self.index.get(&parent_key))?) };
        let fits = parent.is_none_or(|parent| {
            let parent = &self.index[parent];
            parent.depth + 1 == depth && parent.disk.is_stored()
        });
        let rejected = &self.disk.rejected;
        if !fits || rejected.contains(&key) || depth > 0 && rejected.contains(&parent_key) {
            return None;
        }
        let id = if let Some(id) = self.index.get(&key) {
            let entry = &self.index[id];
            let is_older = entry.expires_s != NEVER && saved_s < entry.saved_s; // chunks below it would be younger
            if entry.parent != parent || entry.disk.takes_slot() || is_older {
                return None;
            }
            id
        } else {
            self.add(Entry { key, parent_key, parent, depth, saved_s, ..Entry::default() })
        };
        self.change_disk(id, DiskEvent::Found(slot));
        self.unblock_children(id);
        Some(id)
    }
}
