//! Sweeper: once per second, removes expired chunks and evicts chunks of tenants that are over
//! their quotas.
//!
//! The sweeper runs on its own thread, so that it depends on neither the disk nor engine calls.

use std::sync::Arc;
use std::time::Duration;

use crate::store::locked::Locked;
use crate::store::state::{Cause, State};
use crate::store::tenants::table::TENANTS_PER_SLICE;
use crate::sync::thread::{self, JoinHandle};
use crate::{Error, Result};

const SWEEP_EVERY: Duration = Duration::from_secs(1);
/// Maximum number of tree removals to start per call of `State::expire_some`.
const MAX_EXPIRED: usize = 64;
/// Maximum number of chunks to evict per call of `State::trim`. Evicting this many chunks takes
/// about 0.2 ms.
const MAX_TRIMMED: u32 = 128;

impl State {
    /// Continues a round at tenant `next`. Returns true once the round is complete.
    fn sweep(&mut self, next: &mut usize) -> bool {
        if *next == 0 {
            self.update_bases();
        }
        let has_expired = self.expire_some();
        has_expired && !self.is_removing() && self.trim(next)
    }

    /// Starts removing a batch of expired chunks. Returns true if no expired chunks remain.
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

    /// Evicts chunks of tenants that are over their quotas, starting at tenant `next`. Returns true
    /// once all tenants have been visited.
    fn trim(&mut self, next: &mut usize) -> bool {
        let mut budget = MAX_TRIMMED;
        for _ in 0..TENANTS_PER_SLICE {
            let Some(tenant) = self.tenants.nth(*next).filter(|_| self.tenants.limits.has_quotas)
            else {
                return true;
            };
            let ceiling = self.tenants.ceiling(tenant);
            while budget > 0
                && self.tenants.host_pages(tenant) > ceiling.host
                && let Some(victim) = self.host_victim(Some(tenant))
            {
                self.stats.quota_evictions += 1;
                self.evict(victim);
                budget -= 1;
            }
            while budget > 0
                && self.tenants.disk_pages(tenant) > ceiling.disk
                && let Some(victim) = self.disk_policy.victim_of(tenant)
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
    /// Runs one round slice by slice, releasing the lock between slices. Returns false if the store
    /// is closing.
    pub(crate) fn sweep(&self) -> bool {
        let mut next = 0;
        loop {
            let done = self
                .with_state(|state| (!state.disk.stopping).then(|| state.sweep(&mut next)))
                .flatten();
            match done {
                Some(false) => thread::yield_now(),
                done => return done.is_some(),
            }
        }
    }
}

pub(crate) fn spawn(inner: &Arc<Locked>) -> Result<JoinHandle<()>> {
    let inner = Arc::clone(inner);
    let work = move || {
        while inner.sweep() {
            let Some(state) = inner.lock().filter(|state| !state.disk.stopping) else { return };
            if inner.sweep.wait_timeout(state, SWEEP_EVERY).is_err() {
                return;
            }
        }
    };
    let thread = thread::Builder::new().name("kvloft-sweep".to_owned()).spawn(work);
    thread.map_err(|error| Error::io("cannot start the sweeper thread for tenant limits", error))
}
