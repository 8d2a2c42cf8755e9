//! Expiries: a chunk is not found any more some time after it was saved, and is forgotten soon after.
//!
//! Time counts from the reservation of a chunk, which is before its bytes are there, and goes on over restarts: the disk keeps
//! when a chunk was saved. Using a chunk does not make it younger. No chunk outlives its parent, so `expires_s` never grows
//! downwards: presence stays monotone while chunks expire. Time is seconds of Unix time: what it was when the store was opened, and
//! what the store's clock counted since.

use std::sync::Arc;

use crate::Result;
use crate::evict::ChunkId;
use crate::index::{Entry, NEVER};
use crate::key::SaltTag;
use crate::store::config::DiskSettings;
use crate::store::state::State;
use crate::store::tenants::limits::{Bases, Ceiling, Table, TenantLimits};
use crate::tier::disk::{self, DiskRoot, Erased};

/// What was saved later than now by more than this has an age that is not known: it counts as expired.
const MAX_SKEW_S: u32 = 60;

/// When what was saved at `saved_s` expires, seen at `now_s`.
fn expiry(ttl_s: u32, saved_s: u32, now_s: u32) -> u32 {
    match ttl_s {
        Ceiling::NONE => NEVER,
        _ if saved_s > now_s.saturating_add(MAX_SKEW_S) => 0,
        _ => saved_s.min(now_s).saturating_add(ttl_s),
    }
}

/// Erases what is older than `limits` allow in those namespaces of a disk directory that no store has open. `root` is that of the
/// stores. `Io` if the directory cannot be listed.
pub fn erase_expired(
    settings: &DiskSettings,
    root: &Arc<DiskRoot>,
    limits: &TenantLimits,
    now_s: u64,
) -> Result<Erased> {
    let table = Table::new(limits, 1, Bases::default());
    let seconds = |time: u64| u32::try_from(time).unwrap_or(u32::MAX);
    disk::erase(&settings.dir, settings.cap_bytes, root, "", |first| {
        let ttl_s = table.ceiling(table.class_of(SaltTag::of_root(&first.parent))).ttl_s;
        expiry(ttl_s, seconds(first.saved_s), seconds(now_s)) <= seconds(now_s)
    })
}

impl State {
    /// Seconds of Unix time after which the chunk, which was saved at `saved_s`, must not be found.
    pub(crate) fn expiry(&self, ttl_s: u32, parent: Option<ChunkId>, saved_s: u32) -> u32 {
        let own = expiry(ttl_s, saved_s, self.unix_s);
        parent.map_or(own, |parent| own.min(self.index[parent].expires_s))
    }

    /// Whether it was saved too long ago.
    pub(crate) fn is_expired(&self, entry: &Entry) -> bool {
        entry.expires_s <= self.unix_s
    }

    fn expires_alone(&self, entry: &Entry) -> bool {
        entry.expires_s != NEVER && entry.parent.is_none_or(|parent| entry.expires_s < self.index[parent].expires_s)
    }

    /// The chunk was entered.
    pub(crate) fn track_expiry(&mut self, id: ChunkId) {
        if self.expires_alone(&self.index[id]) {
            self.expiries.0.insert((self.index[id].expires_s, id));
        }
    }

    /// The chunk's entry is about to be freed.
    pub(crate) fn untrack_expiry(&mut self, id: ChunkId) {
        if self.index[id].expires_s != NEVER {
            self.expiries.0.remove(&(self.index[id].expires_s, id));
        }
    }

    /// Whether every entry that expires by itself is noted, and nothing else; for checks.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn check_expiry(&self) -> bool {
        let is_noted = |id: ChunkId, entry: &Entry| self.expiries.0.contains(&(entry.expires_s, id));
        let is_right = |(id, entry): (ChunkId, &Entry)| {
            let is_old = entry.removing || entry.detached;
            is_noted(id, entry) == self.expires_alone(entry) || is_old && !is_noted(id, entry)
        };
        self.index.iter().all(is_right) && self.expiries.0.iter().all(|(_, id)| self.index.at(id.0).is_some())
    }
}
