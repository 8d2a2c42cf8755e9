//! An open namespace of a disk directory: its files and its mutable state (slots, counters, queued
//! log lines and file growth). `open` creates the tier, and `growth` and `local` use it.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::budget::{self, SlotCount};
use super::files::SlotFiles;
use super::namespaces;
use super::root::OpenNamespace;
use super::slots::{SlotState, Slots};
use super::types::{DiskConfig, DiskStats, SlotId};
use crate::io::SizeClass;
use crate::sync::{Condvar, Mutex, MutexGuard, locked};
use crate::{Error, ErrorKind, Result};

/// Maximum number of queued log lines.
const MAX_EVENTS: usize = 64;

/// Mutable state of an open tier. A single lock guards the state and is never held during I/O.
#[derive(Debug, Default)]
pub(super) struct TierState {
    /// The slots of each size class, indexed by class.
    pub(super) slots: Vec<Slots>,
    /// Counters of the tier. The gauges in this struct are not maintained and stay zero.
    pub(super) stats: DiskStats,
    /// Total size of all other namespaces when last measured, in bytes.
    pub(super) foreign_bytes: u64,
    pub(super) next_sequence: u64,
    waiting: Vec<String>,
    logged: Vec<String>,
}

impl TierState {
    /// Returns a size class's slots, or None if there is no such class.
    pub(super) fn of(&mut self, class: SizeClass) -> Option<&mut Slots> {
        self.slots.get_mut(class.index())
    }

    /// Applies `change` to a size class's slots. Does nothing if there is no such class.
    pub(super) fn with(&mut self, class: SizeClass, change: impl FnOnce(&mut Slots)) {
        if let Some(slots) = self.of(class) {
            change(slots);
        }
    }

    /// Returns all slots in `state`, in ascending order in each class.
    pub(super) fn slots_in(&self, state: SlotState) -> Vec<SlotId> {
        self.slots.iter().flat_map(|slots| slots.slots_in(state)).collect()
    }

    pub(super) fn take(&mut self, class: SizeClass) -> Option<SlotId> {
        self.of(class)?.take()
    }

    /// Like `take`, but, as a last resort, reserves a slot whose writes keep failing.
    pub(super) fn take_any(&mut self, class: SizeClass) -> Option<SlotId> {
        let slots = self.of(class)?;
        slots.take().or_else(|| slots.take_failed())
    }

    pub(super) fn counts(&self) -> Vec<SlotCount> {
        self.slots.iter().map(Slots::count).collect()
    }

    /// Returns the namespace's size on disk, in bytes.
    pub(super) fn num_bytes(&self) -> u64 {
        budget::namespace_bytes(&self.counts())
    }

    /// Queues a log line unless the queue is full. Drops the line if it is already queued or was
    /// returned by the last `take_events` call that returned any lines.
    pub(super) fn event(&mut self, line: String) {
        if self.waiting.len() < MAX_EVENTS
            && !self.waiting.contains(&line)
            && !self.logged.contains(&line)
        {
            self.waiting.push(line);
        }
    }

    pub(super) fn take_events(&mut self) -> Vec<String> {
        let taken = std::mem::take(&mut self.waiting);
        if !taken.is_empty() {
            self.logged.clone_from(&taken);
        }
        taken
    }
}

/// The state of the thread that grows the files, if any.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum Grower {
    #[default]
    None,
    Busy,
    /// A thread is growing the files so slowly that callers stopped waiting for it at this time.
    /// These callers get no new slots until the thread is done.
    Slow(Instant),
}

/// File growth state.
#[derive(Debug, Default)]
pub(super) struct Growth {
    pub(super) grower: Grower,
    /// True if the last attempt to grow the files failed and was logged.
    pub(super) is_refused: bool,
    pub(super) num_to_reject: u32,
    pub(super) refused_at: Option<Instant>,
    /// True if the last attempt to grow the files failed because of the file system rather than the
    /// size limit.
    pub(super) is_full: bool,
    /// True if the last attempt to punch holes failed and was logged.
    pub(super) is_punch_refused: bool,
    pub(super) punch_refused_at: Option<Instant>,
}

/// Number of reservations rejected between a failed attempt to grow the files and the next attempt.
const REJECTIONS_BEFORE_RETRY: u32 = 256;

/// An open namespace of a disk directory. All methods are thread-safe.
///
/// No lock is held during system calls, so a slow or hung call does not delay other calls.
#[derive(Debug)]
pub struct DiskTier {
    pub(super) config: DiskConfig,
    /// The files of each size class, indexed by class.
    pub(super) files: Vec<SlotFiles>,
    pub(super) state: Mutex<TierState>,
    pub(super) growth: Mutex<Growth>,
    pub(super) grown: Condvar,
    /// None once the tier is closed. In-flight calls share ownership, and the last call to return
    /// releases the directory. A hung call keeps the directory locked, so there are never two
    /// owners. This field is declared last so that it is dropped last.
    pub(super) owner: Mutex<Option<Arc<OpenNamespace>>>,
}

impl DiskTier {
    pub(super) fn enter(&self) -> Result<Arc<OpenNamespace>> {
        let owner = locked(&self.owner).clone();
        owner.ok_or_else(|| Error::new(ErrorKind::Closed, "the disk tier is closed"))
    }

    /// Returns a size class's files, or `InvalidConfig` if there is no such class.
    pub(super) fn files_of(&self, class: SizeClass) -> Result<&SlotFiles> {
        self.files.get(class.index()).ok_or_else(|| {
            let message = format!("the disk tier has no size class {}", class.0);
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

    /// Prevents growth for a while after a failed attempt. `is_full` is true if the file system,
    /// rather than the size limit, prevented growth.
    pub(super) fn skip_growth(&self, is_full: bool) {
        let mut growth = self.growth();
        growth.is_full = is_full;
        (growth.num_to_reject, growth.refused_at) = (REJECTIONS_BEFORE_RETRY, Some(Instant::now()));
    }

    /// Counts a failure to add slots. Logs only the first failure since slots were last added.
    pub(super) fn note_refusal(&self, num_slots: u32, error: &io::Error) {
        let is_news = !std::mem::replace(&mut self.growth().is_refused, true);
        self.count_refusal(is_news.then(|| format!("grow by {num_slots} chunks: {error}")));
    }

    /// Counts a failure to grow the files or punch holes. Logs the failed operation if `news` names
    /// it.
    pub(super) fn count_refusal(&self, news: Option<String>) {
        let mut state = self.state();
        state.stats.grow_errors += 1;
        if let Some(what) = news {
            state.event(format!("disk tier in {}: cannot {what}", self.config.dir.display()));
        }
    }
}
