//! What a store with limits does by itself: forgets what is too old, and trims what is beyond a quota that became smaller.
//!
//! A thread of its own looks once a second, so that neither a disk that hangs nor engines that rest hold it up.

use std::sync::Arc;
use std::time::Duration;

use super::inner::Inner;
use super::owners::OWNERS;
use super::quota::group;
use super::state::{State, Why};
use crate::sync::thread::{self, JoinHandle};
use crate::{Error, Result};

/// How often it looks.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Trees that one call begins to forget.
const MAX_EXPIRED: usize = 64;
/// Chunks taken by one call of `trim`: some 0.2 ms.
const MAX_TRIMMED: u32 = 128;

impl State {
    /// Some of a round; `next` is where it is. True at its end.
    fn tend(&mut self, next: &mut usize) -> bool {
        if *next == 0 {
            self.look_at_bases();
        }
        let has_expired = self.expire_some();
        has_expired && !self.is_forgetting() && self.trim(next)
    }

    /// Begins to forget some of what expired; true if that was all.
    fn expire_some(&mut self) -> bool {
        for _ in 0..MAX_EXPIRED {
            match self.ages.0.first().copied() {
                Some((expires_s, id)) if expires_s <= self.unix_s => {
                    self.ages.0.remove(&(expires_s, id));
                    self.doom_for(id, Why::Age);
                }
                _ => return true,
            }
        }
        false
    }

    /// Looks at some owners, from the `next`th on, and takes what they have beyond their quotas and may go; true at the end.
    fn trim(&mut self, next: &mut usize) -> bool {
        let mut budget = MAX_TRIMMED;
        for _ in 0..OWNERS {
            let Some(owner) = self.owners.nth(*next).filter(|_| self.owners.limits.has_quotas) else { return true };
            let ceiling = self.owners.ceiling(owner);
            while budget > 0
                && self.owners.num_frames(owner) > ceiling.host
                && let Some(victim) = self.host_victim(Some(group(owner)))
            {
                self.evict_for_quota(victim);
                budget -= 1;
            }
            while budget > 0
                && self.owners.num_slots(owner) > ceiling.disk
                && let Some(victim) = self.disk_policy.victim_of(group(owner))
            {
                self.drop_for_quota(victim);
                budget -= 1;
            }
            if budget == 0 {
                return false;
            }
            *next += 1;
        }
        false
    }
}

impl Inner {
    /// One round, a slice a lock; false once the store ends.
    pub(super) fn tend(&self) -> bool {
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
