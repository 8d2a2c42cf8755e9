//! Loading: pin what is here, and say how far it got.

use super::lookup::Chunks;
use super::state::State;
use crate::evict::ChunkId;
use crate::index::Entry;
use crate::io::FrameId;
use crate::key::ChunkKey;

/// Where a chunk was when its lease was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TierName {
    /// In host memory.
    Host,
    /// On disk only.
    Disk,
}

impl TierName {
    /// `host` or `disk`.
    pub fn as_str(self) -> &'static str {
        match self {
            TierName::Host => "host",
            TierName::Disk => "disk",
        }
    }
}

/// A frame that a read lease covers. Blocks count from the prefix's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeasedFrame {
    /// Where to scatter from.
    pub frame: FrameId,
    /// The chunk.
    pub key: ChunkKey,
    /// Its first block.
    pub first_block: u32,
    /// How many blocks it has.
    pub num_blocks: u32,
    /// Where it was.
    pub tier: TierName,
}

/// How far a read lease is, in blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Ready and pinned, from position 0.
    pub ready_blocks: u32,
    /// Still being read behind those.
    pub pending_blocks: u32,
}

/// What a read lease holds: a visible prefix, and behind it chunks that are being read.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// The last chunk that was in host.
    host_end: Option<ChunkId>,
    /// Chunks behind it, in order; those before `ready` are visible.
    loads: Vec<ChunkId>,
    ready: usize,
    num_chunks: u32,
}

impl Held {
    fn end(&self) -> Option<ChunkId> {
        self.loads.last().copied().or(self.host_end)
    }
}

fn end_block(entry: &Entry) -> u32 {
    entry.first_block + entry.num_blocks
}

impl State {
    /// Holds the longest prefix that is in host.
    pub(crate) fn acquire(&mut self, chunks: &Chunks<'_>) -> Held {
        let (host, _) = self.find(chunks);
        let per_chunk = chunks.per_chunk();
        let host_end = match host.blocks(per_chunk) {
            0 => None,
            blocks => self.visible(chunks.key_of_blocks(blocks)),
        };
        let num_chunks = host_end.map_or(0, |id| self.index[id].depth + 1);
        let held = Held { host_end, loads: Vec::new(), ready: 0, num_chunks };
        if let Some(end) = held.end() {
            self.hold(end);
            self.host_policy.touch(end);
        }
        self.pins += u64::from(held.num_chunks);
        self.read_leases += 1;
        held
    }

    /// How far it is. What failed to load ends the lease there.
    pub(crate) fn poll(&self, held: &mut Held) -> Progress {
        while held.loads.get(held.ready).is_some_and(|&id| self.index[id].is_visible()) {
            held.ready += 1;
        }
        let ready_blocks = self.ready_end(held).map_or(0, |id| end_block(&self.index[id]));
        Progress { ready_blocks, pending_blocks: 0 }
    }

    fn ready_end(&self, held: &Held) -> Option<ChunkId> {
        held.ready.checked_sub(1).map_or(held.host_end, |last| held.loads.get(last).copied())
    }

    /// Every ready chunk, from position 0.
    pub(crate) fn frames(&self, held: &mut Held) -> Vec<LeasedFrame> {
        self.poll(held);
        let Some(end) = self.ready_end(held) else { return Vec::new() };
        let num_host = self.index[end].depth as usize + 1 - held.ready;
        let mut frames: Vec<_> = self
            .index
            .ancestry(end)
            .filter_map(|id| {
                let entry = &self.index[id];
                let tier = if (entry.depth as usize) < num_host { TierName::Host } else { TierName::Disk };
                let Entry { key, first_block, num_blocks, .. } = *entry;
                Some(LeasedFrame { frame: entry.host.frame()?, key, first_block, num_blocks, tier })
            })
            .collect();
        frames.reverse();
        frames
    }

    /// Ends a lease.
    pub(crate) fn release(&mut self, held: &Held) {
        self.pins -= u64::from(held.num_chunks);
        self.read_leases -= 1;
        if let Some(end) = held.end() {
            self.unhold(end);
        }
    }
}
