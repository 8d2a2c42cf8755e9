//! The evictable chunks of each tenant, by row and last use. If no chunk has a tenant, each call only
//! checks that a list is empty.

use std::collections::BTreeSet;

use super::{ChunkId, TenantId};

/// Number of queues per tenant; see `Node::row`.
pub(super) const NUM_ROWS: usize = 4;
/// The rows, in order: used once; reused; unwritten and used once; unwritten and reused.
const ROWS: [u8; NUM_ROWS] = [0, 1, 2, 3];

#[derive(Debug, Default)]
pub(super) struct TenantQueues {
    /// Each chunk's tenant, indexed by chunk. Chunks beyond the end have no tenant.
    of: Vec<Option<TenantId>>,
    /// Entries of the form (tenant, row, last use, chunk).
    queue: BTreeSet<(TenantId, u8, u64, u32)>,
}

impl TenantQueues {
    /// Sets the tenant of a chunk that is not evictable.
    pub(super) fn set(&mut self, id: ChunkId, tenant: TenantId) {
        let at = id.0 as usize;
        if at >= self.of.len() {
            self.of.resize(at + 1, None);
        }
        self.of[at] = Some(tenant);
    }

    /// Removes the tenant of a chunk that is not evictable.
    pub(super) fn unset(&mut self, id: ChunkId) {
        if let Some(of) = self.of.get_mut(id.0 as usize) {
            *of = None;
        }
    }

    fn find(&self, id: ChunkId) -> Option<TenantId> {
        self.of.get(id.0 as usize).copied().flatten()
    }

    /// Adds a chunk that has become evictable.
    pub(super) fn enter(&mut self, id: ChunkId, row: u8, last: u64) {
        if let Some(tenant) = self.find(id) {
            self.queue.insert((tenant, row, last, id.0));
        }
    }

    /// Removes a chunk that is no longer evictable.
    pub(super) fn leave(&mut self, id: ChunkId, row: u8, last: u64) {
        if let Some(tenant) = self.find(id) {
            self.queue.remove(&(tenant, row, last, id.0));
        }
    }

    /// Returns the coldest chunk in each row as (last use, chunk).
    pub(super) fn heads(&self, tenant: TenantId) -> [Option<(u64, u32)>; NUM_ROWS] {
        ROWS.map(|row| {
            let all = (tenant, row, 0, 0)..=(tenant, row, u64::MAX, u32::MAX);
            self.queue.range(all).next().map(|(_, _, last, id)| (*last, *id))
        })
    }
}
