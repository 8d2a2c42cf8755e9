//! Finds frames for chunks: free frames, or frames freed by evicting other chunks.

use crate::evict::{ChunkId, Removal, TenantId};
use crate::index::HostEvent;
use crate::io::{FrameId, SizeClass};
use crate::store::state::State;
use crate::store::tenants::quota::FrameSource;
use crate::tier::host::FrameRequest;

/// Maximum number of chunks to evict for one frame. This many evictions take a few milliseconds.
const MAX_EVICTED: usize = 8192;
/// Number of evictions allowed even for a frame size that the store does not use yet.
const MIN_EVICTED: usize = 64;
/// Maximum number of chunks to spare while searching for one frame.
const MAX_SPARED: usize = 64;

/// The search stopped after sparing too many chunks with unsuitable frames.
struct TooManySpared;

impl State {
    /// Takes a frame from `source` for a child of `parent`. Never evicts `parent`.
    pub(crate) fn take_frame_under(
        &mut self,
        parent: Option<ChunkId>,
        source: FrameSource,
        request: FrameRequest,
    ) -> Option<FrameId> {
        if source == FrameSource::Any
            && let Some(frame) = self.host.take(request)
        {
            return Some(frame);
        }
        if let Some(parent) = parent {
            self.hold(parent);
        }
        let frame = match source {
            FrameSource::Any => self.take_frame(request),
            FrameSource::Own(tenant) => self.take_own_frame(tenant, request),
            FrameSource::None => None,
        };
        if let Some(parent) = parent {
            self.unhold(parent);
        }
        frame
    }

    /// Takes a free frame, evicting chunks if needed. Returns None if eviction frees no suitable
    /// frame. The caller must pin any chunks that must not be evicted.
    ///
    /// Evicts chunks in the policy's order, regardless of size. If that frees no frame of the
    /// requested class, a slab of a different class is emptied, one slice per call, and given to
    /// the requested class.
    fn take_frame(&mut self, request: FrameRequest) -> Option<FrameId> {
        if let frame @ Some(_) = self.host.take(request) {
            return frame;
        }
        let mut frame = self.host.grow(request);
        if frame.is_none() {
            let is_useful = |state: &Self, id| state.is_frame_fit(id, request);
            let take = |state: &mut Self| state.host.grow(request);
            let evicted = self.evict_until(request.class, None, is_useful, take);
            frame = evicted.unwrap_or_else(|TooManySpared| self.take_frame_below_limit(request));
        }
        if frame.is_none() {
            self.host.set_hungry(request);
        }
        frame
    }

    /// Evicts chunks of one tenant, or of all tenants, until `take` returns a frame. Spares chunks
    /// whose eviction would not help. Returns `TooManySpared` once `MAX_SPARED` chunks have been
    /// spared.
    ///
    /// A step saves thousands of chunks group by group, and the policy evicts them in roughly that
    /// order. Before a frame of one size becomes free, a step's chunks of every other size may have
    /// to be evicted. The next saves reuse their frames. Saves of a rare size must not evict all
    /// chunks of other sizes, so the limit grows with the number of in-use frames of the requested
    /// size.
    fn evict_until(
        &mut self,
        class: SizeClass,
        tenant: Option<TenantId>,
        is_useful: impl Fn(&Self, ChunkId) -> bool,
        mut take: impl FnMut(&mut Self) -> Option<FrameId>,
    ) -> Result<Option<FrameId>, TooManySpared> {
        let (mut frame, mut spared, mut num_evicted) = (None, Vec::new(), 0);
        let max_evicted = MAX_EVICTED.min(MIN_EVICTED + self.host.num_taken(class));
        while frame.is_none()
            && spared.len() < MAX_SPARED
            && num_evicted < max_evicted
            && let Some(victim) = self.host_victim(tenant)
        {
            debug_assert_eq!(
                self.index[victim].host_evictable,
                Some(true),
                "a policy only returns evictable chunks"
            );
            if is_useful(self, victim) {
                self.stats.quota_evictions += u64::from(tenant.is_some());
                self.evict(victim);
                num_evicted += 1;
                frame = take(self);
            } else {
                self.host_policy.set_evictable(victim, false);
                spared.push(victim);
            }
        }
        let is_many = spared.len() == MAX_SPARED;
        for id in spared {
            self.host_policy.set_evictable(id, true);
        }
        if is_many { Err(TooManySpared) } else { Ok(frame) }
    }

    fn is_frame_fit(&self, id: ChunkId, request: FrameRequest) -> bool {
        let frame = self.index[id].host.frame();
        frame.is_none_or(|frame| self.host.is_fit(frame, request))
    }

    /// Takes a frame for a save by evicting any chunk whose frame saves can use, because the policy
    /// would return too many chunks in unsuitable frames first.
    fn take_frame_below_limit(&mut self, request: FrameRequest) -> Option<FrameId> {
        for _ in 0..MAX_SPARED {
            if let Some(id) = self.host.next_below_limit(request.class)
                && self.index[id].host_evictable == Some(true)
            {
                self.evict(id);
                return self.host.take(request);
            }
        }
        None
    }

    /// Takes a frame for a tenant at its quota by evicting the tenant's own chunks. If that makes
    /// room in the quota but frees no frame of the requested class, takes any frame of that class,
    /// even another tenant's.
    fn take_own_frame(&mut self, tenant: TenantId, request: FrameRequest) -> Option<FrameId> {
        let quota = self.tenants.ceiling(tenant).host;
        if self.tenants.host_pages(tenant) > quota {
            return None; // the quota was lowered: the sweeper must evict the excess first
        }
        let pages = u64::from(self.host.pages(request.class));
        let is_useful =
            |state: &Self, id| state.host.has_free(request) || state.is_frame_fit(id, request);
        let fits = |state: &Self| state.tenants.host_pages(tenant) + pages <= quota;
        let take = |state: &mut Self| if fits(state) { state.host.grow(request) } else { None };
        let frame = self.evict_until(request.class, Some(tenant), is_useful, take).unwrap_or(None);
        if frame.is_none() && fits(self) { self.take_frame(request) } else { frame }
    }

    pub(crate) fn evict(&mut self, id: ChunkId) {
        self.stats.host_evictions += 1;
        let is_lost = self.cancel_write(id);
        self.stats.disk_dropped += u64::from(is_lost);
        self.stats.disk_unwritten += u64::from(is_lost);
        self.change_host(id, HostEvent::Leave(Removal::Evicted));
        self.settle(id);
    }
}
