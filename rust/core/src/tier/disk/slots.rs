//! Who has which slot. Pure state, no I/O.
//!
//! Invariant: free + reserved + used = slots, and only a free slot is ever handed out. Slots whose
//! blocks exist come first: a file system without room for more blocks still takes a write there.
//! The others may be holes, or refused a write. Each kind is handed out in the order in which its
//! slots became free, so a place that refuses writes is not tried again at once.

use std::collections::VecDeque;

use super::types::{DiskEntry, SlotId};

/// What a slot is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// `true`: its record on disk may not be empty.
    Free(bool),
    /// The caller's, not written; `true` as for `Free`.
    Reserved(bool),
    /// The caller's, with a chunk in it.
    Used,
    /// Its record is being cleared.
    Leaving,
}

impl State {
    /// Whether the record must be cleared before the slot is free.
    pub(super) fn may_have_record(self) -> bool {
        matches!(self, State::Used | State::Reserved(true))
    }
}

/// The state of every slot.
#[derive(Debug, Default)]
pub(super) struct Slots {
    states: Vec<State>,
    /// Whether the file system is known to have blocks for a slot.
    has_blocks: Vec<bool>,
    /// Free slots that have blocks.
    free: VecDeque<u32>,
    /// Free slots that may be holes.
    holes: VecDeque<u32>,
    /// No hole is handed out: the file system had no block for one.
    are_holes_held: bool,
    used: u64,
}

impl Slots {
    /// At open: `len` slots, those of `entries` with a chunk, those of `unsure` with a record that
    /// could not be cleared.
    pub(super) fn found(len: u32, entries: &[DiskEntry], unsure: &[SlotId]) -> Self {
        let mut states = vec![State::Free(false); len as usize];
        for slot in unsure {
            states[slot.0 as usize] = State::Free(true);
        }
        for entry in entries {
            states[entry.slot.0 as usize] = State::Used;
        }
        let is_clean = |&slot: &u32| states[slot as usize] == State::Free(false);
        let holes = (0..len).filter(is_clean).chain(unsure.iter().map(|slot| slot.0)).collect();
        let has_blocks = states.iter().map(|state| *state == State::Used).collect();
        Self { states, has_blocks, holes, used: entries.len() as u64, ..Self::default() }
    }

    /// Number of slots.
    pub(super) fn len(&self) -> u32 {
        u32::try_from(self.states.len()).unwrap_or(u32::MAX)
    }

    /// Slots that hold a chunk.
    pub(super) fn used(&self) -> u64 {
        self.used
    }

    /// Slots that callers hold and have not written.
    pub(super) fn reserved(&self) -> u64 {
        (self.states.len() - self.free.len() - self.holes.len()) as u64 - self.used
    }

    /// Adds free slots up to `len`, with blocks or as holes.
    pub(super) fn grow(&mut self, len: u32, have_blocks: bool) {
        let new = self.len()..len;
        if have_blocks {
            self.free.extend(new);
        } else {
            self.holes.extend(new);
        }
        let len = self.states.len().max(len as usize);
        self.states.resize(len, State::Free(false));
        self.has_blocks.resize(len, have_blocks);
    }

    /// A free slot, now reserved: one that has blocks if there is one.
    pub(super) fn take(&mut self) -> Option<SlotId> {
        let holes = (!self.are_holes_held).then_some(&mut self.holes);
        let slot = SlotId(self.free.pop_front().or_else(|| holes?.pop_front())?);
        let is_unsure = self.states[slot.0 as usize] == State::Free(true);
        self.set(slot, State::Reserved(is_unsure));
        Some(slot)
    }

    /// Whether a caller may write the slot.
    pub(super) fn may_write(&self, slot: SlotId) -> bool {
        matches!(self.states.get(slot.0 as usize), Some(State::Reserved(_)))
    }

    /// A write of the record begins: from now on it may be there.
    pub(super) fn unsure(&mut self, slot: SlotId) {
        self.set(slot, State::Reserved(true));
    }

    /// A write went through.
    pub(super) fn written(&mut self, slot: SlotId) {
        self.set(slot, State::Used);
        self.used += 1;
        self.has_blocks[slot.0 as usize] = true;
    }

    /// A write was refused, and not for lack of space: others come before this slot.
    pub(super) fn doubt(&mut self, slot: SlotId) {
        self.has_blocks[slot.0 as usize] = false;
    }

    /// Hands out no holes until `release_holes`: the file system has no blocks for them.
    pub(super) fn hold_holes(&mut self) {
        self.are_holes_held = true;
    }

    /// Hands out holes again.
    pub(super) fn release_holes(&mut self) {
        self.are_holes_held = false;
    }

    /// Begins to take the slot from its caller: end it with `left` or `stays`. None if no caller
    /// has it.
    pub(super) fn leaving(&mut self, slot: SlotId) -> Option<State> {
        let before = self.states.get(slot.0 as usize).copied();
        let before = before.filter(|state| matches!(state, State::Reserved(_) | State::Used))?;
        self.set(slot, State::Leaving);
        self.used -= u64::from(before == State::Used);
        Some(before)
    }

    /// The slot is free; its record is empty.
    pub(super) fn left(&mut self, slot: SlotId) {
        self.set(slot, State::Free(false));
        let queue = if self.has_blocks[slot.0 as usize] { &mut self.free } else { &mut self.holes };
        queue.push_back(slot.0);
    }

    /// The slot stays its caller's, as it was.
    pub(super) fn stays(&mut self, slot: SlotId, before: State) {
        self.set(slot, before);
        self.used += u64::from(before == State::Used);
    }

    /// Every slot that holds a chunk, in ascending order.
    pub(super) fn all_used(&self) -> Vec<SlotId> {
        (0..)
            .zip(&self.states)
            .filter(|(_, state)| **state == State::Used)
            .map(|(slot, _)| SlotId(slot))
            .collect()
    }

    fn set(&mut self, slot: SlotId, state: State) {
        self.states[slot.0 as usize] = state;
    }
}
