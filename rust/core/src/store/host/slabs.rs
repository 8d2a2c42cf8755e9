//! A store's share of a pool of several stores.

use std::sync::Arc;

use crate::Result;
use crate::pool::Pool;
use crate::store::config::StoreConfig;
use crate::store::disk::opener::Opener;
use crate::store::host::emptying::SlabRelease;
use crate::store::open::Store;
use crate::store::state::State;

impl Store {
    /// As [`Self::open`], in a pool of several stores. This store's share is `percent` of it, or an
    /// equal part.
    ///
    /// Ignores `config.host_bytes`. `InvalidConfig` also if its frames are too large for the pool's
    /// slabs.
    pub fn open_in(config: &StoreConfig, pool: &Arc<Pool>, percent: Option<u32>) -> Result<Self> {
        let config = &StoreConfig { host_bytes: pool.size_bytes(), ..config.clone() };
        Self::build(config, Some((pool, percent)), Self::opener(config, &pool.disk)?, Self::clock())
    }

    #[doc(hidden)]
    pub fn with_tier_in(
        config: &StoreConfig,
        pool: &Arc<Pool>,
        opener: Option<Opener>,
    ) -> Result<Self> {
        let config = &StoreConfig { host_bytes: pool.size_bytes(), ..config.clone() };
        Self::build(config, Some((pool, None)), opener, Self::clock())
    }

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
