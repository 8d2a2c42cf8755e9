//! Loading: pin what is in host, start reading what is on disk, and say how far it got.

use std::iter::Sum;

use crate::evict::ChunkId;
use crate::index::{Entry, HostEvent, HostState};
use crate::io::FrameId;
use crate::key::ChunkKey;
use crate::store::lookup::Prefix;
use crate::store::state::State;

/// Where a chunk was when its lease was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TierName {
    /// In host memory.
    Host,
    /// On disk only.
    Disk,
}

/// A frame that a read lease covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeasedFrame {
    /// Where to scatter from.
    pub frame: FrameId,
    /// The chunk.
    pub key: ChunkKey,
    /// Where it was.
    pub tier: TierName,
}

/// How far a read lease is, in units.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Ready and pinned, from position 0.
    pub ready_units: u32,
    /// Still being read behind those.
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

/// What a read lease holds of one prefix: a visible part, and behind it chunks that are being read.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// The last chunk that was in host: held, and with it its whole prefix, of `num_host` chunks.
    host_end: Option<ChunkId>,
    num_host: u32,
    /// Chunks behind it, in order, each held; those before `ready` are visible.
    loads: Vec<ChunkId>,
    ready: usize,
}

impl Held {
    /// The last chunk that is ready.
    fn ready_end(&self) -> Option<ChunkId> {
        self.ready.checked_sub(1).map_or(self.host_end, |last| self.loads.get(last).copied())
    }

    fn num_pins(&self) -> u64 {
        u64::from(self.num_host) + self.loads.len() as u64
    }
}

/// Ancestors looked at for one that is on disk, to tell the disk that it was used.
const MAX_TOUCH_STEPS: usize = 64;

impl State {
    /// Holds the longest prefix that is in host, and wants the chunks behind it from disk.
    pub(crate) fn acquire(&mut self, prefix: &Prefix<'_>) -> Held {
        let (host, any) = self.find(prefix);
        let mut held = Held { host_end: self.visible(prefix, host), ..Held::default() };
        if any > host {
            held.loads = self.want_reads(prefix, host, any);
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

    /// Chunks between two numbers of units that come from disk, each held. What was found is right as far as `to`.
    fn want_reads(&mut self, prefix: &Prefix<'_>, from: u32, to: u32) -> Vec<ChunkId> {
        let end = self.index.get(&prefix.key_of(to));
        let above = end.into_iter().flat_map(|id| self.index.ancestry(id));
        let mut loads: Vec<_> = above.take_while(|id| self.index[*id].depth >= from).collect();
        loads.reverse();
        let will_come = loads.iter().position(|&id| !self.want_read(id)).unwrap_or(loads.len());
        loads.truncate(will_come);
        loads
    }

    /// Wants a chunk from disk and holds it; false if it will not come. It takes a frame only when a disk thread begins.
    fn want_read(&mut self, id: ChunkId) -> bool {
        let entry = self.index[id];
        let is_readable = entry.disk.is_stored() && self.now.as_secs() >= u64::from(entry.unreadable_until_s);
        let may_come = entry.parent.is_none_or(|parent| !self.index[parent].host.is_absent());
        let is_saving = matches!(entry.host, HostState::Saving(_));
        let will_come = entry.host.is_visible() || entry.is_coming() && !is_saving;
        if !will_come {
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
        let touched = end.and_then(|end| self.index.ancestry(end).take(MAX_TOUCH_STEPS).find(on_disk));
        if let Some(id) = touched {
            self.disk_policy.touch(id);
        }
    }

    /// How far it is. What failed to load ends the lease there, and so does a tier that is left alone.
    pub(crate) fn poll(&mut self, held: &mut Held) -> Progress {
        while held.loads.get(held.ready).is_some_and(|&id| self.index[id].host.is_visible()) {
            held.ready += 1;
        }
        let answers = self.disk.answers(self.now);
        let comes = |&id: &ChunkId| self.index[id].is_coming() && (answers || !self.index[id].host.is_read());
        if !held.loads.get(held.ready).is_some_and(comes) {
            self.release_loads(held, held.ready);
        }
        let ready_units = held.ready_end().map_or(0, |id| self.index[id].depth + 1);
        let last_unit = held.loads.last().map_or(ready_units, |&id| self.index[id].depth + 1);
        Progress { ready_units, pending_units: last_unit - ready_units }
    }

    /// Every ready chunk, from position 0.
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

    /// Gives up the loads from the `keep`th on, deepest first: reads that have not begun end with their last lease.
    fn release_loads(&mut self, held: &mut Held, keep: usize) {
        let before = held.num_pins();
        for id in held.loads.split_off(keep).into_iter().rev() {
            self.unhold(id);
        }
        held.ready = held.ready.min(keep);
        self.stats.pins -= before - held.num_pins();
    }

    /// Ends a lease. Reads under way go on: what they bring is found by others.
    pub(crate) fn release(&mut self, mut held: Held) {
        self.release_loads(&mut held, 0);
        self.stats.pins -= held.num_pins();
        self.stats.read_leases -= 1;
        if let Some(end) = held.host_end {
            self.unhold(end);
        }
    }
}
