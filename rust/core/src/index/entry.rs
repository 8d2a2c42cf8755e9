//! One chunk: its place in its prefix, its state in each tier, and its users.

use super::disk_state::DiskState;
use super::host_state::HostState;
use crate::evict::ChunkId;
use crate::key::ChunkKey;

/// `expires_s` of a chunk that never expires.
pub(crate) const NEVER: u32 = u32::MAX;

/// The tenant of a chunk: see `store/tenants/table.rs`. The default is that of requests without a
/// salt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct TenantId(pub(crate) u32);

/// One chunk.
#[derive(Debug, Clone, Copy, Default)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts about a chunk")]
pub(crate) struct Entry {
    pub(crate) key: ChunkKey,
    pub(crate) parent_key: ChunkKey,
    pub(crate) parent: Option<ChunkId>,
    pub(crate) tenant: TenantId,
    /// Number of chunks above it, and so its unit in the prefix. 0 for a chunk that depends on no
    /// other chunk.
    pub(crate) depth: u32,
    /// Its key and the keys of all its ancestors were compared with a prefix's keys.
    pub(crate) proven: bool,
    /// The links, the generation, `live` and `detached` are changed by the index only.
    pub(crate) first_child: Option<ChunkId>,
    pub(crate) prev_sibling: Option<ChunkId>,
    pub(crate) next_sibling: Option<ChunkId>,
    /// Detached children, which are not among the siblings.
    pub(crate) num_detached: u32,
    pub(crate) generation: u32,
    pub(crate) live: bool,
    /// It and all its descendants were removed; the entry stays until its last user ends.
    pub(crate) detached: bool,
    /// It and all chunks below it will be removed. No key maps to this entry any longer.
    pub(crate) removing: bool,
    /// Changed by `State::change_host` only.
    pub(crate) host: HostState,
    /// Changed by `State::change_disk` only.
    pub(crate) disk: DiskState,
    /// Time, in seconds of the store's life, before which it is not read again.
    pub(crate) unreadable_until_s: u32,
    /// Unix time in seconds when it was reserved, and when it expires.
    pub(crate) saved_s: u32,
    pub(crate) expires_s: u32,
    /// Read leases that end here or wait for it, and a disk thread that copies the frame.
    pub(crate) holds: u32,
    /// Children that are not absent from host memory, including detached ones.
    pub(crate) host_children: u32,
    /// Children that take a slot on disk, including detached ones.
    pub(crate) disk_children: u32,
    /// Whether each policy may evict it, as last reported; None while the policy does not have the
    /// chunk.
    pub(crate) host_evictable: Option<bool>,
    pub(crate) disk_evictable: Option<bool>,
    /// It ends a prefix that was reused, or was kept with one; reported when a policy receives the
    /// chunk.
    pub(crate) reused: bool,
    /// Pages of its slot on disk while it has one; changed by `State::change_disk` only.
    pub(crate) disk_pages: u32,
}

// With 160 bytes, the last chunks of stored prompts of 128 x n chunks share CPU cache sets, and
// lookups that alternate between such prompts are up to 9 % slower.
const _: () = assert!(size_of::<Entry>() == 164);

impl Entry {
    pub(crate) fn has_children(&self) -> bool {
        self.first_child.is_some() || self.num_detached > 0
    }

    /// Returns true if it waits for a disk thread to read it.
    pub(crate) fn is_to_read(&self) -> bool {
        self.host == HostState::Queued
    }

    pub(crate) fn is_to_write(&self) -> bool {
        self.disk == DiskState::Queued
    }

    /// Returns true if it is expected to become visible in host memory.
    pub(crate) fn is_coming(&self) -> bool {
        let is_failed = matches!(self.host, HostState::Failed(_));
        self.host.is_pending() && !is_failed && !self.detached && !self.removing
    }

    /// Returns true if lookups find it in host memory, as far as they find its parents.
    pub(crate) fn is_in_host(&self) -> bool {
        self.host.is_visible() && !self.detached && !self.removing
    }

    /// Returns true if it must stay in host memory: a load or a write uses it, or a chunk below it
    /// is there.
    pub(crate) fn is_in_use(&self) -> bool {
        self.host_children > 0 || self.holds > 0 || self.disk.is_unwritten()
    }

    /// Returns true if the host policy may evict it: a visible leaf without users.
    pub(crate) fn is_host_evictable(&self) -> bool {
        self.host.is_visible() && self.host_children == 0 && self.holds == 0 && !self.detached
    }

    /// Returns true if the disk policy may evict it: a stored leaf that is not being read.
    pub(crate) fn is_disk_evictable(&self) -> bool {
        self.disk.is_stored() && self.disk_children == 0 && !self.host.is_read()
    }
}
