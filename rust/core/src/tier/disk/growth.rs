//! How far the files may grow now, and what has to go for it.
//!
//! The one place that compares the cap with what is on disk; it holds for every instant because the files only grow
//! here, one thread at a time, to a size that was added up first, while the directory has one owner. No lock is held while
//! files grow or namespaces are deleted.

use std::path::PathBuf;
use std::sync::PoisonError;
use std::time::Duration;

use super::budget;
use super::counters::Counters;
use super::files::SlotFiles;
use super::namespaces;
use super::slots::Slots;
use super::types::{DiskConfig, SlotId};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// The files grow by about this much at a time: few allocations, and no more taken than soon used.
const EXTENT_BYTES: u64 = 64 * 1024 * 1024;
/// After the file system had no room, so many asks are turned away before it is tried again.
const ASKS_BEFORE_RETRY: u32 = 256;
/// Longest wait for another thread that grows the files. An extent is usually there in a few milliseconds, and who does not
/// wait for it gives up a chunk for a slot.
const MAX_WAIT: Duration = Duration::from_millis(100);

/// Growing, and how large all is.
#[derive(Debug)]
pub(super) struct Growth {
    dir: PathBuf,
    own_name: String,
    cap_bytes: u64,
    frame_bytes: u64,
    /// Bytes of other namespaces when last looked.
    foreign_bytes: AtomicU64,
    plan: Mutex<Plan>,
    ended: Condvar,
}

/// Whether a thread grows the files now.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Grower {
    #[default]
    None,
    Busy,
    /// It takes longer than anyone waits: until it ends the files are as good as full.
    Slow,
}

#[derive(Debug, Default)]
struct Plan {
    grower: Grower,
    /// Nothing more can ever fit: the cap is ours alone and full.
    is_full: bool,
    /// The last growth failed; a person was told.
    is_refused: bool,
    asks_to_skip: u32,
}

/// The one right to grow; its end is told to who waits, also where growing panics.
struct Turn<'a>(&'a Growth);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.plan().grower = Grower::None;
        self.0.ended.notify_all();
    }
}

impl Growth {
    pub(super) fn new(config: &DiskConfig, foreign_bytes: u64) -> Self {
        Self {
            dir: config.dir.clone(),
            own_name: namespaces::dir_name(&config.namespace),
            cap_bytes: config.cap_bytes,
            frame_bytes: config.frame_bytes,
            foreign_bytes: AtomicU64::new(foreign_bytes),
            plan: Mutex::default(),
            ended: Condvar::new(),
        }
    }

    /// The cap on `bytes`.
    pub(super) fn cap_bytes(&self) -> u64 {
        self.cap_bytes
    }

    /// Bytes that the whole directory is accounted at with so many slots of ours.
    pub(super) fn bytes(&self, slots: u32) -> u64 {
        let foreign_bytes = self.foreign_bytes.load(Ordering::Relaxed);
        (budget::FIXED_BYTES + budget::slots_bytes(slots, self.frame_bytes)).saturating_add(foreign_bytes)
    }

    /// A slot where none is free: another thread's growth is waited for, or the files grow here.
    pub(super) fn reserve(&self, slots: &Mutex<Slots>, files: &SlotFiles, counters: &Counters) -> Option<SlotId> {
        let lock = || slots.lock().unwrap_or_else(PoisonError::into_inner);
        let turn = self.turn()?;
        // Another thread may have grown the files, or freed a slot, while this one waited.
        let taken = lock().take();
        if taken.is_some() {
            return taken;
        }
        let have = lock().len();
        let len = self.grow(have, files, counters);
        let mut slots = lock();
        slots.grow(len);
        let taken = slots.take();
        drop(slots);
        drop(turn);
        taken
    }

    /// Waits for a thread that grows the files, if that does not take long. None where there is no sense in growing now.
    fn turn(&self) -> Option<Turn<'_>> {
        let waited = self.ended.wait_timeout_while(self.plan(), MAX_WAIT, |plan| plan.grower == Grower::Busy);
        let (mut plan, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let is_mine = plan.grower == Grower::None;
        plan.grower = if is_mine { Grower::Busy } else { Grower::Slow };
        drop(plan);
        is_mine.then(|| Turn(self))
    }

    /// Grows the files beyond `have` slots; returns how many there are now.
    fn grow(&self, have: u32, files: &SlotFiles, counters: &Counters) -> u32 {
        if self.is_pointless() {
            return have;
        }
        let room = self.make_room(have, counters);
        let extent = u32::try_from(EXTENT_BYTES / self.frame_bytes).unwrap_or(u32::MAX).max(1);
        let mut to = have.saturating_add(extent).min(room);
        while to > have {
            let Err(error) = files.grow(have, to) else {
                self.plan().is_refused = false;
                return to;
            };
            counters.grow_errors.add(1);
            if !std::mem::replace(&mut self.plan().is_refused, true) {
                counters.event(format!("{} cannot grow by {} chunks: {error}", self.dir.display(), to - have));
            }
            to = have + (to - have) / 2;
        }
        if room > have {
            self.plan().asks_to_skip = ASKS_BEFORE_RETRY;
        }
        have
    }

    fn is_pointless(&self) -> bool {
        let mut plan = self.plan();
        let skip = plan.asks_to_skip > 0;
        plan.asks_to_skip = plan.asks_to_skip.saturating_sub(1);
        plan.is_full || skip
    }

    /// Slots that fit the cap; other namespaces go only if else not one more fits.
    fn make_room(&self, have: u32, counters: &Counters) -> u32 {
        let is_enough = |foreign_bytes| self.slots_that_fit(foreign_bytes) > have;
        let made = namespaces::make_room(&self.dir, &self.own_name, is_enough, |line| counters.event(line));
        let Ok((foreign_bytes, num_removed)) = made else { return have };
        counters.namespaces_removed.add(num_removed);
        self.foreign_bytes.store(foreign_bytes, Ordering::Relaxed);
        let room = self.slots_that_fit(foreign_bytes);
        let mut plan = self.plan();
        plan.is_full = room <= have && foreign_bytes == 0;
        if room <= have && !plan.is_full {
            // Something that is not ours to delete takes the room; it may go one day.
            plan.asks_to_skip = ASKS_BEFORE_RETRY;
        }
        room
    }

    fn slots_that_fit(&self, foreign_bytes: u64) -> u32 {
        budget::max_slots_beside(foreign_bytes, self.cap_bytes, self.frame_bytes)
    }

    fn plan(&self) -> MutexGuard<'_, Plan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
