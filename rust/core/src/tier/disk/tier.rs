//! An open disk directory: its parts, and the calls in progress. `open` creates it; `growth` and
//! `local` use it.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::files::SlotFiles;
use super::namespaces;
use super::root::OpenNamespace;
use super::tier_state::{Growth, TierState};
use super::types::{DiskConfig, SlotId};
use crate::io::SizeClass;
use crate::sync::{Condvar, Mutex, MutexGuard, locked};
use crate::{Error, ErrorKind, Result};

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
        let mut state = self.state();
        state.stats.grow_errors += 1;
        if is_news {
            state.event(format!(
                "{} cannot grow by {num_slots} chunks: {error}",
                self.config.dir.display()
            ));
        }
    }
}
