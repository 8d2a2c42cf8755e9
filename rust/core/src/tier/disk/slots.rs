//! Who has which slot. Pure state, no I/O.
//!
//! Invariant: free + reserved + used + retired = slots, and only a free slot is ever handed out.

use super::types::SlotId;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    /// The caller's; its record on disk is empty.
    Reserved,
    /// The caller's; a write failed part-way. `true`: the place itself may be bad.
    Failed(bool),
    Used,
    Retired,
}

/// How the caller's part with a slot ends, and what must happen to its record first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Release {
    /// It is nobody's: nothing to do.
    Nothing,
    /// Its record is empty already.
    Clean,
    /// Its record must be cleared first.
    Clear,
}

/// The state of every slot.
#[derive(Debug, Default)]
pub(super) struct Slots {
    states: Vec<State>,
    free: Vec<u32>,
    used: u64,
    retired: u64,
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

    /// Slots out of use.
    pub(super) fn retired(&self) -> u64 {
        self.retired
    }

    /// Slots that callers hold and have not written.
    pub(super) fn reserved(&self) -> u64 {
        self.states.len() as u64 - self.free.len() as u64 - self.used - self.retired
    }

    /// Adds free slots up to `len`; they are handed out in ascending order.
    pub(super) fn grow(&mut self, len: u32) {
        let old = self.len();
        self.states.resize(self.states.len().max(usize_of(len)), State::Free);
        self.free.splice(0..0, (old..len).rev());
    }

    /// At open: the slot holds a chunk. Call `collect_free` once all are marked.
    pub(super) fn mark_used(&mut self, slot: SlotId) {
        self.states[usize_of(slot.0)] = State::Used;
        self.used += 1;
    }

    /// At open: the slot is not to be used.
    pub(super) fn mark_retired(&mut self, slot: SlotId) {
        self.states[usize_of(slot.0)] = State::Retired;
        self.retired += 1;
    }

    /// Makes the list of free slots from the states.
    pub(super) fn collect_free(&mut self) {
        let states = &self.states;
        self.free = (0..self.len()).rev().filter(|&i| states[usize_of(i)] == State::Free).collect();
    }

    /// A free slot, now reserved.
    pub(super) fn take(&mut self) -> Option<SlotId> {
        let slot = self.free.pop()?;
        self.states[usize_of(slot)] = State::Reserved;
        Some(SlotId(slot))
    }

    /// Whether a caller may write the slot.
    pub(super) fn may_write(&self, slot: SlotId) -> bool {
        matches!(self.get(slot), Some(State::Reserved | State::Failed(_)))
    }

    /// A write went through.
    pub(super) fn written(&mut self, slot: SlotId) {
        self.states[usize_of(slot.0)] = State::Used;
        self.used += 1;
    }

    /// A write failed; `bad` where the place itself may be to blame.
    pub(super) fn failed(&mut self, slot: SlotId, bad: bool) {
        self.states[usize_of(slot.0)] = State::Failed(bad);
    }

    /// What must be done before the caller's slot can be `released`.
    pub(super) fn before_release(&self, slot: SlotId) -> Release {
        match self.get(slot) {
            Some(State::Reserved) => Release::Clean,
            Some(State::Failed(_) | State::Used) => Release::Clear,
            Some(State::Free | State::Retired) | None => Release::Nothing,
        }
    }

    /// The caller's slot is free again, or retired where its place is bad or its record could not be cleared.
    pub(super) fn released(&mut self, slot: SlotId, cleared: bool) {
        let state = &mut self.states[usize_of(slot.0)];
        match *state {
            State::Free | State::Retired => return,
            State::Used => self.used -= 1,
            State::Reserved | State::Failed(_) => {}
        }
        if cleared && *state != State::Failed(true) {
            *state = State::Free;
            self.free.push(slot.0);
        } else {
            *state = State::Retired;
            self.retired += 1;
        }
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
