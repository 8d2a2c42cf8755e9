//! An open disk directory: its parts, and the state that changes while it is open: the state of
//! each slot, the counters, the lines to log, and the thread that grows the files. `open` creates
//! it; `growth` and `local` use it.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::budget::{self, SlotCount};
use super::files::SlotFiles;
use super::namespaces;
use super::root::OpenNamespace;
use super::slots::Slots;
use super::types::{DiskConfig, DiskStats, SlotId};
use crate::io::SizeClass;
use crate::sync::{Condvar, Mutex, MutexGuard, locked};
use crate::{Error, ErrorKind, Result};

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

/// Number of reservations rejected after a failed growth before the next attempt.
const REJECTIONS_BEFORE_RETRY: u32 = 256;

/// An open disk directory of one namespace. All methods take `&self` and may be called from any
/// thread.
///
/// No lock is held during system calls, so a slow or hung call delays no other.
#[derive(Debug)]
pub struct DiskTier {
    pub(super) config: DiskConfig,
    /// By size class.
    pub(super) files: Vec<SlotFiles>,
    pub(super) state: Mutex<TierState>,
    pub(super) growth: Mutex<Growth>,
    pub(super) grown: Condvar,
    /// None once closed. Each call in progress shares ownership, and the last one to return
    /// releases the directory: a hung call keeps it, so there are never two owners. Declared last,
    /// so that it is dropped last.
    pub(super) owner: Mutex<Option<Arc<OpenNamespace>>>,
}

impl DiskTier {
    pub(super) fn enter(&self) -> Result<Arc<OpenNamespace>> {
        let owner = locked(&self.owner).clone();
        owner.ok_or_else(|| Error::new(ErrorKind::Closed, "the disk tier was closed"))
    }

    /// The files of a size class. Err if there is no such class.
    pub(super) fn files_of(&self, class: SizeClass) -> Result<&SlotFiles> {
        self.files.get(class.index()).ok_or_else(|| {
            let message = format!("a disk tier has no frames of size class {}", class.0);
            Error::invalid(message)
        })
    }

    pub(super) fn state(&self) -> MutexGuard<'_, TierState> {
        locked(&self.state)
    }

    pub(super) fn growth(&self) -> MutexGuard<'_, Growth> {
        locked(&self.growth)
    }

    pub(super) fn io_error(&self, verb: &str, slot: SlotId, error: io::Error) -> Error {
        let message =
            format!("cannot {verb} a chunk in {}", namespaces::dir_of(&self.config).display());
        Error::io(message, error).with_context("slot", slot.number())
    }

    /// Rejects growth for a while, because the file system or the limit refused it.
    pub(super) fn skip_growth(&self, is_full: bool) {
        let mut growth = self.growth();
        growth.is_full = is_full;
        (growth.num_to_reject, growth.refused_at) = (REJECTIONS_BEFORE_RETRY, Some(Instant::now()));
    }

    /// Counts failures to add slots; logs the first one until slots are added again.
    pub(super) fn note_refusal(&self, num_slots: u32, error: &io::Error) {
        let is_news = !std::mem::replace(&mut self.growth().is_refused, true);
        self.count_refusal(is_news.then(|| format!("grow by {num_slots} chunks: {error}")));
    }

    /// Counts a failure to grow or to punch; logs what the tier cannot do, if that is news.
    pub(super) fn count_refusal(&self, news: Option<String>) {
        let mut state = self.state();
        state.stats.grow_errors += 1;
        if let Some(what) = news {
            state.event(format!("{} cannot {what}", self.config.dir.display()));
        }
    }
}
