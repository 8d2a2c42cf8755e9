//! Finds a frame for a chunk: a free one, or one freed by evicting chunks.

use crate::evict::{ChunkId, Removal};
use crate::index::{HostEvent, TenantId};
use crate::io::{FrameId, SizeClass};
use crate::store::state::State;
use crate::store::tenants::quota::{FrameSource, group};
use crate::tier::host::FrameFor;

/// Maximum number of chunks evicted for one frame, and of chunks skipped because their frames do
/// not fit its purpose.
const MAX_VICTIMS: usize = 64;

/// Many chunks were spared because their frames do not fit.
struct TooManySpared;

impl State {
    /// Takes a frame of `class` from `source` for a child of `parent`, which is not evicted
    /// meanwhile.
    pub(crate) fn take_frame_under(
        &mut self,
        parent: Option<ChunkId>,
        source: FrameSource,
        (class, what_for): (SizeClass, FrameFor),
    ) -> Option<FrameId> {
        if source == FrameSource::Any
            && let Some(frame) = self.host.take(class, what_for)
        {
            return Some(frame); // nothing is evicted for it
        }
        if let Some(parent) = parent {
            self.hold(parent);
        }
        let frame = match source {
            FrameSource::Any => self.take_frame(class, what_for),
            FrameSource::Own(tenant) => self.take_own_frame(tenant, class, what_for),
            FrameSource::None => None,
        };
        if let Some(parent) = parent {
            self.unhold(parent);
        }
        frame
    }

    /// Takes a free frame, evicting chunks if needed; None if every frame that fits is in use. The
    /// caller pins the chunks that must stay.
    ///
    /// Chunks are evicted in the policy's order, whatever their size. If that frees no frame of
    /// this class, a slab of another class is emptied for it, a slice per call.
    fn take_frame(&mut self, class: SizeClass, what_for: FrameFor) -> Option<FrameId> {
        if let frame @ Some(_) = self.host.take(class, what_for) {
            return frame;
        }
        let mut frame = self.host.grow(class, what_for);
        if frame.is_none() {
            let is_useful = |state: &Self, id| state.is_frame_fit(id, class, what_for);
            let take = |state: &mut Self| state.host.grow(class, what_for);
            let evicted = self.evict_until(None, is_useful, take);
            frame = evicted.unwrap_or_else(|TooManySpared| self.take_frame_below_limit(class));
        }
        if frame.is_none() {
            self.host.set_hungry(class);
        }
        frame
    }

    /// Evicts chunks, of all tenants or of one, until `take` returns a frame. Spares chunks whose
    /// eviction would not be useful; Err if there were many.
    fn evict_until(
        &mut self,
        tenant: Option<TenantId>,
        is_useful: impl Fn(&Self, ChunkId) -> bool,
        mut take: impl FnMut(&mut Self) -> Option<FrameId>,
    ) -> Result<Option<FrameId>, TooManySpared> {
        let (mut frame, mut spared, mut num_evicted) = (None, Vec::new(), 0);
        while frame.is_none()
            && spared.len() < MAX_VICTIMS
            && num_evicted < MAX_VICTIMS
            && let Some(victim) = self.host_victim(tenant.map(group))
        {
            debug_assert_eq!(
                self.index[victim].host_evictable,
                Some(true),
                "a policy returns evictable chunks only"
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
        let is_many = spared.len() == MAX_VICTIMS;
        for id in spared {
            self.host_policy.set_evictable(id, true);
        }
        if is_many { Err(TooManySpared) } else { Ok(frame) }
    }

    fn is_frame_fit(&self, id: ChunkId, class: SizeClass, what_for: FrameFor) -> bool {
        let frame = self.index[id].host.frame();
        frame.is_none_or(|frame| self.host.is_fit(frame, class, what_for))
    }

    /// Takes a frame for saves from any chunk that may be evicted; the policy would propose many
    /// others first.
    fn take_frame_below_limit(&mut self, class: SizeClass) -> Option<FrameId> {
        for _ in 0..MAX_VICTIMS {
            if let Some(id) = self.host.next_below_limit(class)
                && self.index[id].host_evictable == Some(true)
            {
                self.evict(id);
                return self.host.take(class, FrameFor::Save);
            }
        }
        None
    }

    /// Takes a frame for a tenant at its quota, evicting some of its chunks.
    fn take_own_frame(
        &mut self,
        tenant: TenantId,
        class: SizeClass,
        what_for: FrameFor,
    ) -> Option<FrameId> {
        let quota = self.tenants.ceiling(tenant).host;
        if self.tenants.host_pages(tenant) > quota {
            return None; // its quota was lowered: `trim` comes first
        }
        let pages = self.host.pages(class);
        let is_useful = |state: &Self, id| {
            state.host.has_free(class, what_for) || state.is_frame_fit(id, class, what_for)
        };
        let take = |state: &mut Self| {
            let fits = state.tenants.host_pages(tenant) + pages <= quota;
            if fits { state.host.take(class, what_for) } else { None }
        };
        self.evict_until(Some(tenant), is_useful, take).unwrap_or(None)
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
