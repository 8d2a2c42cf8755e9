//! Entering what a tier holds when it is opened: at the start, or later beside what is in host by then.

use std::time::Duration;

use crate::evict::ChunkId;
use crate::index::{DiskEvent, Entry, NEVER};
use crate::store::disk::removed_dir::CHECK_EVERY;
use crate::store::disk::work::{Attached, Clearing};
use crate::store::state::State;
use crate::tier::disk::{DiskEntry, DiskMeta, SlotId};

/// Chunks entered by one call: some 0.2 ms.
pub(crate) const SLICE: usize = 512;

impl State {
    /// The tier is there and holds `found`, parents before children; false if there is no use for it any more.
    pub(crate) fn attach(&mut self, mut found: Vec<DiskEntry>) -> bool {
        self.disk.attached = Attached::Yes;
        self.disk.check_at = self.now + CHECK_EVERY;
        if !std::mem::take(&mut self.disk.last_event).is_empty() {
            self.log(format!("the disk tier is open now, with {} chunks; it is used again", found.len()));
        }
        if self.disk.clearing == Clearing::No {
            found.reverse();
            self.disk.found = found;
        }
        !self.disk.stopping
    }

    /// The tier could not be opened: again after `wait`.
    pub(crate) fn postpone(&mut self, wait: Duration, why: &str) {
        self.disk.attached = Attached::NotBefore(self.now + wait);
        if self.disk.last_event != why {
            why.clone_into(&mut self.disk.last_event);
            self.log(format!("the disk tier cannot be opened; using host memory only and retrying: {why}"));
        }
    }

    /// It is still being opened: a disk thread is to wait for that.
    pub(crate) fn open_later(&mut self, waited: Duration) {
        self.disk.attached = Attached::NotBefore(self.now);
        let seconds = waited.as_secs();
        self.disk.last_event =
            format!("the disk tier has not opened within {seconds} s; using host memory only until it has");
        self.log(self.disk.last_event.clone());
    }

    /// Whether the caller should open the tier now; then `attach` or `postpone` must follow.
    pub(crate) fn must_open(&mut self) -> bool {
        let is_due = matches!(self.disk.attached, Attached::NotBefore(time) if self.now >= time);
        if is_due {
            self.disk.attached = Attached::Opening;
        }
        is_due
    }

    /// Enters some of what was found; false if nothing is left. What does not fit is freed.
    pub(crate) fn recover_some(&mut self) -> bool {
        let mut ids: Vec<ChunkId> = Vec::new();
        for _ in 0..SLICE {
            let Some(entry) = self.disk.found.pop() else { break };
            // Chunks of a prefix come one behind the other, which spares most lookups.
            let before = ids.last().copied().filter(|&id| self.index[id].key == entry.meta.parent);
            if let Some(id) = self.recover(entry.meta, entry.slot, before) {
                ids.push(id);
            } else {
                self.disk.to_free.push(entry.slot);
                self.disk.rejected.insert(entry.meta.key);
            }
        }
        self.stats.disk_recovered += ids.len() as u64;
        // Only now, so that chains do not become and cease to be leaves link by link.
        for id in ids {
            self.sync_disk(id);
        }
        if !self.disk.is_recovering() {
            self.disk.rejected.clear();
        }
        !self.disk.found.is_empty()
    }

    /// The entry of a found chunk, on disk now; None where its place is impossible, it was discarded, or is on disk elsewhere.
    fn recover(&mut self, found: DiskMeta, slot: SlotId, before: Option<ChunkId>) -> Option<ChunkId> {
        let DiskMeta { key, parent: parent_key, depth, saved_s } = found;
        let saved_s = u32::try_from(saved_s).unwrap_or(u32::MAX);
        let parent = if depth == 0 { None } else { Some(before.or_else(|| self.index.get(&parent_key))?) };
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
            let is_older = entry.expires_s != NEVER && saved_s < entry.saved_s; // what hangs on it would be younger
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
