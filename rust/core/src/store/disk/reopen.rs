//! Indexes the chunks found when the disk tier opens, possibly while the store is serving. If the
//! tier's directory is removed, drops the tier's chunks and reopens the tier.
//!
//! The directory is checked once per second. Once a check detects a removal, no job starts until
//! the new tier is open, so that old and new slots never mix. This file does no I/O: `threads`
//! opens, checks and closes the tier. A hung check opens the breakers, just as a hung job does.

use std::path::Path;
use std::time::Duration;

use crate::evict::{ChunkId, Removal};
use crate::index::{DiskEvent, Entry, NEVER};
use crate::store::disk::work::{Clearing, DiskOpening};
use crate::store::state::State;
use crate::tier::disk::{DiskEntry, DiskMeta, SlotId};
use crate::{Error, Event};

/// Maximum number of chunks to index per call. Indexing this many chunks takes about 0.2 ms.
pub(crate) const SLICE: usize = 512;
/// Maximum unused capacity of `found`, in entries. A list with more unused capacity than this is
/// shrunk.
const MAX_SPARE: usize = 1 << 16;
/// Interval between directory checks.
pub(crate) const CHECK_EVERY: Duration = Duration::from_secs(1);
/// Minimum interval between reopens, in case the directory is removed repeatedly.
const REOPEN_EVERY: Duration = Duration::from_secs(60);
/// Maximum number of chunks to drop per call. Dropping this many chunks takes about 0.2 ms.
const DROP_SLICE: usize = 256;

/// Progress of `empty_removed`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Emptying {
    /// The tier was not removed, or its jobs are still running.
    No,
    /// Some chunks remain for the next call to drop.
    Working,
    /// The caller must close the tier and call `reopen`.
    Done,
}

impl State {
    /// Records that the tier is open and holds the chunks in `found`, which lists children before
    /// parents. The records of `uncleared` slots could be neither read nor cleared. Returns false
    /// if the store is closing.
    pub(crate) fn end_opening(&mut self, found: Vec<DiskEntry>, uncleared: Vec<SlotId>) -> bool {
        self.disk.opening = DiskOpening::Open;
        (self.disk.unfreed, self.disk.unfreed_until) = (uncleared, self.now);
        self.disk.first_opening.get_or_insert(Ok(()));
        self.disk.check_at = self.now + CHECK_EVERY;
        if !std::mem::take(&mut self.disk.last_event).is_empty() {
            let num_chunks = found.len();
            let chunks = if num_chunks == 1 { "chunk" } else { "chunks" };
            self.log(Event::recovery(format!("disk tier: opened with {num_chunks} {chunks}")));
        }
        if self.disk.clearing == Clearing::No {
            self.disk.found = found;
        }
        !self.disk.stopping
    }

    /// Schedules another attempt to open the tier after `wait`.
    pub(crate) fn postpone(&mut self, wait: Duration, error: Error) {
        self.disk.opening = DiskOpening::NotBefore(self.now + wait);
        let why = error.to_string();
        if self.disk.last_event != why {
            self.log(Event::problem(format!(
                "disk tier: failed to open; using host memory only and retrying: {why}"
            )));
            self.disk.last_event = why;
        }
        self.disk.first_opening.get_or_insert(Err(error));
    }

    /// Logs that the tier is still not open after `waited`, unless the first attempt has completed.
    pub(crate) fn report_slow_opening(&mut self, waited: Duration) {
        if self.disk.first_opening.is_none() {
            let seconds = waited.as_secs();
            let event = "using host memory only until it opens";
            self.disk.last_event = format!("disk tier: not open after {seconds} s; {event}");
            self.log(Event::problem(self.disk.last_event.clone()));
        }
    }

    /// Returns true if the caller must open the tier now and then call `end_opening` or `postpone`.
    pub(crate) fn must_open(&mut self) -> bool {
        let is_due = matches!(self.disk.opening, DiskOpening::NotBefore(time) if self.now >= time);
        if is_due {
            self.disk.opening = DiskOpening::Opening;
        }
        is_due
    }

    /// Indexes a batch of the chunks found on disk and frees the slots of chunks that cannot be
    /// indexed. Returns false once no chunks remain.
    pub(crate) fn recover_some(&mut self) -> bool {
        let mut ids: Vec<ChunkId> = Vec::new();
        for _ in 0..SLICE {
            let Some(entry) = self.disk.found.pop() else { break };
            // A prefix's chunks are adjacent, so most parents need no lookup.
            let before = ids.last().copied().filter(|&id| self.index[id].key == entry.meta.parent);
            if let Some(id) = self.recover(entry.meta, entry.slot, before) {
                ids.push(id);
            } else {
                self.disk.to_free.push(entry.slot);
                self.disk.rejected.insert(entry.meta.key);
            }
        }
        self.stats.disk_recovered += ids.len() as u64;
        // Update the policy last, so that a chain's chunks do not briefly become evictable leaves.
        for id in ids {
            self.sync_disk(id);
        }
        let found = &mut self.disk.found;
        if found.is_empty() || found.capacity() - found.len() > MAX_SPARE {
            found.shrink_to_fit();
        }
        if !self.disk.is_recovering() {
            self.disk.rejected.clear();
        }
        !self.disk.found.is_empty()
    }

    /// Indexes a chunk. Returns None if the chunk's tree position is invalid, if the chunk was
    /// discarded, or if its index entry already has a slot or can expire and is newer than the
    /// record.
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
            // An older record would make this chunk's descendants younger than the chunk itself.
            let is_older = entry.expires_s != NEVER && saved_s < entry.saved_s;
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

    /// Starts a directory check if one is due. Returns the ticket, which the caller must pass to
    /// `end_check`.
    pub(crate) fn begin_check(&mut self) -> Option<u64> {
        let is_open = self.disk.opening == DiskOpening::Open && !self.disk.stopping;
        if !is_open || self.now < self.disk.check_at || self.disk.is_checking() {
            return None;
        }
        let ticket = self.new_ticket();
        self.disk.begin_check(ticket, self.now);
        Some(ticket)
    }

    /// Completes a directory check. `removed` is the missing directory or file, if any.
    pub(crate) fn end_check(&mut self, ticket: u64, removed: Option<&Path>) {
        self.disk.check_at = self.now + CHECK_EVERY;
        let Some(at) = self.disk.in_flight.iter().position(|job| job.ticket == ticket) else {
            return;
        };
        if self.disk.in_flight.swap_remove(at).hangs {
            self.end_hang(ticket);
        }
        let Some(path) = removed.filter(|_| self.disk.opening == DiskOpening::Open) else { return };
        self.stats.disk_removals += 1;
        self.disk.opening = DiskOpening::Removed;
        self.disk.found.clear();
        let (path, num_chunks) = (path.display(), self.stats.disk_used);
        let chunks = if num_chunks == 1 { "chunk" } else { "chunks" };
        self.disk.last_event = format!(
            "disk tier: {path} was removed; dropping its {num_chunks} {chunks} and reopening the \
             tier"
        );
        self.log(Event::problem(self.disk.last_event.clone()));
    }

    /// Once no job is running, drops a batch of the removed tier's chunks, children before parents
    /// as the policies require.
    pub(crate) fn empty_removed(&mut self) -> Emptying {
        if self.disk.opening != DiskOpening::Removed || !self.disk.in_flight.is_empty() {
            return Emptying::No;
        }
        for _ in 0..DROP_SLICE {
            if let Some(id) = self.disk.read_queue.pop(&self.index, Entry::is_to_read) {
                self.fail_host(id);
            } else if let Some(id) = self.disk_policy.victim() {
                self.drop_removed(id);
            } else {
                self.end_emptying();
                return Emptying::Done;
            }
        }
        Emptying::Working
    }

    /// Drops a chunk from the removed tier and, if the chunk is in host memory, queues it to be
    /// written again.
    fn drop_removed(&mut self, id: ChunkId) {
        self.change_disk(id, DiskEvent::Leave(Removal::Dropped));
        self.unblock_children(id);
        if self.index[id].host.is_visible() && !self.index[id].removing {
            self.want_on_disk(id);
        }
        self.settle(id);
    }

    fn end_emptying(&mut self) {
        let work = &mut self.disk;
        // If the directory was only moved, it may be moved back along with chunks that were removed
        // from the index but never freed.
        if work.has_removed() {
            work.clearing = Clearing::Wanted;
        }
        work.to_free.clear();
        work.unfreed.clear();
        work.unfreed_may_be_removed = false;
        work.opening = DiskOpening::Opening;
        (self.stats.disk_slots, self.stats.disk_bytes) = (0, 0);
    }

    /// Schedules a removed tier, which must be closed, to be reopened now or `REOPEN_EVERY` after
    /// the previous reopen, whichever is later.
    pub(crate) fn reopen(&mut self) {
        let at = self.now.max(self.disk.reopen_at);
        self.disk.reopen_at = at + REOPEN_EVERY;
        self.disk.opening = DiskOpening::NotBefore(at);
    }
}
