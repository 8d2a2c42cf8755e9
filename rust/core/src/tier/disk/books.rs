//! What changes while a tier is open: who has which slot, the counters, the few lines that a person
//! should see, and who grows the files. Data only.

use std::time::Instant;

use super::slots::Slots;
use super::types::DiskStats;

/// Events that wait to be taken, and events that are remembered as told.
const MAX_EVENTS: usize = 64;

/// All of it; the tier keeps it behind one lock, and no I/O happens under that.
#[derive(Debug, Default)]
pub(super) struct Books {
    pub(super) slots: Slots,
    /// The counters; gauges are left at zero.
    pub(super) stats: DiskStats,
    /// Bytes of other namespaces when last looked.
    pub(super) foreign_bytes: u64,
    pub(super) next_sequence: u64,
    waiting: Vec<String>,
    told: Vec<String>,
}

impl Books {
    /// Notes an event, up to a limit, and not again what was told lately.
    pub(super) fn event(&mut self, line: String) {
        if self.waiting.len() < MAX_EVENTS
            && !self.waiting.contains(&line)
            && !self.told.contains(&line)
        {
            self.waiting.push(line);
        }
    }

    /// The events noted since the last call.
    pub(super) fn take_events(&mut self) -> Vec<String> {
        let taken = std::mem::take(&mut self.waiting);
        if !taken.is_empty() {
            self.told.clone_from(&taken);
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
    /// It takes longer than anyone waits: until it ends the files are as good as full.
    Slow,
}

/// Who grows the files, and how that went.
#[derive(Debug, Default)]
pub(super) struct Growth {
    pub(super) grower: Grower,
    /// The last growth failed; a person was told.
    pub(super) is_refused: bool,
    pub(super) asks_to_skip: u32,
    pub(super) refused_at: Option<Instant>,
}
