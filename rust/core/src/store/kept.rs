//! Kept chunks, and how they stay: where one would be the next to leave a tier for want of room, it goes to the end of the row, as
//! if it were used, while kept chunks are at most half of the tier. So the policies need not know, and nothing is walked when
//! keeping begins or ends.

use super::state::State;
use crate::evict::{ChunkId, Policy};

/// Most kept chunks that one call sends to the end of a tier's row: some 1 ms. With more of them in front, nothing leaves yet.
const MAX_SPARED: usize = 1024;

/// Kept chunks that were in front of a tier's row.
#[derive(Debug, Default)]
pub(super) struct Spared(Vec<ChunkId>);

impl Spared {
    /// Whether there was one.
    pub(super) fn has_some(&self) -> bool {
        !self.0.is_empty()
    }

    /// Whether one call has looked at as many as it may.
    pub(super) fn is_full(&self) -> bool {
        self.0.len() >= MAX_SPARED
    }

    /// Takes a chunk out of the row for now.
    pub(super) fn push(&mut self, policy: &mut dyn Policy, id: ChunkId) {
        policy.set_evictable(id, false);
        self.0.push(id);
    }

    /// Back to the row, at its end.
    pub(super) fn end(self, policy: &mut dyn Policy) {
        for id in self.0 {
            policy.set_evictable(id, true);
            policy.touch(id);
        }
    }
}

impl State {
    /// Whether a chunk that may leave host memory is kept there.
    pub(super) fn keeps_in_host(&self, id: ChunkId) -> bool {
        let kept = self.owners.kept.num_host;
        kept > 0 && self.owners.is_kept(self.index[id].owner) && 2 * kept <= self.host.num_frames().0
    }

    /// The same of the disk.
    pub(super) fn keeps_on_disk(&self, id: ChunkId) -> bool {
        let kept = self.owners.kept.num_disk;
        kept > 0 && self.owners.is_kept(self.index[id].owner) && 2 * kept <= self.stats.disk_used
    }

    /// Looks that pass all that is kept on disk, where each may go only so far.
    pub(super) fn looks_past_kept(&self) -> u64 {
        1 + self.owners.kept.num_disk / MAX_SPARED as u64
    }
}
