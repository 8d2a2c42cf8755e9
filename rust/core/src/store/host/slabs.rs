//! A store's share of a pool of several stores.

use crate::store::host::emptying::SlabRelease;
use crate::store::open::Store;
use crate::store::state::State;

impl Store {
    /// Sets whether the store has a share of its pool. Without one, it keeps its slabs until other
    /// stores need them.
    pub fn set_active(&self, is_active: bool) {
        self.inner.with_state(|state| state.host.member().set_active(is_active));
    }

    /// Returns the number of slabs it has, and how many of them exceed its share.
    pub fn num_slabs(&self) -> (u32, u32) {
        let state = self.inner.lock();
        state.map(|state| state.host.member().num_slabs()).unwrap_or_default()
    }

    /// Releases memory beyond this store's share, if a store below its share needs it. Never waits;
    /// each call does a slice.
    pub fn release_slab(&self) -> SlabRelease {
        self.inner.with_state(State::release_slab).unwrap_or(SlabRelease::NotNeeded)
    }
}
