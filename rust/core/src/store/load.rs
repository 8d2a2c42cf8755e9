//! Loads: pins chunks in host memory, queues disk reads for the rest, and reports progress.

use std::iter::Sum;

use crate::evict::ChunkId;
use crate::index::{Entry, HostEvent, HostState};
use crate::io::FrameId;
use crate::key::ChunkKey;
use crate::store::lookup::{Lookup, Prefix};
use crate::store::state::State;

/// The tier that held a chunk when its lease was acquired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TierName {
    /// The chunk was in host memory.
    Host,
    /// The chunk was only on disk.
    Disk,
}

/// A frame covered by a read lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeasedFrame {
    /// The frame to copy from.
    pub frame: FrameId,
    /// The chunk's key.
    pub key: ChunkKey,
    /// The tier that held the chunk when the lease was acquired.
    pub tier: TierName,
}

/// Progress of a read lease, in units.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Number of leading units that are ready and pinned.
    pub ready_units: u32,
    /// Number of units that follow the ready units and are still being read.
    pub pending_units: u32,
}

impl Sum for Progress {
    fn sum<I: Iterator<Item = Self>>(every: I) -> Self {
        every.fold(Self::default(), |sum, one| Self {
            ready_units: sum.ready_units.saturating_add(one.ready_units),
            pending_units: sum.pending_units.saturating_add(one.pending_units),
        })
    }
}

/// One prefix's chunks under a read lease: first the chunks in host memory, then the chunks that
/// were only on disk.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// The last chunk that was in host memory. A hold on this chunk pins the first `num_host`
    /// chunks.
    host_end: Option<ChunkId>,
    num_host: u32,
    /// The chunks after `host_end`, in order, each held separately. The first `ready` chunks are
    /// visible.
    loads: Vec<ChunkId>,
    ready: usize,
}

impl Held {
    fn ready_end(&self) -> Option<ChunkId> {
        self.ready.checked_sub(1).map_or(self.host_end, |last| self.loads.get(last).copied())
    }

    fn num_pins(&self) -> u64 {
        u64::from(self.num_host) + self.loads.len() as u64
    }
}

/// Maximum number of ancestors `touch_disk` searches for an on-disk chunk.
const MAX_TOUCH_STEPS: usize = 64;

impl State {
    /// Holds the leading chunks in host memory and queues reads for the chunks after them. Only
    /// this method verifies that the chunks belong to the prefix.
    pub(crate) fn acquire(&mut self, prefix: &Prefix<'_>) -> Held {
        let Lookup { host_units, stored_units } = self.find_verified(prefix);
        let mut held = Held { host_end: self.visible(prefix, host_units), ..Held::default() };
        if stored_units > host_units {
            held.loads = self.want_reads(prefix, host_units, stored_units);
        }
        if let Some(end) = held.host_end {
            held.num_host = self.index[end].depth + 1;
            self.hold(end);
            self.host_policy.touch(end);
        }
        self.touch_disk(held.loads.last().copied().or(held.host_end));
        self.stats.pins += held.num_pins();
        self.stats.read_leases += 1;
        held
    }

    /// Queues reads for stored units `from..to`. Holds and returns their chunks, up to the first
    /// unreadable chunk.
    fn want_reads(&mut self, prefix: &Prefix<'_>, from: u32, to: u32) -> Vec<ChunkId> {
        let end = self.index.get(&prefix.key_of(to));
        let above = end.into_iter().flat_map(|id| self.index.ancestry(id));
        let mut loads: Vec<_> = above.take_while(|id| self.index[*id].depth >= from).collect();
        loads.reverse();
        let num_readable = loads.iter().position(|&id| !self.want_read(id)).unwrap_or(loads.len());
        loads.truncate(num_readable);
        loads
    }

    /// Holds a chunk and queues its read, unless the chunk is already on its way to host memory.
    /// The chunk gets a frame when the read starts. Returns false if the chunk cannot be read.
    fn want_read(&mut self, id: ChunkId) -> bool {
        let entry = self.index[id];
        let is_readable =
            entry.disk.is_stored() && self.now.as_secs() >= u64::from(entry.unreadable_until_s);
        let may_come = entry.parent.is_none_or(|parent| !self.index[parent].host.is_absent());
        let is_saving = matches!(entry.host, HostState::Saving(_));
        let is_expected = entry.host.is_visible() || entry.is_pending() && !is_saving;
        if !is_expected {
            if !entry.host.is_absent() || !is_readable || !may_come {
                return false;
            }
            self.change_host(id, HostEvent::Want);
        }
        self.hold(id);
        true
    }

    fn touch_disk(&mut self, end: Option<ChunkId>) {
        let on_disk = |id: &ChunkId| self.index[*id].disk_evictable.is_some();
        let touched =
            end.and_then(|end| self.index.ancestry(end).take(MAX_TOUCH_STEPS).find(on_disk));
        if let Some(id) = touched {
            self.disk_policy.touch(id);
        }
    }

    /// Cuts off a lease before the first chunk whose read has failed or is paused. Returns the
    /// lease's progress.
    pub(crate) fn poll(&mut self, held: &mut Held) -> Progress {
        while held.loads.get(held.ready).is_some_and(|&id| self.index[id].host.is_visible()) {
            held.ready += 1;
        }
        let accepts_reads = self.disk.accepts_reads(self.now);
        let comes = |&id: &ChunkId| {
            self.index[id].is_pending() && (accepts_reads || !self.index[id].host.awaits_read())
        };
        if !held.loads.get(held.ready).is_some_and(comes) {
            self.release_loads(held, held.ready);
        }
        let ready_units = held.ready_end().map_or(0, |id| self.index[id].depth + 1);
        let last_unit = held.loads.last().map_or(ready_units, |&id| self.index[id].depth + 1);
        Progress { ready_units, pending_units: last_unit - ready_units }
    }

    pub(crate) fn frames(&mut self, held: &mut Held) -> Vec<LeasedFrame> {
        self.poll(held);
        let Some(end) = held.ready_end() else { return Vec::new() };
        let leased = |id| {
            let Entry { host, key, depth, .. } = self.index[id];
            let tier = if depth < held.num_host { TierName::Host } else { TierName::Disk };
            Some(LeasedFrame { frame: host.frame()?, key, tier })
        };
        let mut frames: Vec<_> = self.index.ancestry(end).filter_map(leased).collect();
        frames.reverse();
        frames
    }

    /// Keeps the first `keep` reads and releases the rest, deepest first. A queued read is canceled
    /// once no lease needs it.
    fn release_loads(&mut self, held: &mut Held, keep: usize) {
        let before = held.num_pins();
        for id in held.loads.split_off(keep).into_iter().rev() {
            self.unhold(id);
        }
        held.ready = held.ready.min(keep);
        self.stats.pins -= before - held.num_pins();
    }

    /// Ends a lease. In-flight reads continue, so that later lookups find their chunks.
    pub(crate) fn release(&mut self, mut held: Held) {
        self.release_loads(&mut held, 0);
        self.stats.pins -= held.num_pins();
        self.stats.read_leases -= 1;
        if let Some(end) = held.host_end {
            self.unhold(end);
        }
    }
}
