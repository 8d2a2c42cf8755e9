//! Saving: reserve a frame, then commit or abort.

use super::lookup::Prefix;
use super::quota::Room;
use super::state::State;
use crate::evict::ChunkId;
use crate::index::{Entry, Filler};
use crate::io::FrameId;
use crate::key::ChunkKey;
use crate::tier::host::FrameFor;
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
    /// `InvalidConfig` if the prefix has not got all the chunks.
    pub fn check(self, prefix: &Prefix<'_>, per_chunk: u32) -> Result<()> {
        let Self { start, stop, tail_blocks } = self;
        let end = u64::from(stop) * u64::from(per_chunk) + u64::from(tail_blocks);
        if start <= stop && tail_blocks < per_chunk && end <= u64::from(prefix.num_blocks()) {
            return Ok(());
        }
        let error = Error::new(ErrorKind::InvalidConfig, "no such chunks in this chain").with_context("start", start);
        let error = error.with_context("stop", stop).with_context("tail_blocks", tail_blocks);
        Err(error.with_context("num_blocks", prefix.num_blocks()).with_context("blocks_per_chunk", per_chunk))
    }

    /// Chunks asked for.
    pub fn num_chunks(self) -> u32 {
        self.stop.saturating_sub(self.start) + u32::from(self.tail_blocks > 0)
    }
}

/// How much was reserved of one range.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Got {
    /// Chunks that have to be filled.
    pub num_reserved: usize,
    /// Chunks without a frame or a parent; of those that are not attached, all behind the first of them.
    pub num_dropped: u32,
}

/// What is to be saved of a prefix.
#[derive(Debug, Clone, Copy)]
pub struct ToSave<'a> {
    /// The prefix.
    pub prefix: Prefix<'a>,
    /// Which chunks of it.
    pub range: SaveRange,
    /// Each chunk hangs on the root alone, as what a group of windows or states keeps. One that cannot be had ends nothing then.
    /// A key behind the range's is that of the chunk which ends the prefix that they are kept beside, and of no use without.
    pub is_attached: bool,
}

impl<'a> From<(Prefix<'a>, SaveRange)> for ToSave<'a> {
    fn from((prefix, range): (Prefix<'a>, SaveRange)) -> Self {
        Self { prefix, range, is_attached: false }
    }
}

/// Why a chunk gets no frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Refused {
    /// There is none, or no parent.
    NoPlace,
    /// Its owner has as many as it may, and none of those may go.
    Quota,
}

impl State {
    /// Reserves what is missing of a range, which must be the prefix's, into `reserved`.
    pub(crate) fn reserve(&mut self, asked: &ToSave<'_>, reserved: &mut Vec<(ChunkId, Reservation)>) -> Got {
        let ToSave { prefix, range, is_attached } = *asked;
        let (before, mut num_dropped) = (reserved.len(), 0);
        let beside = prefix.keys.get((range.stop * self.per_chunk) as usize).filter(|_| is_attached);
        let wanted = range.num_chunks();
        let mut above = None; // the chunk before, once it is known to be there
        for nth in 0..wanted {
            let depth = range.start + nth;
            let num_blocks = if depth < range.stop { self.per_chunk } else { range.tail_blocks };
            let first_block = depth * self.per_chunk;
            let key = prefix.key_of(first_block + num_blocks);
            let new = if is_attached {
                Entry { key, parent_key: prefix.root, num_blocks, ..Entry::default() }
            } else {
                let parent_key = prefix.key_of(first_block);
                Entry { key, parent_key, depth, first_block, num_blocks, ..Entry::default() }
            };
            let parent = above.take().or_else(|| self.parent_of(&new));
            debug_assert_eq!(parent, self.parent_of(&new), "what was there is found by its key");
            let own = self.find_own(&new, parent);
            if let Some(id) = own.filter(|id| self.is_there(*id)) {
                above = Some(id).filter(|_| !is_attached);
                continue;
            }
            match self.reserve_one(new, parent, own) {
                Ok((id, frame)) => {
                    above = Some(id).filter(|_| !is_attached);
                    if let Some(end) = beside.and_then(|key| self.index.get(key)) {
                        self.keep_beside(id, end);
                    }
                    let ticket = self.new_ticket();
                    reserved.push((id, Reservation { ticket, frame, key, first_block, num_blocks }));
                }
                Err(why) => {
                    let num_lost = if is_attached { 1 } else { wanted - nth };
                    self.stats.quota_dropped += if why == Refused::Quota { num_lost.into() } else { 0 };
                    num_dropped += num_lost;
                    if !is_attached {
                        break;
                    }
                }
            }
        }
        self.stats.reserve_dropped += u64::from(num_dropped);
        Got { num_reserved: reserved.len() - before, num_dropped }
    }

    /// Looks at what saves of `asked` will look at first: these reads do not wait for each other, as those of the saves do.
    pub(crate) fn warm(&self, asked: &[ToSave<'_>]) {
        let found = asked.iter().map(|ToSave { prefix, range, .. }| {
            let first = range.start * self.per_chunk;
            let end = if range.start < range.stop { first + self.per_chunk } else { first + range.tail_blocks };
            let ids = [first, end].map(|num_blocks| self.index.get(&prefix.key_of(num_blocks)));
            ids.map(|id| id.map_or(0, |id| u64::from(id.0)))
        });
        std::hint::black_box(found.fold(0, |sum, [parent, own]| sum ^ parent ^ own));
    }

    /// The entry of the parent's key.
    fn parent_of(&self, new: &Entry) -> Option<ChunkId> {
        if new.depth == 0 { None } else { self.index.get(&new.parent_key) }
    }

    /// The entry that the chunk has already. What has its key but hangs elsewhere is being forgotten, or was forged on disk.
    fn find_own(&mut self, new: &Entry, parent: Option<ChunkId>) -> Option<ChunkId> {
        let id = self.index.get(&new.key)?;
        let entry = &self.index[id];
        let is_elsewhere = entry.parent != parent && (parent.is_some() || new.depth == 0);
        if is_elsewhere || entry.first_block != new.first_block {
            self.doom(id);
            return None;
        }
        Some(id)
    }

    /// Whether the chunk is in host or being filled.
    fn is_there(&self, id: ChunkId) -> bool {
        !self.index[id].host.is_absent() && !self.index[id].is_queued()
    }

    /// A frame for the chunk, under a parent that has one; a read of it that has not begun becomes this save.
    fn reserve_one(
        &mut self,
        new: Entry,
        parent: Option<ChunkId>,
        own: Option<ChunkId>,
    ) -> std::result::Result<(ChunkId, FrameId), Refused> {
        let fits = parent.map_or(new.depth == 0, |parent| {
            let parent = &self.index[parent];
            parent.has_frame() && parent.end_block() == new.first_block
        });
        if !fits {
            return Err(Refused::NoPlace);
        }
        let room = self.room_for(&new, parent);
        let refused = if room == Room::Any { Refused::NoPlace } else { Refused::Quota };
        let frame = self.take_frame_under(parent, room, FrameFor::Save).ok_or(refused)?;
        let proven = parent.is_none_or(|parent| self.index[parent].proven);
        let saved_s = self.unix_s;
        let own = own.and_then(|_| self.index.get(&new.key)); // what gave its frame up may have taken it along
        let id = own.unwrap_or_else(|| self.add(Entry { parent, proven, saved_s, ..new }));
        if self.index[id].is_queued() {
            self.index[id].filler = Filler::Lease;
            self.disk.num_queued -= 1;
        } else {
            self.enter_host(id, Filler::Lease);
        }
        self.give_frame(id, frame);
        self.sync_disk(id);
        self.stats.write_leases += 1;
        Ok((id, frame))
    }

    /// `id`, which has a frame, is kept beside the prefix that ends with `end`: where that goes on, both are likely to be used again.
    fn keep_beside(&mut self, id: ChunkId, end: ChunkId) {
        let num_chunks = self.index[end].depth + 1;
        if self.index[end].host_evictable.is_none() || !self.host_policy.goes_on(end, num_chunks) {
            return;
        }
        for each in [id, end] {
            self.host_policy.mark_reused(each);
            self.index[each].goes_on = true;
            if self.index[each].disk_evictable.is_some() {
                self.disk_policy.mark_reused(each);
            }
        }
    }

    /// Ends a write lease; false if its chunk was forgotten meanwhile, and so is aborted.
    fn end_write_lease(&mut self, id: ChunkId) -> bool {
        self.stats.write_leases -= 1;
        if !self.index[id].detached {
            return true;
        }
        self.stats.aborts += 1;
        self.abandon(id);
        false
    }

    /// A reserved chunk is filled; returns how many chunks became visible by it.
    pub(crate) fn commit(&mut self, id: ChunkId) -> u32 {
        if !self.end_write_lease(id) {
            return 0;
        }
        let risen = self.fill(id);
        self.stats.commits += u64::from(risen);
        risen
    }

    /// A reserved chunk will not be filled.
    pub(crate) fn abort(&mut self, id: ChunkId) {
        if self.end_write_lease(id) {
            self.stats.aborts += 1;
            self.fail_host(id);
        }
    }
}
