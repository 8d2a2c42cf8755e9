//! Who is inside the tier, and whether it was closed. It never waits: the last call to leave a closed tier gives the
//! directory up, so a call that hangs keeps the directory, and there are never two owners.

use super::lock::DirLock;
use crate::sync::atomic::{AtomicU64, Ordering};

/// The bit that says "closed"; below it, the number of calls inside.
const CLOSED: u64 = 1 << 63;

#[derive(Debug)]
pub(super) struct Gate {
    state: AtomicU64,
    lock: DirLock,
}

/// A call that is inside.
#[derive(Debug)]
pub(super) struct Inside<'a>(&'a Gate);

impl Gate {
    /// An open gate to the directory that `lock` holds.
    pub(super) fn new(lock: DirLock) -> Self {
        Self { state: AtomicU64::new(0), lock }
    }

    /// Lets a call in; None once closed.
    pub(super) fn enter(&self) -> Option<Inside<'_>> {
        let inside = Inside(self);
        let before = self.state.fetch_add(1, Ordering::AcqRel);
        (before & CLOSED == 0).then_some(inside)
    }

    /// Lets nobody in any more.
    pub(super) fn close(&self) {
        if self.state.fetch_or(CLOSED, Ordering::AcqRel) & !CLOSED == 0 {
            self.lock.release();
        }
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        if self.0.state.fetch_sub(1, Ordering::AcqRel) == CLOSED | 1 {
            self.0.lock.release();
        }
    }
}
