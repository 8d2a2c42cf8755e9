//! An entry of the index: a chunk's position in its prefix, its state in each tier, and its users.

use super::disk_state::DiskState;
use super::host_state::HostState;
use crate::evict::ChunkId;
use crate::key::ChunkKey;

/// `expires_s` of a chunk that never expires.
pub(crate) const NEVER: u32 = u32::MAX;

/// The tenant of a chunk; see `store/tenants/table.rs`. The default is the tenant of requests
/// without a salt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct TenantId(pub(crate) u32);

/// The index entry of a chunk.
#[derive(Debug, Clone, Copy, Default)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts about a chunk")]
pub(crate) struct Entry {
    pub(crate) key: ChunkKey,
    pub(crate) parent_key: ChunkKey,
    pub(crate) parent: Option<ChunkId>,
    pub(crate) tenant: TenantId,
    /// Number of ancestors, which equals its unit in the prefix; 0 for independent chunks.
    pub(crate) depth: u32,
    /// Its key and the keys of all its ancestors were compared with the keys of a prefix.
    pub(crate) proven: bool,
    /// Only the index changes the links, `generation`, `live` and `detached`.
    pub(crate) first_child: Option<ChunkId>,
    pub(crate) prev_sibling: Option<ChunkId>,
    pub(crate) next_sibling: Option<ChunkId>,
    /// Number of detached children, which are not in the list of siblings.
    pub(crate) num_detached: u32,
    pub(crate) generation: u32,
    pub(crate) live: bool,
    /// The chunk and all its descendants were removed. The entry stays until its last user has
    /// finished.
    pub(crate) detached: bool,
    /// The chunk and all its descendants are being removed. No key maps to this entry.
    pub(crate) removing: bool,
    /// Only `State::change_host` changes this field.
    pub(crate) host: HostState,
    /// Only `State::change_disk` changes this field.
    pub(crate) disk: DiskState,
    /// Earliest time of the next read after a failed read, in seconds since the store was opened.
    pub(crate) unreadable_until_s: u32,
    /// Unix time at which it was reserved, and at which it expires, in seconds.
    pub(crate) saved_s: u32,
    pub(crate) expires_s: u32,
    /// Number of read leases whose part in host memory ends here or which wait for this chunk, plus
    /// one while a disk thread writes the chunk or an operation keeps it.
    pub(crate) holds: u32,
    /// Number of children that are not absent from host memory, including detached children.
    pub(crate) host_children: u32,
    /// Number of children that occupy a slot on disk, including detached children.
    pub(crate) disk_children: u32,
    /// Whether each policy may evict the chunk, as last reported to the policy; None if the policy
    /// does not have the chunk.
    pub(crate) host_evictable: Option<bool>,
    pub(crate) disk_evictable: Option<bool>,
    /// The chunk ends a prefix that was mostly reused, or is an independent chunk of such a prefix.
    /// Reported to the disk policy when the policy receives the chunk.
    pub(crate) reused: bool,
    /// Number of pages of its slot on disk; 0 without a slot. Only `State::change_disk` changes
    /// this field.
    pub(crate) disk_pages: u32,
}

// With 160 bytes, the last chunks of stored prompts of 128 x n chunks share CPU cache sets, and
// lookups that alternate between such prompts are up to 9 % slower.
const _: () = assert!(size_of::<Entry>() == 164);

impl Entry {
    pub(crate) fn has_children(&self) -> bool {
        self.first_child.is_some() || self.num_detached > 0
    }

    /// Returns true if the chunk waits for a disk thread to read it.
    pub(crate) fn is_to_read(&self) -> bool {
        self.host == HostState::Queued
    }

    pub(crate) fn is_to_write(&self) -> bool {
        self.disk == DiskState::Queued
    }

    /// Returns true if the chunk is expected to become visible in host memory.
    pub(crate) fn is_coming(&self) -> bool {
        let is_failed = matches!(self.host, HostState::Failed(_));
        self.host.is_pending() && !is_failed && !self.detached && !self.removing
    }

    /// Returns true if lookups find the chunk in host memory, unless an ancestor is being removed.
    pub(crate) fn is_in_host(&self) -> bool {
        self.host.is_visible() && !self.detached && !self.removing
    }

    /// Returns true if the chunk must stay in host memory: a load or a write uses it, or a child is
    /// in host memory.
    pub(crate) fn is_in_use(&self) -> bool {
        self.host_children > 0 || self.holds > 0 || self.disk.is_unwritten()
    }

    /// Returns true if the host policy may evict the chunk: it is a visible leaf without users.
    pub(crate) fn is_host_evictable(&self) -> bool {
        self.host.is_visible() && self.host_children == 0 && self.holds == 0 && !self.detached
    }

    /// Returns true if the disk policy may evict the chunk: it is a stored leaf that no read uses
    /// or will use.
    pub(crate) fn is_disk_evictable(&self) -> bool {
        self.disk.is_stored() && self.disk_children == 0 && !self.host.awaits_read()
    }
}
