//! An index entry: a chunk's position in its prefix, its state in each tier, and its users.

use super::disk_state::DiskState;
use super::host_state::HostState;
use crate::evict::{ChunkId, TenantId};
use crate::key::ChunkKey;

/// Value of `expires_s` for a chunk that never expires.
pub(crate) const NEVER: u32 = u32::MAX;

#[derive(Debug, Clone, Copy, Default)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts about a chunk")]
pub(crate) struct Entry {
    pub(crate) key: ChunkKey,
    pub(crate) parent_key: ChunkKey,
    pub(crate) parent: Option<ChunkId>,
    pub(crate) tenant: TenantId,
    /// Number of ancestors, which is also the unit's index in the prefix. 0 for independent chunks.
    pub(crate) depth: u32,
    /// True if the keys of the chunk and all its ancestors have been checked against a prefix.
    pub(crate) proven: bool,
    /// Only the index changes the links, `generation`, `live` and `detached`.
    pub(crate) first_child: Option<ChunkId>,
    pub(crate) prev_sibling: Option<ChunkId>,
    pub(crate) next_sibling: Option<ChunkId>,
    /// Number of detached children, which are no longer in the sibling list.
    pub(crate) num_detached: u32,
    pub(crate) generation: u32,
    pub(crate) live: bool,
    /// True if the chunk and all its descendants have been removed. The entry is kept until its
    /// last user finishes.
    pub(crate) detached: bool,
    /// True if the chunk and all its descendants are being removed. The chunk's key no longer maps
    /// to this entry.
    pub(crate) removing: bool,
    /// Only `State::change_host` changes this field.
    pub(crate) host: HostState,
    /// Only `State::change_disk` changes this field.
    pub(crate) disk: DiskState,
    /// Earliest time to retry a failed read, in seconds since the store opened.
    pub(crate) unreadable_until_s: u32,
    /// Unix time at which the chunk was reserved, in seconds.
    pub(crate) saved_s: u32,
    /// Unix time at which the chunk expires, in seconds.
    pub(crate) expires_s: u32,
    /// Number of holds on the chunk. A chunk is held by read leases that end at it in host memory
    /// or are waiting for it, by a disk thread writing it, and by operations that keep it in host
    /// memory.
    pub(crate) holds: u32,
    /// Number of children whose host state is not `Absent`, including detached children.
    pub(crate) host_children: u32,
    /// Number of children that occupy disk slots, including detached children.
    pub(crate) disk_children: u32,
    /// The evictability last reported to each tier's policy, or None if that policy is not tracking
    /// the chunk.
    pub(crate) host_evictable: Option<bool>,
    pub(crate) disk_evictable: Option<bool>,
    /// True if the chunk is at the end of a mostly reused prefix, or is an independent chunk in
    /// such a prefix. The disk policy receives this flag when the chunk is added.
    pub(crate) reused: bool,
    /// True if another save skipped this chunk because the chunk was still being saved.
    pub(crate) contended: bool,
    /// Number of pages in the chunk's disk slot, or 0 if the chunk has no slot. Only
    /// `State::change_disk` changes this field.
    pub(crate) disk_pages: u32,
}

// If entries were 160 bytes long, the last entries of stored prompts with 128 x n chunks would
// share CPU cache sets, and lookups alternating between such prompts would be up to 9% slower.
const _: () = assert!(size_of::<Entry>() == 164);

impl Entry {
    pub(crate) fn has_children(&self) -> bool {
        self.first_child.is_some() || self.num_detached > 0
    }

    pub(crate) fn is_to_read(&self) -> bool {
        self.host == HostState::Queued
    }

    pub(crate) fn is_to_write(&self) -> bool {
        self.disk == DiskState::Queued
    }

    /// Returns true if the chunk is expected to become visible in host memory.
    pub(crate) fn is_pending(&self) -> bool {
        let is_failed = matches!(self.host, HostState::Failed(_));
        self.host.is_pending() && !is_failed && !self.detached && !self.removing
    }

    /// Returns true if lookups find the chunk in host memory, provided that no ancestor is being
    /// removed.
    pub(crate) fn is_in_host(&self) -> bool {
        self.host.is_visible() && !self.detached && !self.removing
    }

    /// Returns true if a load, a write or a child in host memory keeps the chunk in host memory.
    pub(crate) fn is_in_use(&self) -> bool {
        self.host_children > 0 || self.holds > 0 || self.disk.is_unwritten()
    }

    /// Returns true if the chunk is a complete, unused leaf, which the host policy may evict. The
    /// chunk might not be visible yet, because the engine saving its parent might be hung.
    pub(crate) fn is_host_evictable(&self) -> bool {
        self.host.is_complete() && self.host_children == 0 && self.holds == 0 && !self.detached
    }

    /// Returns true if the chunk is a stored leaf that no running or queued read needs, so the disk
    /// policy may evict it.
    pub(crate) fn is_disk_evictable(&self) -> bool {
        self.disk.is_stored() && self.disk_children == 0 && !self.host.awaits_read()
    }
}
