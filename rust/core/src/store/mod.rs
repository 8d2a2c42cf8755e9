//! The store: lookup, lease, reserve, commit.
//!
//! One index over the tiers behind one lock. No call waits for a disk but those that say so. A store that failed inside
//! (a panic under the lock) answers with misses from then on. It must not know Python, tokens' meaning or what pages hold.

mod check;
mod config;
mod load;
mod lookup;
mod save;
mod state;
mod stats;

use std::sync::{Arc, Mutex, MutexGuard};

pub use config::StoreConfig;
pub(crate) use load::Held;
pub use load::{LeasedFrame, Progress, TierName};
use lookup::Chunks;
pub use save::{Reservation, SaveRange};
use state::State;
pub use stats::{Counters, Gauges};

use crate::Result;
use crate::key::{ChunkKey, KeyChain};
use crate::lease::{ReadLease, WriteLease};
use crate::tier::host::HostTier;

/// Host arena and index of one process. All methods take `&self` and may be called from any thread.
#[derive(Debug)]
pub struct Store {
    inner: Arc<Inner>,
}

/// What the store and its leases share.
#[derive(Debug)]
pub(crate) struct Inner {
    state: Mutex<State>,
    arena_path: String,
    frame_bytes: u64,
    num_frames: u32,
    blocks_per_chunk: u32,
}

impl Inner {
    /// The books; None for ever after a panic under the lock.
    pub(crate) fn books(&self) -> Option<MutexGuard<'_, State>> {
        self.state.lock().ok()
    }

    /// The books of a store that still serves.
    fn open_books(&self) -> Option<MutexGuard<'_, State>> {
        self.books().filter(|state| !state.closed)
    }
}

/// What [`Store::lookup`] found, in blocks from position 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Lookup {
    /// In host memory.
    pub host_blocks: u32,
    /// In host memory or on disk.
    pub stored_blocks: u32,
}

/// What [`Store::reserve`] got: a lease for each chunk that has to be filled, and how many chunks could not be had.
#[derive(Debug, Default)]
pub struct Reserved {
    /// In order of the prefix.
    pub leases: Vec<WriteLease>,
    /// The first chunk without a frame or a parent, and all behind it.
    pub num_dropped: u32,
}

impl Store {
    /// Takes the memory. `InvalidConfig` names the setting that is wrong; `Io` if the system refuses.
    pub fn open(config: &StoreConfig) -> Result<Self> {
        let num_frames = config.num_frames()?;
        let host = HostTier::create(config.frame_bytes, num_frames)?;
        let arena_path = host.arena().path();
        let state = Mutex::new(State::new(host, config.eviction.policy(num_frames as usize)));
        let StoreConfig { frame_bytes, blocks_per_chunk, .. } = *config;
        Ok(Self { inner: Arc::new(Inner { state, arena_path, frame_bytes, num_frames, blocks_per_chunk }) })
    }

    /// Path that another process of this user may map, see [`crate::io::Arena::open`].
    pub fn arena_path(&self) -> &str {
        &self.inner.arena_path
    }

    /// Bytes of one frame.
    pub fn frame_bytes(&self) -> u64 {
        self.inner.frame_bytes
    }

    /// Frames in host memory.
    pub fn num_frames(&self) -> u32 {
        self.inner.num_frames
    }

    /// Blocks in a full chunk.
    pub fn blocks_per_chunk(&self) -> u32 {
        self.inner.blocks_per_chunk
    }

    fn chunks<'a>(&self, chain: &'a KeyChain) -> Chunks<'a> {
        Chunks::new(chain, self.inner.blocks_per_chunk)
    }

    /// How much of the chain is stored: full chunks, then the longest tail behind them. No side effect (I9).
    pub fn lookup(&self, chain: &KeyChain) -> Lookup {
        let Some(state) = self.inner.open_books() else { return Lookup::default() };
        let (host, any) = state.find(&self.chunks(chain));
        let per_chunk = self.inner.blocks_per_chunk;
        Lookup { host_blocks: host.blocks(per_chunk), stored_blocks: any.blocks(per_chunk) }
    }

    /// Pins what is in host of the chain's stored prefix.
    pub fn acquire(&self, chain: &KeyChain) -> ReadLease {
        let held = self.inner.open_books().map(|mut state| state.acquire(&self.chunks(chain)));
        ReadLease::new(Arc::clone(&self.inner), held)
    }

    /// Reserves frames for those chunks of `range` that are neither in host nor being filled.
    ///
    /// It stops at the first that cannot be had. `InvalidConfig` if the chain has not got the range.
    pub fn reserve(&self, chain: &KeyChain, range: SaveRange) -> Result<Reserved> {
        let chunks = self.chunks(chain);
        let wanted = range.check(&chunks)?;
        let Some(mut state) = self.inner.open_books() else {
            return Ok(Reserved { leases: Vec::new(), num_dropped: wanted });
        };
        let (reserved, num_dropped) = state.reserve(&chunks, range);
        drop(state);
        let lease = |(id, reservation)| WriteLease::new(Arc::clone(&self.inner), id, reservation);
        Ok(Reserved { leases: reserved.into_iter().map(lease).collect(), num_dropped })
    }

    /// Makes filled chunks visible; returns how many became so. One whose parent is gone is aborted; one whose parent is
    /// not visible yet becomes visible with it. Leases of another store are aborted.
    pub fn commit(&self, leases: impl IntoIterator<Item = WriteLease>) -> u32 {
        let (own, foreign): (Vec<_>, Vec<_>) = leases.into_iter().partition(|lease| lease.is_of(&self.inner));
        drop(foreign);
        let Some(mut state) = self.inner.books() else { return 0 };
        own.into_iter().map(|lease| state.commit(lease.disarm())).sum()
    }

    /// Forgets chunks and all that hangs on them, in every tier. Pinned ones cannot be found any more and are freed with
    /// their last pin. Returns how many were forgotten.
    pub fn discard(&self, keys: &[ChunkKey]) -> u64 {
        self.inner.books().map_or(0, |mut state| state.discard(keys))
    }

    /// Forgets everything in every tier. Pinned and reserved frames are freed when their owners end.
    pub fn clear(&self) {
        if let Some(mut state) = self.inner.books() {
            state.clear();
        }
    }

    /// Counters and gauges by name; all 0 after an internal failure.
    pub fn stats(&self) -> Vec<(&'static str, u64)> {
        let (counters, gauges) =
            self.inner.books().map_or_else(Default::default, |state| (state.counters, state.gauges()));
        counters.named().into_iter().chain(gauges.named()).collect()
    }

    /// Stops serving: lookups miss and reservations are dropped from now on. Leases end as ever.
    pub fn close(&self) {
        if let Some(mut state) = self.inner.books() {
            state.closed = true;
        }
    }

    /// Counts everything again and compares; for tests. The error is the first contradiction.
    #[doc(hidden)]
    pub fn check(&self) -> Result<(), String> {
        self.inner.books().ok_or_else(|| "the store failed".to_owned())?.check()
    }
}
