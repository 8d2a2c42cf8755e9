//! What a store with limits does by itself: forgets what is too old, and trims what is beyond a quota that became smaller.
//!
//! A thread of its own looks once a second, so that neither a disk that hangs nor engines that rest hold it up.

use std::sync::Arc;
use std::time::Duration;

use crate::store::locked::Locked;
use crate::store::state::{Cause, State};
use crate::store::tenants::quota::group;
use crate::store::tenants::table::TENANTS_PER_SLICE;
use crate::sync::thread::{self, JoinHandle};
use crate::{Error, Result};

/// How often it looks.
const CHECK_EVERY: Duration = Duration::from_secs(1);
/// Trees that one call begins to forget.
const MAX_EXPIRED: usize = 64;
/// Chunks taken by one call of `trim`: some 0.2 ms.
const MAX_TRIMMED: u32 = 128;

impl State {
    /// Some of a round; `next` is where it is. True at its end.
    fn tend(&mut self, next: &mut usize) -> bool {
        if *next == 0 {
            self.update_bases();
        }
        let has_expired = self.expire_some();
        has_expired && !self.is_removing() && self.trim(next)
    }

    /// Begins to forget some of what expired; true if that was all.
    fn expire_some(&mut self) -> bool {
        for _ in 0..MAX_EXPIRED {
            match self.expiries.0.first().copied() {
                Some((expires_s, id)) if expires_s <= self.unix_s => {
                    self.expiries.0.remove(&(expires_s, id));
                    self.remove_tree_for(id, Cause::Age);
                }
                _ => return true,
            }
        }
        false
    }

    /// Looks at some tenants, from the `next`th on, and takes what they have beyond their quotas and may go; true at the end.
    fn trim(&mut self, next: &mut usize) -> bool {
        let mut budget = MAX_TRIMMED;
        for _ in 0..TENANTS_PER_SLICE {
            let Some(tenant) = self.tenants.nth(*next).filter(|_| self.tenants.limits.has_quotas) else { return true };
            let ceiling = self.tenants.ceiling(tenant);
            while budget > 0
                && self.tenants.num_frames(tenant) > ceiling.host
                && let Some(victim) = self.host_victim(Some(group(tenant)))
            {
                self.evict_for_quota(victim);
                budget -= 1;
            }
            while budget > 0
                && self.tenants.num_slots(tenant) > ceiling.disk
                && let Some(victim) = self.disk_policy.victim_of(group(tenant))
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

impl Locked {
    /// One round, a slice a lock; false once the store ends.
    pub(crate) fn tend(&self) -> bool {
        let mut next = 0;
        loop {
            let done = self.with_state(|state| (!state.disk.stopping).then(|| state.tend(&mut next))).flatten();
            match done {
                Some(false) => thread::yield_now(),
                done => return done.is_some(),
            }
        }
    }
}

/// Starts the thread; `Io` if the system has none left.
pub(crate) fn spawn(inner: &Arc<Locked>) -> Result<JoinHandle<()>> {
    let inner = Arc::clone(inner);
    let work = move || {
        while inner.tend() {
            let Some(state) = inner.lock().filter(|state| !state.disk.stopping) else { return };
            if inner.tend.wait_timeout(state, CHECK_EVERY).is_err() {
                return;
            }
        }
    };
    let thread = thread::Builder::new().name("kvloft-tend".to_owned()).spawn(work);
    thread.map_err(|error| Error::io("the thread that looks after limits cannot be started", error))
}
