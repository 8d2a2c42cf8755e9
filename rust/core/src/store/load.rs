//! Loading: pin what is in host, start reading what is on disk, and say how far it got.

use super::lookup::{Chunks, Found};
use super::state::State;
use crate::evict::ChunkId;
use crate::index::{Entry, HostState};
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
    /// The last chunk of all, which is held, and with it its whole prefix.
    end: Option<ChunkId>,
    /// The last chunk that was in host.
    host_end: Option<ChunkId>,
    /// Chunks behind it, in order; those before `ready` are visible.
    loads: Vec<ChunkId>,
    ready: usize,
    num_chunks: u32,
}

impl Held {
    /// The last chunk that is ready.
    fn ready_end(&self) -> Option<ChunkId> {
        self.ready.checked_sub(1).map_or(self.host_end, |last| self.loads.get(last).copied())
    }
}

/// Ancestors looked at for one that is on disk, to tell the disk that it was used.
const MAX_TOUCH_STEPS: usize = 64;

impl State {
    /// Holds the longest prefix that is in host, and what can be brought there from disk.
    pub(crate) fn acquire(&mut self, chunks: &Chunks<'_>) -> Held {
        let (host, any) = self.find(chunks);
        let per_chunk = chunks.per_chunk();
        let full_end = host.chunks.checked_sub(1).and_then(|last| self.visible(chunks.key(last)));
        let mut held = Held { end: full_end, host_end: full_end, ..Held::default() };
        if any.blocks(per_chunk) > host.blocks(per_chunk) {
            self.start_reads(chunks, host.chunks, any, &mut held);
        }
        if held.loads.is_empty() && host.tail_blocks > 0 {
            held.host_end = self.visible(chunks.key_of_blocks(host.blocks(per_chunk)));
            held.end = held.host_end;
        }
        if let Some(end) = held.end {
            held.num_chunks = self.index[end].depth + 1;
            self.hold(end);
            self.touch(end);
        }
        self.pins += u64::from(held.num_chunks);
        self.read_leases += 1;
        held
    }

    /// Reads chunks behind `from` full ones as far as frames can be had.
    fn start_reads(&mut self, chunks: &Chunks<'_>, from: u32, to: Found, held: &mut Held) {
        let full = (from..to.chunks).map(|chunk| chunks.key(chunk));
        let tail = (to.tail_blocks > 0).then(|| chunks.key_of_blocks(to.blocks(chunks.per_chunk())));
        for key in full.chain(tail) {
            match self.index.get(key) {
                Some(id) if self.start_read(id) => held.loads.push(id),
                _ => break,
            }
            held.end = held.loads.last().copied();
        }
    }

    fn touch(&mut self, end: ChunkId) {
        self.host_policy.touch(end);
        let Some(books) = &mut self.disk else { return };
        let on_disk = |id: &ChunkId| self.index[*id].disk_evictable.is_some();
        if let Some(id) = self.index.ancestry(end).take(MAX_TOUCH_STEPS).find(on_disk) {
            books.policy.touch(id);
        }
    }

    /// How far it is. What failed to load ends the lease there.
    pub(crate) fn poll(&self, held: &mut Held) -> Progress {
        while held.loads.get(held.ready).is_some_and(|&id| self.index[id].is_visible()) {
            held.ready += 1;
        }
        let ready_blocks = held.ready_end().map_or(0, |id| self.index[id].end_block());
        let coming = held.loads.get(held.ready).is_some_and(|&id| {
            let entry = &self.index[id];
            matches!(entry.host, HostState::Loading(_))
                || matches!(entry.host, HostState::Waiting(_)) && !entry.detached
        });
        if !coming {
            held.loads.truncate(held.ready);
        }
        let last_block = held.loads.last().map_or(ready_blocks, |&id| self.index[id].end_block());
        Progress { ready_blocks, pending_blocks: last_block - ready_blocks }
    }

    /// Every ready chunk, from position 0.
    pub(crate) fn frames(&self, held: &mut Held) -> Vec<LeasedFrame> {
        self.poll(held);
        let Some(end) = held.ready_end() else { return Vec::new() };
        let num_host = held.host_end.map_or(0, |id| self.index[id].depth + 1);
        let leased = |id| {
            let Entry { host, key, first_block, num_blocks, depth, .. } = self.index[id];
            let tier = if depth < num_host { TierName::Host } else { TierName::Disk };
            Some(LeasedFrame { frame: host.frame()?, key, first_block, num_blocks, tier })
        };
        let mut frames: Vec<_> = self.index.ancestry(end).filter_map(leased).collect();
        frames.reverse();
        frames
    }

    /// Ends a lease. Reads under way go on: what they bring is found by others.
    pub(crate) fn release(&mut self, held: &Held) {
        self.pins -= u64::from(held.num_chunks);
        self.read_leases -= 1;
        if let Some(end) = held.end {
            self.unhold(end);
        }
    }
}
