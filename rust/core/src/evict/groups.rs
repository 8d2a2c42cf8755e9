//! Evictable chunks of each group in order of their last use. Where no chunk has a group, it costs
//! a look at an empty list.

use std::collections::BTreeSet;

use super::policy::{ChunkId, GroupId};

/// Rows of chunks in order of their last use.
pub(super) const NUM_ROWS: usize = 4;
/// Used once, and used again; unwritten ones used once, and used again.
const ROWS: [u8; NUM_ROWS] = [0, 1, 2, 3];

/// What is in a group.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// By chunk; chunks behind the end have none.
    of: Vec<Option<GroupId>>,
    /// Group, row, last use, chunk.
    queue: BTreeSet<(GroupId, u8, u64, u32)>,
}

impl Groups {
    /// A chunk that is not evictable has this group from now on.
    pub(super) fn set(&mut self, id: ChunkId, group: GroupId) {
        let at = id.0 as usize;
        if at >= self.of.len() {
            self.of.resize(at + 1, None);
        }
        self.of[at] = Some(group);
    }

    /// A chunk that is not evictable has no group any more.
    pub(super) fn forget(&mut self, id: ChunkId) {
        if let Some(of) = self.of.get_mut(id.0 as usize) {
            *of = None;
        }
    }

    fn find(&self, id: ChunkId) -> Option<GroupId> {
        self.of.get(id.0 as usize).copied().flatten()
    }

    /// A chunk became evictable.
    pub(super) fn enter(&mut self, id: ChunkId, row: u8, last: u64) {
        if let Some(group) = self.find(id) {
            self.queue.insert((group, row, last, id.0));
        }
    }

    /// A chunk is evictable no more.
    pub(super) fn leave(&mut self, id: ChunkId, row: u8, last: u64) {
        if let Some(group) = self.find(id) {
            self.queue.remove(&(group, row, last, id.0));
        }
    }

    /// Last use and number of the coldest chunk of each row.
    pub(super) fn heads(&self, group: GroupId) -> [Option<(u64, u32)>; NUM_ROWS] {
        ROWS.map(|row| {
            let all = (group, row, 0, 0)..=(group, row, u64::MAX, u32::MAX);
            self.queue.range(all).next().map(|(_, _, last, id)| (*last, *id))
        })
    }
}
