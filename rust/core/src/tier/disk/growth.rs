//! Grows the files within the size limit and deletes closed namespaces to make room.
//!
//! The size limit is never exceeded: only one process uses the directory (see the `root` module),
//! and files grow only in this module, on one thread at a time, and only to a size claimed
//! beforehand. No lock is held while files grow or namespaces are deleted.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::budget::{self, SlotCount};
use super::root::{Claim, OpenNamespace};
use super::tier::DiskTier;
use super::tier::Grower;
use super::types::SlotId;
use crate::Result;
use crate::error::is_no_space;
use crate::io::{MAX_FRAMES, SizeClass};
use crate::tier::NoSlot;

/// Delay before retrying after a failure to grow the files. The delay is shorter if many slots are
/// requested (see `REJECTIONS_BEFORE_RETRY`).
const RETRY_AFTER: Duration = Duration::from_secs(2);
/// Maximum time to wait for another thread to grow the files. Growing them usually takes a few
/// milliseconds. After the timeout, a waiting thread reads chunks instead of waiting longer.
const MAX_WAIT: Duration = Duration::from_millis(100);
/// If growing the files takes this much longer, the other thread may be hung, so only slots of the
/// same size are reused.
const MAX_SLOW: Duration = Duration::from_secs(5);

/// The exclusive right to grow the files. Dropping it wakes waiting threads, even during a panic.
struct Turn<'a>(&'a DiskTier);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.growth().grower = Grower::None;
        self.0.grown.notify_all();
    }
}

impl DiskTier {
    /// Obtains a slot when none is free: grows the files, or waits for the thread that is growing
    /// them.
    pub(super) fn reserve_more(&self, class: SizeClass) -> Result<SlotId, NoSlot> {
        let _turn = self.turn()?;
        let is_pointless = self.is_pointless();
        let is_full = is_pointless && self.growth().is_full;
        let mut state = self.state();
        if !is_pointless {
            state.slots.iter_mut().for_each(|slots| slots.are_holes_held = false);
        }
        // Holes may be usable again, or another thread may have added or freed a slot.
        if is_pointless && self.files.len() == 1 {
            return state.take_any(class).ok_or(NoSlot::Full);
        }
        if let Some(slot) = state.take(class) {
            return Ok(slot);
        }
        drop(state);
        self.make_slots(class, is_full);
        let is_refused = self.growth().is_punch_refused;
        let reason = if is_refused { NoSlot::FullExceptSameSize } else { NoSlot::Full };
        self.state().take_any(class).ok_or(reason)
    }

    /// Handles a write that failed because the file system is full. Deletes a closed namespace if
    /// there is one. Otherwise, only slots with allocated blocks are written until the next attempt
    /// to grow the files.
    pub(super) fn hold_growth(&self) {
        if self.delete_closed() {
            return; // the next write has space
        }
        self.skip_growth(true);
        let mut state = self.state();
        state.stats.grow_errors += 1;
        state.slots.iter_mut().for_each(|slots| slots.are_holes_held = true);
        let dir = self.config.dir.display();
        state.event(format!(
            "disk tier: the file system holding {dir} is full; evicting chunks from disk \
             to make room"
        ));
    }

    /// Waits up to [`MAX_WAIT`] for the thread that is growing the files, if any. Returns an error
    /// if that thread is too slow.
    fn turn(&self) -> Result<Turn<'_>, NoSlot> {
        let waited = self
            .grown
            .wait_timeout_while(self.growth(), MAX_WAIT, |growth| growth.grower == Grower::Busy);
        let (mut growth, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match growth.grower {
            Grower::None => {
                growth.grower = Grower::Busy;
                drop(growth);
                Ok(Turn(self))
            }
            Grower::Busy => {
                growth.grower = Grower::Slow(Instant::now());
                Err(NoSlot::Growing)
            }
            Grower::Slow(since) if since.elapsed() < MAX_SLOW => Err(NoSlot::Growing),
            Grower::Slow(_) => Err(NoSlot::FullExceptSameSize),
        }
    }

    /// Creates as many free slots of a class as fit in the space that the namespace can claim. If
    /// not even one slot fits, punches holes in free slots of other classes to make room for one.
    /// `is_full` means that the file system has no room for the files to grow.
    fn make_slots(&self, class: SizeClass, is_full: bool) {
        let (Ok(owner), counts) = (self.enter(), self.state().counts()) else { return };
        let (num_bytes, Some(count)) =
            (budget::namespace_bytes(&counts), counts.get(class.index()).copied())
        else {
            return;
        };
        let extent_bytes = if is_full { 0 } else { owner.extent_bytes(self.config.cap_bytes) };
        let extent = u32::try_from(extent_bytes / count.frame_bytes).unwrap_or(u32::MAX).max(1);
        let max_slots = u32::try_from(MAX_FRAMES).unwrap_or(u32::MAX);
        let most = extent.min(max_slots.saturating_sub(count.filled));
        let with = |more| num_bytes - count.bytes() + count.with(more).bytes();
        let claimed = if is_full { None } else { self.claim(&owner, [with(1), with(most)]) };
        let room = num_bytes.max(claimed.unwrap_or(0));
        let mut more = budget::largest_fit(most, |more| with(more) <= room);
        if more == 0 && most > 0 && self.punch_spare(class, with(1) - room, is_full) {
            more = 1;
        }
        if more == 0 && !is_full {
            self.skip_growth(false);
        }
        self.add(class, count, more);
        owner.settle(self.state().num_bytes());
    }

    /// Adds free slots. Refills punched slots first, then grows the files.
    fn add(&self, class: SizeClass, count: SlotCount, more: u32) {
        let punched = more.min(count.slots - count.filled);
        self.refill(class, punched);
        let to = count.slots + (more - punched);
        let (len, have_blocks) = self.grow_to(class, count.slots, to);
        self.state().with(class, |slots| slots.grow(len, have_blocks));
    }

    fn grow_to(&self, class: SizeClass, have: u32, mut to: u32) -> (u32, bool) {
        let Ok(files) = self.files_of(class) else { return (have, false) };
        let (is_asked, wanted) = (to > have, to);
        let mut may_delete = true;
        while to > have {
            let error = match files.grow(have, to) {
                Ok(have_blocks) => {
                    self.growth().is_refused = false;
                    return (to, have_blocks);
                }
                Err(error) => error,
            };
            self.note_refusal(to - have, &error);
            to = have + (to - have) / 2;
            if to == have && is_no_space(&error) && std::mem::take(&mut may_delete) {
                to = if self.delete_closed() { wanted } else { have };
            }
        }
        if is_asked {
            self.skip_growth(true);
        }
        (have, false)
    }

    /// Deletes a closed namespace to free space on a full file system. Returns false if no
    /// namespace was deleted.
    fn delete_closed(&self) -> bool {
        let note = |line| self.state().event(line);
        self.enter().is_ok_and(|owner| owner.delete_closed(&self.config, note))
    }

    fn is_pointless(&self) -> bool {
        let mut growth = self.growth();
        let is_recent = growth.refused_at.is_some_and(|at| at.elapsed() < RETRY_AFTER);
        let skip = growth.num_to_reject > 0 && is_recent;
        growth.num_to_reject = growth.num_to_reject.saturating_sub(1);
        skip
    }

    /// Claims disk space. `bytes` holds the `enough` and `want` arguments of
    /// [`OpenNamespace::claim`]. Returns the number of bytes that the namespace may use, or None on
    /// an I/O error.
    fn claim(&self, owner: &OpenNamespace, bytes: [u64; 2]) -> Option<u64> {
        let room = owner.claim(&self.config, bytes, |line| self.state().event(line));
        let Claim { bytes, foreign_bytes } = room.ok()?;
        self.state().foreign_bytes = foreign_bytes;
        Some(bytes)
    }
}
