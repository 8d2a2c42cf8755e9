//! Expiry: lookups miss a chunk once its TTL has elapsed, and the sweeper removes it soon after.
//!
//! The TTL starts when a chunk is reserved and keeps running across restarts, because disk records
//! hold the start time. Using a chunk does not extend its TTL. A child never expires after its
//! parent, so every visible chunk has a visible parent. Times are Unix times in seconds: the time
//! the store was opened plus the elapsed time on the store's clock.

use std::sync::Arc;

use crate::Result;
use crate::evict::ChunkId;
use crate::index::{Entry, NEVER};
use crate::key::SaltTag;
use crate::store::config::DiskSettings;
use crate::store::state::State;
use crate::store::tenants::limits::{Bases, Table, TenantLimits};
use crate::tier::disk::{self, DiskRoot, RemovedChunks};

/// How far in the future a save time may lie. Beyond this, a chunk's age is unknown and the chunk
/// counts as expired.
const MAX_SKEW_S: u32 = 60;

/// Returns the expiry time, computed at `now_s`, of a chunk saved at `saved_s`.
fn expiry(ttl_s: Option<u32>, saved_s: u32, now_s: u32) -> u32 {
    match ttl_s {
        None => NEVER,
        Some(_) if saved_s > now_s.saturating_add(MAX_SKEW_S) => 0,
        Some(ttl_s) => saved_s.min(now_s).saturating_add(ttl_s),
    }
}

/// Removes expired chunks from a disk directory's closed namespaces.
///
/// `root` must be the [`DiskRoot`] of the open stores. Returns `Io` if the directory cannot be
/// read.
pub fn remove_expired(
    settings: &DiskSettings,
    root: &Arc<DiskRoot>,
    limits: &TenantLimits,
    now_s: u64,
) -> Result<RemovedChunks> {
    let table = Table::new(limits, 1, Bases::default());
    let seconds = |time: u64| u32::try_from(time).unwrap_or(u32::MAX);
    disk::remove_closed(&settings.dir, root, "", |first| {
        let Some(first) = first else { return false };
        let ttl_s = table.ceiling(table.class_of(SaltTag::of_root(&first.parent))).ttl_s;
        expiry(ttl_s, seconds(first.saved_s), seconds(now_s)) <= seconds(now_s)
    })
}

impl State {
    /// Returns the expiry time of a chunk saved at `saved_s`, capped at the parent's expiry time.
    pub(crate) fn expiry(&self, ttl_s: Option<u32>, parent: Option<ChunkId>, saved_s: u32) -> u32 {
        let own = expiry(ttl_s, saved_s, self.unix_s);
        parent.map_or(own, |parent| own.min(self.index[parent].expires_s))
    }

    pub(crate) fn is_expired(&self, entry: &Entry) -> bool {
        entry.expires_s <= self.unix_s
    }

    /// Returns true if the chunk expires before its parent, or expires and has no parent.
    pub(crate) fn expires_alone(&self, entry: &Entry) -> bool {
        entry.expires_s != NEVER
            && entry.parent.is_none_or(|parent| entry.expires_s < self.index[parent].expires_s)
    }

    /// Adds a new chunk to the expiry queue if [`Self::expires_alone`] is true.
    pub(crate) fn track_expiry(&mut self, id: ChunkId) {
        if self.expires_alone(&self.index[id]) {
            self.expiries.0.insert((self.index[id].expires_s, id));
        }
    }

    /// Removes a chunk from the expiry queue before its entry is freed.
    pub(crate) fn untrack_expiry(&mut self, id: ChunkId) {
        if self.index[id].expires_s != NEVER {
            self.expiries.0.remove(&(self.index[id].expires_s, id));
        }
    }
}
