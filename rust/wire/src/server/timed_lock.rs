//! One at a time: who cannot begin before a deadline is told so. It must not know what is done in a turn.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

/// Who has the turn.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    is_taken: Mutex<bool>,
    is_over: Condvar,
}

/// The turn; it is over when this goes, in whatever thread.
#[derive(Debug)]
pub(crate) struct Turn(Arc<Turns>);

impl Turns {
    /// None if another has it until the deadline.
    pub(crate) fn take(self: &Arc<Self>, deadline: Instant) -> Option<Turn> {
        let is_taken = self.is_taken.lock().unwrap_or_else(PoisonError::into_inner);
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self.is_over.wait_timeout_while(is_taken, left, |is_taken| *is_taken);
        let (mut is_taken, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let is_mine = !std::mem::replace(&mut *is_taken, true);
        drop(is_taken);
        is_mine.then(|| Turn(Arc::clone(self)))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *self.0.is_taken.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.0.is_over.notify_one();
    }
}
