//! Saves: reserves frames for chunks, then commits or aborts the reservations.

use std::ops::Range;

use crate::evict::ChunkId;
use crate::index::{Entry, HostEvent, HostState};
use crate::io::{FrameId, SizeClass};
use crate::key::ChunkKey;
use crate::store::lookup::Prefix;
use crate::store::state::{Cause, State};
use crate::store::tenants::quota::FrameSource;
use crate::tier::host::FrameRequest;
use crate::{Error, Result};

/// A frame reserved for one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reservation {
    /// Reservation number, unique within the store.
    pub ticket: u64,
    /// The frame to copy to.
    pub frame: FrameId,
    /// The chunk's key.
    pub key: ChunkKey,
    /// Index of the chunk's unit within the prefix.
    pub unit: u32,
}

/// Result of a [`SaveRequest`]. `T` is or wraps a [`Reservation`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reserved<T = Reservation> {
    /// The reserved chunks, which the caller must fill, in prefix order.
    pub chunks: Vec<T>,
    /// Number of chunks that got no frame. In a request for dependent chunks, this includes all
    /// chunks after the first failure.
    pub num_dropped: u32,
}

impl<T> Reserved<T> {
    /// Converts each reserved chunk.
    pub fn map<U>(self, convert: impl FnMut(T) -> U) -> Reserved<U> {
        let Self { chunks, num_dropped } = self;
        Reserved { chunks: chunks.into_iter().map(convert).collect(), num_dropped }
    }
}

/// A request to save some of a prefix's chunks.
#[derive(Debug, Clone)]
pub struct SaveRequest<'a> {
    /// The prefix whose chunks are saved.
    pub prefix: Prefix<'a>,
    /// Units to save, one chunk each.
    pub units: Range<u32>,
    /// The size class of the frames.
    pub class: SizeClass,
    /// True if the chunks are independent, as in sliding-window and Mamba groups: the root is every
    /// chunk's parent, and chunks that get no frame are skipped. If the prefix has a key after the
    /// last unit, that key identifies the full-attention chunk at the end of the same prefix.
    pub is_independent: bool,
}

impl<'a> From<(Prefix<'a>, Range<u32>)> for SaveRequest<'a> {
    fn from((prefix, units): (Prefix<'a>, Range<u32>)) -> Self {
        Self { prefix, units, class: SizeClass::default(), is_independent: false }
    }
}

impl SaveRequest<'_> {
    /// Returns `InvalidConfig` if the prefix lacks a key for any of the units or for the unit just
    /// before them.
    pub fn check(&self) -> Result<()> {
        let Range { start, end } = self.units;
        let has_parent = self.prefix.first <= start.saturating_sub(1);
        if has_parent && start <= end && end <= self.prefix.num_units() {
            return Ok(());
        }
        let error = Error::invalid("the prefix lacks keys for some of the units")
            .with_context("start", start);
        Err(error.with_context("end", end).with_context("num_units", self.prefix.num_units()))
    }

    /// Like [`Self::check`], but also returns `InvalidConfig` if the size class does not exist.
    pub(crate) fn check_in(&self, num_classes: usize) -> Result<()> {
        if self.class.index() < num_classes {
            return self.check();
        }
        let error = Error::invalid("unknown size class");
        Err(error.with_context("class", self.class.0).with_context("num_classes", num_classes))
    }

    /// Returns the result for a request that gets no frames.
    pub fn dropped<T>(&self) -> Reserved<T> {
        let num_dropped = self.units.end.saturating_sub(self.units.start);
        Reserved { chunks: Vec::new(), num_dropped }
    }
}

/// Why a chunk got no frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NoFrame {
    /// No frame is available, or the chunk's parent has no frame.
    Unavailable,
    /// The chunk's tenant is at its quota and has nothing to evict.
    Quota,
}

impl State {
    /// Reserves frames for the missing chunks of a validated request.
    pub(crate) fn reserve(&mut self, asked: &SaveRequest<'_>) -> Reserved<(ChunkId, Reservation)> {
        let SaveRequest { prefix, ref units, class, is_independent } = *asked;
        let (mut chunks, mut num_dropped) = (Vec::with_capacity(units.len()), 0);
        let with = prefix.keys.get((units.end - prefix.first) as usize).filter(|_| is_independent);
        let mut above = None; // the previous chunk, if it is in host memory
        for unit in units.clone() {
            let key = prefix.key_of(unit + 1);
            let new = if is_independent {
                Entry { key, parent_key: prefix.root, ..Entry::default() }
            } else {
                Entry { key, parent_key: prefix.key_of(unit), depth: unit, ..Entry::default() }
            };
            let parent = above.take().or_else(|| self.parent_of(&new));
            debug_assert_eq!(parent, self.parent_of(&new), "the previous chunk is the parent");
            let own = self.find_own(&new, parent);
            if let Some(id) = own.filter(|id| self.is_there(*id)) {
                self.index[id].contended |= matches!(self.index[id].host, HostState::Saving(_));
                above = Some(id).filter(|_| !is_independent);
                continue;
            }
            match self.reserve_one(new, class, parent, own) {
                Ok((id, frame)) => {
                    above = Some(id).filter(|_| !is_independent);
                    if let Some(end) = with.and_then(|key| self.index.get(key)) {
                        self.keep_with(id, end);
                    }
                    let ticket = self.new_ticket();
                    chunks.push((id, Reservation { ticket, frame, key, unit }));
                }
                Err(why) => {
                    let num_lost = if is_independent { 1 } else { units.end - unit };
                    self.stats.quota_dropped +=
                        if why == NoFrame::Quota { num_lost.into() } else { 0 };
                    num_dropped += num_lost;
                    if !is_independent {
                        break;
                    }
                }
            }
        }
        self.stats.reserve_dropped += u64::from(num_dropped);
        Reserved { chunks, num_dropped }
    }

    /// Loads each request's first index entries into the CPU cache. These memory accesses overlap,
    /// whereas `reserve` would make them one after another.
    pub(crate) fn warm(&self, asked: &[SaveRequest<'_>]) {
        let found = asked.iter().filter(|each| !each.units.is_empty()).map(
            |SaveRequest { prefix, units, .. }| {
                let ids = [units.start, units.start + 1]
                    .map(|num_units| self.index.get(&prefix.key_of(num_units)));
                ids.map(|id| id.map_or(0, |id| u64::from(id.0)))
            },
        );
        std::hint::black_box(found.fold(0, |sum, [parent, own]| sum ^ parent ^ own));
    }

    fn parent_of(&self, new: &Entry) -> Option<ChunkId> {
        if new.depth == 0 { None } else { self.index.get(&new.parent_key) }
    }

    /// Returns the chunk's existing entry, if any. An entry with the same key at a different
    /// position is already being removed or was forged on disk. This method removes such an entry.
    fn find_own(&mut self, new: &Entry, parent: Option<ChunkId>) -> Option<ChunkId> {
        let id = self.index.get(&new.key)?;
        let entry = &self.index[id];
        let is_elsewhere = entry.parent != parent && (parent.is_some() || new.depth == 0);
        if is_elsewhere || entry.depth != new.depth {
            self.remove_tree(id);
            return None;
        }
        Some(id)
    }

    /// Returns true if the chunk is in host memory or is being filled.
    fn is_there(&self, id: ChunkId) -> bool {
        self.index[id].host.frame().is_some()
    }

    /// Reserves a frame for a chunk, which must have a parent with a frame or be the first in its
    /// prefix. Replaces a queued read of the same chunk.
    fn reserve_one(
        &mut self,
        new: Entry,
        class: SizeClass,
        parent: Option<ChunkId>,
        own: Option<ChunkId>,
    ) -> std::result::Result<(ChunkId, FrameId), NoFrame> {
        let fits = parent.map_or(new.depth == 0, |parent| {
            let parent = &self.index[parent];
            parent.host.may_have_children() && parent.depth + 1 == new.depth
        });
        if !fits {
            return Err(NoFrame::Unavailable);
        }
        let source = self.source_for(&new, parent, class);
        let reason = if source == FrameSource::Any { NoFrame::Unavailable } else { NoFrame::Quota };
        let frame =
            self.take_frame_under(parent, source, FrameRequest::for_save(class)).ok_or(reason)?;
        let proven = parent.is_none_or(|parent| self.index[parent].proven);
        let saved_s = self.unix_s;
        // `take_frame_under` may have evicted the entry.
        let own = own.and_then(|_| self.index.get(&new.key));
        let id = own.unwrap_or_else(|| self.add(Entry { parent, proven, saved_s, ..new }));
        self.change_host(id, HostEvent::Reserve(frame));
        self.stats.write_leases += 1;
        Ok((id, frame))
    }

    /// Marks `end` and `id` as reused if the prefix ending at `end` is likely to be used again, so
    /// that neither is evicted much earlier than the other.
    fn keep_with(&mut self, id: ChunkId, end: ChunkId) {
        let num_chunks = self.index[end].depth + 1;
        if self.index[end].host_evictable.is_none()
            || !self.host_policy.is_mostly_reused(end, num_chunks)
        {
            return;
        }
        for each in [id, end] {
            self.host_policy.mark_reused(each);
            self.index[each].reused = true;
            if self.index[each].disk_evictable.is_some() {
                self.disk_policy.mark_reused(each);
            }
        }
    }

    /// Ends a write lease. Aborts the save and returns false if the chunk has since been removed.
    fn end_write_lease(&mut self, id: ChunkId) -> bool {
        self.stats.write_leases -= 1;
        if !self.index[id].detached {
            return true;
        }
        self.stats.aborts += 1;
        self.drop_detached_fill(id);
        false
    }

    /// Commits a filled chunk. Returns how many chunks became visible.
    pub(crate) fn commit(&mut self, id: ChunkId) -> u32 {
        if !self.end_write_lease(id) {
            return 0;
        }
        let num_visible = self.fill(id);
        self.stats.commits += u64::from(num_visible);
        num_visible
    }

    /// Lets other saves reserve the keys of unfinished saves. If `if_contended` is true, affects
    /// only saves that other saves have waited for. Removes the descendants, which no lookup can
    /// find. The frames stay reserved until the saves end. Does nothing for a chunk on disk,
    /// because the disk copies of its descendants would be removed too.
    pub(crate) fn release_keys(&mut self, ids: impl Iterator<Item = ChunkId>, if_contended: bool) {
        for id in ids {
            let entry = &self.index[id];
            let is_meant = entry.contended || !if_contended;
            if is_meant && matches!(entry.host, HostState::Saving(_)) && !entry.disk.takes_slot() {
                self.remove_tree_for(id, Cause::Unfinished);
            }
        }
        self.remove_slice();
    }

    pub(crate) fn abort(&mut self, id: ChunkId) {
        if self.end_write_lease(id) {
            self.stats.aborts += 1;
            self.fail_host(id);
        }
    }
}
