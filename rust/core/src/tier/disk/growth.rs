//! Growing the files: how far they may grow now, and what has to go for it.
//!
//! The cap holds at every instant because the files only grow here, one thread at a time, to a size
//! that was claimed first, while the directory has one owner (`root`). No lock is held while files
//! grow or namespaces are deleted.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::books::Grower;
use super::root::{Owner, Room};
use super::tier::DiskTier;
use super::types::SlotId;

/// After the files could not grow, so many asks are turned away before it is tried again: room may
/// come back one day.
const ASKS_BEFORE_RETRY: u32 = 256;
/// And no longer than this, for where few ask.
const RETRY_AFTER: Duration = Duration::from_secs(2);
/// Longest wait for another thread that grows the files. An extent is usually there in a few
/// milliseconds, and who does not wait for it gives up a chunk for a slot.
const MAX_WAIT: Duration = Duration::from_millis(100);

/// The one right to grow; its end is told to who waits, also where growing panics.
struct Turn<'a>(&'a DiskTier);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.growth().grower = Grower::None;
        self.0.grown.notify_all();
    }
}

impl DiskTier {
    /// A slot where none is free: another thread's growth is waited for, or the files grow here.
    pub(super) fn reserve_more(&self) -> Option<SlotId> {
        let _turn = self.turn()?;
        let is_pointless = self.is_pointless();
        let mut books = self.books();
        if !is_pointless {
            books.slots.release_holes();
        }
        // A hole, or another thread has grown the files, or freed a slot, while this one waited.
        let taken = books.slots.take();
        if taken.is_some() || is_pointless {
            return taken;
        }
        let have = books.slots.len();
        drop(books);
        let (len, have_blocks) = self.grow(have);
        let mut books = self.books();
        books.slots.grow(len, have_blocks);
        books.slots.take()
    }

    /// The file system had no space for a write: until it is tried again, only slots whose blocks
    /// exist are written.
    pub(super) fn hold_growth(&self) {
        self.skip_growth();
        let mut books = self.books();
        books.stats.grow_errors += 1;
        books.slots.hold_holes();
        let dir = self.config.dir.display();
        books.event(format!(
            "disk tier: the file system of {dir} is full; evicting chunks from disk for new ones"
        ));
    }

    fn skip_growth(&self) {
        let mut growth = self.growth();
        (growth.asks_to_skip, growth.refused_at) = (ASKS_BEFORE_RETRY, Some(Instant::now()));
    }

    /// Waits for a thread that grows the files, if that does not take long. None where there is no
    /// sense in growing now.
    fn turn(&self) -> Option<Turn<'_>> {
        let waited = self
            .grown
            .wait_timeout_while(self.growth(), MAX_WAIT, |growth| growth.grower == Grower::Busy);
        let (mut growth, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let is_mine = growth.grower == Grower::None;
        growth.grower = if is_mine { Grower::Busy } else { Grower::Slow };
        drop(growth);
        is_mine.then(|| Turn(self))
    }

    /// Grows the files beyond `have` slots; returns how many there are now, and whether the new
    /// ones have blocks.
    fn grow(&self, have: u32) -> (u32, bool) {
        let Ok(owner) = self.enter() else { return (have, false) };
        let extent_bytes = owner.extent_bytes(self.config.cap_bytes);
        let extent = u32::try_from(extent_bytes / self.config.frame_sizes.largest())
            .unwrap_or(u32::MAX)
            .max(1);
        let grown = self.grow_to(have, self.make_room(&owner, have, have.saturating_add(extent)));
        owner.settle(&self.config, grown.0);
        grown
    }

    fn grow_to(&self, have: u32, mut to: u32) -> (u32, bool) {
        while to > have {
            let error = match self.files.grow(have, to) {
                Ok(have_blocks) => {
                    self.growth().is_refused = false;
                    return (to, have_blocks);
                }
                Err(error) => error,
            };
            let is_news = !std::mem::replace(&mut self.growth().is_refused, true);
            let mut books = self.books();
            books.stats.grow_errors += 1;
            if is_news {
                books.event(format!(
                    "{} cannot grow by {} chunks: {error}",
                    self.config.dir.display(),
                    to - have
                ));
            }
            to = have + (to - have) / 2;
        }
        self.skip_growth();
        (have, false)
    }

    fn is_pointless(&self) -> bool {
        let mut growth = self.growth();
        let is_recent = growth.refused_at.is_some_and(|at| at.elapsed() < RETRY_AFTER);
        let skip = growth.asks_to_skip > 0 && is_recent;
        growth.asks_to_skip = growth.asks_to_skip.saturating_sub(1);
        skip
    }

    /// Slots up to `want` that fit the cap; closed namespaces go only if else not one more than
    /// `have` fits.
    fn make_room(&self, owner: &Owner, have: u32, want: u32) -> u32 {
        let room = owner.claim(&self.config, [have, have.saturating_add(1), want], |line| {
            self.books().event(line);
        });
        let Ok(Room { slots, foreign_bytes }) = room else { return have };
        self.books().foreign_bytes = foreign_bytes;
        slots
    }
}
