//! The public methods of [`Store`]: lookup, leases, saves, removal, statistics and tenants.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::evict::TenantId;
use crate::io::FRAME_ALIGN;
use crate::key::{ChunkKey, SaltTag};
use crate::store::config::ArenaInfo;
use crate::store::disk::work::Clearing;
use crate::store::host::emptying::SlabRelease;
use crate::store::locked::{ReadLease, WriteLease};
use crate::store::lookup::{Anchors, Lookup, Prefix};
use crate::store::open::Store;
use crate::store::save::{Reserved, SaveRequest};
use crate::store::state::State;
use crate::store::tenants::limits::Ceiling;
use crate::store::tenants::table::TENANTS_PER_SLICE;
use crate::{Event, Result};

/// How long `clear` waits for the disk to be cleared. After that, a disk thread clears the disk in
/// the background.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(5);

/// Usage and limits of one tenant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tenant {
    /// The salt's tag, or None for requests without a salt.
    pub tag: Option<SaltTag>,
    /// Host memory used by the tenant's frames, in bytes.
    pub host_bytes: u64,
    /// Disk space used by the tenant's slots, in bytes.
    pub disk_bytes: u64,
    /// The tenant's host memory quota, in bytes.
    pub max_host_bytes: Option<u64>,
    /// The tenant's disk quota, in bytes.
    pub max_disk_bytes: Option<u64>,
    /// Time to live of the tenant's chunks, in seconds.
    pub ttl_s: Option<u32>,
}

impl State {
    fn tenants(&self, next: &mut usize) -> (Vec<Tenant>, u64) {
        let if_limited = |pages: u64| Some(pages).filter(|pages| *pages != Ceiling::NONE);
        let bytes = |pages: u64| pages * FRAME_ALIGN;
        let tenant = |tenant: TenantId| {
            let ceiling = self.tenants.ceiling(tenant);
            Tenant {
                tag: self.tenants.tag(tenant),
                host_bytes: bytes(self.tenants.host_pages(tenant)),
                disk_bytes: bytes(self.tenants.disk_pages(tenant)),
                max_host_bytes: if_limited(ceiling.host).map(bytes),
                max_disk_bytes: if_limited(ceiling.disk).map(bytes),
                ttl_s: ceiling.ttl_s,
            }
        };
        let some: Vec<_> = (*next..*next + TENANTS_PER_SLICE)
            .map_while(|nth| self.tenants.nth(nth))
            .map(tenant)
            .collect();
        *next += some.len();
        (some, self.tenants.num_salts())
    }
}

impl Store {
    /// Returns the information that another process run by the same user needs to map the frames.
    pub fn arena(&self) -> &ArenaInfo {
        &self.inner.arena
    }

    /// Returns how many leading units of each prefix are stored, as one consistent snapshot. Treats
    /// the disk as empty while reads are paused. Has no side effects (I9).
    pub fn lookup_many(&self, prefixes: &[Prefix<'_>]) -> Vec<Lookup> {
        let find = |state: &mut State| prefixes.iter().map(|prefix| state.find(prefix)).collect();
        let found = self.inner.with_open_state(find);
        found.unwrap_or_else(|| vec![Lookup::default(); prefixes.len()])
    }

    /// Returns how many of a prefix's leading `anchors` are stored, and how many of these are
    /// proven.
    ///
    /// An anchor pairs a unit count with the key of the last counted unit. Anchors must be in
    /// ascending order. A prefix that starts at a proven anchor needs no earlier keys (see
    /// [`Prefix::first`]).
    pub fn anchors(&self, anchors: &[(u32, ChunkKey)]) -> Anchors {
        self.inner.with_open_state(|state| state.anchors(anchors)).unwrap_or_default()
    }

    /// Pins the parts of the prefixes that are in host memory and queues reads for the parts that
    /// are only on disk. Returns one lease that covers all prefixes.
    ///
    /// A read takes its frame when the read starts. Each prefix is leased up to the first chunk
    /// that gets no frame or cannot be read.
    pub fn acquire_all(&self, prefixes: &[Prefix<'_>]) -> ReadLease {
        let hold =
            |state: &mut State| prefixes.iter().map(|prefix| state.acquire(prefix)).collect();
        ReadLease::new(Arc::clone(&self.inner), self.inner.with_open_state(hold))
    }

    /// Reserves frames for chunks that are neither in host memory nor being filled. Returns one
    /// result per request. A request for dependent chunks stops at the first chunk that gets no
    /// frame, whereas a request for independent chunks skips such chunks.
    ///
    /// If `limit_bytes` is set, restricts this and all later saves to the first `limit_bytes` bytes
    /// of the arena. Reserves nothing and returns `InvalidConfig` if any request is invalid (see
    /// [`SaveRequest::check`]).
    pub fn reserve_many(
        &self,
        limit_bytes: Option<u64>,
        asked: &[SaveRequest<'_>],
    ) -> Result<Vec<Reserved<WriteLease>>> {
        let reserved = self.inner.with_open_state(|state| {
            if let Some(limit_bytes) = limit_bytes {
                state.host.limit(limit_bytes);
            }
            let num_classes = state.host.num_classes();
            asked.iter().try_for_each(|each| each.check_in(num_classes))?;
            state.warm(asked);
            Ok(asked.iter().map(|each| state.reserve(each)).collect::<Vec<_>>())
        });
        let none = || Ok(asked.iter().map(SaveRequest::dropped).collect());
        let lease = |(id, reservation)| WriteLease::new(Arc::clone(&self.inner), id, reservation);
        Ok(reserved.unwrap_or_else(none)?.into_iter().map(|each| each.map(lease)).collect())
    }

    /// Makes filled chunks visible. Returns how many became visible.
    ///
    /// A chunk becomes visible only after its parent. A save is aborted if its chunk's parent is
    /// gone or if the lease belongs to a different store.
    pub fn commit(&self, leases: impl IntoIterator<Item = WriteLease>) -> u32 {
        let leases = leases.into_iter();
        let mut ids = Vec::with_capacity(leases.size_hint().0);
        ids.extend(leases.filter(|lease| lease.is_of(&self.inner)).map(WriteLease::disarm));
        self.inner.with_state(|state| ids.into_iter().map(|id| state.commit(id)).sum()).unwrap_or(0)
    }

    /// Lets other saves reserve the chunks of these unfinished saves. If `if_contended` is true,
    /// affects only saves that other saves have waited for. Lookups miss the descendants of these
    /// chunks until another save makes the chunks visible. The frames stay reserved until the
    /// leases end.
    pub fn release_keys<'a>(
        &self,
        leases: impl Iterator<Item = &'a WriteLease>,
        if_contended: bool,
    ) {
        let ids = leases.filter(|lease| lease.is_of(&self.inner)).map(WriteLease::id);
        self.inner.with_state(|state| state.release_keys(ids, if_contended));
    }

    /// Removes chunks and their descendants from every tier. Returns how many chunks the first
    /// slice removed.
    ///
    /// Lookups miss these chunks immediately. Pinned chunks are freed when their last pin is
    /// released. Later calls remove the rest of a large tree slice by slice.
    pub fn discard(&self, keys: &[ChunkKey]) -> u64 {
        self.inner.with_state(|state| state.discard(keys)).unwrap_or(0)
    }

    /// Removes all chunks from every tier. Pinned and reserved frames are freed when their leases
    /// end.
    ///
    /// Lookups miss immediately. Waits up to five seconds for the disk to be cleared, so that a
    /// restart finds no chunks either. If the disk takes longer, logs an event and leaves the work
    /// to a disk thread. Returns true if no chunks are left on disk.
    pub fn clear(&self) -> bool {
        self.inner.with_state(State::clear);
        let cleared = |state: &State| {
            let is_cleared = state.disk.clearing == Clearing::No && state.disk.unfreed.is_empty();
            (is_cleared || !state.disk.cannot_settle_by(state.now)).then_some(is_cleared)
        };
        let is_cleared = self.inner.wait(Instant::now() + CLEAR_TIMEOUT, cleared);
        if !is_cleared {
            self.inner.with_state(|state| {
                state.log(Event::problem(
                    "disk tier: not cleared yet; still clearing in the background (a restart \
                     before the clear finishes would bring back the old chunks)",
                ));
            });
        }
        is_cleared
    }

    /// Returns true if chunks removed by a clear or an [`Evict`](super::Evict) may still be on disk,
    /// because reopening the directory would bring them back. Slots in bad sectors count for ten
    /// minutes.
    pub fn must_stay_open(&self) -> bool {
        self.inner.with_state(State::must_stay_open).unwrap_or(false)
    }

    /// Sets whether the store is entitled to a share of its pool. A store without a share keeps its
    /// slabs until other stores need them.
    pub fn set_active(&self, is_active: bool) {
        self.inner.with_state(|state| state.host.member.set_active(is_active));
    }

    /// Returns the number of slabs the store owns and how many of them exceed its share.
    pub fn num_slabs(&self) -> (u32, u32) {
        let state = self.inner.lock();
        state.map(|state| state.host.member.num_slabs()).unwrap_or_default()
    }

    /// Releases memory beyond this store's share if another store is below its own share and needs
    /// memory. Otherwise, frees a slab for one of this store's size classes that needs frames.
    /// Never blocks, and each call does a bounded amount of work.
    pub fn release_slab(&self) -> SlabRelease {
        self.inner.with_state(State::release_slab).unwrap_or(SlabRelease::NotNeeded)
    }

    /// Returns the log lines added since the last call: the store's lines, oldest first, followed
    /// by the disk tier's lines.
    pub fn take_events(&self) -> Vec<Event> {
        let mut events =
            self.inner.with_state(|state| std::mem::take(&mut state.events)).unwrap_or_default();
        let of_tier = self.inner.tier().map(|disk| disk.take_events()).unwrap_or_default();
        events.extend(of_tier.into_iter().map(Event::problem));
        events
    }

    /// Returns all counters and gauges by name. All values are 0 after an internal failure.
    pub fn stats(&self) -> Vec<(&'static str, u64)> {
        self.inner.lock().map(|state| state.stats()).unwrap_or_default().named()
    }

    /// Returns the `limit` tenants that use the most host memory (ties are broken by disk usage),
    /// and the number of salts that have chunks.
    pub fn tenants(&self, limit: usize) -> (Vec<Tenant>, u64) {
        let (mut all, mut next, mut num) = (Vec::new(), 0, 0);
        while let Some((some, num_salts)) = self.inner.with_state(|state| state.tenants(&mut next))
        {
            num = num_salts;
            if some.is_empty() {
                break;
            }
            all.extend(some);
            all.sort_by_key(|tenant: &Tenant| {
                std::cmp::Reverse((
                    tenant.host_bytes,
                    tenant.disk_bytes,
                    tenant.tag.map(|tag| tag.0),
                ))
            });
            all.truncate(limit);
        }
        all.retain(|tenant| tenant.host_bytes > 0 || tenant.disk_bytes > 0);
        (all, num)
    }
}
