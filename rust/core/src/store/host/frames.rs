//! Finds a frame for a chunk: a free one, or that of a chunk that is evicted for it.

use crate::evict::{ChunkId, Removal};
use crate::index::{HostEvent, TenantId};
use crate::io::FrameId;
use crate::store::state::State;
use crate::store::tenants::quota::{Room, group};
use crate::tier::host::FrameFor;

/// Most chunks skipped for one frame because their frames do not fit its purpose.
const MAX_SPARED: usize = 64;

impl State {
    /// Takes a frame from `room` for a child of `parent`, which is not evicted meanwhile.
    pub(crate) fn take_frame_under(
        &mut self,
        parent: Option<ChunkId>,
        room: Room,
        what_for: FrameFor,
    ) -> Option<FrameId> {
        if room == Room::Any
            && let Some(frame) = self.host.take(what_for)
        {
            return Some(frame); // nothing is evicted for it
        }
        if let Some(parent) = parent {
            self.hold(parent);
        }
        let frame = match room {
            Room::Any => self.take_frame(what_for),
            Room::Own(tenant) => self.take_own_frame(tenant, what_for),
            Room::None => None,
        };
        if let Some(parent) = parent {
            self.unhold(parent);
        }
        frame
    }

    /// Takes a free frame, evicting a chunk if needed; None if every frame that fits is in use. The
    /// caller holds chunks that must stay.
    fn take_frame(&mut self, what_for: FrameFor) -> Option<FrameId> {
        let mut frame = self.host.take(what_for).or_else(|| self.host.grow(what_for));
        let mut spared = Vec::new();
        while frame.is_none()
            && spared.len() < MAX_SPARED
            && let Some(victim) = self.host_victim(None)
        {
            debug_assert_eq!(
                self.index[victim].host_evictable,
                Some(true),
                "a policy returns evictable chunks only"
            );
            let its_frame = self.index[victim].host.frame();
            if its_frame.is_some_and(|its_frame| !self.host.is_fit(its_frame, what_for)) {
                self.host_policy.set_evictable(victim, false); // its frame does not fit, so evicting it would not help
                spared.push(victim);
                continue;
            }
            self.evict(victim);
            frame = self.host.take(what_for);
        }
        if spared.len() == MAX_SPARED {
            frame = frame.or_else(|| self.take_frame_below_limit());
        }
        for id in spared {
            self.host_policy.set_evictable(id, true);
        }
        frame
    }

    /// Takes a frame for saves from any chunk that may be evicted; the policy would propose many
    /// others first.
    fn take_frame_below_limit(&mut self) -> Option<FrameId> {
        for _ in 0..MAX_SPARED {
            if let Some(id) = self.host.next_below_limit()
                && self.index[id].host_evictable == Some(true)
            {
                self.evict(id);
                return self.host.take(FrameFor::Save);
            }
        }
        None
    }

    /// Takes a frame for a tenant at its quota, evicting one of its chunks.
    pub(crate) fn take_own_frame(
        &mut self,
        tenant: TenantId,
        what_for: FrameFor,
    ) -> Option<FrameId> {
        if self.tenants.num_frames(tenant) > self.tenants.ceiling(tenant).host {
            return None; // its quota was lowered: `trim` comes first
        }
        let has_free = self.host.has_free(what_for);
        let (mut frame, mut spared) = (None, Vec::new());
        while frame.is_none()
            && spared.len() < MAX_SPARED
            && let Some(victim) = self.host_victim(Some(group(tenant)))
        {
            let its_frame = self.index[victim].host.frame();
            if has_free || its_frame.is_some_and(|its_frame| self.host.is_fit(its_frame, what_for))
            {
                self.evict_for_quota(victim);
                frame = self.host.take(what_for);
            } else {
                self.host_policy.set_evictable(victim, false); // its frame does not fit, so evicting it would not help
                spared.push(victim);
            }
        }
        for id in spared {
            self.host_policy.set_evictable(id, true);
        }
        frame
    }

    /// Evicts a chunk from host memory.
    pub(crate) fn evict(&mut self, id: ChunkId) {
        self.stats.host_evictions += 1;
        let is_lost = self.cancel_write(id);
        self.stats.disk_dropped += u64::from(is_lost);
        self.stats.disk_unwritten += u64::from(is_lost);
        self.change_host(id, HostEvent::Leave(Removal::Evicted));
        self.settle(id);
    }

    /// Evicts a chunk from host memory because its tenant is at its quota.
    pub(crate) fn evict_for_quota(&mut self, id: ChunkId) {
        self.stats.quota_evictions += 1;
        self.evict(id);
    }
}
