//! One chunk: its place in its prefix, in each tier, and who uses it now.

use crate::evict::ChunkId;
use crate::io::FrameId;
use crate::key::ChunkKey;
use crate::tier::disk::SlotId;

/// Where a chunk is in the host tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HostState {
    /// Nowhere.
    Absent,
    /// A worker is filling the frame; a `WriteLease` owns it.
    Reserved(FrameId),
    /// A disk thread will fill the frame, or is filling it.
    Loading(FrameId),
    /// Filled, but its parent is not visible yet; it becomes visible with it.
    Waiting(FrameId),
    /// Anybody may find it.
    Visible(FrameId),
    /// Could not be read; it stays only until the leases that wait for it end.
    Failed,
}

impl HostState {
    pub(crate) fn frame(self) -> Option<FrameId> {
        match self {
            HostState::Reserved(frame)
            | HostState::Loading(frame)
            | HostState::Waiting(frame)
            | HostState::Visible(frame) => Some(frame),
            HostState::Absent | HostState::Failed => None,
        }
    }
}

/// Where a chunk is in the disk tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DiskState {
    /// Nowhere.
    Absent,
    /// A disk thread is writing it.
    Writing,
    /// In this slot.
    Present(SlotId),
}

/// Whether a chunk is on its way to disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dirty {
    /// No.
    Clean,
    /// In the queue.
    Queued,
    /// Behind its parent, which is in the queue or being written.
    Behind,
    /// Being written.
    Writing,
}

/// What an entry begins with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewEntry {
    pub(crate) key: ChunkKey,
    pub(crate) parent_key: ChunkKey,
    pub(crate) parent: Option<ChunkId>,
    /// Chunks before it.
    pub(crate) depth: u32,
    pub(crate) first_block: u32,
    pub(crate) num_blocks: u32,
}

/// One chunk.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) key: ChunkKey,
    pub(crate) parent_key: ChunkKey,
    pub(crate) parent: Option<ChunkId>,
    pub(super) first_child: Option<ChunkId>,
    pub(super) prev_sibling: Option<ChunkId>,
    pub(super) next_sibling: Option<ChunkId>,
    pub(super) generation: u32,
    pub(super) live: bool,
    /// No key leads here any more.
    pub(crate) detached: bool,
    pub(crate) depth: u32,
    pub(crate) first_block: u32,
    pub(crate) num_blocks: u32,
    pub(crate) host: HostState,
    pub(crate) disk: DiskState,
    pub(crate) dirty: Dirty,
    /// A disk thread reads the slot, or will.
    pub(crate) reading: bool,
    /// Read leases that end here, and a disk thread that copies the frame.
    pub(crate) holds: u32,
    /// Children with a host state, detached ones too.
    pub(crate) host_children: u32,
    /// Children with a disk state.
    pub(crate) disk_children: u32,
    /// What the policies were told last; None while they do not know the chunk.
    pub(crate) host_evictable: Option<bool>,
    pub(crate) disk_evictable: Option<bool>,
}

impl Entry {
    pub(super) fn new(new: NewEntry, next_sibling: Option<ChunkId>, generation: u32) -> Self {
        Self {
            key: new.key,
            parent_key: new.parent_key,
            parent: new.parent,
            first_child: None,
            prev_sibling: None,
            next_sibling,
            generation,
            live: true,
            detached: false,
            depth: new.depth,
            first_block: new.first_block,
            num_blocks: new.num_blocks,
            host: HostState::Absent,
            disk: DiskState::Absent,
            dirty: Dirty::Clean,
            reading: false,
            holds: 0,
            host_children: 0,
            disk_children: 0,
            host_evictable: None,
            disk_evictable: None,
        }
    }

    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }

    /// The block behind its last one.
    pub(crate) fn end_block(&self) -> u32 {
        self.first_block + self.num_blocks
    }

    pub(crate) fn has_children(&self) -> bool {
        self.first_child.is_some()
    }

    pub(crate) fn is_visible(&self) -> bool {
        matches!(self.host, HostState::Visible(_))
    }

    pub(crate) fn is_on_disk(&self) -> bool {
        matches!(self.disk, DiskState::Present(_))
    }
}
