//! Handles a removed disk directory: a check once a second detects it, the chunks leave the index,
//! and the tier is opened again.
//!
//! No job begins between that check and the new tier, so slots of the two tiers never mix. Without
//! I/O: `threads` checks, closes and opens. A check that hangs opens the breakers, as a job does.

use std::path::Path;
use std::time::Duration;

use crate::evict::{ChunkId, Removal};
use crate::index::{DiskEvent, Entry};
use crate::store::disk::work::{Attached, Clearing};
use crate::store::state::State;

/// Time between two checks.
pub(crate) const CHECK_EVERY: Duration = Duration::from_secs(1);
/// Least time between two reopenings, for a directory that is removed repeatedly.
const REOPEN_EVERY: Duration = Duration::from_secs(60);
/// Chunks dropped by one call: some 0.2 ms.
const SLICE: usize = 256;

/// Progress of `empty_removed`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Emptying {
    /// Nothing to do: the tier was not removed, or its last jobs are still running.
    No,
    /// Some chunks remain for the next call.
    Working,
    /// The caller must close the tier and call `reopen`.
    Done,
}

impl State {
    /// Begins a check that the tier's directory is still there, if one is due; returns its ticket.
    /// `end_check` must follow.
    pub(crate) fn begin_check(&mut self) -> Option<u64> {
        let is_open = self.disk.attached == Attached::Yes && !self.disk.stopping;
        if !is_open || self.now < self.disk.check_at || self.disk.is_checking() {
            return None;
        }
        let ticket = self.new_ticket();
        self.disk.begin_check(ticket, self.now);
        Some(ticket)
    }

    /// Ends a check. `removed` is the directory or file that was removed, if one was.
    pub(crate) fn end_check(&mut self, ticket: u64, removed: Option<&Path>) {
        self.disk.check_at = self.now + CHECK_EVERY;
        let Some(at) = self.disk.in_flight.iter().position(|job| job.ticket == ticket) else {
            return;
        };
        if self.disk.in_flight.swap_remove(at).hangs {
            self.end_hang(ticket);
        }
        let Some(path) = removed.filter(|_| self.disk.attached == Attached::Yes) else { return };
        self.stats.disk_removals += 1;
        self.disk.attached = Attached::Removed;
        self.disk.found.clear();
        let (path, num_chunks) = (path.display(), self.stats.disk_used);
        self.disk.last_event = format!(
            "disk tier: {path} was removed; dropping its {num_chunks} chunks and opening it again"
        );
        self.log(self.disk.last_event.clone());
    }

    /// Removes some chunks of a removed tier from the disk once no job is running: children before
    /// parents, as policies require.
    pub(crate) fn empty_removed(&mut self) -> Emptying {
        if self.disk.attached != Attached::Removed || !self.disk.in_flight.is_empty() {
            return Emptying::No;
        }
        for _ in 0..SLICE {
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

    /// Removes a chunk from the disk, and queues it for writing if it is in host memory.
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
        // A directory that was moved may return, with chunks that were removed from the index and
        // not freed.
        if !(work.to_free.is_empty() && work.unfreed.is_empty()) {
            work.clearing = Clearing::Wanted;
        }
        work.to_free.clear();
        work.unfreed.clear();
        work.attached = Attached::Opening;
        (self.stats.disk_slots, self.stats.disk_bytes) = (0, 0);
    }

    /// Schedules the opening after a removed tier was closed: at once, or a minute after the last
    /// one.
    pub(crate) fn reopen(&mut self) {
        let at = self.now.max(self.disk.reopen_at);
        self.disk.reopen_at = at + REOPEN_EVERY;
        self.disk.attached = Attached::NotBefore(at);
    }
}
