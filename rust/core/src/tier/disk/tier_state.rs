//! State that changes while a tier is open: the state of each slot, the counters, the lines to log,
//! and the thread that grows the files. Data only.

use std::time::Instant;

use super::budget::{self, SlotCount};
use super::slots::Slots;
use super::types::{DiskStats, SlotId};
use crate::io::SizeClass;

/// Limits of pending events, and of events remembered as logged.
const MAX_EVENTS: usize = 64;

/// The whole state; the tier keeps it behind one lock, and does no I/O under it.
#[derive(Debug, Default)]
pub(super) struct TierState {
    /// By size class.
    pub(super) slots: Vec<Slots>,
    /// The counters; gauges are left at zero.
    pub(super) stats: DiskStats,
    /// Bytes of other namespaces at the last measurement.
    pub(super) foreign_bytes: u64,
    pub(super) next_sequence: u64,
    waiting: Vec<String>,
    logged: Vec<String>,
}

impl TierState {
    /// The slots of a size class, if there is one.
    pub(super) fn of(&mut self, class: SizeClass) -> Option<&mut Slots> {
        self.slots.get_mut(class.index())
    }

    /// Changes the slots of a size class that exists.
    pub(super) fn with(&mut self, class: SizeClass, change: impl FnOnce(&mut Slots)) {
        if let Some(slots) = self.of(class) {
            change(slots);
        }
    }

    /// A free slot of a class, now reserved.
    pub(super) fn take(&mut self, class: SizeClass) -> Option<SlotId> {
        self.of(class)?.take()
    }

    pub(super) fn counts(&self) -> Vec<SlotCount> {
        self.slots.iter().map(Slots::count).collect()
    }

    /// Bytes of the namespace on disk.
    pub(super) fn num_bytes(&self) -> u64 {
        budget::namespace_bytes(&self.counts())
    }

    /// Queues a line for the log, up to a limit; skips lines that were logged recently.
    pub(super) fn event(&mut self, line: String) {
        if self.waiting.len() < MAX_EVENTS
            && !self.waiting.contains(&line)
            && !self.logged.contains(&line)
        {
            self.waiting.push(line);
        }
    }

    /// The events noted since the last call.
    pub(super) fn take_events(&mut self) -> Vec<String> {
        let taken = std::mem::take(&mut self.waiting);
        if !taken.is_empty() {
            self.logged.clone_from(&taken);
        }
        taken
    }
}

/// Whether a thread grows the files now.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum Grower {
    #[default]
    None,
    Busy,
    /// It takes longer than callers wait; until it ends, the files count as full.
    Slow,
}

/// Who grows the files, and how that went.
#[derive(Debug, Default)]
pub(super) struct Growth {
    pub(super) grower: Grower,
    /// The last growth failed and was logged.
    pub(super) is_refused: bool,
    pub(super) num_to_reject: u32,
    pub(super) refused_at: Option<Instant>,
    /// The file system refused it, not the cap.
    pub(super) is_full: bool,
    /// The last punch failed and was logged.
    pub(super) is_punch_refused: bool,
    pub(super) punch_refused_at: Option<Instant>,
}
