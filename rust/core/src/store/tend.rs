//! What a store with limits does by itself: forgets what is too old, and trims what is beyond a quota that became smaller.
//!
//! A thread of its own looks once a second, so that neither a disk that hangs nor engines that rest hold it up.

use std::sync::Arc;
use std::time::Duration;

use super::Store;
use super::inner::Inner;
use super::state::State;
use crate::sync::thread::{self, JoinHandle};
use crate::{Error, Result};

/// How often it looks.
const LOOK_EVERY: Duration = Duration::from_secs(1);

impl State {
    /// Some of a round; `next` is where it is. True at its end.
    fn tend(&mut self, next: &mut usize) -> bool {
        if *next == 0 {
            self.look_at_bases();
        }
        let has_expired = self.expire_some();
        has_expired && !self.is_forgetting() && self.trim(next)
    }
}

impl Inner {
    /// One round, a slice a lock; false once the store ends.
    fn tend(&self) -> bool {
        let mut next = 0;
        loop {
            let done = self.with_books(|state| (!state.disk.stopping).then(|| state.tend(&mut next))).flatten();
            match done {
                Some(false) => thread::yield_now(),
                done => return done.is_some(),
            }
        }
    }
}

/// Starts the thread; `Io` if the system has none left.
pub(super) fn spawn(inner: &Arc<Inner>) -> Result<JoinHandle<()>> {
    let inner = Arc::clone(inner);
    let work = move || {
        while inner.tend() {
            let Some(state) = inner.books().filter(|state| !state.disk.stopping) else { return };
            if inner.tend.wait_timeout(state, LOOK_EVERY).is_err() {
                return;
            }
        }
    };
    let thread = thread::Builder::new().name("kvloft-tend".to_owned()).spawn(work);
    thread.map_err(|error| Error::io("the thread that looks after limits cannot be started", error))
}

impl Store {
    /// What the store's thread does each second, now; for tests.
    #[doc(hidden)]
    pub fn tend(&self) {
        self.inner.tend();
    }
}
