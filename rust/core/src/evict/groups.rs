//! The evictable chunks of each group, sorted by last use. If no chunk has a group, each call costs
//! only a check for an empty list.

use std::collections::BTreeSet;

use super::{ChunkId, GroupId};

/// Number of queues per group; see `Node::row`.
pub(super) const NUM_ROWS: usize = 4;
/// The rows, in order: used once; reused; unwritten and used once; unwritten and reused.
const ROWS: [u8; NUM_ROWS] = [0, 1, 2, 3];

#[derive(Debug, Default)]
pub(super) struct Groups {
    /// Each chunk's group, indexed by chunk. Chunks beyond the end have no group.
    of: Vec<Option<GroupId>>,
    /// Entries of the form (group, row, last use, chunk).
    queue: BTreeSet<(GroupId, u8, u64, u32)>,
}

impl Groups {
    /// Sets the group of a chunk that is not evictable.
    pub(super) fn set(&mut self, id: ChunkId, group: GroupId) {
        let at = id.0 as usize;
        if at >= self.of.len() {
            self.of.resize(at + 1, None);
        }
        self.of[at] = Some(group);
    }

    /// Removes the group of a chunk that is not evictable.
    pub(super) fn unset(&mut self, id: ChunkId) {
        if let Some(of) = self.of.get_mut(id.0 as usize) {
            *of = None;
        }
    }

    fn find(&self, id: ChunkId) -> Option<GroupId> {
        self.of.get(id.0 as usize).copied().flatten()
    }

    /// Adds a chunk that has become evictable.
    pub(super) fn enter(&mut self, id: ChunkId, row: u8, last: u64) {
        if let Some(group) = self.find(id) {
            self.queue.insert((group, row, last, id.0));
        }
    }

    /// Removes a chunk that is no longer evictable.
    pub(super) fn leave(&mut self, id: ChunkId, row: u8, last: u64) {
        if let Some(group) = self.find(id) {
            self.queue.remove(&(group, row, last, id.0));
        }
    }

    /// Returns the coldest chunk in each row as (last use, chunk).
    pub(super) fn heads(&self, group: GroupId) -> [Option<(u64, u32)>; NUM_ROWS] {
        ROWS.map(|row| {
            let all = (group, row, 0, 0)..=(group, row, u64::MAX, u32::MAX);
            self.queue.range(all).next().map(|(_, _, last, id)| (*last, *id))
        })
    }
}
