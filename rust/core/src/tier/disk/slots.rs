//! Who has which slot. Pure state, no I/O.
//!
//! Invariant: free + reserved + used = slots, and only a free slot is ever handed out. Free slots are handed out in the order
//! in which they became free, so a place that refuses writes is not tried again at once.

use std::collections::VecDeque;

use super::types::SlotId;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// `true`: its record on disk may not be empty.
    Free(bool),
    /// The caller's, not written; `true` as for `Free`.
    Reserved(bool),
    /// The caller's, with a chunk in it.
    Used,
    /// Its record is being cleared.
    Leaving,
}

/// What a slot was before it began to leave.
#[derive(Debug, Clone, Copy)]
pub(super) struct Before(State);

impl Before {
    /// Whether its record must be cleared before the slot is free.
    pub(super) fn may_have_record(self) -> bool {
        matches!(self.0, State::Used | State::Reserved(true))
    }
}

/// The state of every slot.
#[derive(Debug, Default)]
pub(super) struct Slots {
    states: Vec<State>,
    free: VecDeque<u32>,
    used: u64,
}

impl Slots {
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
        self.states.len() as u64 - self.free.len() as u64 - self.used
    }

    /// Adds free slots up to `len`.
    pub(super) fn grow(&mut self, len: u32) {
        let old = self.len();
        self.states.resize(self.states.len().max(usize_of(len)), State::Free(false));
        self.free.extend(old..len);
    }

    /// At open: the slot holds a chunk. Call `collect_free` once all are marked.
    pub(super) fn mark_used(&mut self, slot: SlotId) {
        self.states[usize_of(slot.0)] = State::Used;
        self.used += 1;
    }

    /// At open: the slot is free, but its record could not be cleared.
    pub(super) fn mark_unsure(&mut self, slot: SlotId) {
        self.states[usize_of(slot.0)] = State::Free(true);
    }

    /// Makes the list of free slots from the states; those whose record could not be cleared come last.
    pub(super) fn collect_free(&mut self) {
        let states = &self.states;
        let in_state = |state| (0..self.len()).filter(move |&i| states[usize_of(i)] == state);
        self.free = in_state(State::Free(false)).chain(in_state(State::Free(true))).collect();
    }

    /// A free slot, now reserved.
    pub(super) fn take(&mut self) -> Option<SlotId> {
        let slot = self.free.pop_front()?;
        let state = &mut self.states[usize_of(slot)];
        *state = State::Reserved(*state == State::Free(true));
        Some(SlotId(slot))
    }

    /// Whether a caller may write the slot.
    pub(super) fn may_write(&self, slot: SlotId) -> bool {
        matches!(self.get(slot), Some(State::Reserved(_)))
    }

    /// A write of the record begins: from now on it may be there.
    pub(super) fn unsure(&mut self, slot: SlotId) {
        self.states[usize_of(slot.0)] = State::Reserved(true);
    }

    /// A write went through.
    pub(super) fn written(&mut self, slot: SlotId) {
        self.states[usize_of(slot.0)] = State::Used;
        self.used += 1;
    }

    /// Begins to take the slot from its caller: end it with `left` or `stays`. None if no caller has it.
    pub(super) fn leaving(&mut self, slot: SlotId) -> Option<Before> {
        let before = self.get(slot).filter(|state| matches!(state, State::Reserved(_) | State::Used))?;
        self.states[usize_of(slot.0)] = State::Leaving;
        self.used -= u64::from(before == State::Used);
        Some(Before(before))
    }

    /// The slot is free; its record is empty.
    pub(super) fn left(&mut self, slot: SlotId) {
        self.states[usize_of(slot.0)] = State::Free(false);
        self.free.push_back(slot.0);
    }

    /// The slot stays its caller's, as it was.
    pub(super) fn stays(&mut self, slot: SlotId, before: Before) {
        self.states[usize_of(slot.0)] = before.0;
        self.used += u64::from(before.0 == State::Used);
    }

    /// Every slot that holds a chunk, in ascending order.
    pub(super) fn all_used(&self) -> Vec<SlotId> {
        (0..self.len()).filter(|&i| self.states[usize_of(i)] == State::Used).map(SlotId).collect()
    }

    fn get(&self, slot: SlotId) -> Option<State> {
        self.states.get(usize_of(slot.0)).copied()
    }
}

fn usize_of(slot: u32) -> usize {
    usize::try_from(slot).expect("a 32-bit slot number fits an address")
}
