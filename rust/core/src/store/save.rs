//! Saving: reserve a frame, then commit or abort. And forgetting: discard and clear.

use super::disk::Clearing;
use super::lookup::Chunks;
use super::state::State;
use crate::evict::{ChunkId, Removal};
use crate::index::{Entry, HostState, NewEntry};
use crate::io::FrameId;
use crate::key::ChunkKey;
use crate::{Error, ErrorKind, Result};

/// A frame reserved for one chunk. Blocks count from the prefix's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reservation {
    /// Number of this reservation, never used again by this store.
    pub ticket: u64,
    /// Where to gather to.
    pub frame: FrameId,
    /// The chunk.
    pub key: ChunkKey,
    /// Its first block.
    pub first_block: u32,
    /// How many blocks it has.
    pub num_blocks: u32,
}

/// Which chunks of a chain to save: full chunks [start, stop) and a tail of `tail_blocks` behind them (0: none).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SaveRange {
    /// First full chunk.
    pub start: u32,
    /// Behind the last full chunk.
    pub stop: u32,
    /// Blocks of the tail.
    pub tail_blocks: u32,
}

impl SaveRange {
    /// Chunks asked for; `InvalidConfig` if the chain has not got them all.
    pub(crate) fn check(self, chunks: &Chunks<'_>) -> Result<u32> {
        let Self { start, stop, tail_blocks } = self;
        let end = u64::from(stop) * u64::from(chunks.per_chunk()) + u64::from(tail_blocks);
        if start > stop || tail_blocks >= chunks.per_chunk() || end > u64::from(chunks.num_blocks()) {
            return Err(Error::new(ErrorKind::InvalidConfig, "no such chunks in this chain")
                .with_context("start", start)
                .with_context("stop", stop)
                .with_context("tail_blocks", tail_blocks)
                .with_context("num_blocks", chunks.num_blocks())
                .with_context("blocks_per_chunk", chunks.per_chunk()));
        }
        Ok(stop - start + u32::from(tail_blocks > 0))
    }
}

impl State {
    /// Reserves what is missing of a checked range; returns it and how many chunks could not be had.
    pub(crate) fn reserve(&mut self, chunks: &Chunks<'_>, range: SaveRange) -> (Vec<(ChunkId, Reservation)>, u32) {
        let mut reserved = Vec::new();
        let wanted = range.stop - range.start + u32::from(range.tail_blocks > 0);
        for nth in 0..wanted {
            let depth = range.start + nth;
            let num_blocks = if depth < range.stop { chunks.per_chunk() } else { range.tail_blocks };
            let first_block = depth * chunks.per_chunk();
            let key = *chunks.key_of_blocks(first_block + num_blocks);
            let parent_key = chunks.parent_key(depth);
            if self.index.get(&key).is_some_and(|id| self.index[id].host != HostState::Absent) {
                continue;
            }
            let Some((id, frame)) = self.reserve_one(key, parent_key, depth, first_block, num_blocks) else {
                let dropped = wanted - nth;
                self.counters.reserve_dropped += u64::from(dropped);
                return (reserved, dropped);
            };
            let ticket = self.new_ticket();
            reserved.push((id, Reservation { ticket, frame, key, first_block, num_blocks }));
        }
        (reserved, 0)
    }

    fn reserve_one(
        &mut self,
        key: ChunkKey,
        parent_key: ChunkKey,
        depth: u32,
        first_block: u32,
        num_blocks: u32,
    ) -> Option<(ChunkId, FrameId)> {
        let parent = if depth == 0 { None } else { Some(self.index.get(&parent_key)?) };
        if parent.is_some_and(|parent| self.index[parent].host == HostState::Absent) {
            return None;
        }
        let frame = self.take_frame_under(parent)?;
        let new = NewEntry { key, parent_key, parent, depth, first_block, num_blocks };
        let id = self.index.get(&key).unwrap_or_else(|| self.index.insert(new));
        self.enter_host(id, HostState::Reserved(frame));
        self.write_leases += 1;
        Some((id, frame))
    }

    /// A reserved chunk is filled; returns how many chunks became visible by it.
    pub(crate) fn commit(&mut self, id: ChunkId) -> u32 {
        let HostState::Reserved(frame) = self.index[id].host else { return 0 };
        self.write_leases -= 1;
        if self.index[id].detached {
            self.counters.aborts += 1;
            self.leave_host(id, Removal::Dropped);
            self.reap(id);
            return 0;
        }
        self.change_host(id, HostState::Waiting(frame));
        let risen = self.rise(id);
        self.counters.commits += u64::from(risen);
        risen
    }

    /// A reserved chunk will not be filled.
    pub(crate) fn abort(&mut self, id: ChunkId) {
        let HostState::Reserved(_) = self.index[id].host else { return };
        self.write_leases -= 1;
        self.counters.aborts += 1;
        if !self.index[id].detached {
            // Whatever hangs on it in host could only wait for it.
            let waits = |entry: &Entry| entry.host != HostState::Absent && !entry.detached;
            let behind: Vec<_> = self.index.children(id).filter(|&child| waits(&self.index[child])).collect();
            for child in behind {
                self.detach_tree(child);
            }
        }
        self.leave_host(id, Removal::Dropped);
        self.settle(id);
    }

    /// Forgets chunks and all that hangs on them; returns how many chunks are gone.
    pub(crate) fn discard(&mut self, keys: &[ChunkKey]) -> u64 {
        let mut discarded = 0;
        for key in keys {
            if let Some(id) = self.index.get(key) {
                discarded += self.detach_tree(id);
            }
        }
        self.counters.discards += discarded;
        discarded
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        let roots: Vec<_> = self
            .index
            .iter()
            .filter(|(_, entry)| !entry.detached && entry.parent.is_none())
            .map(|(id, _)| id)
            .collect();
        for id in roots {
            self.counters.cleared += self.detach_tree(id);
        }
        // Reads under way end before the disk is cleared; those that wait must not give their slots back after it.
        self.fail_queued_reads();
        if let Some(books) = &mut self.disk {
            books.clearing = Clearing::Wanted;
        }
    }
}
