//! What a store is asked: lookup, lease, reserve, commit, and to forget.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::Result;
use crate::key::ChunkKey;
use crate::store::config::ArenaInfo;
use crate::store::disk::work::Clearing;
use crate::store::lease::{ReadLease, WriteLease};
use crate::store::lookup::{Anchors, Prefix};
use crate::store::open::Store;
use crate::store::save::{Got, ToSave};
use crate::store::state::State;

/// Longest wait of `clear` for the disk; it is cleared later where that is not enough.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(5);

/// Leading units of a prefix that are stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Lookup {
    /// In host memory.
    pub host_units: u32,
    /// In host memory or on disk.
    pub stored_units: u32,
}

/// What [`Store::reserve`] reserved: a lease for each chunk to be filled, and the number of chunks without a frame.
#[derive(Debug, Default)]
pub struct Reserved {
    /// In order of the prefix.
    pub leases: Vec<WriteLease>,
    /// The first chunk without a frame or a parent, and all behind it.
    pub num_dropped: u32,
}

impl Store {
    /// How another process of this user maps the frames.
    pub fn arena(&self) -> &ArenaInfo {
        &self.inner.arena
    }

    /// Returns how many leading units of the prefix are stored. A paused disk counts as empty. No side effect (I9).
    pub fn lookup<'a>(&self, prefix: impl Into<Prefix<'a>>) -> Lookup {
        self.lookup_many(&[prefix.into()]).pop().unwrap_or_default()
    }

    /// The same of many, at one moment.
    pub fn lookup_many(&self, prefixes: &[Prefix<'_>]) -> Vec<Lookup> {
        let find = |state: &mut State| prefixes.iter().map(|prefix| state.find(prefix)).collect();
        let found: Option<Vec<_>> = self.inner.with_open_state(find);
        let of = |(host_units, stored_units)| Lookup { host_units, stored_units };
        found.unwrap_or_else(|| vec![(0, 0); prefixes.len()]).into_iter().map(of).collect()
    }

    /// How many of a prefix's `anchors` are stored and known. An anchor is a number of units and the key of their prefix; they
    /// come in order. Behind a known one a prefix needs no other keys (see [`Prefix::first`]).
    pub fn anchors(&self, anchors: &[(u32, ChunkKey)]) -> Anchors {
        self.inner.with_open_state(|state| state.anchors(anchors)).unwrap_or_default()
    }

    /// Pins what is in host of the stored part of a prefix, and wants the rest of it from disk. A read takes a frame when it
    /// begins; the lease ends before a chunk that no frame can be had for, or that cannot be read.
    pub fn acquire<'a>(&self, prefix: impl Into<Prefix<'a>>) -> ReadLease {
        self.acquire_all(&[prefix.into()])
    }

    /// The same for many prefixes, as one lease; it counts the units of all of them.
    pub fn acquire_all(&self, prefixes: &[Prefix<'_>]) -> ReadLease {
        let hold = |state: &mut State| prefixes.iter().map(|prefix| state.acquire(prefix)).collect();
        ReadLease::new(Arc::clone(&self.inner), self.inner.with_open_state(hold))
    }

    /// Reserves frames for the chunks of `units` that are neither in host memory nor being filled.
    ///
    /// It stops at the first chunk without a frame. `InvalidConfig` if the prefix is shorter than `units`.
    pub fn reserve<'a>(&self, prefix: impl Into<Prefix<'a>>, units: Range<u32>) -> Result<Reserved> {
        let (leases, got) = self.reserve_many(None, &[(prefix.into(), units).into()])?;
        Ok(Reserved { leases, num_dropped: got[0].num_dropped })
    }

    /// As [`Self::reserve`] for many: the leases of all, one prefix's after the other's, and how many are whose. With a `limit`,
    /// saves take frames below it only from now on. Nothing is reserved if one prefix is shorter than its units.
    pub fn reserve_many(&self, limit: Option<u32>, asked: &[ToSave<'_>]) -> Result<(Vec<WriteLease>, Vec<Got>)> {
        let reserved = self.inner.with_open_state(|state| {
            if let Some(limit) = limit {
                state.host.limit(limit);
            }
            asked.iter().try_for_each(ToSave::check)?;
            state.warm(asked);
            let mut reserved = Vec::with_capacity(asked.iter().map(|each| each.units.len()).sum());
            let got = asked.iter().map(|each| state.reserve(each, &mut reserved)).collect();
            Ok((reserved, got))
        });
        let none = || asked.iter().map(|each| Got { num_reserved: 0, num_dropped: each.num_units() }).collect();
        let (reserved, got) = reserved.unwrap_or_else(|| Ok((Vec::new(), none())))?;
        let lease = |(id, reservation)| WriteLease::new(Arc::clone(&self.inner), id, reservation);
        Ok((reserved.into_iter().map(lease).collect(), got))
    }

    /// Makes filled chunks visible; returns how many became so. One whose parent is gone is aborted; one whose parent is
    /// not visible yet becomes visible with it. Leases of another store are aborted.
    pub fn commit(&self, leases: impl IntoIterator<Item = WriteLease>) -> u32 {
        let leases = leases.into_iter();
        let mut ids = Vec::with_capacity(leases.size_hint().0);
        ids.extend(leases.filter(|lease| lease.is_of(&self.inner)).map(WriteLease::disarm));
        self.inner.with_state(|state| ids.into_iter().map(|id| state.commit(id)).sum()).unwrap_or(0)
    }

    /// Forgets chunks and all that hangs on them, in every tier. Pinned ones cannot be found any more and are freed with
    /// their last pin. Returns how many are forgotten already; what hangs on a large one is forgotten piece by piece.
    pub fn discard(&self, keys: &[ChunkKey]) -> u64 {
        self.inner.with_state(|state| state.discard(keys)).unwrap_or(0)
    }

    /// Forgets everything in every tier. Pinned and reserved frames are freed when their owners end.
    ///
    /// Nothing is found from the moment it is called. It waits some seconds at most for the disk, so that nothing comes back
    /// after a restart either; a disk that does not answer is cleared later, and an event says so.
    pub fn clear(&self) {
        self.inner.with_state(State::clear);
        let cleared = |state: &State| {
            let is_cleared = state.disk.clearing == Clearing::No;
            (is_cleared || !state.disk.cannot_settle_by(state.now)).then_some(is_cleared)
        };
        if !self.inner.wait(Instant::now() + CLEAR_TIMEOUT, cleared) {
            self.inner.with_state(|state| {
                state.log("the disk tier is not cleared yet; until it is, a restart finds its chunks".to_owned());
            });
        }
    }

    /// Whether a clear has not reached the disk yet.
    pub fn is_clearing(&self) -> bool {
        self.inner.with_state(|state| state.disk.clearing != Clearing::No).unwrap_or(false)
    }

    /// Saves take frames below `num_frames` only from now on: workers cannot copy to the others yet. Reads from disk take any.
    pub fn limit_frames(&self, num_frames: u32) {
        self.inner.with_state(|state| state.host.limit(num_frames));
    }

    /// What a person should see in the log since the last call, oldest first: each once, and not many.
    pub fn take_events(&self) -> Vec<String> {
        let mut events = self.inner.with_state(|state| std::mem::take(&mut state.events)).unwrap_or_default();
        events.extend(self.inner.tier().map(|disk| disk.take_events()).unwrap_or_default());
        events
    }

    /// Counters and gauges by name; all 0 after an internal failure.
    pub fn stats(&self) -> Vec<(&'static str, u64)> {
        self.inner.lock().map(|state| state.stats()).unwrap_or_default().named()
    }

    /// What the store's thread does each second, now; for tests.
    #[doc(hidden)]
    pub fn tend(&self) {
        self.inner.tend();
    }
}
