//! Tracks the state of each slot of one size class. This module does no I/O.
//!
//! Invariant: free + punched + reserved + used = slots. Only free slots can be reserved. Free slots
//! with blocks are reserved first, because they can be written even on a full file system. Slots
//! that may be holes come next, in the order in which they became free, so that a slot whose write
//! failed is not retried immediately. If writes to a slot keep failing, its blocks may be damaged.
//! The slot is then set aside, and chunks in other slots are evicted instead. A punched slot has no
//! blocks and uses no space until `refill` makes it free again.

use std::collections::{BTreeSet, VecDeque};

use super::budget::SlotCount;
use super::types::SlotId;
use crate::io::SizeClass;

/// A slot is set aside after this many consecutive failed writes. If every write fails, this limits
/// how often chunks are evicted in search of a writable slot.
const MAX_FAILURES: u8 = 8;
/// Number of writes after which one of the slots that were set aside can be reserved again.
const WRITES_BEFORE_RETRY: u32 = 1000;

/// The known state of a slot's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Blocks {
    /// The slot may be a hole.
    Unknown,
    Allocated,
    /// The most recent writes to the slot failed, but not because the file system was full.
    Failed(u8),
}

impl Blocks {
    fn new(are_allocated: bool) -> Self {
        if are_allocated { Self::Allocated } else { Self::Unknown }
    }
}

/// State of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SlotState {
    /// The slot is free, and its record is empty.
    Free,
    /// A caller owns the slot, which does not hold a chunk yet. The flag is true if the record on
    /// disk might not be empty.
    Reserved(bool),
    /// A caller owns the slot, which holds a chunk.
    Used,
    /// The slot's record is being cleared, or its blocks are being released.
    Leaving,
    /// The slot is punched: it has an empty record and no blocks.
    Punched,
}

impl SlotState {
    /// Returns true if the record must be cleared before the slot becomes free.
    pub(super) fn may_have_record(self) -> bool {
        matches!(self, SlotState::Used | SlotState::Reserved(true))
    }
}

/// The states of a class's slots.
#[derive(Debug, Default)]
pub(super) struct Slots {
    class: SizeClass,
    frame_bytes: u64,
    states: Vec<SlotState>,
    blocks: Vec<Blocks>,
    /// Free slots that have blocks.
    free: VecDeque<u32>,
    /// Free slots that may lack blocks.
    holes: VecDeque<u32>,
    /// Free slots whose last [`MAX_FAILURES`] writes failed.
    failed: VecDeque<u32>,
    /// Number of writes since a slot last entered or left `failed`.
    num_written: u32,
    pub(super) punched: BTreeSet<u32>,
    /// True while the file system has no space to fill holes. Holes are not reserved during this
    /// time.
    pub(super) are_holes_held: bool,
    pub(super) used: u64,
}

impl Slots {
    /// Initializes the states when a directory is opened. The slots in `entries` hold chunks, the
    /// slots in `uncleared` have records that could not be cleared, and the slots in `punched` have
    /// no blocks. The caller owns the slots in `entries` and `uncleared`.
    pub(super) fn found(
        class: SizeClass,
        count: SlotCount,
        entries: impl Iterator<Item = SlotId>,
        uncleared: &[SlotId],
        punched: BTreeSet<u32>,
    ) -> Self {
        let mut states = vec![SlotState::Free; count.slots as usize];
        for slot in uncleared {
            states[slot.number() as usize] = SlotState::Reserved(true);
        }
        for slot in &punched {
            states[*slot as usize] = SlotState::Punched;
        }
        let mut used = 0;
        for slot in entries {
            states[slot.number() as usize] = SlotState::Used;
            used += 1;
        }
        let is_free = |&slot: &u32| states[slot as usize] == SlotState::Free;
        let holes = (0..count.slots).filter(is_free).collect();
        let blocks = states.iter().map(|state| Blocks::new(*state == SlotState::Used)).collect();
        let frame_bytes = count.frame_bytes;
        Self { class, frame_bytes, states, blocks, holes, punched, used, ..Self::default() }
    }

    /// Returns the slot counts from which the size on disk is computed.
    pub(super) fn count(&self) -> SlotCount {
        let num_punched = u32::try_from(self.punched.len()).unwrap_or(u32::MAX);
        let frame_bytes = self.frame_bytes;
        SlotCount { frame_bytes, slots: self.len(), filled: self.len() - num_punched }
    }

    /// Returns the number of slots that fit in the files at their current length.
    pub(super) fn len(&self) -> u32 {
        u32::try_from(self.states.len()).unwrap_or(u32::MAX)
    }

    /// Returns the number of slots that are reserved but not yet written, or are being freed.
    pub(super) fn reserved(&self) -> u64 {
        let num_free = self.free.len() + self.holes.len() + self.failed.len();
        (self.states.len() - num_free - self.punched.len()) as u64 - self.used
    }

    /// Adds free slots, either with blocks or as holes, until there are `len` slots.
    pub(super) fn grow(&mut self, len: u32, have_blocks: bool) {
        let new = self.len()..len;
        if have_blocks {
            self.free.extend(new);
        } else {
            self.holes.extend(new);
        }
        let len = self.states.len().max(len as usize);
        self.states.resize(len, SlotState::Free);
        self.blocks.resize(len, Blocks::new(have_blocks));
    }

    /// Removes the slots numbered `len` and higher, which must be punched.
    pub(super) fn cut(&mut self, len: u32) {
        self.states.truncate(len as usize);
        self.blocks.truncate(len as usize);
        self.punched.split_off(&len);
    }

    /// Returns the number of slots that would remain if the punched slots at the end were removed.
    pub(super) fn end(&self) -> u32 {
        let is_punched = |slot: &u32| self.punched.contains(&(slot - 1));
        (1..=self.len()).rev().find(|slot| !is_punched(slot)).unwrap_or(0)
    }

    /// Marks punched slots as free, either with blocks or as holes.
    pub(super) fn refill(&mut self, slots: impl Iterator<Item = u32>, have_blocks: bool) {
        for slot in slots {
            self.punched.remove(&slot);
            self.blocks[slot as usize] = Blocks::new(have_blocks);
            self.left(SlotId::new(self.class, slot));
        }
    }

    /// Returns the maximum number of slots that `take_for_punch` can take.
    pub(super) fn num_spare(&self, with_holes: bool) -> u32 {
        let len = self.free.len() + if with_holes { self.holes.len() } else { 0 };
        u32::try_from(len).unwrap_or(u32::MAX)
    }

    /// Takes up to `most` free slots and returns them in ascending order. The caller must then call
    /// `punched` or `left` for each slot.
    pub(super) fn take_for_punch(&mut self, most: u32, with_holes: bool) -> Vec<u32> {
        let mut taken = Vec::new();
        while taken.len() < most as usize {
            let hole = if with_holes { self.holes.pop_back() } else { None };
            let Some(slot) = hole.or_else(|| self.free.pop_back()) else { break };
            self.states[slot as usize] = SlotState::Leaving;
            taken.push(slot);
        }
        taken.sort_unstable();
        taken
    }

    /// Records that the given slots were punched.
    pub(super) fn punched(&mut self, slots: impl Iterator<Item = u32>) {
        for slot in slots {
            self.states[slot as usize] = SlotState::Punched;
            self.punched.insert(slot);
        }
    }

    /// Reserves a free slot, preferring slots with blocks.
    pub(super) fn take(&mut self) -> Option<SlotId> {
        let holes = (!self.are_holes_held).then_some(&mut self.holes);
        let number = self.free.pop_front().or_else(|| holes?.pop_front())?;
        Some(self.reserve(number))
    }

    /// Reserves a slot whose writes keep failing, unless chunks can be evicted from other slots.
    pub(super) fn take_failed(&mut self) -> Option<SlotId> {
        let number = if self.used == 0 { self.failed.pop_front() } else { None }?;
        Some(self.reserve(number))
    }

    fn reserve(&mut self, number: u32) -> SlotId {
        let slot = SlotId::new(self.class, number);
        self.set(slot, SlotState::Reserved(false));
        slot
    }

    /// Returns true if the slot is reserved. A slot's owner may write to it only while it is
    /// reserved.
    pub(super) fn may_write(&self, slot: SlotId) -> bool {
        matches!(self.states.get(slot.number() as usize), Some(SlotState::Reserved(_)))
    }

    /// Marks the slot's record as possibly present, because a write to the slot has started.
    pub(super) fn unsure(&mut self, slot: SlotId) {
        self.set(slot, SlotState::Reserved(true));
    }

    pub(super) fn written(&mut self, slot: SlotId) {
        self.set(slot, SlotState::Used);
        self.used += 1;
        self.blocks[slot.number() as usize] = Blocks::Allocated;
        self.num_written += 1;
        if self.num_written >= WRITES_BEFORE_RETRY {
            self.num_written = 0;
            self.holes.extend(self.failed.pop_front());
        }
    }

    /// Records that a write to the slot failed for a reason other than a full file system.
    pub(super) fn write_failed(&mut self, slot: SlotId) {
        let blocks = &mut self.blocks[slot.number() as usize];
        let before = if let Blocks::Failed(num) = *blocks { num } else { 0 };
        *blocks = Blocks::Failed(before.saturating_add(1));
    }

    /// Starts freeing a slot and returns its previous state. The caller must then call `left` or
    /// `stays`. Returns None if no caller owns the slot.
    pub(super) fn leaving(&mut self, slot: SlotId) -> Option<SlotState> {
        let before = self.states.get(slot.number() as usize).copied();
        let before =
            before.filter(|state| matches!(state, SlotState::Reserved(_) | SlotState::Used))?;
        self.set(slot, SlotState::Leaving);
        self.used -= u64::from(before == SlotState::Used);
        Some(before)
    }

    /// Records that the slot is free and that its record is empty.
    pub(super) fn left(&mut self, slot: SlotId) {
        self.set(slot, SlotState::Free);
        let queue = match self.blocks[slot.number() as usize] {
            Blocks::Allocated => &mut self.free,
            Blocks::Failed(MAX_FAILURES..) => {
                self.num_written = 0;
                &mut self.failed
            }
            Blocks::Unknown | Blocks::Failed(_) => &mut self.holes,
        };
        queue.push_back(slot.number());
    }

    /// Returns the slot to its owner in its previous state.
    pub(super) fn stays(&mut self, slot: SlotId, before: SlotState) {
        self.set(slot, before);
        self.used += u64::from(before == SlotState::Used);
    }

    /// Returns all slots in `state`, in ascending order.
    pub(super) fn slots_in(&self, state: SlotState) -> Vec<SlotId> {
        (0..)
            .zip(&self.states)
            .filter(|(_, current)| **current == state)
            .map(|(slot, _)| SlotId::new(self.class, slot))
            .collect()
    }

    fn set(&mut self, slot: SlotId, state: SlotState) {
        self.states[slot.number() as usize] = state;
    }
}
