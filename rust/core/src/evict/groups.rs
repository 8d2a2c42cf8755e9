//! Evictable chunks of each group in order of their last use. Where no chunk has a group, it costs a look at an empty list.

use std::collections::BTreeSet;

use super::policy::{ChunkId, GroupId};

/// What is in a group.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// By chunk; chunks behind the end have none.
    of: Vec<Option<GroupId>>,
    /// Group, whether it was used again, last use, chunk.
    queue: BTreeSet<(GroupId, bool, u64, u32)>,
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
    pub(super) fn enter(&mut self, id: ChunkId, reused: bool, last: u64) {
        if let Some(group) = self.find(id) {
            self.queue.insert((group, reused, last, id.0));
        }
    }

    /// A chunk is evictable no more.
    pub(super) fn leave(&mut self, id: ChunkId, reused: bool, last: u64) {
        if let Some(group) = self.find(id) {
            self.queue.remove(&(group, reused, last, id.0));
        }
    }

    /// Last use and number of the coldest chunk that was used once, and of the coldest that was used again.
    pub(super) fn heads(&self, group: GroupId) -> [Option<(u64, u32)>; 2] {
        [false, true].map(|reused| {
            let all = (group, reused, 0, 0)..=(group, reused, u64::MAX, u32::MAX);
            self.queue.range(all).next().map(|(_, _, last, id)| (*last, *id))
        })
    }
}
